// Functions that the figures share. Each figure adds itself to `figures` under its name: { start, … }.
const figures = {};

// Start each figure on the page, and show it instead of its static picture.
function startFigures() {
  for (const figure of document.querySelectorAll("figure.play")) {
    const name = figure.dataset.figure;
    const data = document.getElementById(`${name}-data`);
    const settings = JSON.parse(figure.dataset.settings || "{}");
    figure.querySelector(".live").hidden = false;
    figure.classList.add("started");
    figure.hidden = false;
    figures[name].start(figure, data && JSON.parse(data.textContent), settings);
  }
}

// Append a new element with attributes and a text, and return the element.
function add(parent, tag, attributes = {}, text = "") {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== "") element.textContent = text;
  return parent.appendChild(element);
}

// Append a row to a table, with a heading and a cell for each text.
function addRow(body, heading, texts, attributes = {}) {
  const line = add(body, "tr", attributes);
  add(line, "th", { scope: "row" }, heading);
  for (const text of texts) add(line, "td", {}, text);
  return line;
}

// Return the values of a form's controls: {name: number, text, or whether it is ticked}.
function formValues(form) {
  const named = [...form.elements].filter((control) => control.name);
  return Object.fromEntries(named.map(({ name, type, checked, value }) => {
    const text = value === "" || Number.isNaN(Number(value)) ? value : Number(value);
    return [name, type === "checkbox" ? checked : text];
  }));
}

// Call `update` now, and whenever the form is changed, reset, shown or resized.
function onChange(form, update) {
  form.addEventListener("input", () => update());
  form.addEventListener("reset", () => setTimeout(update));
  form.addEventListener("submit", (event) => event.preventDefault());
  new ResizeObserver(() => update()).observe(form);
  update();
}

// Set a text only if it has changed; otherwise, a screen reader would read it out again.
function setText(region, text) {
  if (region.textContent !== text) region.textContent = text;
}

// Show a slider's value beside it as a text, which a screen reader reads out instead of the number.
function setSliderText(slider, text) {
  slider.nextElementSibling.value = text;
  slider.setAttribute("aria-valuetext", text);
}

// Return a number as a text with a real minus sign and a fixed number of digits.
function formatNumber(number, digits = 2) {
  const text = Math.abs(number).toFixed(digits);
  return number < 0 && Number(text) !== 0 ? `−${text}` : text;
}

const sumOf = (numbers) => numbers.reduce((sum, number) => sum + number, 0);
const upTo = (count) => [...Array(count).keys()];
const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;
