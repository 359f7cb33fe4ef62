// Find what was typed or pasted: the rows, pages, hunks and sections that share its rarest words.
const KEPT = 12; // hits shown
const PARTICULAR = [ // what differs from run to run
  /\bFile "[^"]*", line \d+(, in \S+)?/g,
  /\bhttps?:\/\/\S+/g,
  /\b(?:[a-z_]\w*\.)+(?=[A-Z])|\b[a-z_]+(?:\.[a-z_]+){2,}:/g, // the module of an exception or of a logger
  /(?<![\w.)])(?:[A-Za-z]:)?[\\/](?!dev\b|proc\b)[\w.+@-]+(?:[\\/][\w.+@<>-]+)+/g, // a path
  /\b0x[0-9a-f]+\b/gi,
  /\b\d{1,3}(?:\.\d{1,3}){3}\b/g, // an address
];
const HARMLESS = "#see-warnings-that-are-harmless ~ table tr"; // printed above the error, and longer
const CODE = /\b(exit ?code|status|signal|err(?:or|no)?|code)\b\s*[:=]?\s*-?(\d{1,3})\b/gi;
// What is printed after every failure, whatever its cause, or before its cause is named.
const ANNOUNCED = /ChildFailedError|exited unexpectedly|exitcode: [12]\)|Details are lost|ProcessRaisedException|ncclInternalError|ncclSystemError|ncclUnhandledCudaError|watchdog thread terminated|Signal 6 |Signal 15 /;

// The words of a text, without what is particular, each with its parts: find_unused, TCPStore.
function words(text) {
  for (const pattern of PARTICULAR) text = text.replace(pattern, " ");
  text = text.replace(CODE, "$1 №$2 "); // the one kind of number that tells something
  return (text.match(/[A-Za-z_]+|№\d+/g) || []).filter((word) => word.length > 1);
}

const COMMON = new Set(`a an and any are as at be been but by can could do does did for from get gets had has have how however i
  if in into is it its me my no not of on one or our out so some still than that the their them then there these they this
  to up use used using was we what when where which while who why will with would you your`.split(/\s+/));
const ALIKE = { freez: "hang", stuck: "hang", hung: "hang", deadlock: "hang", slower: "slow", faster: "fast", speed: "fast",
  oom: "memory", multi: "several", multipl: "several", machin: "node", host: "node" };

// The word that stands for a word and for its other forms.
function stem(word) {
  const lower = word.toLowerCase().replace(/^_+|_+$/g, "");
  const root = lower.replace(/(?<=[a-z]{3})(?:ing|ed|es|s|e)$/, "");
  return ALIKE[root] || root;
}

// The terms of a text: its words, their parts, and each pair of neighbours.
function terms(text) {
  const found = new Set();
  let before = "";
  for (const word of words(text)) {
    if (COMMON.has(word.toLowerCase())) continue;
    const whole = stem(word);
    const parts = word.replace(/([a-z])([A-Z])/g, "$1_$2").split("_").filter((part) => part.length > 1);
    found.add(whole);
    if (parts.length > 1) for (const part of parts) found.add(stem(part));
    if (before) found.add(`${before} ${whole}`);
    before = whole;
  }
  return found;
}

// ---------------------------------------------------------------- what can be found

function entry(link, title, where, message, text, worth = 1) {
  const weights = new Map();
  for (const term of terms(text)) weights.set(term, 0.3);
  for (const term of terms(message)) weights.set(term, 1);
  return { link, title, where, message: terms(message), weights, worth };
}

function row(element) {
  const [seen, why, remedy] = [...element.cells].map((cell) => cell.textContent);
  const message = seen.replace(/\(source\)\s*$/, "");
  const worth = ANNOUNCED.test(message) ? 0.5 : 1;
  const harmless = element.matches(HARMLESS);
  return { ...entry(`#${element.id}`, message, why, message, `${why} ${remedy}`, worth), harmless };
}

function article(element) {
  const heading = element.querySelector("h3").textContent.replace(/^\s*\d+|#\s*$/g, "").trim();
  const kind = element.closest(".step").querySelector("h2").textContent;
  return entry(`#${element.id}`, heading, kind, heading, element.querySelector(".note").textContent);
}

function section(element) {
  const link = element.querySelector("a");
  const page = element.parentElement.previousElementSibling.textContent;
  return entry(link.getAttribute("href"), link.textContent, page, link.textContent, element.dataset.words, 0.7);
}

function collect() {
  const all = (selector, make) => [...document.querySelectorAll(selector)].map(make);
  const entries = [
    ...all("#troubleshooting tbody tr", row),
    ...all(".step:not([id='01-to-05']) article", article),
    ...all("#troubleshooting li[data-words]", section),
  ];
  const counts = new Map();
  for (const { weights } of entries) {
    for (const term of weights.keys()) counts.set(term, (counts.get(term) || 0) + 1);
  }
  const rarity = new Map();
  for (const [term, count] of counts) rarity.set(term, Math.log(1 + entries.length / count));
  return { entries, rarity };
}

let index = null;

// The entries for a text, best first.
function find(text) {
  index ||= collect();
  const { entries, rarity } = index;
  const asked = [...terms(text)].filter((term) => rarity.has(term));
  const mass = (some) => some.reduce((sum, term) => sum + rarity.get(term), 0);
  const all = mass(asked);
  const scored = entries.map((found) => {
    let shared = 0;
    for (const term of asked) shared += rarity.get(term) * (found.weights.get(term) || 0);
    const covered = mass(asked.filter((term) => found.message.has(term))) / mass([...found.message]);
    return { ...found, covered, score: shared * (0.4 + covered) * found.worth };
  });
  // Only a row can be an error in place of the warning.
  if (scored.some((found) => found.harmless === false && found.covered > 0.5)) {
    for (const found of scored) if (found.harmless) found.score *= 0.13;
  }
  return scored.filter((found) => found.score > 0.03 * all).sort((a, b) => b.score - a.score).slice(0, KEPT);
}

// ---------------------------------------------------------------- what is shown

const search = document.getElementById("search");
const hits = document.getElementById("hits");
const told = document.getElementById("found");
const NOTHING = "Nothing found. Try the last line of the error alone, without numbers and paths, or two or three of its "
  + "rarest words, such as “watchdog timeout”. A script that gives wrong results in silence: let ddp_check watch it.";

function hit(found) {
  const link = document.createElement("a");
  link.href = found.link;
  link.dataset.hit = "";
  const title = link.appendChild(document.createElement("b"));
  title.textContent = found.title.trim();
  link.appendChild(document.createElement("span")).textContent = found.where.trim();
  return link;
}

function look() {
  const text = search.value.trim();
  const found = text ? find(text) : [];
  hits.replaceChildren(...found.map(hit));
  if (text && !found.length) hits.textContent = NOTHING;
  hits.hidden = !text;
  told.textContent = !text ? "" : found.length ? `${found.length} found, best first` : "Nothing found";
}

function close() {
  hits.hidden = true;
}

search.addEventListener("input", look);
search.addEventListener("focus", look);
search.parentElement.addEventListener("keydown", (event) => {
  const links = [search, ...hits.children];
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const target = links[links.indexOf(document.activeElement) + step];
  if (step && target && !hits.hidden) target.focus();
  else if (event.key === "Enter" && event.target === search && hits.firstElementChild) hits.firstElementChild.click();
  else if (event.key === "Escape") {
    search.focus();
    close();
  }
  else return;
  event.preventDefault();
});
hits.addEventListener("click", (event) => {
  if (event.target.closest("a")) close();
});
document.addEventListener("click", (event) => {
  if (!search.parentElement.contains(event.target)) close();
});
search.parentElement.hidden = false;
