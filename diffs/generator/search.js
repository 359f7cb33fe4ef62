// The search. MiniSearch ranks the entries; this file defines what a word is, what belongs to an entry, and how a hit is shown.
/* global MiniSearch, add, addCopyButton */

// These parts differ from run to run or are printed with every error, so they say nothing about its cause.
const NOISE = [
  /Traceback \(most recent call last\):?/g,
  /\bFile "[^"]*", line \d+(, in \S+)?|\bFile [~/\w]\S*:\d+, in \w+(?:\(.*?\))?/g,
  /CUDA kernel errors might be asynchronously.*?incorrect\.?|For debugging consider.*?=1|Compile with `?TORCH_USE_CUDA_DSA.*?assertions/g,
  /\[?\b[EWI]\d+ [\d:.]+ (?:\d+ )?\S+:\d+\](?: \[PG [^\]]*\])?/g, // the beginning of a line that PyTorch logs
  /\bfailed \(exitcode: 1\) local_rank: \d+ \(pid: \d+\) of binary: \S+/g,
  /\bhttps?:\/\/\S+|\b0x[0-9a-f]+\b/gi,
  /\b(?:[a-z_]\w*\.)+(?=[A-Z])|\b[a-z_]+(?:\.[a-z_]+){2,}:/g, // the module of an exception, the name of a logger
  /(?<![\w.)])(?:[A-Za-z]:)?[\\/](?!dev\b|proc\b)[\w.+@-]+(?:[\\/][\w.+@<>…-]+)+/g, // a path
];
// Patterns of different spellings of the same thing. Only the numbers of exit codes and errors are kept, because other numbers say nothing about the cause.
const SPELLINGS = [
  [/\b(exit ?code|status|signal|err(?:or|no)?|code|failure)\b\s*[:=]?\s*-?(\d{1,3})\b/gi, "$1 code$2 "],
  [/\b(?:[2-9]|two|three|four|eight|dual|multi(?:ple)?|many|all|both)[ -]?(?:x ?)?(?:rtx ?|graphics |video )?(?:gpu|card|a100|h100|v100|[345]090)s?\b/gi, " gpu "],
  [/\bout[ -]of[ -]memory\b|\bOutOfMemory(?:Error)?\b/gi, "OOM"],
];
const STOP_WORDS = new Set(`a an and any are as at be been but by can cant could do does doesn doesnt did don dont for from get gets had has
  have how however i if in into is isn isnt it its me my no not of on one or our out so some still than that the their them then there these
  they this to up use used using was we what when where which while who why will with wont would you your`.split(/\s+/));
const SYNONYMS = { freez: "hang", stuck: "hang", hung: "hang", deadlock: "hang", slower: "slow", faster: "fast", speed: "fast",
  multi: "several", multipl: "several", machin: "node", host: "node", comput: "node", card: "gpu", each: "every", reshuffl: "shuffl",
  validat: "evaluat", validation: "evaluat", evaluation: "evaluat", acc: "accuracy", ckpt: "checkpoint" };

// Return the same stem for all forms of a word: "running" and "runs" become "run".
function stem(word) {
  const root = word.toLowerCase().replace(/(?<=[a-z]{3})(?:ing|ed|es|s|e)$/, "").replace(/([b-df-hj-np-tv-z])\1$/, "$1");
  return Object.hasOwn(SYNONYMS, root) ? SYNONYMS[root] : root;
}

// Return the distinct terms of a text: its words, the parts of its identifiers and, if `pairs` is true, pairs of adjacent words.
function terms(text, pairs = true) {
  for (const pattern of NOISE) text = text.replace(pattern, " ");
  for (const [pattern, spelling] of SPELLINGS) text = text.replace(pattern, spelling);
  const found = new Set();
  let before = "";
  for (const word of text.match(/\bcode\d+|[A-Za-z_]{2,}|[\u4e00-\u9fff]/g) ?? []) {
    if (STOP_WORDS.has(word.toLowerCase())) continue;
    const parts = word.replace(/([a-z])([A-Z])/g, "$1_$2").split("_").filter((part) => part.length > 1 || part >= "\u4e00");
    found.add(stem(word.replaceAll("_", "")));
    for (const part of parts.map(stem)) {
      found.add(part);
      if (before && pairs) found.add(`${before} ${part}`);
      before = part;
    }
  }
  found.delete("");
  return [...found];
}

const BOOST = { title: 2, words: 4, body: 1 };
const PAIR = 0.3; // A pair of adjacent words counts less than a word, because its words are counted too.
const TYPO = 0.4; // A known word that differs by one letter from an unknown word in the search counts this much.
const LOG = 30; // A text with more terms than this is a log, not a question.
const FIELD = /gpu|cuda|torch|ddp|fsdp|nccl|gloo|\branks?\b|\bnodes?\b|train|distributed|deepspeed|accelerate|lightning|slurm|srun|sbatch|checkpoint|epoch|\bmodel|\bloss|multi|card/i;
// These weights come from a logistic regression on questions in other people's words and on texts about other subjects.
const ODDS = { score: 0.35, share: 4, lead: 2.1, field: 0.6, none: -5.65 };

// Return a function that finds the entries {title, words, body, worth, …} for a text, best first.
function finder(entries) {
  const counts = new Map(); // {term: number of fields that contain it}
  const tokenize = (text, field) => {
    const list = text.split("\n").flatMap((line) => terms(line, field !== "words")); // Words of different lines are not adjacent.
    for (const term of new Set(list)) counts.set(term, (counts.get(term) ?? 0) + 1);
    return list;
  };
  const index = new MiniSearch({ fields: Object.keys(BOOST), tokenize, processTerm: (term) => term });
  index.addAll(entries.map(({ title, words, body }, id) => ({ id, title, words, body })));
  const weight = (term) => (term.includes(" ") ? PAIR : 1);
  const mass = (list) => list.reduce((sum, term) => sum + weight(term) * Math.log(1 + entries.length / (counts.get(term) ?? 1)), 0);
  const fuzzy = (term) => (counts.has(term) || term.length < 5 || term.includes(" ") ? false : 1);
  const options = { boost: BOOST, boostTerm: weight, fuzzy, weights: { fuzzy: TYPO, prefix: 0 }, tokenize: (text) => terms(text) };
  return (text) => {
    const asked = terms(text).filter((term) => counts.has(term) || !term.includes(" "));
    const power = asked.length > LOG ? 1 : 0.2; // Someone who pastes a log is seldom looking for a recipe.
    const list = index.search(text, options).map(({ id, score, match, queryTerms }) =>
      // MiniSearch has multiplied the score by the number of terms, which is too much if they are common.
      ({ ...entries[id], match, score: (score / queryTerms.length ** 0.25) * entries[id].worth ** power }));
    list.sort((one, other) => other.score - one.score);
    const [first, second] = list;
    if (!first) return [];
    const named = asked.filter((term) => Object.hasOwn(first.match, term) && first.match[term].some((field) => field !== "body"));
    const lead = Math.log(first.score / (second?.score ?? 0.3 * first.score));
    const odds = ODDS.none + ODDS.score * Math.log(first.score) + (ODDS.share * mass(named)) / mass(asked) + ODDS.lead * lead + ODDS.field * FIELD.test(text);
    first.sure = odds > 0;
    return list.slice(0, 8);
  };
}

// Return what the search knows about an entry, recipe, pitfall or change. The generator writes more search terms into data-words.
function read(element) {
  const heading = element.querySelector("h3, h4, h5");
  const title = heading.textContent.replace(/^\s*\d+|#\s*$/g, "").trim();
  const isPatch = element.matches("article");
  const symptoms = isPatch ? [...element.querySelectorAll("td:first-child")].map((cell) => cell.textContent) : [];
  const name = isPatch ? element.id.replaceAll("-", " ") : "";
  const body = (element.querySelector(".note") ?? element).textContent;
  const { words = "" } = element.dataset;
  return { element, title: [title, ...symptoms, name].join("\n"), heading: title, words, body, worth: isPatch ? 0.7 : 1 };
}

const [search, hits, found] = ["search", "hits", "found"].map((id) => document.getElementById(id));
const NOTHING = "Nothing found. Try the last line of the error alone, or two or three of its rarest words, such as “watchdog timeout”.";
const DAGGER = "† from the linked source; we have not tried it";
let find = null; // The function of `finder`. The first search sets it, because reading all entries takes a while.

// Show a whole entry with its text, code and lists. Only the first hit is unfolded.
function showHit({ element, heading }, number) {
  const hit = add(hits, "details", {});
  hit.open = number === 0;
  add(hit, "summary", {}, heading);
  const parts = [...element.children].filter((part) => !part.matches("h3, h4, h5"));
  hit.append(...parts.map((part) => part.cloneNode(true)));
  for (const part of hit.querySelectorAll(".tests, .picture, button")) part.remove();
  for (const pre of hit.querySelectorAll("pre")) addCopyButton(pre);
  if (hit.textContent.includes("†")) add(hit, "p", { class: "dagger" }, DAGGER);
  add(add(hit, "p"), "a", { href: `#${element.id}`, "data-hit": "" }, "Show it on the page");
}

function look() {
  const text = search.value.trim();
  find ??= finder([...document.querySelectorAll(".entry, article:has(.note)")].map(read));
  const list = text ? find(text) : [];
  hits.replaceChildren();
  if (text && !list.length) add(hits, "p", {}, NOTHING);
  if (list.length && !list[0].sure) add(hits, "p", {}, "No entry is surely about this. The nearest:");
  list.forEach(showHit);
  hits.hidden = !text;
  found.textContent = !text ? "" : list.length ? `${list.length} found, the best first` : "Nothing found";
}

for (const event of ["input", "focus"]) search.addEventListener(event, look);
search.parentElement.addEventListener("keydown", (event) => {
  const stops = [search, ...hits.querySelectorAll("summary")];
  const target = stops[stops.indexOf(document.activeElement) + ({ ArrowDown: 1, ArrowUp: -1 }[event.key] ?? NaN)];
  if (target && !hits.hidden) target.focus();
  else if (event.key === "Enter" && event.target === search) hits.querySelector("a[data-hit]")?.click();
  else if (event.key === "Escape") {
    search.focus();
    hits.hidden = true;
  } else return;
  event.preventDefault();
});
document.addEventListener("click", (event) => {
  if (event.target.closest("#hits a") || !event.target.closest(".search, #hits")) hits.hidden = true;
});
search.parentElement.hidden = false;
