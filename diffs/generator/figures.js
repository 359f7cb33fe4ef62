// What the figures share. Each adds itself under its name: { start, … }.
const figures = {};

// Set up each figure on the page, and show it instead of its still picture.
function startFigures() {
  for (const figure of document.querySelectorAll("figure.play")) {
    const name = figure.dataset.figure;
    const data = document.getElementById(`${name}-data`);
    const settings = JSON.parse(figure.dataset.settings || "{}");
    figures[name].start(figure, data && JSON.parse(data.textContent), settings);
    figure.querySelector(".live").hidden = false;
    figure.classList.add("started");
    figure.hidden = false;
  }
}

// Append a new element and return it: text if the content is a string, else nested elements.
function add(parent, tag, attributes = {}, text = "") {
  const svg = parent instanceof SVGElement || tag === "svg";
  const element = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== "") element.textContent = text;
  return parent.appendChild(element);
}

// Write what a slider stands at beside it, and have a screen reader say so instead of the number.
function tell(slider, text) {
  slider.nextElementSibling.value = text;
  slider.setAttribute("aria-valuetext", text);
}

// Return a number with a real minus sign and a fixed number of digits.
function shown(number, digits = 2) {
  const text = Math.abs(number).toFixed(digits);
  return number < 0 && Number(text) !== 0 ? `−${text}` : text;
}
