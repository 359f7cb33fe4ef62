// Show one step at a time: the one that the page's address names.
const steps = [...document.querySelectorAll(".step")];
const links = [...document.querySelectorAll("nav a")];
const folds = [...document.querySelectorAll(".fold")];
const unfold = document.getElementById("unfold");

function show() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const chosen = (target && target.closest(".step")) || steps.find((step) => !step.hidden);
  const moved = chosen.hidden;
  for (const step of steps) step.hidden = step !== chosen;
  for (const link of links) link.ariaCurrent = link.hash === `#${chosen.id}` ? "true" : null;
  if (target) {
    document.body.classList.add("scrolled"); // this comes first, because it changes the height of the bar and thus the position to scroll to
    target.scrollIntoView();
  }
  if (moved || (target && target.matches(".entry"))) {
    const heading = target.querySelector("h2, h3") || target;
    heading.tabIndex = -1; // the Tab key continues from here
    heading.focus({ preventScroll: true });
  }
}

unfold.addEventListener("click", () => {
  const open = unfold.getAttribute("aria-pressed") === "false";
  unfold.setAttribute("aria-pressed", open);
  for (const fold of folds) fold.open = open;
});
unfold.hidden = false;

// Add a button to a block of code that copies the code and says so.
function addCopyButton(pre) {
  const [code, status] = [pre.querySelector("code"), document.getElementById("copied")];
  const button = add(pre, "button", { type: "button" }, "Copy");
  button.addEventListener("click", () => {
    getSelection().selectAllChildren(code); // navigator.clipboard does not exist on a page served over http
    const copied = document.execCommand("copy");
    if (copied) getSelection().removeAllRanges();
    button.textContent = copied ? "Copied" : "Not copied";
    status.textContent = copied ? "The code is copied." : "Copy the code by hand.";
    setTimeout(() => {
      button.textContent = "Copy";
      status.textContent = "";
    }, 2000);
  });
}
document.querySelectorAll("main pre").forEach(addCopyButton);

// On a phone, each row of a table becomes a card that names its cells. Screen readers still see a table because of the roles.
const ROLES = { table: "table", thead: "rowgroup", tbody: "rowgroup", tr: "row", th: "columnheader", td: "cell" };
for (const table of document.querySelectorAll("table:not(:has([scope]))")) { // the figures' tables stay tables
  for (const part of [table, ...table.querySelectorAll("*")]) if (ROLES[part.localName]) part.setAttribute("role", ROLES[part.localName]);
  for (const td of table.querySelectorAll("td")) td.dataset.head = table.tHead.rows[0].cells[td.cellIndex].textContent;
}

new IntersectionObserver(([{ isIntersecting }]) => document.body.classList.toggle("scrolled", !isIntersecting))
  .observe(document.querySelector("header"));
addEventListener("hashchange", show);
show();
