// One step of DDP on one to four ranks, computed as PyTorch computes it, but in float64.
{
  const SAMPLES = [ // x0, x1, and the target
    [-0.9, -0.5, -0.5], [0.4, -0.8, 1.3], [0.6, 0.6, -0.5], [-0.7, 0.7, -2.1], [0.4, 1, -0.7],
    [0.6, 1, -0.8], [1.1, 0, 1.9], [1.1, -0.2, 2], [0.7, 0.5, 0.1], [0.9, -0.4, 2],
    [-1, 0.5, -2.2], [-0.2, -0.9, 1.1], [0.8, 0.6, 0.8], [-1.1, 0, -1], [0.3, -1, 1.4],
    [0.8, 0.6, 0.9], [0, 0.9, -1.2], [0.7, 0.6, 0.4], [-0.5, 0.8, -1.3], [-0.5, 0.7, -1.4],
    [0.3, 0.9, -0.5], [0.7, 0.7, 0.5], [0.8, -0.7, 1.9], [0.2, -1.1, 1.1],
  ];
  const [BATCH, RATE, FIRST] = [2, 0.4, [-1, 1]];
  const SHUFFLES = [5, 7, 11, 13]; // each rank's stride through all samples, instead of a shuffled order

  // ------------------------------------------------------------ what PyTorch does

  function begin(ranks) {
    const weights = Array.from({ length: ranks }, () => [...FIRST]);
    return { ranks, weights, steps: 0, reduces: 0, waiting: false, ...fresh() };
  }

  // Return the part of the state that is reset before each step.
  const fresh = () => ({ taken: [], losses: [], own: [], mean: null, phase: "forward" });

  // Return the samples of a rank's next batch. With a sampler, they are from the rank's own shard;
  // without one, they are from all samples, in the rank's own order, as with shuffle=True.
  function batch(state, sets, rank) {
    return upTo(BATCH).map((j) => {
      const position = state.steps * BATCH + j;
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

  const present = (state, sets) => upTo(state.ranks).slice(0, sets.absent ? -1 : undefined);

  const ACTIONS = {
    forward(state, sets) {
      Object.assign(state, fresh());
      for (const rank of present(state, sets)) {
        state.taken[rank] = batch(state, sets, rank);
        state.losses[rank] = lossAndGradient(state.weights[rank], state.taken[rank]).loss;
      }
      state.phase = "backward";
    },

    backward(state, sets) {
      for (const rank of present(state, sets)) {
        state.own[rank] = lossAndGradient(state.weights[rank], state.taken[rank]).gradient;
      }
      state.phase = sets.module ? "step" : "allReduce";
    },

    // Give every rank the mean of all gradients. If a rank is missing, the others wait for it.
    allReduce(state, sets) {
      state.waiting = sets.absent;
      if (state.waiting) return;
      state.mean = [0, 1].map((i) => sumOf(state.own.map((own) => own[i])) / state.ranks);
      state.reduces += 1;
      state.phase = "step";
    },

    step(state, sets) {
      for (const rank of present(state, sets)) {
        const gradient = state.mean ?? state.own[rank];
        state.weights[rank] = state.weights[rank].map((weight, i) => weight - RATE * gradient[i]);
      }
      state.phase = "forward";
      state.steps += 1;
    },

    whole(state, sets) {
      const { steps } = state;
      while (state.steps === steps && !state.waiting) ACTIONS[state.phase](state, sets);
    },
  };

  // Return the state after some steps; only the tests use this.
  function train(sets, steps) {
    const state = begin(sets.ranks);
    for (let done = 0; done < steps && !state.waiting; done++) ACTIONS.whole(state, sets);
    return state;
  }

  // ------------------------------------------------------------ in words

  const last = (state) => `rank ${state.ranks - 1}`;
  const equal = ({ weights }) => weights.every((own) => String(own) === String(weights[0]));

  // The texts that the figure shows after each action, after a change of the form, and after a reset.
  const LESSONS = {
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
      return "Each rank has gradients of its own, and would go its own way (in blue).";
    },

    allReduce(state) {
      if (state.waiting) {
        return `The other ranks wait in backward(), inside the all-reduce, and cannot know whether ${last(state)} will ` +
          "arrive. No error is raised until the timeout: 30 minutes with gloo, 10 with NCCL. Untick “never arrives”.";
      }
      return "The all-reduce has given every rank the mean (in amber). In PyTorch it runs inside backward(): each " +
        "rank waits there for all the others.";
    },

    step(state, sets) {
      if (state.waiting) return LESSONS.allReduce(state);
      if (!equal(state)) {
        return sets.module
          ? `There are now ${state.ranks} different models. No error is raised, and the checkpoint will hold rank 0's, ` +
            "which has seen its own share of the data only."
          : "Equal steps from different weights keep them different: DDP averages gradients and never compares weights.";
      }
      if (sets.sameData) {
        const batches = SAMPLES.length / BATCH;
        return "All ranks took the same step, and no error is raised. But each goes through all samples: an epoch " +
          `has ${batches} batches, as on one GPU. With DistributedSampler it has ${Math.ceil(batches / state.ranks)}.`;
      }
      return "All ranks took the same step from the same weights, so they are equal again without being sent. It is " +
        `the step of one process with a batch of ${BATCH * state.ranks}.`;
    },

    change(state, sets) {
      if (sets.absent) return `Somewhere else, ${last(state)} hangs. Run a step.`;
      if (sets.module) return "The forward pass is now model.module(x), past DDP. Run some steps.";
      if (sets.sameData) return "Without a DistributedSampler, every rank reads all data. Run a step.";
      return "Nothing is broken now. Run a step.";
    },

    reset: () => "All ranks hold the same weights: DDP(model) has sent them from rank 0. Press Forward.",
  };

  // ------------------------------------------------------------ the table

  // Add the row for one part of the step, with what each rank has computed in it so far.
  function addPart(body, code, label, kind, texts) {
    const line = addRow(body, label, texts.map((text) => text ?? "–"));
    line.firstChild.prepend(add(line.firstChild, "code", {}, code));
    texts.forEach((text, rank) => line.children[rank + 1].classList.toggle(kind, Boolean(text)));
    return line;
  }

  function tabulate(place, state, sets) {
    place.replaceChildren();
    const table = add(place, "table");
    const ranks = upTo(state.ranks);
    const top = add(add(table, "thead"), "tr");
    for (const name of ["", ...ranks.map((rank) => `rank ${rank}`)]) add(top, name ? "th" : "td", {}, name);
    const body = add(table, "tbody");
    const pair = (numbers) => numbers && numbers.map((number) => formatNumber(number)).join("\n");
    const taken = ranks.map((rank) => present(state, sets).includes(rank) && (state.taken[rank] ?? batch(state, sets, rank)).join(", "));
    addPart(body, "batch", "samples", "known", taken.map((text) => text || undefined));
    addPart(body, sets.module ? "model.\u200bmodule(x)" : "model(x)", "loss", "known", ranks.map((rank) => state.losses[rank]?.toFixed(2)));
    addPart(body, "backward()", "own gradients", "own", ranks.map((rank) => pair(state.own[rank])));
    const [kind, text] = mean(state, sets);
    add(addPart(body, "all-reduce", "their mean", "", []), "td", { colspan: state.ranks, class: kind }, text);
    addPart(body, "step()", "weights", equal(state) ? "known" : "bad", state.weights.map(pair));
    const compared = equal(state) ? "equal on all ranks." : "different.";
    const counts = `Steps: ${state.steps}. All-reduces: ${state.reduces}. Weights: ${compared}`;
    add(place, "p", { class: "counts" }, counts);
  }

  // Return the kind and the text of the row for the all-reduce.
  function mean(state, sets) {
    if (state.waiting) return ["bad", `all wait here for ${last(state)}`];
    if (!state.mean) return ["off", sets.module && state.own.length ? "does not happen" : "–"];
    const summed = (i) => `(${state.own.map((own) => formatNumber(own[i])).join(" + ").replaceAll("+ −", "− ")})`;
    return ["shared", [0, 1].map((i) => `${summed(i)} / ${state.ranks} = ${formatNumber(state.mean[i])}`).join("\n")];
  }

  // ------------------------------------------------------------ the controls

  function start(figure) {
    const form = figure.querySelector("form");
    const buttons = [...figure.querySelectorAll("[data-do]")];
    let state;

    function show(did) {
      const sets = formValues(form);
      tabulate(figure.querySelector(".ledger"), state, sets);
      setText(figure.querySelector(".said"), LESSONS[did === "whole" ? "step" : did](state, sets));
      for (const button of buttons) {
        const action = button.dataset.do;
        const isNext = action === state.phase && !state.waiting;
        button.classList.toggle("now", isNext);
        button.setAttribute("aria-disabled", action === "whole" ? state.waiting : !isNext);
      }
      for (const text of figure.querySelectorAll(".last")) {
        text.textContent = text.textContent.replace(/\d/, state.ranks - 1);
      }
    }

    function restart() {
      state = begin(formValues(form).ranks);
      show("reset");
    }

    for (const button of buttons) {
      button.addEventListener("click", () => {
        if (button.getAttribute("aria-disabled") === "true") return;
        ACTIONS[button.dataset.do](state, formValues(form));
        show(button.dataset.do);
      });
    }
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(restart));
    form.addEventListener("input", ({ target }) => {
      if (target.name === "ranks") return restart();
      Object.assign(state, fresh(), { waiting: false }); // the step starts again
      return show("change");
    });
    restart();
  }

  figures["one-step"] = { start, train, SAMPLES, FIRST, RATE, BATCH };
}
