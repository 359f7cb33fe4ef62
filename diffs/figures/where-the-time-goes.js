// A recorded step of DDP, and what a slower network, a larger batch or accumulation would make of it.
{
  const PARTS = ["data", "forward", "backward", "waiting", "optimizer"];

  // Return when each bucket's all-reduce starts and ends: one at a time, none before it is ready.
  function sent(ready, times) {
    let free = 0;
    return ready.map((moment, number) => {
      const start = Math.max(moment, free);
      free = start + times[number];
      return [start, free];
    });
  }

  const lastReady = (ranks, bucket) => Math.max(...ranks.map((rank) => rank.ready[bucket][0]));

  // Return how long all all-reduces take together, if the undisturbed forecast is as long as the
  // recording. One of the buckets decides: it and those after it are sent without a break.
  function calibrated({ ranks, bucket_bytes: sizes }) {
    const longest = Math.max(...ranks.map(({ optimizer: [[begin, end]] }) => end - begin));
    const room = summary(ranks).length - longest;
    return sumOf(sizes) * Math.min(...sizes.map((_, number) =>
      (room - lastReady(ranks, number)) / sumOf(sizes.slice(number))));
  }

  // Return a recorded step, changed. A larger batch stretches everything until the end of backward;
  // of several passes before the optimizer's step, only the last one communicates with no_sync.
  function forecasted(record, settings) {
    const { ranks, bucket_bytes: sizes } = record;
    const total = settings.slower * calibrated(record);
    const times = sizes.map((size) => (total * size) / sumOf(sizes));
    const steps = ranks.map((rank) =>
      Object.fromEntries(Object.keys(rank).map((name) => [name, []])));
    let starts = ranks.map((rank) => rank.data[0][0]);
    for (let pass = 1; pass <= settings.passes; pass++) {
      const computed = ranks.map((rank, number) => stretched(rank, starts[number], settings.batch));
      const moments = sizes.map((_, bucket) => lastReady(computed, bucket));
      const sums = pass === settings.passes || !settings.no_sync ? sent(moments, times) : [];
      starts = computed.map((part, number) => {
        const end = part.backward[0][1];
        const start = Math.max(end, ...sums.map(([, after]) => after));
        if (!sums.length) part.ready = [];
        Object.assign(part, { "all-reduce": sums, waiting: [[end, start]] });
        for (const name of Object.keys(part)) steps[number][name].push(...part[name]);
        return start;
      });
    }
    ranks.forEach((rank, number) => {
      const [begin, end] = rank.optimizer[0];
      steps[number].optimizer.push([starts[number], starts[number] + end - begin]);
    });
    return steps;
  }

  function stretched(rank, start, factor) {
    const origin = rank.data[0][0];
    const from = (moment) => start + factor * (moment - origin);
    const parts = ["data", "forward", "backward", "ready"];
    return Object.fromEntries(parts.map((name) => [name, rank[name].map((span) => span.map(from))]));
  }

  // Return what the figure shows: the recording itself, unless something is changed.
  function redrawn(record, settings) {
    const same = ["slower", "batch", "passes"].every((name) => settings[name] === 1);
    return same ? record.ranks : forecasted(record, settings);
  }

  // Return the length of a step, and the share of it that its ranks wait, on average.
  function summary(ranks) {
    const length = Math.max(...ranks.map((rank) => rank.optimizer[0][1]));
    const waits = ranks.map((rank) => sumOf(rank.waiting.map(([start, end]) => end - start)));
    const waiting = sumOf(waits) / ranks.length;
    return { length, waiting, share: waiting / length };
  }

  // Return the settings that were measured, with the forecast and its relative error.
  function errors(record) {
    return record.measured.map((row) => {
      const forecast = summary(forecasted(record, row)).length;
      return { ...row, forecast, error: forecast / row.milliseconds - 1 };
    });
  }

  function named({ batch, passes, no_sync: noSync }) {
    if (batch > 1) return `batch × ${batch}`;
    return `${passes} batches, ${noSync ? "with" : "without"} no_sync`;
  }

  const duration = (ms) => `${shown(ms, ms < 10 ? 1 : 0)} ms`;
  const percent = (share) => `${shown(100 * share, 0)}%`;

  // ---------------------------------------------------------------- the drawing

  const BAR = 28;
  const LANE = 18;

  // Return the lane of each all-reduce: the first that is free.
  function lanes(spans) {
    const free = [];
    return spans.map(([start, end]) => {
      const found = free.findIndex((moment) => moment <= start);
      const lane = found < 0 ? free.length : found;
      free[lane] = end;
      return lane;
    });
  }

  // Draw a bar, with its text if that fits.
  function drawBar(svg, name, [start, end], y, height, scale, label, text) {
    const [x, width] = [scale * start, scale * (end - start)];
    const bar = { class: `bar ${name}`, x, y, width, height };
    add(add(svg, "rect", bar), "title", {}, `${label}: ${shown(start, 1)} to ${shown(end, 1)} ms`);
    if (7.5 * text.length < width) add(svg, "text", { x: x + width / 2, y: y + height / 2 + 4.5 }, text);
  }

  // Draw a rank below `top`; return where the next one begins.
  function drawRank(svg, rank, number, sizes, top, scale) {
    const row = add(svg, "g");
    add(row, "text", { class: "rank", x: 0, y: top + 15 }, `rank ${number}`);
    const y = top + 22;
    for (const name of PARTS) {
      for (const span of rank[name]) drawBar(row, name, span, y, BAR, scale, name, name);
    }
    const lane = lanes(rank["all-reduce"]);
    rank["all-reduce"].forEach((span, index) => {
      const bucket = index % sizes.length;
      const label = `all-reduce of bucket ${bucket + 1}, ${shown(sizes[bucket] / 1e6, 3)} MB`;
      drawBar(row, "all-reduce", span, y + BAR + 6 + LANE * lane[index], LANE - 2, scale, label, `${bucket + 1}`);
    });
    for (const [moment] of rank.ready) {
      add(row, "circle", { class: "ready", cx: scale * moment, cy: y + BAR + 2, r: 4 });
    }
    return y + BAR + 14 + LANE * Math.max(2, ...lane.map((index) => index + 1));
  }

  // Draw a step, and when as many samples took `before` as recorded, in so many steps.
  function draw(svg, ranks, sizes, before, steps) {
    const { length } = summary(ranks);
    const most = Math.max(length, before);
    const width = blank(svg, 1100);
    const scale = (width - 50) / most;
    const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4].find((size) => scale * size > 75);
    const grid = add(svg, "g", { transform: "translate(2 0)" });
    let y = 20;
    const rows = add(svg, "g", { transform: "translate(2 0)" });
    ranks.forEach((rank, number) => {
      y = drawRank(rows, rank, number, sizes, y, scale);
    });
    for (let moment = 0; moment <= most; moment += step) {
      const x = scale * moment;
      add(grid, "line", { class: "grid", x1: x, x2: x, y1: 20, y2: y });
      add(grid, "text", { class: "tick", x, y: y + 16, "text-anchor": moment ? "middle" : "start" }, `${moment} ms`);
    }
    if (length !== before) {
      const x = scale * before;
      add(grid, "line", { class: "then", x1: x, x2: x, y1: 20, y2: y });
      const left = x > width / 2;
      const attributes = { x: x + (left ? 4 : -4), y: 13, "text-anchor": left ? "end" : "start" };
      add(grid, "text", attributes, `${steps > 1 ? `${steps} recorded steps` : "recorded"}: ${duration(before)}`);
    }
    resize(svg, width, y + 24);
    svg.setAttribute("aria-label", `The timeline of ${ranks.length} ranks. The text above sums it up.`);
  }

  // ---------------------------------------------------------------- the words

  function speed(record, { batch, passes }, length) {
    const samples = record.world_size * record.options.batch_size * batch * passes;
    return `${Math.round((1e3 * samples) / length).toLocaleString("en-US")} samples/s`;
  }

  function words(record, settings, ranks) {
    const { length, waiting, share } = summary(ranks);
    const same = ranks === record.ranks;
    const waits = `On average, each rank ${same ? "waited" : "waits"} for ${duration(waiting)} of it (${percent(share)}).`;
    const took = `the step ${same ? "took" : "takes"} ${duration(length)} (${speed(record, settings, length)}).`;
    if (same) return `Recorded: ${took} ${waits}`;
    const steps = settings.batch * settings.passes;
    const recorded = summary(record.ranks).length;
    const then = `As recorded, as many samples take ${duration(steps * recorded)} ` +
      `(${speed(record, { batch: 1, passes: 1 }, recorded)}).`;
    const measured = record.measured.find((row) =>
      ["slower", "batch", "passes", "no_sync"].every((name) => row[name] === settings[name]));
    return `Forecast: ${took} ${waits} ${then}` + (measured ? ` Measured: ${duration(measured.milliseconds)}.` : "");
  }

  function howRecorded({ machine, options, world_size: ranks }) {
    return `Recorded on ${machine.date} with ${ranks} ranks on gloo and ${machine.cores} cores (${machine.cpu}), ` +
      `torch ${machine.torch.split("+")[0]}, by benchmarks/breakdown.py: the fastest of many steps of step 5 with ` +
      `--width=${options.width} --batch-size=${options.batch_size}, and bucket_cap_mb=${options.bucket_mb}, since ` +
      "the default model fits into a single bucket.";
  }

  function start(figure, data) {
    const form = figure.querySelector("form");
    const { slower, batch } = form.elements;
    const times = (number, word) => (number === 1 ? "as recorded" : `${number} times ${word}`);

    follow(form, () => {
      const { ranks: count, accumulate, ...rest } = chosen(form);
      const [passes, sync] = String(accumulate).split(" ");
      const settings = { ...rest, passes: Number(passes), no_sync: passes === "1" || sync === "no_sync" };
      const record = data.records[count];
      tell(slower, times(settings.slower, "slower"));
      tell(batch, times(settings.batch, "larger"));
      const ranks = redrawn(record, settings);
      const steps = settings.batch * settings.passes;
      draw(figure.querySelector("svg"), ranks, record.bucket_bytes, steps * summary(record.ranks).length, steps);
      say(figure.querySelector(".said"), words(record, settings, ranks));
      figure.querySelector(".recorded").textContent = howRecorded(record);
      const body = figure.querySelector("tbody");
      body.replaceChildren();
      for (const one of errors(record)) {
        const off = `${one.error < 0 ? "" : "+"}${percent(one.error)}`;
        addRow(body, named(one), [duration(one.forecast), duration(one.milliseconds), off]);
      }
    });
  }

  figures["where-the-time-goes"] = { start, forecasted, summary, errors };
}
