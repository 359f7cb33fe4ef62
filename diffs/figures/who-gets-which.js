// Which samples each rank gets from three samplers. orders.py computes the shuffled orders.
{
  const upTo = (count) => [...Array(count).keys()];
  const DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz";

  // ------------------------------------------------------------ what the samplers do

  // The order in which an epoch deals the samples, before it is padded or cut.
  function order(sets, data, epoch = sets.epoch) {
    if (!sets.shuffle) return upTo(sets.samples);
    const seed = sets.seed + (sets.setEpoch ? epoch : 0);
    return [...data.orders[sets.samples - 1][seed]].map((digit) => DIGITS.indexOf(digit));
  }

  // The same, padded with its first samples or cut, so that all ranks get the same number.
  function even(indices, sets) {
    const rounded = sets.dropLast ? Math.floor : Math.ceil;
    const total = rounded(indices.length / sets.ranks) * sets.ranks;
    return upTo(total).map((position) => indices[position % indices.length]);
  }

  const share = (indices, rank, ranks) =>
    indices.filter((_, position) => position % ranks === rank);

  // What each rank gets: {way: [indices of rank 0, of rank 1, …]}.
  function deal(sets, data) {
    const indices = even(order(sets, data), sets);
    const ranks = upTo(sets.ranks);
    const distributed = ranks.map((rank) => share(indices, rank, sets.ranks));
    const done = Math.min(sets.resume * sets.batch, distributed[0].length); // by each rank
    return {
      distributed,
      resumable: distributed.map((own) => own.slice(done)),
      range: ranks.map((rank) => share(upTo(sets.samples), rank, sets.ranks)),
    };
  }

  // How often each sample is dealt, and what comes of it.
  function count(shards, samples) {
    const times = Array(samples).fill(0);
    for (const index of shards.flat()) times[index] += 1;
    return {
      counted: shards.flat().length,
      never: upTo(samples).filter((index) => times[index] === 0),
      again: upTo(samples).filter((index) => times[index] > 1),
      times,
    };
  }

  // ------------------------------------------------------------ in words

  const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

  function list(indices) {
    if (indices.length > 6) {
      return `${indices.length} samples (${indices.slice(0, 5).join(", ")}, …)`;
    }
    const named = indices.map(String);
    const last = named.pop();
    const text = named.length ? `${named.join(", ")} and ${last}` : last;
    return `sample${indices.length === 1 ? "" : "s"} ${text}`;
  }

  const percent = (part, whole) => `${((100 * part) / whole).toFixed(1)}%`;

  const is = (indices) => (indices.length === 1 ? "is" : "are");

  // What is to be seen: [[subject, sentences]].
  function told(sets, dealt) {
    const shares = [sharesTold(sets, dealt), resumeTold(sets, dealt)];
    return [limitTold(sets), epochTold(sets), ...shares].filter(Boolean);
  }

  function limitTold({ asked, samples, most }) {
    if (asked === samples) return null;
    return ["Samples", `The figure deals 1 to ${most}, so it shows ${samples}.`];
  }

  function epochTold(sets) {
    if (!sets.shuffle) return null;
    const text = sets.setEpoch
      ? "The order depends on the seed and the epoch, so each epoch usually has a new one. Each rank " +
        "computes the same order for itself, without a message."
      : "Forgotten, so every epoch has the order of epoch 0: the model sees the same batches in " +
        "the same order again and again. No error is raised.";
    return ["set_epoch", text];
  }

  function sharesTold(sets, dealt) {
    const counts = count(dealt.distributed, sets.samples);
    if (counts.never.length) return ["drop_last", dropTold(sets, counts)];
    if (counts.again.length) return ["Padding", paddingTold(sets, counts)];
    return ["Padding", "None is needed: all ranks get the same number of samples, each once."];
  }

  const unequal = (sets) =>
    `${plural(sets.samples, "sample")} cannot be shared equally by ${sets.ranks} ranks`;

  // What an evaluation makes of one misread sample.
  function misread(sets, { counted, times }, index) {
    const reported = counted ? percent(counted - times[index], counted) : "nothing";
    const right = percent(sets.samples - 1, sets.samples);
    if (reported === right) return "each equally often, so here the accuracy happens to be right";
    return `if only sample ${index} is misread, it reports ${reported} instead of ${right}`;
  }

  function dropTold(sets, counts) {
    const training =
      sets.shuffle && sets.setEpoch
        ? "another epoch leaves out others"
        : `no epoch will ever show ${counts.never.length === 1 ? "it" : "them"} to the model`;
    return (
      `${unequal(sets)}, so ${list(counts.never)} ${is(counts.never)} left out` +
      `${sets.evaluation ? "" : `: ${training}`}. An evaluation counts ${counts.counted} instead ` +
      `of ${sets.samples}: ${misread(sets, counts, counts.never[0])}.`
    );
  }

  function paddingTold(sets, counts) {
    const twice = Math.max(...counts.times) === 2;
    const again = `${list(counts.again)} ${twice ? "a second time" : "more than once"}`;
    const wrong = misread(sets, counts, counts.again[0]);
    return sets.evaluation
      ? `${unequal(sets)}, so DistributedSampler deals ${again}, and the evaluation counts ` +
          `${plural(counts.counted, "sample")}: ${wrong}. Step 5's range leaves some ranks one ` +
          "sample short. That is fine here: no gradients are averaged, so no rank waits for " +
          "another."
      : `${unequal(sets)}, but all must take the same number of steps, or one would wait for ` +
          `gradients that never come. So DistributedSampler deals ${again}. That hardly ` +
          `matters in training, but an evaluation would count ${counts.counted} samples: ${wrong}.`;
  }

  function resumeTold(sets, dealt) {
    if (!sets.resume) return null;
    const before = dealt.distributed[0].length - dealt.resumable[0].length;
    const text =
      `The checkpoint says that ${before * sets.ranks} samples of the epoch are done. ` +
      `ResumableSampler skips ${before} on each rank; DistributedSampler starts the epoch again ` +
      "and repeats them all.";
    return ["Resume", text];
  }

  // ------------------------------------------------------------ the drawing

  function cell(place, index, kind, meaning) {
    const shown = add(place, "span", { class: `cell ${kind}` }, String(index));
    if (meaning) add(shown, "span", { class: "unseen" }, ` ${meaning}`);
    return shown;
  }

  // One way to deal: a row per rank, its batches apart.
  function drawWay(place, title, story, shards, sets, mark) {
    const way = add(place, "div", { class: "way" });
    add(way, "h4", {}, title);
    add(way, "p", {}, story);
    const body = add(add(way, "table"), "tbody");
    shards.forEach((shard, rank) => {
      const line = add(body, "tr");
      add(line, "th", { scope: "row" }, `rank ${rank}`);
      const cells = add(line, "td");
      let batch;
      shard.forEach((index, position) => {
        if (position % sets.batch === 0) batch = add(cells, "span", { class: "batch" });
        cell(batch, index, ...mark(rank, position));
        batch.append(" ");
      });
      if (!shard.length) cells.textContent = "nothing";
    });
    return way;
  }

  function verdict(way, shards, samples) {
    const { counted, never } = count(shards, samples);
    const right = counted === samples;
    const place = add(way, "p", { class: "verdict" }, "An evaluation counts ");
    add(place, "b", { class: right ? "right" : "wrong" }, plural(counted, "sample"));
    place.append(
      right ? ", each once." : ` instead of ${samples}. `,
      right ? "" : never.length ? `Never seen: ${list(never)}.` : "Every sample is seen.",
    );
  }

  function drawWays(place, sets, dealt) {
    place.replaceChildren();
    const padded = (rank, position) =>
      position * sets.ranks + rank >= sets.samples ? ["again", "again"] : ["", ""];
    const before = dealt.distributed[0].length - dealt.resumable[0].length;
    const again = (rank, position) =>
      position < before ? ["repeated", "repeated"] : padded(rank, position);
    const uses = sets.evaluation ? "What it would do to an evaluation" : "Steps 2 and 3, training";
    const way = drawWay(place, "DistributedSampler", uses, dealt.distributed, sets, again);
    if (before) {
      add(way, "p", { class: "verdict" }, `After the resume, repeats ${before} on each rank.`);
    }
    verdict(way, dealt.distributed, sets.samples);
    if (!sets.evaluation) drawResumable(place, sets, dealt, padded, before);
    verdict(
      drawWay(
        place,
        "range(rank, len(test_set), world_size)",
        sets.evaluation
          ? "Step 5, evaluation: never shuffled, padded or cut"
          : "Step 5, evaluation: ignores shuffle, drop_last and the resume",
        dealt.range,
        sets,
        () => ["", ""],
      ),
      dealt.range,
      sets.samples,
    );
  }

  function drawResumable(place, sets, dealt, padded, before) {
    const mark = (rank, position) =>
      position < before ? ["done", "skipped"] : padded(rank, position);
    const way = drawWay(
      place,
      "ResumableSampler",
      "Steps 4 and 5, training",
      dealt.distributed,
      sets,
      mark,
    );
    const text = before
      ? `Skips ${before} on each rank and deals the rest of the epoch.`
      : "Deals the same, until a job resumes mid-epoch.";
    add(way, "p", { class: "verdict" }, text);
  }

  // The order of each epoch, and in the current one, the rank that gets each sample.
  function drawOrders(place, sets, data) {
    place.replaceChildren();
    const table = add(place, "table");
    add(
      table,
      "caption",
      {},
      sets.shuffle
        ? "The order of each epoch, and below each sample its rank."
        : "The order of the data, and below each sample its rank.",
    );
    const body = add(table, "tbody");
    for (const epoch of sets.shuffle ? upTo(data.epochs) : [sets.epoch]) {
      const now = epoch === sets.epoch;
      const line = add(body, "tr", now ? { class: "now" } : {});
      add(line, "th", { scope: "row" }, sets.shuffle ? `epoch ${epoch}` : "in order");
      const cells = add(line, "td");
      if (!now) {
        for (const index of order(sets, data, epoch))
          add(cells, "span", { class: "plain" }, `${index} `);
        continue;
      }
      const indices = order(sets, data);
      even(indices, sets).forEach((index, position) => {
        const again = position >= indices.length;
        const shown = cell(cells, index, again ? "again" : "", again ? "again" : "");
        add(shown, "span", { class: "unseen" }, " to rank ");
        add(shown, "small", {}, String(position % sets.ranks));
      });
      for (const index of indices.slice(even(indices, sets).length)) {
        cell(cells, index, "done", "never seen");
      }
    }
  }

  // ------------------------------------------------------------ the controls

  function start(figure, data, settings) {
    const control = (name) => figure.querySelector(`[name="${name}"]`);
    const numbers = ["samples", "ranks", "batch", "seed", "epoch", "resume"];
    const switches = ["shuffle", "dropLast", "setEpoch"];

    function read() {
      const chosen = Object.fromEntries(numbers.map((name) => [name, Number(control(name).value)]));
      const asked = chosen.samples;
      chosen.samples = Math.min(Math.max(Math.round(asked) || 1, 1), data.orders.length);
      const { evaluation } = settings;
      return {
        ...chosen,
        asked,
        most: data.orders.length,
        evaluation,
        ...Object.fromEntries(switches.map((name) => [name, control(name).checked])),
      };
    }

    // An interruption after an epoch's last batch would be one between epochs.
    function offerBatches(sets, dealt) {
      const most = Math.max(Math.ceil(dealt.distributed[0].length / sets.batch) - 1, 0);
      const chosen = Math.min(sets.resume, most);
      control("resume").replaceChildren();
      for (const batches of upTo(most + 1)) add(control("resume"), "option", {}, String(batches));
      control("resume").value = chosen;
      return { ...sets, resume: chosen };
    }

    function show() {
      const first = read();
      const sets = offerBatches(first, deal(first, data));
      const dealt = deal(sets, data);
      const last = sets.epoch === data.epochs - 1;
      control("nextEpoch").textContent = last ? "Back to epoch 0" : "Next epoch";
      control("setEpoch").disabled = control("seed").disabled = !sets.shuffle;
      drawOrders(figure.querySelector(".orders"), sets, data);
      drawWays(figure.querySelector(".ways"), sets, dealt);
      const said = figure.querySelector(".said");
      said.replaceChildren();
      for (const [subject, text] of told(sets, dealt)) {
        add(add(said, "p"), "b", {}, `${subject}.`).after(` ${text}`);
      }
    }

    for (const [name, value] of Object.entries(settings)) {
      if (switches.includes(name)) control(name).checked = value;
      else if (numbers.includes(name)) control(name).value = value;
    }
    for (const name of [...numbers, ...switches]) control(name).addEventListener("input", show);
    control("samples").addEventListener("change", () => {
      control("samples").value = read().samples;
    });
    control("nextEpoch").addEventListener("click", () => {
      control("epoch").value = (read().epoch + 1) % data.epochs;
      show();
    });
    show();
  }

  figures["who-gets-which"] = { start, deal, count };
}
