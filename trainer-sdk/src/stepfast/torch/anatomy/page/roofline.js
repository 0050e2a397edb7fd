
// Operation classes under the device's roof (Williams, Waterman, Patterson, 2009): FLOP/byte against FLOP/s, log-log.

const SHAPES = {
  forward: "M0,-1A1,1,0,1,1,0,1A1,1,0,1,1,0,-1Z",
  backward: "M-0.89,-0.89H0.89V0.89H-0.89Z",
  optimizer: "M0,-1.2L1.17,0.83H-1.17Z",
};
const OTHER_SHAPE = "M0,-1.25L1.25,0L0,1.25L-1.25,0Z";

function drawRoofline(place, width) {
  place.replaceChildren();
  const { roof, classes } = report.time;
  const marks = classes.filter((each) => each.flops > 0 && each.moved_bytes > 0 && each.seconds > 0).map((each) => ({
    ...each, intensity: each.flops / each.moved_bytes, rate: each.flops / each.seconds,
  }));
  if (!roof || !marks.length) {
    const words = roof ? "No operation computes anything: there is no roofline." : "What the device does at most is not known: there is no roofline.";
    element(place, "p", { class: "empty" }, words);
    return;
  }
  const best = Math.max(roof.contraction_flops, roof.other_flops);
  const intensities = [...marks.map((mark) => mark.intensity), roof.contraction_flops / roof.bandwidth, roof.other_flops / roof.bandwidth];
  const xRange = decades(Math.min(...intensities) / 1.5, Math.max(...intensities) * 3);
  const yRange = decades(Math.min(...marks.map((mark) => mark.rate)) / 1.5, best * 1.5);
  const frame = { left: 88, right: 14, top: 16, bottom: 44 };
  const height = width < 560 ? 320 : 380;
  const x = scale(xRange, frame.left, width - frame.right);
  const y = scale(yRange, height - frame.bottom, frame.top);

  drawKey(place, marks);
  const svg = element(place, "svg:svg", {
    height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Roofline of the operation classes",
  });
  const yStep = Math.ceil(Math.log10(yRange[1] / yRange[0]) / 8);
  powers(yRange).forEach((power, index) => {
    if (index % yStep) return;
    element(svg, "svg:line", { class: "grid", x1: frame.left, x2: width - frame.right, y1: y(power), y2: y(power) });
    element(svg, "svg:text", { class: "y-tick", x: frame.left - 8, y: y(power) + 4, "text-anchor": "end" }, withUnit(power, "FLOP/s").replace(".0 ", " "));
  });
  for (const power of powers(xRange)) {
    element(svg, "svg:line", { class: "grid", x1: x(power), x2: x(power), y1: frame.top, y2: height - frame.bottom });
    element(svg, "svg:text", { class: "x-tick", x: x(power), y: height - frame.bottom + 18, "text-anchor": "middle" }, String(+power.toPrecision(1)));
  }
  element(svg, "svg:text", { x: (frame.left + width - frame.right) / 2, y: height - 6, "text-anchor": "middle" }, "FLOP/byte");
  drawRoof(svg, roof, best, xRange, yRange, x, y);

  const step = sum(classes.map((each) => each.seconds));
  for (const mark of marks.sort((a, b) => b.seconds - a.seconds)) {
    const size = 5 + 11 * Math.sqrt(mark.seconds / step);
    const name = `${mark.kind}, ${mark.phase}`;
    const rows = [
      ["time", `${secondsText(mark.seconds)}, ${shareText(mark.seconds / step)}`, ""],
      ["computes", withUnit(mark.flops, "FLOP"), ""],
      ["moves", sizeText(mark.moved_bytes), ""],
      ["does", withUnit(mark.rate, "FLOP/s"), ""],
      ["intensity", withUnit(mark.intensity, "FLOP/byte"), ""],
      ["bound by", mark.bound, ""],
    ];
    const shape = element(svg, "svg:path", {
      class: `mark ${colourClass(mark.kind)}`, d: SHAPES[mark.phase] ?? OTHER_SHAPE, tabindex: 0, role: "img",
      "vector-effect": "non-scaling-stroke", transform: `translate(${x(mark.intensity)},${y(mark.rate)}) scale(${size})`,
      "aria-label": `${name}: ${rows.map(([what, value]) => `${what} ${value}`).join(", ")}`,
    });
    const tell = () => showTooltip(name, rows, shape);
    shape.addEventListener("pointerenter", tell);
    shape.addEventListener("focus", tell);
    shape.addEventListener("pointerleave", hideTooltip);
    shape.addEventListener("blur", hideTooltip);
  }
}

function drawRoof(svg, roof, best, xRange, yRange, x, y) {
  const start = Math.max(xRange[0], yRange[0] / roof.bandwidth);
  const ridge = best / roof.bandwidth;
  element(svg, "svg:path", {
    class: "roof", d: `M${x(start)},${y(start * roof.bandwidth)}L${x(ridge)},${y(best)}L${x(xRange[1])},${y(best)}`,
  });
  const end = { x: x(xRange[1]) - 4, "text-anchor": "end", class: "halo" };
  element(svg, "svg:text", { ...end, y: y(best) - 7 }, withUnit(best, "FLOP/s"));
  const lesser = Math.min(roof.contraction_flops, roof.other_flops);
  if (lesser < best) {
    element(svg, "svg:path", { class: "roof other", d: `M${x(lesser / roof.bandwidth)},${y(lesser)}L${x(xRange[1])},${y(lesser)}` });
    const what = lesser === roof.other_flops ? "outside of contractions" : "in contractions";
    element(svg, "svg:text", { ...end, y: y(lesser) + 16 }, `${withUnit(lesser, "FLOP/s")} ${what}`);
  }
  const middle = Math.sqrt(start * ridge);
  const at = [x(middle), y(middle * roof.bandwidth)];
  const angle = (Math.atan2(y(best) - y(start * roof.bandwidth), x(ridge) - x(start)) * 180) / Math.PI;
  const turned = { class: "halo", "text-anchor": "middle", transform: `translate(${at}) rotate(${angle}) translate(0,-9)` };
  element(svg, "svg:text", turned, withUnit(roof.bandwidth, "B/s"));
}

function drawKey(place, marks) {
  const list = element(place, "ul", { class: "key" });
  for (const kind of new Set(marks.map((mark) => mark.kind))) {
    const item = element(list, "li");
    element(item, "span", { class: `swatch ${colourClass(kind)}` });
    item.append(kind);
  }
  for (const phase of new Set(marks.map((mark) => mark.phase))) {
    const item = element(list, "li");
    const svg = element(item, "svg:svg", { class: "key-shape", viewBox: "-1.4 -1.4 2.8 2.8", "aria-hidden": "true" });
    element(svg, "svg:path", { class: "shape", d: SHAPES[phase] ?? OTHER_SHAPE });
    item.append(phase);
  }
  element(list, "li", { class: "quiet" }, "area: share of the time");
}

function decades(least, most) {
  return [10 ** Math.floor(Math.log10(least)), 10 ** Math.ceil(Math.log10(most))];
}

function powers([least, most]) {
  const [first, last] = [Math.round(Math.log10(least)), Math.round(Math.log10(most))];
  return Array.from({ length: last - first + 1 }, (_, index) => 10 ** (first + index));
}

function scale([least, most], from, to) {
  const span = Math.log(most / least);
  return (value) => from + (Math.log(value / least) / span) * (to - from);
}

const rooflinePlace = document.getElementById("roofline");
drawn(rooflinePlace, (width) => drawRoofline(rooflinePlace, width));
