// A recorded step of DDP, and a forecast for a slower network, a larger batch or accumulation.
{
  const PARTS = ["data", "forward", "backward", "waiting", "optimizer"];

  // Return when each bucket's all-reduce starts and ends. The all-reduces run one at a time, each of
  // them once its bucket is ready.
  function schedule(ready, times) {
    let free = 0;
    return ready.map((moment, number) => {
      const start = Math.max(moment, free);
      free = start + times[number];
      return [start, free];
    });
  }

  const lastReady = (ranks, bucket) => Math.max(...ranks.map((rank) => rank.ready[bucket][0]));

  // Return the total time of the all-reduces with which the unchanged forecast is as long as the
  // recording. One bucket decides it, because this bucket and all later ones are sent without a break.
  function totalReduceTime({ ranks, bucket_bytes: sizes }) {
    const longest = Math.max(...ranks.map(({ optimizer: [[begin, end]] }) => end - begin));
    const room = summary(ranks).length - longest;
    return sumOf(sizes) * Math.min(...sizes.map((_, number) =>
      (room - lastReady(ranks, number)) / sumOf(sizes.slice(number))));
  }

  // Return the forecast of a step. A larger batch makes everything up to the end of backward longer.
  // If no_sync is used, only the last pass before the optimizer's step communicates.
  function forecast(record, settings) {
    const { ranks, bucket_bytes: sizes } = record;
    const total = settings.slower * totalReduceTime(record);
    const times = sizes.map((size) => (total * size) / sumOf(sizes));
    const steps = ranks.map((rank) =>
      Object.fromEntries(Object.keys(rank).map((name) => [name, []])));
    let starts = ranks.map((rank) => rank.data[0][0]);
    for (let pass = 1; pass <= settings.passes; pass++) {
      const computed = ranks.map((rank, number) => stretch(rank, starts[number], settings.batch));
      const moments = sizes.map((_, bucket) => lastReady(computed, bucket));
      const sums = pass === settings.passes || !settings.no_sync ? schedule(moments, times) : [];
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

  function stretch(rank, start, factor) {
    const origin = rank.data[0][0];
    const from = (moment) => start + factor * (moment - origin);
    const parts = ["data", "forward", "backward", "ready"];
    return Object.fromEntries(parts.map((name) => [name, rank[name].map((span) => span.map(from))]));
  }

  // Return the length of a step, and the share of it that its ranks wait, on average.
  function summary(ranks) {
    const length = Math.max(...ranks.map((rank) => rank.optimizer[0][1]));
    const waits = ranks.map((rank) => sumOf(rank.waiting.map(([start, end]) => end - start)));
    const waiting = sumOf(waits) / ranks.length;
    return { length, waiting, share: waiting / length };
  }

  const duration = (ms) => `${formatNumber(ms, ms < 10 ? 1 : 0)} ms`;

  // ---------------------------------------------------------------- the drawing

  // Draw a step of all ranks, and mark the time `before` that as many samples took in recorded steps.
  function draw(chart, ranks, sizes, before, steps) {
    const { length } = summary(ranks);
    const most = Math.max(length, before);
    const percent = (moment) => `${(100 * moment) / most}%`;
    const size = [5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((each) => most / each < 8);
    chart.replaceChildren();
    for (let tick = 0; tick < most; tick += size) add(chart, "span", { class: "tick", style: `left:${percent(tick)}` }, `${tick} ms`);
    ranks.forEach((rank, number) => {
      const row = add(chart, "div", { class: "rank" });
      const addBar = (name, [start, end], text, style = "") => {
        const place = `left:${percent(start)};width:${percent(end - start)};${style}`;
        add(row, "span", { class: `bar ${name}`, style: place, title: `${text}: ${formatNumber(start, 1)} to ${formatNumber(end, 1)} ms` }, text);
      };
      add(row, "b", {}, `rank ${number}`);
      for (const name of PARTS) for (const span of rank[name]) addBar(name, span, name);
      rank["all-reduce"].forEach((span, index) => { // at three heights, so that simultaneous ones do not overlap
        addBar("all-reduce", span, `bucket ${(index % sizes.length) + 1}`, `top:${3.4 + 1.1 * (index % 3)}rem`);
      });
      for (const [moment] of rank.ready) add(row, "span", { class: "ready", style: `left:${percent(moment)}` });
    });
    if (length === before) return;
    const text = `${steps > 1 ? `${steps} recorded steps` : "recorded"}: ${duration(before)}`;
    add(chart, "span", { class: before > most / 2 ? "then late" : "then", style: `left:${percent(before)}` }, text);
  }

  // ---------------------------------------------------------------- the words

  function words(record, settings, ranks) {
    const { length, waiting, share } = summary(ranks);
    const same = ranks === record.ranks;
    const waits = `On average, each rank ${same ? "waited" : "waits"} for ${duration(waiting)} of it (${formatNumber(100 * share, 0)}%).`;
    if (same) return `Recorded: the step took ${duration(length)}. ${waits}`;
    const recorded = settings.batch * settings.passes * summary(record.ranks).length;
    return `Forecast: the step takes ${duration(length)}. ${waits} As recorded, as many samples take ${duration(recorded)}.`;
  }

  function start(figure, data) {
    const form = figure.querySelector("form");
    const { slower, batch } = form.elements;
    const times = (number, word) => (number === 1 ? "as recorded" : `${number} times ${word}`);

    onChange(form, () => {
      const { ranks: count, accumulate, ...rest } = formValues(form);
      const [passes, sync] = String(accumulate).split(" ");
      const settings = { ...rest, passes: Number(passes), no_sync: passes === "1" || sync === "no_sync" };
      const record = data.records[count];
      setSliderText(slower, times(settings.slower, "slower"));
      setSliderText(batch, times(settings.batch, "larger"));
      const same = ["slower", "batch", "passes"].every((name) => settings[name] === 1);
      const ranks = same ? record.ranks : forecast(record, settings);
      const steps = settings.batch * settings.passes;
      draw(figure.querySelector(".chart"), ranks, record.bucket_bytes, steps * summary(record.ranks).length, steps);
      setText(figure.querySelector(".said"), words(record, settings, ranks));
    });
  }

  figures["where-the-time-goes"] = { start, forecast, summary };
}
