// A recorded step of DDP, and what a slower network, a larger batch or accumulation would make of it.
{
  const PARTS = ["data", "forward", "backward", "waiting", "optimizer"];
  const AS_RECORDED = { slower: 1, batch: 1, passes: 1, no_sync: true };

  // These five are ring(), sent(), calibrated(), forecasted() and stretched() of
  // benchmarks/timeline.py. Times are in milliseconds.
  function ring(ranks, size, alpha, beta) {
    return 2 * (ranks - 1) * (alpha + (size / ranks) * beta);
  }

  function sent(ready, times) {
    let free = 0;
    return ready.map((moment, number) => {
      const start = Math.max(moment, free);
      free = start + times[number];
      return [start, free];
    });
  }

  const sumOf = (numbers) => numbers.reduce((sum, number) => sum + number, 0);
  const lastReady = (ranks, bucket) => Math.max(...ranks.map((rank) => rank.ready[bucket][0]));

  // Return a network as much slower as makes the undisturbed forecast as long as the recording.
  function calibrated({ ranks, bucket_bytes: sizes }, network) {
    const bytes = sumOf(sizes);
    const total = 1e3 * ring(ranks.length, bytes, ...network);
    const longest = Math.max(...ranks.map(({ optimizer: [[begin, end]] }) => end - begin));
    const room = summary(ranks).length - longest;
    const factors = sizes.map((_, number) =>
      (room - lastReady(ranks, number)) / ((total * sumOf(sizes.slice(number))) / bytes));
    return network.map((value) => Math.min(...factors) * value);
  }

  function forecasted({ ranks, bucket_bytes: sizes }, network, settings) {
    const bytes = sumOf(sizes);
    const total = 1e3 * settings.slower * ring(ranks.length, bytes, ...network);
    const times = sizes.map((size) => (total * size) / bytes);
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
  function chosen(record, network, settings) {
    const same = ["slower", "batch", "passes"].every((name) => settings[name] === 1);
    return same ? record.ranks : forecasted(record, calibrated(record, network), settings);
  }

  // Return the length of a step, and the share of it that its ranks wait, on average.
  function summary(ranks) {
    const length = Math.max(...ranks.map((rank) => rank.optimizer[0][1]));
    const waits = ranks.map((rank) => sumOf(rank.waiting.map(([start, end]) => end - start)));
    const waiting = sumOf(waits) / ranks.length;
    return { length, waiting, share: waiting / length };
  }

  // Return the settings that were measured, with the forecast and its relative error. The first is
  // what the forecast is calibrated by, so there the fitted network is used.
  function errors(record, network) {
    const recorded = { ...AS_RECORDED, milliseconds: summary(record.ranks).length };
    return [recorded, ...record.measured].map((row, number) => {
      const used = number ? calibrated(record, network) : network;
      const forecast = summary(forecasted(record, used, row)).length;
      return { ...row, forecast, error: forecast / row.milliseconds - 1 };
    });
  }

  function named({ batch, passes, no_sync: noSync }) {
    if (batch > 1) return `batch × ${batch}`;
    if (passes === 1) return "as recorded, not calibrated";
    return `${passes} batches, ${noSync ? "with" : "without"} no_sync`;
  }

  const duration = (ms) => `${shown(ms, ms < 10 ? 1 : 0)} ms`;
  const percent = (share) => `${shown(100 * share, 0)}%`;
  const off = (error) => `${error < 0 ? "" : "+"}${percent(error)}`;

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

  // Draw a bar with the longest text that fits. The shortest may stand in the room to its right.
  function drawBar(svg, name, [start, end], y, height, scale, label, texts, room = 0) {
    const [x, width] = [scale * start, scale * (end - start)];
    const bar = { class: `bar ${name}`, x, y, width, height, "data-start": start, "data-end": end };
    add(add(svg, "rect", bar), "title", {}, `${label}: ${shown(start, 1)} to ${shown(end, 1)} ms`);
    const text = texts.find((words) => 7.5 * words.length < width);
    const middle = y + height / 2 + 4.5;
    if (text) add(svg, "text", { x: x + width / 2, y: middle }, text);
    else if (scale * room > 16) {
      add(svg, "text", { class: "beside", x: x + width + 7, y: middle }, texts.at(-1));
    }
  }

  // Draw a step, and when as many samples took `recordedLength` as recorded, in so many steps.
  function draw(svg, ranks, sizes, width, recordedLength, recordedSteps) {
    svg.replaceChildren();
    const { length } = summary(ranks);
    const most = Math.max(length, recordedLength);
    const scale = (width - 24) / most;
    const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4]
      .find((size) => scale * size > 60);
    const grid = add(svg, "g", { transform: "translate(2 0)" });
    let y = length === recordedLength ? 0 : 20;
    ranks.forEach((rank, number) => {
      const row = add(svg, "g", { "data-rank": number, transform: "translate(2 0)" });
      add(row, "text", { class: "rank", x: 0, y: y + 15 }, `rank ${number}`);
      y += 22;
      for (const name of PARTS) {
        for (const span of rank[name]) drawBar(row, name, span, y, BAR, scale, name, [name]);
      }
      const lane = lanes(rank["all-reduce"]);
      rank["all-reduce"].forEach((span, index) => {
        const bucket = index % sizes.length;
        const size = `${shown(sizes[bucket] / 1e6, sizes[bucket] < 1e5 ? 3 : 1)} MB`;
        const top = y + BAR + 6 + LANE * lane[index];
        const label = `all-reduce of bucket ${bucket + 1}, ${size}`;
        const texts = [`bucket ${bucket + 1}, ${size}`, `${bucket + 1}`];
        const follows = rank["all-reduce"].find((_, other) =>
          other > index && lane[other] === lane[index]);
        const room = (follows ? follows[0] : Infinity) - span[1];
        drawBar(row, "all-reduce", span, top, LANE - 2, scale, label, texts, room);
      });
      for (const [moment] of rank.ready) {
        add(row, "circle", { class: "ready", cx: scale * moment, cy: y + BAR + 2, r: 4, "data-at": moment });
      }
      y += BAR + 6 + LANE * Math.max(2, ...lane.map((index) => index + 1)) + 8;
    });
    for (let moment = 0; moment <= most; moment += step) {
      const x = scale * moment;
      add(grid, "line", { class: "grid", x1: x, x2: x, y1: 20, y2: y });
      const text = moment ? `${moment}` : "0 ms";
      const anchor = moment ? "middle" : "start";
      add(grid, "text", { class: "tick", x, y: y + 16, style: `text-anchor: ${anchor}` }, text);
    }
    if (length !== recordedLength) {
      const x = scale * recordedLength;
      add(grid, "line", { class: "then", x1: x, x2: x, y1: 20, y2: y });
      const left = x > width / 2;
      const attributes = { x: x + (left ? 4 : -4), y: 13, "text-anchor": left ? "end" : "start" };
      const what = recordedSteps > 1 ? `${recordedSteps} recorded steps` : "recorded";
      add(grid, "text", attributes, `${what}: ${duration(recordedLength)}`);
    }
    for (const [name, value] of Object.entries({ width, height: y + 22 })) svg.setAttribute(name, value);
    svg.setAttribute("viewBox", `0 0 ${width} ${y + 22}`);
    svg.setAttribute("aria-label", `The timeline of ${ranks.length} ranks. The text below sums it up.`);
  }

  // ---------------------------------------------------------------- the words

  function speed(record, { batch, passes }, length) {
    const samples = record.world_size * record.options.batch_size * batch * passes;
    return `${Math.round((1e3 * samples) / length).toLocaleString("en-US")} samples/s`;
  }

  function words(record, network, settings, ranks) {
    const { length, waiting, share } = summary(ranks);
    const recorded = summary(record.ranks);
    const waits = `On average, each rank spends ${duration(waiting)} (${percent(share)}) waiting.`;
    if (ranks === record.ranks) {
      const [{ backward, "all-reduce": sums }] = ranks;
      const early = sums.filter(([start]) => start < backward[0][1]).length;
      return `Recorded: the step took ${duration(length)} (${speed(record, settings, length)}). ` +
        `${waits.replace("spends", "spent")} On rank 0, ${early} of ${sums.length} all-reduces ` +
        "started before backward ended.";
    }
    const steps = settings.batch * settings.passes;
    const then = (steps > 1 ? `${steps} steps as recorded take ` : "The recorded step took ") +
      `${duration(steps * recorded.length)} (${speed(record, AS_RECORDED, recorded.length)}).`;
    return `Forecast: the step takes ${duration(length)} (${speed(record, settings, length)}). ` +
      `${waits} ${then}${measuredToo(record, network, settings)}`;
  }

  // Return what was measured with these settings, and with the other choice of no_sync.
  function measuredToo(record, network, settings) {
    const alike = errors(record, network).filter((row) =>
      ["slower", "batch", "passes"].every((name) => row[name] === settings[name]));
    if (!alike.length) return "";
    const { error } = alike.find((row) => row.no_sync === settings.no_sync);
    const times = alike.map((row) => duration(row.milliseconds) +
      (row.passes > 1 ? ` ${row.no_sync ? "with" : "without"} no_sync` : ""));
    return ` Measured: ${times.join(", ")}. This forecast is off by ${off(error)}.`;
  }

  function howRecorded({ machine, options, bucket_bytes: sizes, world_size: ranks, load_average: load }) {
    const bytes = sizes.map((size) => size.toLocaleString("en-US")).join(", ");
    return `Recorded on ${machine.date} with ${ranks} ranks on gloo and ${machine.cores} cores ` +
      `(${machine.cpu}), Python ${machine.python}, torch ${machine.torch.split("+")[0]}, by ` +
      `benchmarks/breakdown.py: the fastest of many steps. Changed for the recording: ` +
      `--width=${options.width} --batch-size=${options.batch_size}, and bucket_cap_mb=` +
      `${options.bucket_mb}, since the default model fits into one bucket of 25 MB. ` +
      `The buckets have ${bytes} bytes; only whole tensors go into a bucket.` +
      (ranks > machine.cores ? ` The ${ranks} ranks share ${machine.cores} cores.` : "") +
      (load > 1 ? " Other programs were running, which is why the ranks are not always equally fast." : "");
  }

  function howCalibrated(record, network) {
    const [{ forecast, milliseconds }] = errors(record, network);
    const factor = shown(calibrated(record, network)[1] / network[1], 1);
    return "It is calibrated by the recorded step: in a step, backward and the other ranks need the " +
      `cores too, so every all-reduce is taken to last ${factor} times as long. That factor makes the ` +
      `forecast as long as the recording, ${duration(milliseconds)}; without it, the forecast would ` +
      `be ${duration(forecast)}. A slower network multiplies this time once more.`;
  }

  function start(figure, data) {
    const [svg, said] = ["svg", ".said"].map((name) => figure.querySelector(name));
    const controls = figure.querySelector(".controls");
    const [slower, batch, passes] = ["slower", "batch", "passes"].map((name) =>
      controls.querySelector(`[name="${name}"]`));

    function update() {
      const record = data.records[controls.querySelector("[type=radio]:checked").value];
      const [count, sync] = passes.value.split(" ");
      const settings = {
        slower: Number(slower.value),
        batch: Number(batch.value),
        passes: Number(count),
        no_sync: count === "1" || sync === "no_sync",
      };
      const times = (number) => (number === 1 ? "as recorded" : `${number} times `);
      tell(slower, times(settings.slower) + (settings.slower > 1 ? "slower" : ""));
      tell(batch, times(settings.batch) + (settings.batch > 1 ? "larger" : ""));
      const ranks = chosen(record, data.network, settings);
      const width = Math.max(300, Math.min(1100, figure.querySelector(".live").clientWidth));
      const steps = settings.batch * settings.passes;
      draw(svg, ranks, record.bucket_bytes, width, steps * summary(record.ranks).length, steps);
      const text = words(record, data.network, settings, ranks);
      if (said.textContent !== text) said.textContent = text;
      figure.querySelector(".recorded").textContent = howRecorded(record);
      figure.querySelector(".calibrated").textContent = howCalibrated(record, data.network);
      const body = figure.querySelector("tbody");
      body.replaceChildren();
      for (const row of errors(record, data.network)) {
        const line = add(body, "tr");
        add(line, "th", { scope: "row" }, named(row));
        for (const text of [duration(row.forecast), duration(row.milliseconds), off(row.error)]) {
          add(line, "td", {}, text);
        }
      }
    }

    controls.addEventListener("input", update);
    controls.querySelector("button").addEventListener("click", () => {
      [slower.value, batch.value, passes.value] = [1, 1, "1"];
      controls.querySelector("[type=radio]").checked = true;
      update();
    });
    new ResizeObserver(update).observe(figure);
    update();
  }

  figures["where-the-time-goes"] = { start, ring, sent, calibrated, forecasted, chosen, summary, errors };
}
