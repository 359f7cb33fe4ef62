// Show one step at a time, the one that the address names.
const steps = [...document.querySelectorAll(".step")];
const links = [...document.querySelectorAll("nav a")];
const folds = [...document.querySelectorAll(".fold")];
const unfold = document.getElementById("unfold");

function show() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const chosen = (target && target.closest(".step")) || steps.find((step) => !step.hidden);
  const moved = chosen.hidden;
  for (const step of steps) step.hidden = step !== chosen;
  for (const link of links) {
    if (link.hash === `#${chosen.id}`) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  if (target) {
    document.body.classList.add("scrolled"); // before the bar's height moves what it scrolls to
    target.scrollIntoView();
  }
  if (moved || (target && target.matches(".entry"))) {
    const heading = target.querySelector("h2, h3") || target;
    heading.tabIndex = -1; // the keyboard continues from here
    heading.focus({ preventScroll: true });
  }
}

unfold.addEventListener("click", () => {
  const open = unfold.getAttribute("aria-pressed") === "false";
  unfold.setAttribute("aria-pressed", open);
  for (const fold of folds) fold.open = open;
});
unfold.hidden = false;

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // not every browser allows it on a page that is a file
    const area = document.body.appendChild(document.createElement("textarea"));
    area.value = text;
    area.style.position = "fixed"; // or the page would scroll to it
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

// Have a button copy the text of an element, and say so.
function copies(button, element) {
  const [label, status] = [button.firstChild, document.getElementById("copied")];
  button.addEventListener("click", async () => {
    const copied = await copy(element.textContent);
    button.focus({ preventScroll: true });
    label.data = copied ? "Copied" : "Not copied";
    status.textContent = copied ? "The command is copied." : "Copy the command by hand.";
    setTimeout(() => {
      label.data = "Copy";
      status.textContent = "";
    }, 2000);
  });
  button.hidden = false;
}

for (const button of document.querySelectorAll(".command button")) {
  copies(button, button.parentElement.querySelector("code"));
}

new IntersectionObserver(([{ isIntersecting }]) => document.body.classList.toggle("scrolled", !isIntersecting))
  .observe(document.querySelector("header"));
addEventListener("hashchange", show);
show();
