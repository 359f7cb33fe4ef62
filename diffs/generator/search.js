// Find what was typed or pasted: the entries, pages, hunks and sections that share its rarest words.
const KEPT = 8; // hits shown
const PARTICULAR = [ // what differs from run to run, or stands above every error
  /Traceback \(most recent call last\):?/g,
  /\bFile "[^"]*", line \d+(, in \S+)?/g,
  /Compile with `?TORCH_USE_CUDA_DSA`? to enable device-side assertions\.?/g,
  /CUDA kernel errors might be asynchronously.*?incorrect\.?(?:\s*For debugging.*?=1\.?)?(?:\s*Compile with.*?assertions\.?)?/g,
  /\bFile [~/\w]\S*:\d+, in \w+(?:\(.*?\))?/g, // of a notebook's traceback
  /\bhttps?:\/\/\S+/g,
  /\b(?:[a-z_]\w*\.)+(?=[A-Z])|\b[a-z_]+(?:\.[a-z_]+){2,}:/g, // the module of an exception or of a logger
  /\b0x[0-9a-f]+\b/gi,
  /\b\d{1,3}(?:\.\d{1,3}){3}\b/g, // an address
];
const PATH = /(?<![\w.)])(?:[A-Za-z]:)?[\\/](?!dev\b|proc\b)[\w.+@-]+(?:[\\/][\w.+@<>…-]+)+/g;
const CACHE = /torchinductor|triton|tmp\.pid|\.arrow\b/g; // whose file it is, all that a path tells
const CODE = /\b(exit ?code|status|signal|err(?:or|no)?|code|failure)\b\s*[:=]?\s*-?(\d{1,3})\b/gi;
const SEVERAL = /\b(?:[2-9]|[1-9]\d+|two|three|four|six|eight|dual|multi(?:ple)?|many|all|both)[ -]?GPUs?\b/gi;
const CARD = /\b(?:(\d|two|dual|four|eight)[ -]?x?[ -]?)?(?:(?:nvidia|geforce|rtx|gtx|tesla)[ -]?)*(?:([1-5]0[5-9]0)(?:[ -]?ti)?|A(?:100|800|6000|5000|40|30|10G?)|H(?:100|200|800|20)|V100|B200|L40S?|T4|P100|MI\d{3}X?)s?\b/gi;
// What is printed after every failure, whatever its cause, or before its cause is named.
const ANNOUNCED = /ChildFailedError|CalledProcessError|exited unexpectedly|exitcode : [12]\b|Details are lost|ProcessRaisedException|nccl(?:Internal|System|UnhandledCuda)Error|ncclInvalidUsage|watchdog thread terminated|SIGABRT|SIGTERM|Some NCCL operations/;
// With this the launcher ends the other ranks, once one has failed.
const ENDED = /Sending process \d+ closing signal SIGTERM|\bexit ?code\s*:\s*-15\b|Signal 15 \(SIGTERM\) received by PID/gi;
const FAILED = /\bexit ?code\s*:\s*-?(?!15\b)[1-9]/i;
const CLASS = /^(?:(?:runtime|value|type|key|attribute|assertion|import|os|user|future|module|not)_?(?:notfound|implemented)?(?:error|warn)|error|warn|exception|traceback|rank|assert|python|help|pleas)$/; // says little, alone

// The words of a text, without what is particular, each with its parts: find_unused, TCPStore.
function words(text) {
  for (const pattern of PARTICULAR) text = text.replace(pattern, " ");
  text = text.replace(PATH, (path) => ` ${(path.match(CACHE) || []).join(" ")} `);
  if (FAILED.test(text)) text = text.replace(ENDED, " ");
  text = text.replace(CODE, "$1 №$2 "); // the one kind of number that tells something
  text = text.replace(SEVERAL, "several GPU");
  text = text.replace(CARD, (_, many, rtx) => `${many > 1 || many?.length > 2 ? "several" : ""} GPU ${rtx ? "rtx" : ""} `);
  text = text.replace(/\bout[ -]of[ -]memory\b|\bOutOfMemory(?:Error)?\b|\bOOM\b/gi, "OOM");
  return text.match(/[A-Za-z_]{2,}|№\d+|[\u4e00-\u9fff]/g) || []; // of Chinese, each letter, as neighbours make terms
}

const NAMED = /\w(?:Error|Exception|Warning)\b *(?=:|$)/m; // an error's own name, not in the middle of a question
const COMMON = new Set(`a an and any are as at be been but by can cant could do does doesn doesnt did don dont for from get gets had has have how however i
  if in into is isn isnt it its me my no not of on one or our out so some still than that the their them then there these they this
  to up use used using was we what when where which while who why will with wont would you your`.split(/\s+/));
const ALIKE = { freez: "hang", stuck: "hang", hung: "hang", deadlock: "hang", slower: "slow", faster: "fast", speed: "fast",
  multi: "several", multipl: "several", machin: "node", host: "node", debugger: "debug", gpus: "gpu", card: "gpu",
  each: "every", reshuffl: "shuffl", validat: "evaluat", validation: "evaluat", evaluation: "evaluat", acc: "accuracy", ckpt: "checkpoint" };

// The word that stands for a word and for its other forms.
function stem(word) {
  const lower = word.toLowerCase().replace(/^_+|_+$/g, "");
  const ended = lower.replace(/(?<=[a-z]{3})(?:ing|ed|es|s|e)$/, "");
  const root = ended.replace(/([b-df-hj-np-tv-z])\1$/, "$1"); // running is run
  return Object.hasOwn(ALIKE, root) ? ALIKE[root] : meant(root);
}

// A word, and what is left of it without one of its letters: words that share one differ by a slip.
function slips(word) {
  return [word, ...Array.from(word, (_, at) => word.slice(0, at) + word.slice(at + 1))];
}

const COMMONER = 8; // a word that differs by a slip from one so much commoner is that one
let counts = new Map(); // {term: in how many entries it is}
const spelt = new Map(); // {slip: the commonest word of which it is one}

// The word that was meant: strangers' wordings have slips, too.
function meant(word) {
  const some = word.length < 6 ? [word] : slips(word); // a short word may lack a letter
  const near = some.map((slip) => spelt.get(slip)).filter(Boolean);
  const best = near.reduce((one, other) => (counts.get(other) > counts.get(one) ? other : one), near[0]);
  return counts.get(best) > COMMONER * (counts.get(word) ?? 0) ? best : word;
}

// The terms of a text: its words, their parts, and each pair of neighbours.
function terms(text) {
  const found = new Set();
  let before = "";
  for (const word of words(text)) {
    if (COMMON.has(word.toLowerCase())) continue;
    const parts = word.replace(/([a-z])([A-Z])/g, "$1_$2").split("_").filter((part) => part.length > 1);
    const snake = parts.length === 2 && word.includes("_");
    const whole = snake ? parts.map(stem).join(" ") : stem(word); // local_rank is local rank
    found.add(whole);
    if (parts.length > 1 && !CLASS.test(whole)) for (const part of parts) found.add(stem(part));
    if (before) found.add(`${before} ${whole}`);
    before = whole;
  }
  return found;
}

// ---------------------------------------------------------------- what can be found

// A term counts more if many of the messages have it, and less in a long text, which has many.
function found(link, title, why, messages, text, more = {}) {
  const sets = messages.map(terms);
  const body = terms(text);
  const counts = new Map([...body].map((term) => [term, 0]));
  for (const set of sets) for (const term of set) counts.set(term, (counts.get(term) || 0) + 1);
  const weights = new Map();
  for (const [term, count] of counts) {
    let weight = body.has(term) ? 1.4 : 1;
    if (!term.includes(" ")) weight += 0.6 * Math.log(1 + count);
    else if (sets[0].has(term)) weight += 0.35;
    weights.set(term, weight / counts.size ** 0.1);
  }
  return { link, title, why, messages: sets, weights, worth: 1, typed: [], ...more };
}

// What a hit shows of an answer: why, and what to type or what stands behind the colon.
function gist(all) {
  const parts = all.filter((part) => !/^\s*(?:Also\b.*: |→|source$|$)/.test(part.textContent));
  const why = parts.find((part) => part.matches("p"));
  const list = parts.find((part) => part.matches("ul, ol"));
  const commands = parts.filter((part) => part.matches("pre"));
  const spoken = why ? why.textContent.trim() : "";
  const led = commands.length && parts.indexOf(commands[0]) < parts.indexOf(why); // then a colon leads to another
  const said = led ? spoken.replace(/(?<=[.?!)] )[^.?!]*:$/, "") : spoken;
  const behind = said.endsWith(":") ? parts[parts.indexOf(why) + 1] : said && commands.length ? null : list;
  const typed = new Set([behind, ...commands].filter(Boolean));
  return { why: said, typed: [...typed].slice(0, 2) };
}

let ALIASES = {}; // {id: [text]}, of lookup/aliases.json

// A browser older than 2023 cannot unpack them, and searches without.
async function unpacked(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

// What may be pasted or typed for an answer: its title, what it names as the same, and its aliases.
function titles(id, title, parts) {
  const also = parts.filter((part) => /^Also\b.*: /.test(part.textContent));
  const named = also.flatMap((part) => [...part.querySelectorAll("code")].map((code) => code.textContent));
  return [title, ...named, ...(ALIASES[id] ?? [])];
}

function entry(element) {
  const title = element.firstElementChild.textContent;
  const rest = [...element.children].slice(1);
  const { why, typed } = gist(rest);
  const question = element.matches("#see-questions ~ *");
  const kind = question ? { worth: 0.9 }
    : { harmless: element.matches("#see-harmless_warnings ~ *"), announced: ANNOUNCED.test(title) };
  return found(`#${element.id}`, title, why, titles(element.id, title, rest), rest.map((part) => part.textContent).join(" "), { typed, ...kind });
}

function row(element) {
  const [link, box] = element.children;
  const [why, ...typed] = box.children;
  return found(link.hash, link.textContent, why.textContent, [link.textContent], box.textContent, { typed, harmless: false });
}

function article(element) {
  const heading = element.querySelector("h3").textContent.replace(/^\s*\d+|#\s*$/g, "").trim();
  const note = element.querySelector(".note");
  const recipe = element.matches("#recipes *");
  const row = !recipe && document.querySelector(`#troubleshooting .pages a[href="#${element.id}"]`)?.nextElementSibling.children;
  const why = row?.[0] ?? (recipe ? note.querySelector("p") : element.closest(".step").querySelector("h2"));
  const typed = row ? [row[1]] : recipe ? added(element) : [];
  const worth = row ? 0.9 : 0.7; // a patch fits step 5 only: an answer for any script is before it
  const name = element.id.split("-").slice(1).join(" "); // fsdp2, tensor parallel
  const messages = [...titles(element.id, heading, []), name];
  return found(`#${element.id}`, heading, why.textContent, messages, note.textContent, { typed, worth });
}

// The lines that a recipe adds, and the command that writes them to a file.
function added(element) {
  const lines = [...element.querySelectorAll(".stretches ins")].map((line) => line.textContent.trimEnd());
  const command = element.querySelector(".command code");
  return [lines.slice(0, 15).join("\n"), command?.textContent].filter(Boolean).map(code);
}

function code(text) {
  const pre = document.createElement("pre");
  add(pre, "code", {}, text);
  return pre;
}

function read() {
  const all = (selector, make) => [...document.querySelectorAll(selector)].map(make);
  return [
    ...all("#troubleshooting .entry", entry),
    ...all("#troubleshooting .pages li", row),
    ...all(".step:not([id='01-to-05']) article:has(.note)", article),
  ];
}

// Count the entries that have a term.
function recount(entries) {
  counts = new Map();
  for (const { weights } of entries) {
    for (const term of weights.keys()) counts.set(term, (counts.get(term) || 0) + 1);
  }
}

// Read the entries as they are written, which tells how words are spelt, and then as they are meant.
function collect() {
  recount(read());
  const rising = [...counts].sort(([, a], [, b]) => a - b);
  for (const [term] of rising) {
    if (term.length > 4 && !term.includes(" ")) for (const slip of slips(term)) spelt.set(slip, term);
  }
  const entries = read();
  recount(entries);
  const rarity = new Map();
  for (const [term, count] of counts) {
    const part = CLASS.test(term) ? 0.2 : term.includes(" ") ? 0.2 : 1;
    rarity.set(term, Math.log(1 + entries.length / count) * part);
  }
  const postings = new Map([...rarity.keys()].map((term) => [term, []])); // {term: where it stands}
  for (const one of entries) {
    one.masses = one.messages.map((message) => mass(rarity, message) || 1);
    for (const [term, weight] of one.weights) {
      const places = [...one.messages.keys()].filter((at) => one.messages[at].has(term));
      postings.get(term).push({ one, weight, places });
    }
  }
  return { entries, rarity, postings };
}

function mass(rarity, some) {
  return [...some].reduce((sum, term) => sum + rarity.get(term), 0);
}

// What each entry shares with a text, and what each of its messages does.
function meet(asked, log) {
  const met = new Map();
  for (const term of asked) {
    const rare = index.rarity.get(term);
    for (const { one, weight, places } of index.postings.get(term)) {
      if (!met.has(one)) met.set(one, { shared: 0, present: 0, parts: one.masses.map(() => 0) });
      const sum = met.get(one);
      sum.shared += rare * (!log ? weight : places.length ? 1 : 0.3);
      sum.present += rare;
      for (const place of places) sum.parts[place] += rare;
    }
  }
  return [...met];
}

// A logistic regression on wordings of strangers, and on texts of other subjects: of those at SURE,
// three in five are right, of those at LEAST two in five. A text without a word of the field needs more.
const ODDS = { trust: 1.6, present: 1.3, covered: 0.6 };
const FIELD = /gpu|cuda|torch|ddp|fsdp|nccl|gloo|\branks?\b|\bnodes?\b|train|distributed|deepspeed|accelerate|lightning|slurm|srun|sbatch|checkpoint|epoch|\bmodel|\bloss|multi|card/i;
const COMMON_WORD = 2; // less than this is a word that stands in many entries
const SURE = 5.7;
const LEAST = 3.9;
const ELSEWHERE = 4.9;
const LOG = 40; // more than this is no question
let index = null;

// The entries for a text, best first.
function find(text) {
  index ||= collect();
  const { entries, rarity } = index;
  const said = [...terms(text)];
  const asked = new Set(said.filter((term) => rarity.has(term)));
  const unknown = said.filter((term) => !rarity.has(term) && !term.includes(" ")).length;
  const all = mass(rarity, asked) + unknown * Math.log(entries.length);
  const log = all > LOG;
  const scored = meet(asked, log).map(([one, { shared, present, parts }]) => {
    const share = parts.map((part, at) => part / one.masses[at]); // how much of each message is there
    const covered = Math.max(...share.map((part, at) => part * Math.min(1, 0.3 + one.masses[at] / 15)));
    const whole = share.some((part, at) => part > 0.7 && one.masses[at] > 16);
    const named = parts[0] / Math.sqrt(one.masses[0] * all);
    const alike = Math.max(...parts.map((part, at) => part / Math.sqrt(one.masses[at] * all))); // 1: word for word
    const score = shared * (50 / all + covered + named + 2 * alike ** 4) * (log ? one.worth : one.worth ** 0.4);
    return { ...one, present, covered, whole, same: !unknown && alike > 0.99, score };
  });
  // Only an entry can be an error in place of the warning, or the cause in place of the report.
  const failed = scored.some((one) => one.harmless === false && one.whole);
  const cause = scored.some((one) => one.harmless === false && one.whole && !one.announced);
  for (const one of scored) {
    if (one.announced) one.score *= cause ? 0.2 : log ? 0.5 : 1;
    if (one.harmless && failed) one.score *= 0.13;
  }
  scored.sort((a, b) => b.same - a.same || b.score - a.score); // word for word, common as "ddp" is
  const links = new Set();
  const list = scored
    .filter(({ score }) => score > 0.3 * scored[0].score)
    .filter(({ link }) => !links.has(link) && links.add(link))
    .slice(0, KEPT);
  return list.length && fits(list, text, all) ? list : [];
}

// Whether the first hit is about the text; and whether it surely is.
function fits([first, second], text, all) {
  const { same, score, present, covered } = first;
  const trust = Math.log(score - 0.83 * (second?.score ?? 0.3 * score)); // its lead: others are left out
  const odds = ODDS.trust * trust + (ODDS.present * present) / all + ODDS.covered * covered;
  first.sure = same || covered > 0.8 || odds > SURE;
  const part = NAMED.test(text) ? covered : Math.max(covered, present / all); // of an error, or of a question
  if (!same && (present < COMMON_WORD || part < 0.4)) return false;
  return first.sure || odds > (FIELD.test(text) ? LEAST : ELSEWHERE);
}

// ---------------------------------------------------------------- what is shown

const search = document.getElementById("search");
const hits = document.getElementById("hits");
const told = document.getElementById("found");
const NOTHING = "Nothing found. Try the last line of the error alone, without numbers and paths, or two or three of its "
  + "rarest words, such as “watchdog timeout”. A script that gives wrong results in silence: let ddp_check watch it.";
const UNSURE = "No entry is surely about this. The nearest:";

function hit({ link, title, why, typed }, number) {
  const box = document.createElement("div");
  const anchor = add(box, "a", { href: link, "data-hit": "" });
  add(anchor, "b", {}, title.trim());
  if (why) add(anchor, "span", {}, why.trim());
  if (number === 0) box.append(...typed.map((part) => part.cloneNode(true)));
  else if (typed.length) {
    const pre = typed[0].matches("pre");
    const lines = (typed[0].querySelector(pre ? "code" : "li") ?? typed[0]).textContent.trim().split("\n");
    add(anchor, pre ? "code" : "span", {}, lines.find((line) => !line.startsWith("# ")) ?? lines[0]);
  }
  for (const pre of box.querySelectorAll("pre")) copied(pre);
  return box;
}

// Put a button into what is to be typed, instead of that which was cloned with it.
function copied(pre) {
  pre.querySelector("button")?.remove();
  const button = add(pre, "button", { type: "button" }, "Copy");
  copies(button, pre.querySelector("code"));
}

function look() {
  const text = search.value.trim();
  const list = text ? find(text) : [];
  hits.replaceChildren();
  if (list.length && !list[0].sure) add(hits, "p", {}, UNSURE);
  hits.append(...list.map(hit));
  if (text && !list.length) hits.textContent = NOTHING;
  hits.hidden = !text;
  told.textContent = !text ? "" : list.length ? `${list.length} found, best first` : "Nothing found";
}

function close() {
  hits.hidden = true;
}

search.addEventListener("input", look);
search.addEventListener("focus", look);
search.parentElement.addEventListener("keydown", (event) => {
  const links = [search, ...hits.querySelectorAll("a[data-hit]")];
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const target = links[links.indexOf(document.activeElement) + step];
  if (step && target && !hits.hidden) target.focus();
  else if (event.key === "Enter" && event.target === search && links[1]) links[1].click();
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
  if (!search.parentElement.contains(event.target) && !event.target.closest("#hits")) close();
});
for (const pre of document.querySelectorAll("#troubleshooting .entry pre")) copied(pre);
// On a phone, a row of a table is a card that names its lines; it is a table only by its roles.
const ROLES = { table: "table", thead: "rowgroup", tbody: "rowgroup", tr: "row", th: "columnheader", td: "cell" };
for (const table of document.querySelectorAll("table:not(:has([scope]))")) { // those of the figures stay tables
  for (const part of [table, ...table.querySelectorAll("*")]) if (ROLES[part.localName]) part.setAttribute("role", ROLES[part.localName]);
}
for (const td of document.querySelectorAll(":is(.entry, .note) td")) {
  td.dataset.head = td.closest("table").tHead.rows[0].cells[td.cellIndex].textContent;
}
unpacked(document.getElementById("aliases")).catch(() => ({})).then((aliases) => {
  ALIASES = aliases;
  search.parentElement.hidden = false;
});
