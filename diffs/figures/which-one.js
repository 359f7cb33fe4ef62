// Which way of splitting a GPT fits, by the formulae of lookup/which.py, in its order.
{
  const VOCABULARY = 50000;
  const ROOM = 0.9;
  const SHARDED = ["fsdp2_gpt", "hybrid_sharding", "two_dimensional"];
  const WAYS = {
    ddp: "DDP",
    zero_optimizer: "ZeRO-1",
    fsdp2_gpt: "FSDP2",
    hybrid_sharding: "hybrid",
    tensor_parallel: "tensor parallel",
    two_dimensional: "2-D",
    pipeline: "pipeline",
  };
  const SIMPLEST = ["ddp", "zero_optimizer", "hybrid_sharding", "fsdp2_gpt", "two_dimensional", "pipeline"];

  function shape(parameters) {
    const layers = Math.cbrt(parameters / 12 / 100 ** 2);
    return { layers, width: 100 * layers };
  }

  function completed(job) {
    return { ...shape(job.parameters), ...job, ranks: job.nodes * job.gpus, value: job.mixed ? 2 : 4 };
  }

  function parts(way, { ranks, gpus }) {
    if (way === "ddp") return [1, 1, 1];
    if (way === "zero_optimizer") return [1, 1, ranks];
    const split = ["hybrid_sharding", "tensor_parallel"].includes(way) ? gpus : ranks;
    return [split, split, split];
  }

  function memory(way, job) {
    const [parameters, gradients, optimizer] = parts(way, job);
    const states = job.parameters * (4 / parameters + 4 / gradients + 8 / optimizer);
    return [states, inUse(way, job), activations(way, job)];
  }

  function inUse(way, job) {
    if (SHARDED.includes(way)) {
      const split = way === "two_dimensional" ? job.gpus : 1;
      return ((3 * job.value + 4) * job.parameters) / job.layers / split;
    }
    return job.mixed ? (2 * job.parameters) / parts(way, job)[0] : 0;
  }

  // The bytes of a value that passes a block by: autocast leaves it in float32.
  const stream = (way, job) => (SHARDED.includes(way) ? job.value : 4);

  function activations(way, job) {
    const together = ["tensor_parallel", "two_dimensional"].includes(way) ? job.gpus : 1;
    const saved = (12 + 2 * together) * job.value + 2 * stream(way, job);
    const kept = job.checkpointed ? job.layers * stream(way, job) + saved : job.layers * saved;
    return job.tokens * (kept * job.width + 12 * VOCABULARY);
  }

  const ring = (ranks) => (ranks - 1) / ranks;

  // Return the bytes that a rank sends: [inside its node, between nodes].
  function sent(way, job) {
    const gathered = 2 * job.value + 4;
    const activation = job.width * job.tokens * job.gpus;
    const around = { ddp: 8, zero_optimizer: 12, fsdp2_gpt: gathered }[way];
    if (around) {
      const total = around * job.parameters * ring(job.ranks);
      const between = job.nodes > 1 ? total / job.gpus : 0;
      return [total - between, between];
    }
    if (way === "pipeline") {
      const sends = 2 * activation * stream(way, job) * job.nodes;
      const total = sends * ring(job.ranks);
      const between = (sends * ring(job.nodes)) / job.gpus;
      return [total - between, between];
    }
    const each = 4 * (stream(way, job) + job.value) * activation;
    const inside = way === "hybrid_sharding" ? gathered * job.parameters : job.layers * each;
    const across = way === "two_dimensional" ? gathered : 8;
    return [inside * ring(job.gpus), ((across * job.parameters) / job.gpus) * ring(job.nodes)];
  }

  function fits(way, job, limit) {
    return sumOf(memory(way, job)) <= ROOM * limit && (way !== "pipeline" || job.ranks <= job.layers);
  }

  function recommended(job, limit) {
    const ways = SIMPLEST.filter((way) => job.nodes > 1 || way !== "hybrid_sharding");
    return ways.find((way) => fits(way, job, limit)) || null;
  }

  // Return all that the figure shows, for the test.
  function computed(given, limit) {
    const job = completed(given);
    const ways = Object.keys(WAYS).map((way) => [way, memory(way, job), sent(way, job), fits(way, job, limit)]);
    return { ways, recommended: recommended(job, limit) };
  }

  function gigabytes(size) {
    const digits = { minimumFractionDigits: 1, maximumFractionDigits: 1 };
    return `${(size / 1e9).toLocaleString("en-US", digits)} GB`;
  }

  function tooLarge(way, job, limit) {
    return sumOf(memory(way, job)) > ROOM * limit ? ": no" : ": more ranks than layers";
  }

  function words(given, limit, way) {
    const where = way === "ddp" ? "the five scripts as they are" : `recipes/${way}.md`;
    if (way) {
      const job = completed(given);
      const [hybrid, whole] = ["hybrid_sharding", "fsdp2_gpt"].map((each) => gigabytes(sent(each, job)[1] * job.gpus));
      const also = way === "hybrid_sharding" && fits("fsdp2_gpt", job, limit);
      return (
        `The simplest that fits into ${gigabytes(limit)} per GPU: ${WAYS[way]} (${where}). ` +
        `${gigabytes(ROOM * limit)} of them can be used.` +
        (also ? ` FSDP2 fits, too, but a node then sends ${whole} instead of ${hybrid}.` : "")
      );
    }
    const checkpointed = recommended(completed({ ...given, checkpointed: true }), limit);
    return checkpointed
      ? `Nothing fits as it is. With activation checkpointing: ${WAYS[checkpointed]}.`
      : "Nothing fits. Use more GPUs, or fewer tokens per GPU, or move states to the host's memory.";
  }

  function start(figure) {
    const form = figure.querySelector("form");
    const body = figure.querySelector("tbody");
    const said = figure.querySelector(".said");

    follow(form, () => {
      body.replaceChildren();
      const bad = [...form.elements].find((one) => one.type === "number" && (one.value === "" || !one.checkValidity()));
      if (bad) {
        const kind = bad.step === "any" ? "a number" : "a whole number";
        say(said, `${bad.parentElement.textContent.trim()}: type ${kind} that is in range, from ${bad.min} to ${bad.max}.`);
        return;
      }
      const { billions, memory: room, ...rest } = chosen(form);
      const [given, limit] = [{ ...rest, parameters: 1e9 * billions }, 1e9 * room];
      const found = computed(given, limit);
      for (const [way, sizes, [inside, between], fit] of found.ways) {
        const together = gigabytes(sumOf(sizes)) + (fit ? "" : tooLarge(way, completed(given), limit));
        const texts = [...sizes.map(gigabytes), together, ...[inside + between, between * rest.gpus].map(gigabytes)];
        addRow(body, WAYS[way], texts, { class: !fit ? "over" : way === found.recommended ? "chosen" : "" });
      }
      say(said, words(given, limit, found.recommended));
    });
  }

  figures["which-one"] = { start, computed };
}
