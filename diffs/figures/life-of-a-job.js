// A run with saves that is interrupted once: what is lost, and what is repeated when it runs again.
{
  // Return how many batches a run has trained when it stops, after how many the next run continues,
  // and whether the run is finished instead. The event comes during batch `at`, counted from 0;
  // in each epoch, the ranks ask each other before every asks-th batch whether to stop.
  function crashed({ steps }, saveEvery, at) {
    const span = saveEvery * steps;
    return { stopped: at, from: Math.floor(at / span) * span, finished: false };
  }

  function told({ epochs, steps, asks }, saveEvery, at) {
    const next = asks * (Math.floor((at % steps) / asks) + 1);
    const epoch = Math.floor(at / steps);
    const stopped = epoch * steps + (next < steps ? next : steps);
    return { stopped, from: stopped, finished: stopped === epochs * steps };
  }

  // Return what becomes of one step of the ladder: the row of the fault table that says so, and
  // where the run stops and continues.
  function outcome(data, event, script, saveEvery, at) {
    const found = data.events[event].outcomes.find(({ steps }) => steps.includes(script));
    const loses = data.rows[found.row].lost !== "none";
    const how = (loses ? crashed : told)(data, saveEvery, at);
    const late = found.late && how.stopped % data.steps === 0;
    const again = how.finished ? "The run was about to end anyway." : found.again;
    return { row: late ? found.late : found.row, again, ...how, lost: how.stopped - how.from };
  }

  function place({ epochs, steps }, at) {
    return `epoch ${Math.floor(at / steps) + 1} of ${epochs}, batch ${(at % steps) + 1} of ${steps}`;
  }

  const batches = (number) => `${number} batch${number === 1 ? "" : "es"}`;

  // ---------------------------------------------------------------- the drawing

  const BAR = 26;
  const GAP = 30; // batches

  // Return the pieces of a bar: [kind, first step, last step, where it starts].
  function pieces({ epochs, steps }, { stopped, from, finished }) {
    const total = epochs * steps;
    if (finished) return [["kept", 0, total, 0]];
    const shift = stopped + GAP - from;
    return [
      ["kept", 0, from, 0], ["lost", from, stopped, 0],
      ["again", from, stopped, shift], ["kept", stopped, total, shift],
    ].filter(([, first, last]) => first < last);
  }

  function draw(svg, data, found, saveEvery, at, width) {
    const { epochs, steps } = data;
    const scale = (width - 4) / ((epochs + saveEvery) * steps + GAP);
    svg.replaceChildren();
    const bar = add(svg, "g", { transform: "translate(2 4)" });
    const saves = []; // [x, batch]
    for (const [kind, first, last, shift] of pieces(data, found)) {
      for (let epoch = Math.floor(first / steps); epoch * steps < last; epoch++) {
        const [start, end] = [Math.max(first, epoch * steps), Math.min(last, (epoch + 1) * steps)];
        const [x, size] = [scale * (start + shift), scale * (end - start)];
        const cell = { class: kind, x, y: 0, width: size, height: BAR, "data-from": start, "data-to": end };
        const title = `epoch ${epoch + 1}: ${batches(end - start)} ${kind === "again" ? "repeated" : kind}`;
        add(add(bar, "rect", cell), "title", {}, title);
        if (size > 14) add(bar, "text", { x: x + size / 2, y: BAR / 2 + 4 }, `${epoch + 1}`);
        const saved = (epoch + 1) % saveEvery === 0 || epoch + 1 === epochs;
        if (end === (epoch + 1) * steps && saved && kind !== "lost") {
          saves.push([x + size, end]);
        }
      }
    }
    if (!found.finished) {
      const [x, end] = [scale * found.stopped, scale * (found.stopped + GAP)];
      add(bar, "line", { class: "down", x1: x + 4, x2: end - 2, y1: BAR / 2, y2: BAR / 2 });
      if (!found.lost && found.stopped !== at) saves.push([x, found.stopped]);
    }
    for (const [cx, end] of saves) {
      add(bar, "circle", { class: "save", cx, cy: BAR + 1, r: 5, "data-at": end });
    }
    const x = scale * at;
    add(bar, "line", { class: "moment", x1: x, x2: x, y1: -4, y2: BAR + 4 });
    const size = { width, height: BAR + 12 };
    for (const [name, value] of Object.entries(size)) svg.setAttribute(name, value);
    svg.setAttribute("viewBox", `0 0 ${width} ${BAR + 12}`);
  }

  // ---------------------------------------------------------------- the words

  function sentence({ stopped, lost, finished }, at, steps) {
    if (finished) return "nothing lost, the run ends normally";
    if (lost) return `${batches(lost)} lost and repeated`;
    if (stopped === at) return "just saved, nothing lost";
    const later = stopped % steps ? `${batches(stopped - at)} later` : "at the end of the epoch";
    return `stopped and saved ${later}, nothing repeated`;
  }

  // Append text in which words between backticks are code.
  function addText(parent, text) {
    text.split("`").forEach((part, number) => {
      if (number % 2) add(parent, "code", {}, part);
      else parent.append(part);
    });
  }

  function addRules(parent, data, rows) {
    parent.replaceChildren();
    for (const name of new Set(rows)) {
      const { happens, lost, tests } = data.rows[name];
      const text = `${name}: ${happens}. Work lost: ${lost}.`;
      addText(add(parent, "p"), text[0].toUpperCase() + text.slice(1));
      for (const test of tests) add(add(add(parent, "ul"), "li"), "code", {}, test);
    }
    add(parent, "p", {}, "These are rows of the table in tests/README.md.");
  }

  function summed(data, found, at) {
    const groups = {};
    for (const script of Object.keys(found)) {
      (groups[sentence(found[script], at, data.steps)] ??= []).push(Number(script));
    }
    const parts = Object.entries(groups).map(([text, scripts]) => {
      const between = scripts.length > 2 ? " to " : " and ";
      return `steps ${scripts[0]}${between}${scripts.at(-1)}: ${text}`;
    });
    return `Interrupted in ${place(data, at)}. ${parts.map((part) => `S${part.slice(1)}.`).join(" ")}`;
  }

  function start(figure, data) {
    const [event, when, save] = ["event", "at", "save"].map((name) => figure.querySelector(`[name="${name}"]`));
    data.events.forEach(({ name }, number) => add(event, "option", { value: number }, name));
    when.max = data.epochs * data.steps - 1;
    when.value = 3 * data.steps + 23;
    save.value = 2;
    const jobs = Object.fromEntries(["01", "02", "03", "04", "05"].map((script) => {
      const item = add(figure.querySelector(".jobs"), "li", { "data-step": script });
      const text = add(item, "p");
      return [script, { text, svg: add(item, "svg", { "aria-hidden": "true" }) }];
    }));

    function update() {
      const [number, at, saveEvery] = [event, when, save].map((control) => Number(control.value));
      const width = Math.max(280, Math.min(1000, figure.querySelector(".live").clientWidth));
      const found = {};
      for (const [script, { text, svg }] of Object.entries(jobs)) {
        found[script] = outcome(data, number, script, saveEvery, at);
        text.replaceChildren();
        add(text, "b", {}, `Step ${Number(script)}`);
        text.append(`: ${sentence(found[script], at, data.steps)}. `);
        add(text, "i", {}, found[script].again);
        draw(svg, data, found[script], saveEvery, at, width);
      }
      tell(when, place(data, at));
      const said = summed(data, found, at);
      const region = figure.querySelector(".said");
      if (region.textContent !== said) region.textContent = said;
      addRules(figure.querySelector(".rules"), data, Object.values(found).map(({ row }) => row));
    }

    figure.querySelector(".controls").addEventListener("input", update);
    new ResizeObserver(update).observe(figure);
    update();
  }

  figures["life-of-a-job"] = { start, crashed, told, outcome, pieces };
}
