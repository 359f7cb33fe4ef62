// Which samples each rank gets from three samplers. The shuffled orders are those of PyTorch.
{
  const DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz";
  const DEFAULTS = { shuffle: false, setEpoch: true, dropLast: false, epoch: 0, resume: 0 };
  const WAYS = {
    distributed: "DistributedSampler",
    resumable: "ResumableSampler",
    range: "range(rank, len(test_set), world_size)",
  };

  // ------------------------------------------------------------ what the samplers do

  // The order in which an epoch deals the samples, before it is padded or cut.
  function order(sets, data, epoch = sets.epoch) {
    if (!sets.shuffle) return upTo(sets.samples);
    return [...data.orders[sets.samples - 1][sets.setEpoch ? epoch : 0]].map((digit) => DIGITS.indexOf(digit));
  }

  // What each rank gets: {way: [indices of rank 0, of rank 1, …]}.
  function deal(sets, data) {
    const share = (indices) => upTo(sets.ranks).map((rank) =>
      indices.filter((_, position) => position % sets.ranks === rank));
    const indices = order(sets, data);
    const each = (sets.dropLast ? Math.floor : Math.ceil)(indices.length / sets.ranks);
    const even = upTo(each * sets.ranks).map((position) => indices[position % indices.length]);
    const done = Math.min(sets.resume * sets.batch, each); // by each rank
    const distributed = share(even);
    const resumable = distributed.map((own) => own.slice(done));
    return { distributed, resumable, range: share(upTo(sets.samples)), done };
  }

  // How often each sample is dealt, and what comes of it.
  function count(shards, samples) {
    const times = Array(samples).fill(0);
    for (const index of shards.flat()) times[index] += 1;
    const found = (wanted) => upTo(samples).filter((index) => wanted(times[index]));
    return { counted: shards.flat().length, never: found((n) => n === 0), again: found((n) => n > 1), times };
  }

  // ------------------------------------------------------------ in words

  const list = (indices) => indices.length === 1 ? `sample ${indices[0]}`
    : `samples ${indices.slice(0, -1).join(", ")} and ${indices.at(-1)}`;

  function epochTold(sets) {
    if (!sets.shuffle) return "";
    return sets.setEpoch
      ? "Each epoch has an order of its own, which every rank computes from the seed and the epoch, " +
        "without a message. "
      : "Forgotten: every epoch has the order of epoch 0, and no error is raised. ";
  }

  function sharesTold(sets, { distributed }) {
    const { never, again } = count(distributed, sets.samples);
    const unequal = `${plural(sets.samples, "sample")} cannot be shared equally by ${sets.ranks} ranks, so `;
    if (never.length) {
      return `${unequal}${list(never)} ${never.length === 1 ? "is" : "are"} left out` +
        `${sets.shuffle && sets.setEpoch ? ", and others in another epoch" : " of every epoch"}.`;
    }
    if (!again.length) return "All ranks get the same number of samples, each once.";
    return `${unequal}${list(again)} ${again.length === 1 ? "is" : "are"} dealt again: all ranks must take ` +
      "as many steps, or one would wait for gradients that never come.";
  }

  // What an evaluation makes of one misread sample.
  function evaluationTold(sets, { distributed }) {
    const { counted, never, again, times } = count(distributed, sets.samples);
    const [index] = [...never, ...again];
    if (index === undefined) return "Here both count each sample once.";
    const reported = counted ? `${((100 * (counted - times[index])) / counted).toFixed(1)}%` : "nothing";
    const right = `${((100 * (sets.samples - 1)) / sets.samples).toFixed(1)}%`;
    return `If only sample ${index} is misread, an evaluation with DistributedSampler reports ${reported} instead ` +
      `of ${right}. Step 5's range leaves some ranks one sample short. That is fine here: no gradients are ` +
      "averaged, so no rank waits for another.";
  }

  function resumeTold(sets, { done }) {
    return `The checkpoint says that ${done * sets.ranks} samples of the epoch are done. ResumableSampler skips ` +
      `${done} on each rank; DistributedSampler starts the epoch again and repeats them all.`;
  }

  // ------------------------------------------------------------ the drawing

  function cell(place, index, kind) {
    const drawn = add(place, "span", { class: `cell ${kind}` }, String(index));
    if (kind) add(drawn, "span", { class: "unseen" }, ` ${kind}`);
    place.append(" ");
  }

  // A table with a title; return its body.
  function drawCard(place, title) {
    const card = add(place, "div", { class: "way" });
    add(card, "h4", {}, title);
    return add(add(card, "table"), "tbody");
  }

  // One way to deal: a row per rank, its batches apart.
  function drawWay(place, way, sets, dealt) {
    const body = drawCard(place, WAYS[way]);
    const shards = way === "range" ? dealt.range : dealt.distributed;
    shards.forEach((shard, rank) => {
      const { lastChild: cells } = addRow(body, `rank ${rank}`, [shard.length ? "" : "nothing"]);
      let batch;
      shard.forEach((index, position) => {
        if (position % sets.batch === 0) batch = add(cells, "span", { class: "batch" });
        const padding = way !== "range" && position * sets.ranks + rank >= sets.samples;
        const before = { distributed: "repeated", resumable: "done" }[way];
        cell(batch, index, position < dealt.done && before ? before : padding ? "again" : "");
      });
    });
    if (!sets.evaluation) return;
    const { counted } = count(shards, sets.samples);
    const right = counted === sets.samples;
    const verdict = add(body.closest(".way"), "p", { class: "verdict" }, "An evaluation counts ");
    add(verdict, "b", { class: right ? "right" : "wrong" }, plural(counted, "sample"));
    verdict.append(right ? ", each once." : ` instead of ${sets.samples}.`);
  }

  // The order of each epoch, with the current one in bold.
  function drawOrders(place, sets, data) {
    const body = drawCard(place, "The order that is dealt");
    for (const epoch of sets.shuffle ? upTo(data.epochs) : [0]) {
      const title = sets.shuffle ? `epoch ${epoch}` : "each epoch";
      addRow(body, title, [order(sets, data, epoch).join(" ")], epoch === sets.epoch ? { class: "now" } : {});
    }
  }

  function start(figure, data, { ways }) {
    const form = figure.querySelector("form");
    const { next, epoch } = form.elements;
    const place = figure.querySelector(".ways");
    const evaluation = ways.includes("range");

    follow(form, () => {
      const sets = { ...DEFAULTS, shuffle: !evaluation, evaluation, ...chosen(form) };
      sets.samples = Math.min(Math.max(Math.round(sets.samples) || 1, 1), data.orders.length);
      const dealt = deal(sets, data);
      place.replaceChildren();
      for (const way of ways) drawWay(place, way, sets, dealt);
      if (next) drawOrders(place, sets, data);
      say(figure.querySelector(".said"), evaluation ? evaluationTold(sets, dealt)
        : next ? epochTold(sets) + sharesTold(sets, dealt) : resumeTold(sets, dealt));
    });
    next?.addEventListener("click", () => {
      epoch.value = (Number(epoch.value) + 1) % data.epochs;
      form.dispatchEvent(new Event("input"));
    });
  }

  figures["who-gets-which"] = { start, deal, count };
}
