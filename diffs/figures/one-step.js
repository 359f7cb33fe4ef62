// One step of DDP on one to four ranks, computed as PyTorch computes it, but in float64.
{
  const SAMPLES = [ // x0, x1, and the target
    [-0.9, -0.5, -0.5], [0.4, -0.8, 1.3], [0.6, 0.6, -0.5], [-0.7, 0.7, -2.1], [0.4, 1, -0.7],
    [0.6, 1, -0.8], [1.1, 0, 1.9], [1.1, -0.2, 2], [0.7, 0.5, 0.1], [0.9, -0.4, 2],
    [-1, 0.5, -2.2], [-0.2, -0.9, 1.1], [0.8, 0.6, 0.8], [-1.1, 0, -1], [0.3, -1, 1.4],
    [0.8, 0.6, 0.9], [0, 0.9, -1.2], [0.7, 0.6, 0.4], [-0.5, 0.8, -1.3], [-0.5, 0.7, -1.4],
    [0.3, 0.9, -0.5], [0.7, 0.7, 0.5], [0.8, -0.7, 1.9], [0.2, -1.1, 1.1],
  ];
  const [BATCH, RATE, FIRST, EDIT] = [2, 0.4, [-1, 1], 0.5];
  const SHUFFLES = [5, 7, 11, 13]; // each rank goes through all samples in steps of its own

  // ------------------------------------------------------------ what PyTorch does

  function begin(ranks) {
    const weights = Array.from({ length: ranks }, () => [...FIRST]);
    const trails = weights.map((own) => [own]);
    return { ranks, weights, trails, first: 0, steps: 0, reduces: 0, ...fresh() };
  }

  // What a step starts with; `gradients` is what each rank's parameters hold.
  function fresh() {
    const none = { from: [], taken: [], losses: [], gradients: [], own: [], mean: null };
    return { ...none, phase: "forward", micro: 0, waiting: false };
  }

  // The samples of a rank's next batch: with a sampler, those of its own shard; without one, all
  // samples in an order of its own, as with shuffle=True.
  function batch(state, sets, rank) {
    return upTo(BATCH).map((j) => {
      const position = (state.first + state.micro) * BATCH + j;
      const own = (position + 3 * rank) * SHUFFLES[rank];
      return (sets.sameData ? own : position * state.ranks + rank) % SAMPLES.length;
    });
  }

  function lossAndGradient([w0, w1], indices) {
    const errors = indices.map((index) => {
      const [x0, x1, y] = SAMPLES[index];
      return [w0 * x0 + w1 * x1 - y, x0, x1];
    });
    const mean = (f) => sumOf(errors.map(f)) / indices.length;
    const gradient = [mean(([error, x0]) => 2 * error * x0), mean(([error, , x1]) => 2 * error * x1)];
    return { loss: mean(([error]) => error * error), gradient };
  }

  const everyRank = (state) => upTo(state.ranks);
  const missing = (state, sets) => sets.absent && state.ranks > 1;
  const present = (state, sets) => everyRank(state).slice(0, missing(state, sets) ? -1 : undefined);
  const lastBatch = (state, sets) => state.micro === sets.accumulate - 1;

  const ACTIONS = {
    forward(state, sets) {
      if (state.micro === 0) Object.assign(state, fresh());
      for (const rank of present(state, sets)) {
        state.from[rank] = state.weights[rank];
        state.taken[rank] = batch(state, sets, rank);
        state.losses[rank] = lossAndGradient(state.weights[rank], state.taken[rank]).loss;
      }
      state.mean = null;
      state.phase = "backward";
    },

    // A rank adds its gradients to those it holds; each batch counts for its part of the step.
    backward(state, sets) {
      for (const rank of present(state, sets)) {
        const { gradient } = lossAndGradient(state.weights[rank], state.taken[rank]);
        const held = state.gradients[rank] || [0, 0];
        state.own[rank] = held.map((number, i) => number + gradient[i] / sets.accumulate);
        state.gradients[rank] = state.own[rank];
      }
      const reduced = !sets.module && (!sets.noSync || lastBatch(state, sets));
      if (reduced) state.phase = "allReduce";
      else next(state, sets);
    },

    // Every rank gets the mean of all, unless one is missing: then the others wait.
    allReduce(state, sets) {
      state.waiting = missing(state, sets);
      if (state.waiting) return;
      state.mean = [0, 1].map((i) => sumOf(state.gradients.map((own) => own[i])) / state.ranks);
      state.gradients = state.gradients.map(() => state.mean);
      state.reduces += 1;
      next(state, sets);
    },

    step(state, sets) {
      for (const rank of present(state, sets)) {
        move(state, rank, state.gradients[rank].map((number) => -RATE * number));
      }
      state.phase = "forward";
      state.micro = 0;
      state.first += sets.accumulate;
      state.steps += 1;
    },

    whole(state, sets) {
      const { steps } = state;
      while (state.steps === steps && !state.waiting) ACTIONS[state.phase](state, sets);
    },

    edit: (state) => move(state, state.ranks - 1, [EDIT, 0]),
  };

  function next(state, sets) {
    state.phase = lastBatch(state, sets) ? "step" : "forward";
    if (state.phase === "forward") state.micro += 1;
  }

  function move(state, rank, by) {
    state.weights[rank] = state.weights[rank].map((weight, i) => weight + by[i]);
    state.trails[rank].push(state.weights[rank]);
  }

  // Take some steps, for the tests; the last rank's weight is edited after `edit` of them.
  function train(sets, steps) {
    const state = begin(sets.ranks);
    for (let done = 0; done < steps && !state.waiting; done++) {
      if (done === sets.edit) ACTIONS.edit(state);
      ACTIONS.whole(state, sets);
    }
    return state;
  }

  // ------------------------------------------------------------ in words

  // The largest difference between two ranks in one weight.
  function spread({ weights }) {
    return Math.max(...[0, 1].map((i) => {
      const values = weights.map((own) => own[i]);
      return Math.max(...values) - Math.min(...values);
    }));
  }

  const last = (state) => `rank ${state.ranks - 1}`;
  const equal = (state) => spread(state) < 1e-9;

  // What is to be learned from what has just been done.
  function told(state, sets, did) {
    if (state.waiting) {
      return `The other ranks wait in backward(), inside the all-reduce, and cannot know whether ${last(state)} will ` +
        "arrive. No error is raised until the timeout: 30 minutes with gloo, 10 with NCCL, unless you choose (step 4 " +
        `chooses 5). Then the job ends and, started again, continues from its checkpoint. Untick “never arrives”.`;
    }
    return TOLD[did === "whole" ? "step" : did](state, sets);
  }

  const TOLD = {
    forward(state, sets) {
      if (sets.sameData) return "Without the sampler, shuffle=True gives each rank all samples, in an order of its own.";
      if (sets.module) return "The losses are right, but DDP has not seen this forward pass.";
      return "Each rank runs its copy of the model on its own batch, and has a loss of its own.";
    },

    backward(state, sets) {
      if (sets.module) {
        return "Only the wrapper's forward pass prepares the all-reduce, so backward() skipped it: each rank keeps its " +
          "own gradients, and no error is raised.";
      }
      if (state.phase !== "allReduce") return "Inside no_sync(), gradients stay on their rank and add up.";
      if (state.ranks === 1) return "There is one rank: its gradients are the mean already.";
      return "Each rank has gradients of its own, and would go its own way (the blue arrows).";
    },

    allReduce: (state) => state.phase === "forward"
      ? "All ranks have exchanged gradients, and will again before the step. With no_sync, this one is left out."
      : "The all-reduce has given every rank the mean (the amber arrow). In PyTorch it runs inside backward(): each " +
        "rank waits there for all the others.",

    step(state, sets) {
      if (state.ranks === 1) return "One rank took an ordinary step. With more ranks, each step uses more samples.";
      if (!equal(state)) {
        return sets.module
          ? `There are now ${state.ranks} different models, up to ${shown(spread(state))} apart. No error is raised, and ` +
            "the checkpoint will hold rank 0's, which has seen its own share of the data only."
          : "Equal steps from different weights keep them different: DDP averages gradients and never compares " +
            `weights, so the ranks stay ${shown(spread(state))} apart.`;
      }
      if (sets.sameData) {
        const batches = SAMPLES.length / BATCH;
        return "All ranks took the same step, and no error is raised. But each goes through all samples: an epoch " +
          `has ${batches} batches, as on one GPU. With DistributedSampler it has ${Math.ceil(batches / state.ranks)}.`;
      }
      if (sets.accumulate > 1) {
        return sets.noSync
          ? `One all-reduce for ${sets.accumulate} batches. Without no_sync there are ${sets.accumulate}, and the ` +
            "weights end up the same."
          : `${sets.accumulate} all-reduces for one step. Tick no_sync: one is enough, and the weights end up the same.`;
      }
      return "All ranks took the same step from the same weights, so they are equal again without being sent. It is " +
        `the step of one process with a batch of ${BATCH * state.ranks}.`;
    },

    edit: (state) => `Now ${last(state)} has other weights than the rest. Run some steps: do they meet again?`,

    change(state, sets) {
      if (missing(state, sets)) return `Somewhere else, ${last(state)} hangs. Run a step.`;
      if (sets.module) return "The forward pass is now model.module(x), past DDP. Run some steps.";
      if (sets.sameData) return "Without a DistributedSampler, every rank reads all data. Run a step.";
      if (sets.accumulate > 1) return `A step now adds up the gradients of ${sets.accumulate} batches. Run one.`;
      return equal(state) ? "Nothing is broken now. Run a step."
        : `Nothing is broken now, but the weights are still up to ${shown(spread(state))} apart. Run a step.`;
    },

    reset: (state) => (state.ranks === 1 ? "One rank, so there is nobody to average with."
      : "All ranks hold the same weights: DDP(model) has sent them from rank 0.") + " Press Forward.",
  };

  // ------------------------------------------------------------ the table

  // A part of the step: what each rank has of it, if anything.
  function part(body, code, label, ranks, kind, text) {
    const found = ranks.map(text);
    const line = addRow(body, label, found.map((numbers = "–") =>
      Array.isArray(numbers) ? numbers.map((number) => shown(number)).join("\n") : numbers));
    line.firstChild.prepend(add(line.firstChild, "code", {}, code));
    found.forEach((numbers, rank) => {
      if (numbers !== undefined) line.children[rank + 1].className = kind;
    });
    return line;
  }

  function tabulate(place, state, sets) {
    place.replaceChildren();
    const table = add(place, "table");
    const top = add(add(table, "thead"), "tr");
    add(add(top, "th", { scope: "col" }), "span", { class: "unseen" }, "part of the step");
    const ranks = everyRank(state);
    for (const rank of ranks) add(top, "th", { scope: "col" }, `rank ${rank}`);
    const body = add(table, "tbody");
    const here = present(state, sets);
    part(body, "batch", "samples", ranks, "", (rank) =>
      here.includes(rank) ? (state.taken[rank] || batch(state, sets, rank)).join(", ") : undefined);
    part(body, sets.module ? "model.\u200bmodule(x)" : "model(x)", "loss", ranks, "", (rank) =>
      state.losses[rank] === undefined ? undefined : shown(state.losses[rank]));
    part(body, "backward()", "own gradients", ranks, "own", (rank) => state.own[rank]);
    const [kind, text] = met(state, sets);
    add(part(body, "all-reduce", "their mean", [], "", () => ""), "td", { colspan: state.ranks, class: kind }, text);
    part(body, "step()", "weights", ranks, equal(state) ? "" : "bad", (rank) => state.weights[rank]);
    const compared = equal(state) ? "equal on all ranks." : "different.";
    const counts = `Steps: ${state.steps}. All-reduces: ${state.reduces}. Weights: ${compared}`;
    add(place, "p", { class: "counts" }, counts);
  }

  // The row in which all ranks meet: its kind and text.
  function met(state, sets) {
    if (state.waiting) return ["bad", `all wait here for ${last(state)}`];
    if (state.mean) {
      const summed = (i) => `(${state.own.map((own) => shown(own[i])).join(" + ").replaceAll("+ −", "− ")})`;
      return ["shared", [0, 1].map((i) => `${summed(i)} / ${state.ranks} = ${shown(state.mean[i])}`).join("\n")];
    }
    const skipped = state.own.length > 0 && state.phase !== "allReduce";
    return ["off", skipped ? (sets.module ? "does not happen" : "not yet: no_sync") : "–"];
  }

  // ------------------------------------------------------------ the map of the weights

  const [WIDE, HIGH, MARGIN] = [340, 300, 16];

  // The loss on all samples is quadratic: its lowest point, and the axes of its ellipses.
  const VALLEY = (() => {
    const mean = (f) => sumOf(SAMPLES.map(f)) / SAMPLES.length;
    const [a, b, c] = [mean(([x0]) => x0 * x0), mean(([x0, x1]) => x0 * x1), mean(([, x1]) => x1 * x1)];
    const [p, q] = [mean(([x0, , y]) => x0 * y), mean(([, x1, y]) => x1 * y)];
    const best = [(c * p - b * q) / (a * c - b * b), (a * q - b * p) / (a * c - b * b)];
    const root = Math.hypot((a - c) / 2, b);
    return { best, steep: [(a + c) / 2 + root, (a + c) / 2 - root], turn: Math.atan2(2 * b, a - c) / 2 };
  })();

  // Return a function that maps weights to a place: the best in the middle, all of them on the map.
  function mapped(weights) {
    const [b0, b1] = VALLEY.best;
    const reach = (i, most) => Math.max(...weights.map((own) => Math.abs(own[i] - VALLEY.best[i]))) / (most / 2 - MARGIN);
    const scale = 1 / Math.max(reach(0, WIDE), reach(1, HIGH), 0.002);
    return { scale, at: ([w0, w1]) => [WIDE / 2 + (w0 - b0) * scale, HIGH / 2 - (w1 - b1) * scale] };
  }

  function arrow(svg, kind, [x1, y1], [x2, y2]) {
    const length = Math.hypot(x2 - x1, y2 - y1);
    if (length < 12) return;
    const [dx, dy] = [((x2 - x1) / length) * 9, ((y2 - y1) / length) * 9];
    const [bx, by] = [x2 - dx, y2 - dy];
    const head = `M${x2} ${y2}L${bx - dy / 2} ${by + dx / 2}L${bx + dy / 2} ${by - dx / 2}Z`;
    add(svg, "path", { class: `arrow-${kind}`, d: `M${x1} ${y1}L${bx} ${by}${head}` });
  }

  function drawMap(svg, state) {
    svg.replaceChildren();
    add(svg, "rect", { class: "field", x: 0.5, y: 0.5, width: WIDE - 1, height: HIGH - 1, rx: 6 });
    const after = (from, gradient) => from.map((weight, i) => weight - RATE * gradient[i]);
    const arrows = state.own.map((gradient, rank) => ["own", state.from[rank], after(state.from[rank], gradient)]);
    if (state.mean) arrows.push(...state.from.map((from) => ["shared", from, after(from, state.mean)]));
    const { scale, at } = mapped([...state.trails.flat(), ...arrows.map(([, , to]) => to)]);
    const [x, y] = at(VALLEY.best);
    for (const radius of [0.5, 1, 1.6, 2.3, 3.1]) {
      const [rx, ry] = VALLEY.steep.map((value) => (radius * scale) / Math.sqrt(value));
      const rotate = `rotate(${(-VALLEY.turn * 180) / Math.PI} ${x} ${y})`;
      add(svg, "ellipse", { class: "ring", cx: x, cy: y, rx, ry, transform: rotate });
    }
    for (const trail of state.trails) {
      add(svg, "path", { class: "trail", d: `M${trail.map((own) => at(own).join(" ")).join("L")}` });
    }
    add(svg, "path", { class: "best", d: `M${x - 5} ${y}h10M${x} ${y - 5}v10` });
    for (const [kind, from, to] of arrows) arrow(svg, kind, at(from), at(to));
    const named = new Map();
    state.weights.forEach((own, rank) => {
      const key = own.map((weight) => weight.toFixed(9)).join();
      named.set(key, [own, [...(named.get(key)?.[1] || []), rank]]);
    });
    const middle = sumOf([...named.values()].map(([own]) => at(own)[0])) / named.size;
    for (const [own, ranks] of named.values()) {
      const [cx, cy] = at(own);
      add(svg, "circle", { class: "dot", cx, cy, r: 6 });
      const left = cx > WIDE - 80 || (cx > 40 && cx < middle); // away from the others
      const label = { class: "name", x: cx + (left ? -10 : 10), y: cy + (cy < 30 ? 20 : -8), "text-anchor": left ? "end" : "start" };
      add(svg, "text", label, ranks.length === state.ranks && ranks.length > 1 ? "all ranks" : ranks.join(", "));
    }
    const stand = [...named.values()].map(([own, ranks]) =>
      `${ranks.length > 1 ? "Ranks" : "Rank"} ${ranks.join(", ")} at ${own.map((weight) => shown(weight)).join(", ")}`);
    const best = VALLEY.best.map((weight) => shown(weight)).join(", ");
    svg.setAttribute("aria-label", `The weights as a map. ${stand.join("; ")}. The best weights are ${best}.`);
  }

  // ------------------------------------------------------------ the controls

  function start(figure) {
    const form = figure.querySelector("form");
    const buttons = [...figure.querySelectorAll("[data-do]")];
    let state;

    function show(did) {
      const sets = chosen(form);
      tabulate(figure.querySelector(".ledger"), state, sets);
      drawMap(figure.querySelector("svg"), state);
      say(figure.querySelector(".said"), told(state, sets, did));
      const focused = document.activeElement;
      for (const button of buttons) {
        const action = button.dataset.do;
        const now = action === state.phase && !state.waiting;
        button.classList.toggle("now", now);
        button.disabled = action === "whole" ? state.waiting
          : action === "edit" ? state.ranks === 1 || state.phase !== "forward" || state.micro > 0 : !now;
      }
      form.elements.absent.disabled = state.ranks === 1;
      form.elements.noSync.disabled = sets.accumulate === 1;
      for (const text of figure.querySelectorAll(".last")) {
        text.textContent = text.textContent.replace(/\d/, state.ranks - 1);
      }
      // The keyboard goes on with what can be pressed next.
      if (focused.disabled && form.contains(focused)) {
        (figure.querySelector(".now") || form.elements.absent).focus();
      }
    }

    function restart() {
      state = begin(chosen(form).ranks);
      show("reset");
    }

    for (const button of buttons) {
      button.addEventListener("click", () => {
        ACTIONS[button.dataset.do](state, chosen(form));
        show(button.dataset.do);
      });
    }
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(restart));
    form.addEventListener("input", ({ target }) => {
      if (target.name === "ranks") return restart();
      Object.assign(state, fresh()); // the step starts again
      return show("change");
    });
    restart();
  }

  figures["one-step"] = { start, train, SAMPLES, SHUFFLES, FIRST, RATE, BATCH };
}
