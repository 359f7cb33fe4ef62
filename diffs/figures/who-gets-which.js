// Which samples each rank gets in two ways of dealing them. PyTorch computed the shuffled orders.
{
  const DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz";
  const DEFAULTS = { shuffle: false, setEpoch: true, epoch: 0 };
  const WAYS = {
    distributed: "DistributedSampler",
    range: "range(rank, len(test_set), world_size)",
  };

  // ------------------------------------------------------------ what the samplers do

  // Return the order in which an epoch deals the samples, before padding or dropping.
  function order(sets, data, epoch = sets.epoch) {
    if (!sets.shuffle) return upTo(sets.samples);
    return [...data.orders[sets.samples - 1][sets.setEpoch ? epoch : 0]].map((digit) => DIGITS.indexOf(digit));
  }

  // Return the samples that each rank gets: {way: [indices of rank 0, of rank 1, …]}.
  function deal(sets, data) {
    const share = (indices) => upTo(sets.ranks).map((rank) =>
      indices.filter((_, position) => position % sets.ranks === rank));
    const indices = order(sets, data);
    const each = (sets.dropLast ? Math.floor : Math.ceil)(indices.length / sets.ranks);
    const even = upTo(each * sets.ranks).map((position) => indices[position % indices.length]);
    return { distributed: share(even), range: share(upTo(sets.samples)) };
  }

  // Return how many samples are counted, which ones are never dealt, and which ones more than once.
  function count(shards, samples) {
    const dealt = shards.flat();
    const times = (index) => dealt.filter((each) => each === index).length;
    const found = (wanted) => upTo(samples).filter((index) => wanted(times(index)));
    return { counted: dealt.length, never: found((n) => n === 0), again: found((n) => n > 1) };
  }

  // ------------------------------------------------------------ in words

  const list = (indices) => (indices.length === 1 ? `Sample ${indices[0]} is` : `Samples ${indices.join(", ")} are`);

  function aboutEpochs(sets) {
    if (!sets.shuffle) return "";
    return sets.setEpoch
      ? "Each epoch has an order of its own, which every rank computes from the seed and the epoch, " +
        "without a message. "
      : "Forgotten: every epoch has the order of epoch 0, and no error is raised. ";
  }

  function aboutShares(sets, { distributed }) {
    const { never, again } = count(distributed, sets.samples);
    if (never.length) return `${list(never)} left out, because all ranks must take as many steps.`;
    if (again.length) return `${list(again)} dealt again: all ranks must take as many steps, or one would wait for the others.`;
    return "All ranks get the same number of samples, each once.";
  }

  function aboutEvaluation(sets, { distributed }) {
    const { never, again } = count(distributed, sets.samples);
    if (!never.length && !again.length) return "Here both count each sample once.";
    const wrong = never.length ? `${list(never)} never counted` : `${list(again)} counted again`;
    return `${wrong} by an evaluation with DistributedSampler. Step 5's range leaves some ranks one sample short, which is ` +
      "fine here: no gradients are averaged, so no rank waits for another.";
  }

  // ------------------------------------------------------------ the drawing

  function addCell(place, index, kind) {
    const drawn = add(place, "span", { class: `cell ${kind}` }, String(index));
    if (kind) add(drawn, "span", { class: "unseen" }, ` ${kind}`);
    place.append(" ");
  }

  // Add a table with a title; return its body.
  function addCard(place, title) {
    const card = add(place, "div", { class: "way" });
    add(card, "h4", {}, title);
    return add(add(card, "table"), "tbody");
  }

  // Draw one way of dealing, with a row per rank and a gap between the batches.
  function drawWay(place, way, sets, dealt) {
    const body = addCard(place, WAYS[way]);
    const shards = dealt[way];
    shards.forEach((shard, rank) => {
      const { lastChild: cells } = addRow(body, `rank ${rank}`, [shard.length ? "" : "nothing"]);
      let batch;
      shard.forEach((index, position) => {
        if (position % sets.batch === 0) batch = add(cells, "span", { class: "batch" });
        const isPadding = way !== "range" && position * sets.ranks + rank >= sets.samples;
        addCell(batch, index, isPadding ? "again" : "");
      });
    });
    if (!sets.evaluation) return;
    const { counted } = count(shards, sets.samples);
    const right = counted === sets.samples;
    const verdict = `An evaluation counts ${plural(counted, "sample")}${right ? ", each once." : ` instead of ${sets.samples}.`}`;
    add(body.closest(".way"), "p", { class: right ? "verdict" : "verdict wrong" }, verdict);
  }

  // Draw the order of each epoch, with the current epoch in bold.
  function drawOrders(place, sets, data) {
    const body = addCard(place, "The order that is dealt");
    for (const epoch of upTo(data.epochs)) {
      addRow(body, `epoch ${epoch}`, [order(sets, data, epoch).join(" ")], epoch === sets.epoch ? { class: "now" } : {});
    }
  }

  function start(figure, data, { ways }) {
    const form = figure.querySelector("form");
    const { next, epoch } = form.elements;
    const place = figure.querySelector(".ways");
    const evaluation = ways.includes("range");

    onChange(form, () => {
      const sets = { ...DEFAULTS, evaluation, ...formValues(form) };
      sets.samples = Math.min(Math.max(Math.round(sets.samples) || 1, 1), data.orders.length);
      const dealt = deal(sets, data);
      place.replaceChildren();
      for (const way of ways) drawWay(place, way, sets, dealt);
      if (!evaluation) drawOrders(place, sets, data);
      const text = evaluation ? aboutEvaluation(sets, dealt) : aboutEpochs(sets) + aboutShares(sets, dealt);
      setText(figure.querySelector(".said"), text);
    });
    next?.addEventListener("click", () => {
      epoch.value = (Number(epoch.value) + 1) % data.epochs;
      form.dispatchEvent(new Event("input"));
    });
  }

  figures["who-gets-which"] = { start, deal };
}
