// A run that saves now and then and is interrupted once: what is lost, and what is then repeated.
{
  const [EPOCHS, STEPS, ASKS] = [6, 51, 10]; // 12,942 samples; two ranks with 128 per batch
  const TOTAL = EPOCHS * STEPS;
  const SCRIPTS = ["Steps 1 and 2", "Step 3", "Steps 4 and 5"];
  const AGAIN = "Start it again.";
  const EVENTS = [ // which of SCRIPTS react to it in time, and how each of them is started again
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

  // Return how many batches a run has trained when it stops, and after how many batches the next
  // run continues. The event comes during batch `at`, counted from 0.
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

  const GAP = 30; // length of the pause before the next run, in batches

  // Return the parts of a bar: [kind, first batch, last batch].
  function parts({ stopped, from, finished }) {
    if (finished) return [["kept", 0, TOTAL]];
    return [["kept", 0, from], ["lost", from, stopped], ["down", 0, GAP], ["again", from, stopped], ["kept", stopped, TOTAL]];
  }

  function drawBar(bar, found, saveEvery, at) {
    const width = (batches) => `${(100 * batches) / ((EPOCHS + saveEvery) * STEPS + GAP)}%`;
    bar.replaceChildren();
    for (const [kind, first, last] of parts(found)) {
      for (let start = first, end; start < last; start = end) {
        const epoch = Math.floor(start / STEPS);
        end = Math.min(last, (epoch + 1) * STEPS);
        const isWhole = end === (epoch + 1) * STEPS && ((epoch + 1) % saveEvery === 0 || end === TOTAL);
        const isSaved = kind === "lost" || kind === "down" ? false : isWhole || (end === found.from && found.from > 0);
        add(bar, "span", { class: isSaved ? `${kind} save` : kind, style: `width:${width(end - start)}` }, kind === "down" ? "" : String(epoch + 1));
      }
    }
    add(bar, "span", { class: "moment", style: `left:${width(at)}` });
  }

  function start(figure) {
    const form = figure.querySelector("form");
    EVENTS.forEach(([name], number) => add(form.elements.event, "option", { value: number }, name));
    const jobs = SCRIPTS.map(() => {
      const item = add(figure.querySelector(".jobs"), "li");
      return { text: add(item, "p"), bar: add(item, "div", { class: "bar", "aria-hidden": "true" }) };
    });

    onChange(form, () => {
      const { event, at, save } = formValues(form);
      const [, listens, again] = EVENTS[event];
      const place = `epoch ${Math.floor(at / STEPS) + 1} of ${EPOCHS}, batch ${(at % STEPS) + 1} of ${STEPS}`;
      const outcomes = jobs.map(({ text, bar }, number) => {
        const found = outcome(listens[number], save, at);
        const words = sentence(found, at);
        text.replaceChildren();
        add(text, "b", {}, SCRIPTS[number]);
        text.append(`: ${words}. `);
        add(text, "i", {}, found.finished ? "The run was about to end anyway." : again[number]);
        drawBar(bar, found, save, at);
        return `${SCRIPTS[number]}: ${words}.`;
      });
      setSliderText(form.elements.at, place);
      setText(figure.querySelector(".said"), `Interrupted in ${place}. ${outcomes.join(" ")}`);
    });
  }

  figures["life-of-a-job"] = { start, outcome };
}
