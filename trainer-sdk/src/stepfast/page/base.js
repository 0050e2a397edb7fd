
"use strict";
// What charts share: the page's data, words for numbers, SVG elements, the tooltip. `colourClass` is each page's own.

const data = JSON.parse(document.getElementById("data").textContent);
const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);

function threeDigits(number) {
  return number >= 99.95 ? number.toFixed(0) : number >= 9.995 ? number.toFixed(1) : String(+number.toFixed(2));
}

function sizeText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  if (!unit) return `${bytes} B`;
  const tenths = bytes * 10;
  const even = tenths % 1 === 0.5 ? 2 * Math.round(tenths / 2) : Math.round(tenths); // as in the page's tables
  return `${(even / 10).toFixed(1)} ${units[unit]}`;
}

function secondsText(seconds) {
  for (const [factor, unit] of [[1, "s"], [1e3, "ms"], [1e6, "µs"]]) {
    if (seconds * factor >= 0.9995) return `${threeDigits(seconds * factor)} ${unit}`;
  }
  return seconds > 0 ? `${threeDigits(seconds * 1e9)} ns` : "0 s";
}

// In three digits with a metric prefix: withUnit(15.7e12, "FLOP/s") is "15.7 TFLOP/s".
function withUnit(number, unit) {
  for (const [power, prefix] of [[15, "P"], [12, "T"], [9, "G"], [6, "M"], [3, "k"]]) {
    if (number >= 0.9995 * 10 ** power) return `${threeDigits(number / 10 ** power)} ${prefix}${unit}`;
  }
  return `${number && number < 0.0995 ? number.toPrecision(2) : threeDigits(number)} ${unit}`;
}

function shareText(share) {
  if (share > 0 && share < 0.001) return "< 0.1 %";
  return `${(share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
}

function element(parent, name, attributes = {}, text = "") {
  const made = name.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  parent?.append(made);
  return made;
}

function legend(parent, names) {
  const list = element(parent, "ul", { class: "key" });
  for (const name of names) {
    const item = element(list, "li");
    element(item, "span", { class: `swatch ${colourClass(name)}` });
    item.append(name);
  }
  return list;
}

// Ticks at 1, 2 or 5 times a power of ten of `unit`, at most about `count` of them.
function ticks(most, count, unit = 1) {
  const rough = most / unit / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = unit * power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, index) => index * step);
}

const tooltip = document.getElementById("tooltip");

let anchor = null; // the element that the tooltip belongs to; null: the pointer's place

// `rows`: [name, value, colour's class or ""]. `at`: an element, whose tooltip follows it, or [x, y] of the pointer.
function showTooltip(title, rows, at) {
  tooltip.replaceChildren();
  element(tooltip, "p", {}, title);
  for (const [name, value, swatch] of rows) {
    const row = element(tooltip, "div", { class: swatch ? "row" : "row quiet" });
    const left = element(row, "span");
    if (swatch) element(left, "span", { class: `swatch ${swatch}` });
    left.append(name);
    element(row, "span", {}, value);
  }
  tooltip.hidden = false;
  anchor = at instanceof Element ? at : null;
  placeTooltip(anchor ? middle(anchor) : at);
}

function middle(of) {
  const box = of.getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2];
}

function placeTooltip([x, y]) {
  const { width, height } = tooltip.getBoundingClientRect();
  const left = x + 16 + width > innerWidth - 8 ? x - 16 - width : x + 16;
  tooltip.style.left = `${Math.max(8, Math.min(left, innerWidth - 8 - width))}px`;
  tooltip.style.top = `${Math.max(8, Math.min(y + 14, innerHeight - 8 - height))}px`;
}

function hideTooltip() {
  tooltip.hidden = true;
}

addEventListener("scroll", () => (anchor ? placeTooltip(middle(anchor)) : hideTooltip()), { passive: true });
addEventListener("keydown", (event) => event.key === "Escape" && hideTooltip());

// Draws now, and again whenever the place has another width.
function drawn(place, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (place.clientWidth === width) return;
    width = place.clientWidth;
    hideTooltip();
    draw(width);
  }).observe(place);
}
