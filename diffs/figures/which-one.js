// Which way of splitting a GPT fits, computed as in more/lookup/which.py.
{
  const VOCABULARY = 50000;
  const ROOM = 0.9; // share of a GPU's memory
  const WAYS = { ddp: "DDP", zero_optimizer: "ZeRO-1", fsdp2_gpt: "FSDP2", hybrid_sharding: "hybrid" };
  const SIMPLEST = ["ddp", "zero_optimizer", "hybrid_sharding", "fsdp2_gpt"];
  const SHARDED = ["fsdp2_gpt", "hybrid_sharding"];

  // Return how many bytes a rank needs: [states, in use, activations].
  function memory(way, job) {
    const ranks = job.nodes * job.gpus;
    const parts = { hybrid_sharding: job.gpus, fsdp2_gpt: ranks }[way] ?? 1;
    const states = job.parameters * (8 / parts + 8 / (way === "zero_optimizer" ? ranks : parts));
    return [states, inUse(way, job), activations(way, job)];
  }

  function inUse(way, job) {
    if (SHARDED.includes(way)) return ((3 * job.value + 4) * job.parameters) / job.layers;
    return job.mixed ? 2 * job.parameters : 0;
  }

  function activations(way, job) {
    const stream = SHARDED.includes(way) ? job.value : 4;
    const saved = 14 * job.value + 2 * stream;
    const kept = job.checkpointed ? job.layers * stream + saved : job.layers * saved;
    return job.tokens * (kept * job.width + 12 * VOCABULARY);
  }

  // Return what the figure shows: [way, memory, whether it fits], and the simplest way that fits.
  function computed(given, limit) {
    const layers = Math.cbrt(given.parameters / 12 / 100 ** 2);
    const job = { layers, width: 100 * layers, value: given.mixed ? 2 : 4, ...given };
    const fits = (way) => sumOf(memory(way, job)) <= ROOM * limit;
    const ways = Object.keys(WAYS).map((way) => [way, memory(way, job), fits(way)]);
    const recommended = SIMPLEST.find((way) => fits(way) && (job.nodes > 1 || way !== "hybrid_sharding"));
    return { ways, recommended: recommended ?? null };
  }

  function gigabytes(size) {
    const digits = { minimumFractionDigits: 1, maximumFractionDigits: 1 };
    return `${(size / 1e9).toLocaleString("en-US", digits)} GB`;
  }

  function words(given, limit, way) {
    if (way) {
      const where = way === "ddp" ? "the five scripts as they are" : `more/recipes/${way === "hybrid_sharding" ? "fsdp2_gpt" : way}.md`;
      return `The simplest that fits into ${gigabytes(limit)} per GPU: ${WAYS[way]} (${where}).`;
    }
    const { recommended } = computed({ ...given, checkpointed: true }, limit);
    return recommended
      ? `Nothing fits as it is. With activation checkpointing: ${WAYS[recommended]}.`
      : "Nothing fits. Use more GPUs, or fewer tokens per GPU, or move states to the host's memory.";
  }

  function start(figure) {
    const form = figure.querySelector("form");
    const body = figure.querySelector("tbody");

    onChange(form, () => {
      if (!form.reportValidity()) return; // the browser says which number is out of range
      const { billions, memory: room, ...rest } = formValues(form);
      const [given, limit] = [{ ...rest, parameters: 1e9 * billions }, 1e9 * room];
      const { ways, recommended } = computed(given, limit);
      body.replaceChildren();
      for (const [way, sizes, fits] of ways) {
        const texts = [...sizes, sumOf(sizes)].map(gigabytes);
        if (!fits) texts[3] += ": no";
        addRow(body, WAYS[way], texts, { class: !fits ? "over" : way === recommended ? "chosen" : "" });
      }
      setText(figure.querySelector(".said"), words(given, limit, recommended));
    });
  }

  figures["which-one"] = { start, computed };
}
