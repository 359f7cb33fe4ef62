// A run with saves that is interrupted once: what is lost, and what is repeated when it runs again.
{
  const [EPOCHS, STEPS, ASKS] = [6, 51, 10]; // two ranks take 128 of 12,942 samples each in a batch
  const TOTAL = EPOCHS * STEPS;
  const SCRIPTS = ["Steps 1 and 2", "Step 3", "Steps 4 and 5"];
  const AGAIN = "Start it again.";
  const EVENTS = [ // who listens to it, and how each of SCRIPTS runs again
    ["SIGTERM arrives", [false, false, true], [AGAIN, AGAIN, AGAIN]],
    ["A Slurm job nears its time limit", [false, false, true], [
      "Slurm sends SIGTERM at the limit. Submit the job again.",
      "Slurm sends SIGTERM at the limit. Submit the job again.",
      "Slurm sends SIGTERM 90 s before the limit (--signal=TERM@90), and the batch file requeues the job.",
    ]],
    ["A rank is killed (kill -9, out of memory)", [false, false, false], [
      AGAIN,
      "torchrun --max-restarts restarts all ranks; otherwise start it again.",
      "torchrun --max-restarts restarts all ranks; otherwise start it again.",
    ]],
    ["A node of a Slurm job loses power", [false, false, false], [
      "Slurm requeues the job, if your site allows it (JobRequeue).",
      "Slurm requeues the job (--requeue).",
      "Slurm requeues the job (--requeue).",
    ]],
  ];

  // Return how many batches a run has trained when it stops, and after how many the next continues.
  // The event comes during batch `at`, counted from 0.
  function outcome(listens, saveEvery, at) {
    const epoch = Math.floor(at / STEPS);
    const saved = Math.floor(epoch / saveEvery) * saveEvery * STEPS;
    const next = ASKS * (Math.floor((at % STEPS) / ASKS) + 1);
    const agreed = epoch * STEPS + Math.min(next, STEPS);
    const [stopped, from] = listens ? [agreed, agreed] : [at, saved];
    return { stopped, from, lost: stopped - from, finished: stopped === TOTAL };
  }

  function sentence({ stopped, lost, finished }, at) {
    if (finished) return "nothing lost, the run ends normally";
    if (lost) return `${plural(lost, "batch")} lost and repeated`;
    if (stopped === at) return "just saved, nothing lost";
    const later = stopped % STEPS ? `${plural(stopped - at, "batch")} later` : "at the end of the epoch";
    return `stopped and saved ${later}, nothing repeated`;
  }

  // ---------------------------------------------------------------- the drawing

  const BAR = 26;
  const GAP = 30; // batches

  // Return the pieces of a bar: [kind, first step, last step, where it starts].
  function pieces({ stopped, from, finished }) {
    if (finished) return [["kept", 0, TOTAL, 0]];
    const shift = stopped + GAP - from;
    return [
      ["kept", 0, from, 0], ["lost", from, stopped, 0],
      ["again", from, stopped, shift], ["kept", stopped, TOTAL, shift],
    ].filter(([, first, last]) => first < last);
  }

  function draw(svg, found, saveEvery, at) {
    const width = blank(svg, 1000);
    const scale = (width - 4) / ((EPOCHS + saveEvery) * STEPS + GAP);
    resize(svg, width, BAR + 12);
    const bar = add(svg, "g", { transform: "translate(2 4)" });
    const saves = [];
    for (const [kind, first, last, shift] of pieces(found)) {
      for (let epoch = Math.floor(first / STEPS); epoch * STEPS < last; epoch++) {
        const [start, end] = [Math.max(first, epoch * STEPS), Math.min(last, (epoch + 1) * STEPS)];
        const [x, long] = [scale * (start + shift), scale * (end - start)];
        add(bar, "rect", { class: kind, x, y: 0, width: long, height: BAR });
        if (long > 14) add(bar, "text", { x: x + long / 2, y: BAR / 2 + 4 }, `${epoch + 1}`);
        const whole = end === (epoch + 1) * STEPS && kind !== "lost";
        if (whole && ((epoch + 1) % saveEvery === 0 || end === TOTAL)) saves.push(x + long);
      }
    }
    if (!found.finished) {
      const [x, end] = [scale * found.stopped, scale * (found.stopped + GAP)];
      add(bar, "line", { class: "down", x1: x + 4, x2: end - 2, y1: BAR / 2, y2: BAR / 2 });
      if (!found.lost && found.stopped !== at) saves.push(x);
    }
    for (const cx of saves) add(bar, "circle", { class: "save", cx, cy: BAR + 1, r: 5 });
    add(bar, "line", { class: "moment", x1: scale * at, x2: scale * at, y1: -4, y2: BAR + 4 });
  }

  function start(figure) {
    const form = figure.querySelector("form");
    EVENTS.forEach(([name], number) => add(form.elements.event, "option", { value: number }, name));
    const jobs = SCRIPTS.map(() => {
      const item = add(figure.querySelector(".jobs"), "li");
      return { text: add(item, "p"), svg: add(item, "svg", { "aria-hidden": "true" }) };
    });

    follow(form, () => {
      const { event, at, save } = chosen(form);
      const [, listens, again] = EVENTS[event];
      const place = `epoch ${Math.floor(at / STEPS) + 1} of ${EPOCHS}, batch ${(at % STEPS) + 1} of ${STEPS}`;
      const told = jobs.map(({ text, svg }, number) => {
        const found = outcome(listens[number], save, at);
        const words = sentence(found, at);
        text.replaceChildren();
        add(text, "b", {}, SCRIPTS[number]);
        text.append(`: ${words}. `);
        add(text, "i", {}, found.finished ? "The run was about to end anyway." : again[number]);
        draw(svg, found, save, at);
        return `${SCRIPTS[number]}: ${words}.`;
      });
      tell(form.elements.at, place);
      say(figure.querySelector(".said"), `Interrupted in ${place}. ${told.join(" ")}`);
    });
  }

  figures["life-of-a-job"] = { start, outcome };
}
