// Show one step at a time, the one that the address names.
const steps = [...document.querySelectorAll(".step")];
const links = [...document.querySelectorAll("nav a")];
const folds = [...document.querySelectorAll(".fold")];
const unfold = document.getElementById("unfold");

function show() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const chosen = (target && target.closest(".step")) || steps.find((step) => !step.hidden);
  for (const step of steps) step.hidden = step !== chosen;
  for (const link of links) {
    if (link.hash === `#${chosen.id}`) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  if (target === chosen) scrollTo(0, 0);
  else if (target) target.scrollIntoView();
}

unfold.addEventListener("click", () => {
  const open = unfold.getAttribute("aria-pressed") === "false";
  unfold.setAttribute("aria-pressed", open);
  for (const fold of folds) fold.open = open;
});
unfold.hidden = false;

const search = document.getElementById("search");
search.addEventListener("input", () => {
  const words = search.value.toLowerCase().split(/\s+/);
  for (const found of document.querySelectorAll("#pitfalls tbody tr, #pitfalls article")) {
    const text = found.textContent.toLowerCase();
    found.hidden = !words.every((word) => text.includes(word));
  }
});
search.parentElement.hidden = false;
addEventListener("hashchange", show);
show();
