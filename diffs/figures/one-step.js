// One step of DDP on one to four ranks, computed as PyTorch computes it.
{
  // The samples: x0, x1, and the target.
  const SAMPLES = [
    [-0.9, -0.5, -0.5],
    [0.4, -0.8, 1.3],
    [0.6, 0.6, -0.5],
    [-0.7, 0.7, -2.1],
    [0.4, 1, -0.7],
    [0.6, 1, -0.8],
    [1.1, 0, 1.9],
    [1.1, -0.2, 2],
    [0.7, 0.5, 0.1],
    [0.9, -0.4, 2],
    [-1, 0.5, -2.2],
    [-0.2, -0.9, 1.1],
    [0.8, 0.6, 0.8],
    [-1.1, 0, -1],
    [0.3, -1, 1.4],
    [0.8, 0.6, 0.9],
    [0, 0.9, -1.2],
    [0.7, 0.6, 0.4],
    [-0.5, 0.8, -1.3],
    [-0.5, 0.7, -1.4],
    [0.3, 0.9, -0.5],
    [0.7, 0.7, 0.5],
    [0.8, -0.7, 1.9],
    [0.2, -1.1, 1.1],
  ];
  const BATCH = 2;
  const RATE = 0.4;
  const FIRST = [-1, 1];
  const EDIT = 0.5;

  // ------------------------------------------------------------ what PyTorch does

  function begin(ranks) {
    return {
      ranks,
      weights: Array.from({ length: ranks }, () => [...FIRST]),
      trails: Array.from({ length: ranks }, () => [[...FIRST]]),
      first: 0, // of the batches that a rank takes in this step
      steps: 0,
      reduces: 0,
      zoom: 1, // of the map
      ...fresh(),
    };
  }

  // What a step starts with; `gradients` is what each rank's parameters hold.
  function fresh() {
    const none = { from: [], taken: [], losses: [], gradients: [], own: [], mean: null };
    return { ...none, phase: "forward", micro: 0, number: 1, waiting: false, failed: false };
  }

  // The samples of a rank's next batch: with a sampler, those of its own shard.
  function batch(state, sets, rank, micro = state.micro) {
    return Array.from({ length: BATCH }, (_, j) => {
      const position = (state.first + micro) * BATCH + j;
      return (sets.sameData ? position : position * state.ranks + rank) % SAMPLES.length;
    });
  }

  function lossAndGradient([w0, w1], indices) {
    let loss = 0;
    const gradient = [0, 0];
    for (const [x0, x1, y] of indices.map((index) => SAMPLES[index])) {
      const error = w0 * x0 + w1 * x1 - y;
      loss += (error * error) / indices.length;
      gradient[0] += (2 * error * x0) / indices.length;
      gradient[1] += (2 * error * x1) / indices.length;
    }
    return { loss, gradient };
  }

  const everyRank = (state) => [...state.weights.keys()];
  const missing = (state, sets) => sets.absent && state.ranks > 1;
  const present = (state, sets) => everyRank(state).slice(0, missing(state, sets) ? -1 : undefined);
  const lastBatch = (state, sets) => state.micro === sets.accumulate - 1;

  // Whether the backward pass of this batch ends with an all-reduce.
  const reduced = (state, sets) => !sets.module && (!sets.noSync || lastBatch(state, sets));

  function forwardOn(state, sets, rank, micro) {
    state.from[rank] = state.weights[rank];
    state.taken[rank] = batch(state, sets, rank, micro);
    state.losses[rank] = lossAndGradient(state.weights[rank], state.taken[rank]).loss;
  }

  // A rank adds its gradients to those it holds; each batch counts for its part of the step.
  function backwardOn(state, sets, rank) {
    const { gradient } = lossAndGradient(state.weights[rank], state.taken[rank]);
    const held = state.gradients[rank] || [0, 0];
    state.gradients[rank] = held.map((number, i) => number + gradient[i] / sets.accumulate);
    state.own[rank] = state.gradients[rank];
  }

  function forward(state, sets) {
    if (state.micro === 0) Object.assign(state, fresh());
    for (const rank of present(state, sets)) forwardOn(state, sets, rank, state.micro);
    state.mean = null;
    state.number = state.micro + 1;
    state.phase = "backward";
  }

  function backward(state, sets) {
    for (const rank of present(state, sets)) backwardOn(state, sets, rank);
    state.phase = "allReduce";
    if (!reduced(state, sets)) next(state, sets);
  }

  // Every rank gets the mean of all, unless one is missing: then the others wait.
  function allReduce(state, sets) {
    state.waiting = missing(state, sets);
    if (state.waiting) return;
    const sum = (i) => state.gradients.reduce((total, own) => total + own[i], 0);
    state.mean = [sum(0) / state.ranks, sum(1) / state.ranks];
    state.gradients = state.gradients.map(() => state.mean);
    state.reduces += 1;
    next(state, sets);
  }

  function next(state, sets) {
    if (lastBatch(state, sets)) {
      state.phase = "step";
    } else {
      state.phase = "forward";
      state.micro += 1;
    }
  }

  function step(state, sets) {
    for (const rank of present(state, sets)) {
      move(
        state,
        rank,
        state.gradients[rank].map((number) => -RATE * number),
      );
    }
    state.phase = "forward";
    state.micro = 0;
    state.first += sets.accumulate;
    state.steps += 1;
  }

  function move(state, rank, by) {
    state.weights[rank] = state.weights[rank].map((weight, i) => weight + by[i]);
    state.trails[rank].push(state.weights[rank]);
  }

  const edit = (state) => move(state, state.ranks - 1, [EDIT, 0]);

  // The job runs again: every rank begins with the weights that rank 0 saved.
  function restart(state) {
    const [saved, trail] = [state.weights[0], state.trails[0]];
    state.weights = state.weights.map(() => saved);
    state.trails = state.trails.map(() => [...trail]);
    Object.assign(state, fresh());
  }

  // The rank for which the others wait has arrived, and catches up.
  function arrive(state, sets) {
    const late = state.ranks - 1;
    for (let micro = 0; micro <= state.micro; micro++) {
      forwardOn(state, sets, late, micro);
      backwardOn(state, sets, late);
    }
    state.waiting = false;
  }

  const ACTIONS = { forward, backward, allReduce, step };

  function whole(state, sets) {
    const { steps } = state;
    while (state.steps === steps && !state.waiting) ACTIONS[state.phase](state, sets);
  }

  // Take some steps, for the tests; the last rank's weight is edited after `edit` of them.
  function train(sets, steps) {
    const state = begin(sets.ranks);
    for (let done = 0; done < steps && !state.waiting; done++) {
      if (done === sets.edit) edit(state);
      whole(state, sets);
    }
    return state;
  }

  // ------------------------------------------------------------ in words

  const name = (ranks) => {
    const all = ranks.map(String);
    const last = all.pop();
    return all.length ? `ranks ${all.join(", ")} and ${last}` : `rank ${last}`;
  };
  const begun = (text) => text[0].toUpperCase() + text.slice(1);

  // The largest difference between two ranks in one weight.
  function spread(state) {
    const range = (i) => {
      const values = state.weights.map((weights) => weights[i]);
      return Math.max(...values) - Math.min(...values);
    };
    return Math.max(range(0), range(1));
  }

  const others = (state) => name(everyRank(state).slice(0, -1));
  const late = (state) => name([state.ranks - 1]);
  const wait = (state) => (state.ranks > 2 ? "wait" : "waits");

  // What is to be learned from what has just been done.
  function told(state, sets, did) {
    if (state.failed) {
      return (
        `After the timeout, backward() raises an error on ${others(state)} with gloo; with NCCL, ` +
        "the watchdog usually aborts the process. The job ends, and no weight has changed. gloo " +
        "waits 30 minutes and NCCL 10 unless you choose; step 4 chooses 5. Start the job again: " +
        "it continues from its checkpoint."
      );
    }
    if (state.waiting) {
      return (
        `${begun(others(state))} ${wait(state)} in backward(), inside the all-reduce, and cannot ` +
        `know whether ${late(state)} will arrive. No error is raised: the job hangs. Untick ` +
        "“never arrives”, or let the timeout pass."
      );
    }
    const counted = sets.accumulate > 1 && TOLD_OF_A_BATCH.includes(did);
    const number = counted ? `Batch ${state.number} of ${sets.accumulate}. ` : "";
    return number + TOLD[did](state, sets);
  }

  const TOLD_OF_A_BATCH = ["forward", "backward", "allReduce"];
  const TOLD = {
    forward(state, sets) {
      if (sets.sameData && state.ranks > 1) {
        return (
          "Without the sampler, every rank reads all samples, here in the same order: that is so " +
          "without shuffle, or with the same seed on each rank."
        );
      }
      if (sets.module) return "The losses are right, but DDP has not seen this forward pass.";
      if (missing(state, sets)) return `${begun(others(state))} computed a loss. ${begun(late(state))} is not there.`;
      return "Each rank runs its copy of the model on its own batch, and has a loss of its own.";
    },

    backward(state, sets) {
      if (sets.module) {
        return (
          "Only the wrapper's forward pass prepares the all-reduce, so backward() skipped it: " +
          "each rank keeps its own gradients, and no error is raised."
        );
      }
      if (state.phase !== "allReduce") {
        return "Inside no_sync(), gradients stay on their rank and add up. Nothing has been sent.";
      }
      if (state.ranks === 1) return "There is one rank: its gradients are the mean already.";
      if (missing(state, sets)) {
        return `${begun(others(state))} computed gradients. ${begun(late(state))} is not there.`;
      }
      if (sets.sameData) return "The same batch gives the same gradients: the mean is nothing new.";
      return (
        "Each rank has gradients of its own, and would go its own way (the blue arrows)." +
        (sets.accumulate > 1 ? ` Each loss was divided by ${sets.accumulate}.` : "")
      );
    },

    allReduce(state) {
      if (state.phase === "forward") {
        return (
          "All ranks have exchanged gradients, and will do so again before the step. " +
          "With no_sync, this all-reduce is left out."
        );
      }
      return (
        "The all-reduce has given every rank the mean (the amber arrow). In PyTorch it runs " +
        "inside backward(): each rank waits there for all the others."
      );
    },

    step(state, sets) {
      const apart = spread(state);
      if (state.ranks === 1) {
        return "One rank took an ordinary step. With more ranks, each step uses more samples.";
      }
      if (apart > 1e-9 && sets.module) {
        return (
          `There are now ${state.ranks} different models, up to ${shown(apart)} apart. No error ` +
          "is raised, and the checkpoint will hold rank 0's, which has seen its own share of " +
          "the data only."
        );
      }
      if (apart > 1e-9) {
        return (
          "Equal steps from different weights keep them different: DDP averages gradients and " +
          `never compares weights, so the ranks stay ${shown(apart)} apart.`
        );
      }
      if (sets.sameData) {
        const samples = BATCH * sets.accumulate;
        return (
          `${state.ranks} ranks did the work of one: all learned from the same ${samples} ` +
          `samples. With DistributedSampler, this step would have used ${samples * state.ranks}.`
        );
      }
      if (sets.accumulate > 1 && sets.noSync) {
        return (
          `One all-reduce for ${sets.accumulate} batches. Without no_sync there are ` +
          `${sets.accumulate}, and the same weights (Reset, and compare): no_sync saves the other waits.`
        );
      }
      if (sets.accumulate > 1) {
        return (
          `${sets.accumulate} all-reduces for one step. Tick no_sync: one is enough, and the ` +
          "weights end up the same."
        );
      }
      return (
        "All ranks took the same step from the same weights, so they are equal again without " +
        `being sent. It is the step of one process with a batch of ${BATCH * state.ranks}.`
      );
    },

    whole: (state, sets) => TOLD.step(state, sets),

    edit: (state) =>
      `${begun(late(state))} now has other weights than the rest. Run some steps: ` +
      "do they meet again?",

    arrive: (state) => `${begun(late(state))} has arrived. Now the all-reduce can run.`,

    change(state, sets) {
      if (missing(state, sets)) {
        const where = "say on a file system that does not answer";
        return `${begun(late(state))} hangs elsewhere, ${where}. Run a step.`;
      }
      if (sets.module) return "The forward pass is now model.module(x), past DDP. Run some steps.";
      if (sets.sameData) {
        return "Without a DistributedSampler, every rank reads all data. Run a step.";
      }
      if (sets.accumulate > 1) {
        return `A step now adds up the gradients of ${sets.accumulate} batches. Run one.`;
      }
      const apart = spread(state);
      return apart > 1e-9
        ? `Nothing is broken now, but the weights are still up to ${shown(apart)} apart, and DDP ` +
            "never compares them. Run a step: do they meet again?"
        : "Nothing is broken now. Run a step.";
    },

    restart: (state) =>
      `The job runs again, with ${late(state)} on a healthy node. All ranks hold the weights of ` +
      "the checkpoint: DDP(model) has sent them from rank 0. Press Forward.",

    reset(state, sets) {
      const on = stillOn(state, sets);
      return (
        (state.ranks === 1
          ? "One rank, so there is nobody to average with. "
          : "All ranks hold the same weights: DDP(model) has sent them from rank 0. ") +
        (on.length ? `Still switched on: ${on.join("; ")}. ` : "") +
        "Press Forward."
      );
    },
  };

  // The switches, as they are labelled; a reset leaves them alone.
  const stillOn = (state, sets) =>
    [
      sets.sameData && "no sampler",
      sets.module && "forward through .module",
      missing(state, sets) && `${late(state)} never arrives`,
      sets.accumulate > 1 && `${sets.accumulate} batches per step`,
      sets.accumulate > 1 && sets.noSync && "no_sync",
    ].filter(Boolean);

  // ------------------------------------------------------------ the table

  function pair(cell, numbers) {
    for (const number of numbers) {
      add(cell, "span", {}, shown(number));
      add(cell, "br");
    }
    cell.lastChild.remove();
  }

  function row(body, code, label) {
    const line = add(body, "tr");
    const head = add(line, "th", { scope: "row" });
    add(head, "code", {}, code);
    head.append(label);
    return line;
  }

  function cells(line, state, kind, fill) {
    for (const rank of everyRank(state)) {
      const cell = add(line, "td");
      if (fill(cell, rank) === false) cell.textContent = "–";
      else cell.className = kind;
    }
  }

  function tabulate(place, state, sets) {
    place.replaceChildren();
    const table = add(place, "table");
    const top = add(add(table, "thead"), "tr");
    add(add(top, "th", { scope: "col" }), "span", { class: "unseen" }, "part of the step");
    for (const rank of everyRank(state)) add(top, "th", { scope: "col" }, `rank ${rank}`);
    const body = add(table, "tbody");
    const part = sets.accumulate > 1 ? ` ${state.number} of ${sets.accumulate}` : "";
    const absent = (rank) => missing(state, sets) && rank === state.ranks - 1;
    cells(row(body, "batch", `samples${part}`), state, "", (cell, rank) => {
      cell.textContent = absent(rank)
        ? "–"
        : (state.taken[rank] || batch(state, sets, rank)).join(", ");
    });
    cells(
      row(body, sets.module ? "model.module(x)" : "model(x)", "loss"),
      state,
      "",
      (cell, rank) => {
        if (state.losses[rank] === undefined) return false;
        cell.textContent = shown(state.losses[rank]);
        return true;
      },
    );
    cells(row(body, "backward()", "own gradients"), state, "own", (cell, rank) => {
      if (!state.own[rank]) return false;
      pair(cell, state.own[rank]);
      return true;
    });
    meet(row(body, "all-reduce", "their mean"), state, sets);
    const equal = spread(state) < 1e-9;
    cells(row(body, "step()", "weights"), state, equal ? "" : "bad", (cell, rank) =>
      pair(cell, state.weights[rank]),
    );
    const counts = `Steps: ${state.steps}. All-reduces: ${state.reduces}. Weights: `;
    const compared =
      state.ranks === 1 ? "those of one rank." : equal ? "equal on all ranks." : "different.";
    add(place, "p", { class: "counts" }, counts + compared);
  }

  // The row in which all ranks meet.
  function meet(line, state, sets) {
    const cell = add(line, "td", { colspan: state.ranks });
    const done = state.own.length > 0 && ["step", "forward"].includes(state.phase);
    if (state.failed || state.waiting) {
      cell.className = "bad";
      cell.textContent = state.failed
        ? `timed out on ${others(state)}`
        : `${others(state)} ${wait(state)} here for ${late(state)}`;
    } else if (state.mean) {
      cell.className = "shared";
      for (const i of [0, 1]) {
        const sum = state.own
          .map((own) => shown(own[i]))
          .join(" + ")
          .replaceAll("+ −", "− ");
        add(cell, "span", {}, `(${sum}) / ${state.ranks} = `).style.whiteSpace = "normal";
        add(cell, "b", {}, shown(state.mean[i]));
        if (i === 0) add(cell, "br");
      }
    } else {
      cell.className = "off";
      cell.textContent = done ? (sets.module ? "does not happen" : "not yet: no_sync") : "–";
    }
  }

  // ------------------------------------------------------------ the map of the weights

  const SIDE = 340;
  const LOW = [-1.7, -2]; // the map's lower left corner
  const SCALE = SIDE / 4;
  const MARGIN = 14; // of the map, for arrowheads and dots

  // Where weights lie on a map that is magnified around the best of them.
  function mapped(best, zoom) {
    return (weights) => {
      const [w0, w1] = weights.map((weight, i) => best[i] + (weight - best[i]) * zoom);
      return [(w0 - LOW[0]) * SCALE, SIDE - (w1 - LOW[1]) * SCALE];
    };
  }

  // The largest magnification, by powers of two, at which all of the weights are on the map.
  function zoomFor(best, every, most) {
    const inside = (zoom) =>
      every.map(mapped(best, zoom)).flat().every((x) => x >= MARGIN && x <= SIDE - MARGIN);
    let zoom = most;
    while (!inside(zoom)) zoom /= 2;
    return zoom;
  }

  // The loss on all samples is quadratic: its lowest point, and the axes of its ellipses.
  function valley() {
    const mean = (f) => SAMPLES.reduce((sum, sample) => sum + f(sample), 0) / SAMPLES.length;
    const a = mean(([x0]) => x0 * x0);
    const b = mean(([x0, x1]) => x0 * x1);
    const c = mean(([, x1]) => x1 * x1);
    const p = mean(([x0, , y]) => x0 * y);
    const q = mean(([, x1, y]) => x1 * y);
    const best = [(c * p - b * q) / (a * c - b * b), (a * q - b * p) / (a * c - b * b)];
    const root = Math.hypot((a - c) / 2, b);
    const steep = [(a + c) / 2 + root, (a + c) / 2 - root];
    return { best, steep, turn: Math.atan2(2 * b, a - c) / 2 };
  }

  // Returns the points that labels should leave free.
  function arrow(svg, kind, [x1, y1], to, rank, occupied) {
    const length = Math.hypot(to[0] - x1, to[1] - y1);
    if (length < 16) return [];
    const [dx, dy] = [(to[0] - x1) / length, (to[1] - y1) / length];
    const gap = occupied ? 6 : 0; // the head stays clear of a rank's dot
    const [x2, y2] = [to[0] - dx * gap, to[1] - dy * gap];
    const size = kind === "shared" ? 11 : 8;
    const [bx, by] = [x2 - dx * size, y2 - dy * size];
    const points = `M${x1} ${y1}L${bx} ${by}`;
    add(svg, "path", { class: `arrow-${kind}`, d: points });
    const tip = [
      [x2, y2],
      [bx - (dy * size) / 2, by + (dx * size) / 2],
      [bx + (dy * size) / 2, by - (dx * size) / 2],
    ];
    add(svg, "path", {
      class: `arrow-${kind}`,
      d: `M${tip.map((point) => point.join(" ")).join("L")}Z`,
      "stroke-width": 0,
    });
    const label = [x2 + dx * 11, y2 + dy * 11];
    if (!occupied) add(svg, "text", { class: "tip", x: label[0], y: label[1] + 5 }, String(rank));
    const along = [0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1];
    return [...along.map((part) => [x1 + dx * length * part, y1 + dy * length * part]), label];
  }

  // Write a dot's name on that side of it where it covers the fewest of the points.
  function nameDot(svg, [cx, cy], label, points, kind = "name") {
    const width = 8.5 * label.length;
    const sides = [-26, 9].flatMap((dy) => [-width - 5, 5].map((dx) => [cx + dx, cy + dy]));
    sides.push([cx + 11, cy - 9], [cx - width - 11, cy - 9]);
    const covered = ([x, y]) =>
      points.filter(([px, py]) => px > x - 6 && px < x + width + 6 && py > y - 5 && py < y + 22)
        .length + ([x, y, SIDE - x - width, SIDE - y - 17].some((room) => room < 2) ? 100 : 0);
    const [x, y] = sides.reduce((best, one) => (covered(one) < covered(best) ? one : best));
    add(svg, "text", { class: kind, x, y: y + 14 }, label);
    return [0, 0.25, 0.5, 0.75, 1].map((part) => [x + width * part, y + 9]);
  }

  // The ranks by where they stand: [[weights, ranks]].
  function gathered(state) {
    const places = new Map();
    state.weights.forEach((weights, rank) => {
      const key = weights.map((weight) => weight.toFixed(9)).join();
      places.set(key, [weights, [...(places.get(key)?.[1] || []), rank]]);
    });
    return [...places.values()];
  }

  // The arrows of a step: [{ kind, from, to, rank }].
  function planned(state) {
    const by = (from, gradient) => from.map((weight, i) => weight - RATE * gradient[i]);
    const own = state.own.map((gradient, rank) => {
      const from = state.from[rank];
      return { kind: "own", from, to: by(from, gradient), rank };
    });
    const shared = state.mean
      ? state.from.map((from) => ({ kind: "shared", from, to: by(from, state.mean), rank: "" }))
      : [];
    return [...own, ...shared];
  }

  function drawMap(svg, state) {
    svg.replaceChildren();
    add(svg, "rect", { class: "field", x: 0.5, y: 0.5, width: SIDE - 1, height: SIDE - 1, rx: 6 });
    const { best, steep, turn } = valley();
    const places = gathered(state);
    const arrows = planned(state);
    const onMap = [...state.weights, ...arrows.flatMap(({ from, to }) => [from, to])];
    // Without arrows it does not zoom in, or each step would zoom in and out.
    state.zoom = zoomFor(best, onMap, arrows.length ? 4 : state.zoom);
    const { zoom } = state;
    const at = mapped(best, zoom);
    const [x, y] = at(best);
    for (const radius of [0.5, 1, 1.6, 2.3, 3.1]) {
      const [rx, ry] = steep.map((value) => (radius * SCALE) / Math.sqrt(value));
      const rotate = `rotate(${(-turn * 180) / Math.PI} ${x} ${y})`;
      add(svg, "ellipse", { class: "ring", cx: x, cy: y, rx, ry, transform: rotate });
    }
    for (const trail of state.trails) {
      add(svg, "path", {
        class: "trail",
        d: `M${trail.map((point) => at(point).join(" ")).join("L")}`,
      });
    }
    add(svg, "path", { class: "best", d: `M${x - 5} ${y}h10M${x} ${y - 5}v10` });
    add(svg, "text", { class: "axis", x: SIDE - 10, y: SIDE - 10, "text-anchor": "end" }, "w0 →");
    add(svg, "text", { class: "axis", x: 10, y: 22 }, "↑ w1");
    const scale = zoom === 1 ? "" : `zoom ${zoom > 1 ? zoom : `1/${1 / zoom}`}`;
    add(svg, "text", { class: "axis scale", x: 10, y: SIDE - 10 }, scale);
    const dots = places.map(([weights]) => at(weights));
    const standsAt = ([px, py]) => dots.some(([cx, cy]) => Math.hypot(px - cx, py - cy) < 6);
    const points = arrows.flatMap(({ kind, from, to, rank }) =>
      arrow(svg, kind, at(from), at(to), rank, standsAt(at(to))),
    );
    points.push(...dots, [x, y]);
    places.forEach(([, ranks], i) => {
      const [cx, cy] = dots[i];
      add(svg, "circle", { class: "dot", cx, cy, r: 6 });
      const all = ranks.length === state.ranks && ranks.length > 1;
      points.push(...nameDot(svg, dots[i], all ? "all ranks" : ranks.join(", "), points));
    });
    nameDot(svg, [x, y], "best", points, "axis");
    svg.setAttribute(
      "aria-label",
      `The weights as a map${scale && `, ${scale}`}. ${places
        .map(
          ([weights, ranks]) =>
            `${begun(name(ranks))} at ${weights.map((w) => shown(w)).join(", ")}`,
        )
        .join("; ")}. The best weights are ${best.map((w) => shown(w)).join(", ")}.`,
    );
  }

  // ------------------------------------------------------------ the controls

  function start(figure) {
    const control = (field) => figure.querySelector(`[name="${field}"]`);
    const button = (action) => figure.querySelector(`[data-do="${action}"]`);
    const said = figure.querySelector(".said");
    let state;

    const settings = () => ({
      accumulate: Number(control("accumulate").value),
      ...Object.fromEntries(
        ["sameData", "module", "absent", "noSync"].map((field) => [field, control(field).checked]),
      ),
    });

    function show(did) {
      const sets = settings();
      tabulate(figure.querySelector(".ledger"), state, sets);
      drawMap(figure.querySelector("svg"), state);
      said.textContent = told(state, sets, did);
      const focused = document.activeElement;
      for (const action of Object.keys(ACTIONS)) {
        const now = action === state.phase && !state.waiting && !state.failed;
        button(action).disabled = !now;
        button(action).classList.toggle("now", now);
      }
      button("whole").disabled = state.waiting || state.failed;
      button("timeout").hidden = !state.waiting || state.failed;
      button("restart").hidden = !state.failed;
      for (const set of figure.querySelectorAll("fieldset")) set.disabled = state.failed;
      button("edit").disabled = state.ranks === 1 || state.phase !== "forward" || state.micro > 0;
      control("absent").disabled = state.ranks === 1;
      control("noSync").disabled = sets.accumulate === 1;
      for (const text of figure.querySelectorAll(".last")) {
        text.textContent = text.textContent.replace(/\d/, state.ranks - 1);
      }
      // The keyboard goes on with what can be pressed next.
      const next = [state.phase, "timeout", "restart", "reset"].map(button);
      if (figure.contains(focused) && (focused.disabled || focused.hidden)) {
        next.find((one) => !one.disabled && !one.hidden).focus();
      }
    }

    function reset() {
      state = begin(Number(control("ranks").value));
      show("reset");
    }

    function press(action) {
      if (action === "reset") return reset();
      if (action === "timeout") state.failed = true;
      else if (action === "restart") {
        restart(state);
        control("absent").checked = false;
      }
      else if (action === "edit") edit(state);
      else if (action === "whole") whole(state, settings());
      else ACTIONS[action](state, settings());
      return show(action);
    }

    for (const one of figure.querySelectorAll("[data-do]")) {
      one.addEventListener("click", () => press(one.dataset.do));
    }
    control("ranks").addEventListener("change", reset);
    for (const field of ["sameData", "module", "absent", "accumulate", "noSync"]) {
      control(field).addEventListener("change", () => {
        if (state.waiting && field === "absent") {
          arrive(state, settings());
          return show("arrive");
        }
        Object.assign(state, fresh()); // the step starts again
        return show("change");
      });
    }
    reset();
  }

  figures["one-step"] = { start, train, SAMPLES, FIRST, RATE, BATCH };
}
