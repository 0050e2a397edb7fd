
// Memory over time: areas by component on top of CUDA's context, the line of what is reserved, the peak.

function drawCurve(place, width) {
  place.replaceChildren();
  const points = memory.curve;
  if (!points.length) {
    element(place, "p", { class: "empty" }, "Nothing was allocated: there is no curve.");
    return;
  }
  const context = memory.context_bytes;
  const names = [...(context ? ["context"] : []), ...memory.curve_components];
  const stacks = points.map((point) => {
    let top = 0;
    return [...(context ? [context] : []), ...point.components].map((size) => (top += size));
  });
  const totals = points.map((point) => sum(point.components));
  const peak = totals.indexOf(Math.max(...totals));
  const reserved = points.map((point) => context + point.reserved_bytes);
  const most = Math.max(...reserved, context + totals[peak]);
  const limit = memory.limit_bytes;
  const hasLimit = limit !== null && limit <= 1.6 * most;

  const frame = { left: 64, right: 10, top: 34, bottom: 62 };
  const height = width < 560 ? 300 : 380;
  const bottom = height - frame.bottom;
  const times = spread(points.map((point) => point.seconds));
  const x = (at) => frame.left + times.shares[at] * (width - frame.left - frame.right);
  const highest = Math.max(1, 1.04 * (hasLimit ? Math.max(limit, most) : most));
  const y = (bytes) => bottom - (bytes / highest) * (bottom - frame.top);

  legend(place, names);
  const slider = element(place, "div", {
    class: "plot", role: "slider", tabindex: 0, "aria-label": "Memory over time: a point of it",
    "aria-valuemin": 0, "aria-valuemax": points.length - 1,
  });
  const svg = element(slider, "svg:svg", { height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const unit = 1024 ** Math.max(0, Math.min(4, Math.floor(Math.log(highest) / Math.log(1024))));
  for (const tick of ticks(highest, 6, unit)) {
    element(svg, "svg:line", { class: "grid", x1: frame.left, x2: width - frame.right, y1: y(tick), y2: y(tick) });
    const label = `${+(tick / unit).toFixed(2)} ${sizeText(unit).split(" ")[1]}`;
    element(svg, "svg:text", { class: "y-tick", x: frame.left - 8, y: y(tick) + 4, "text-anchor": "end" }, label);
  }
  names.forEach((name, index) => {
    const over = stacks.map((stack, at) => `${x(at)},${y(stack[index])}`);
    const under = stacks.map((stack, at) => `${x(at)},${y(index ? stack[index - 1] : 0)}`).reverse();
    const path = element(svg, "svg:path", {
      class: `area ${colourClass(name)}`, "data-name": name, d: `M${over.join("L")}L${under.join("L")}Z`,
    });
    element(path, "svg:title", {}, name);
  });
  if (points.some((point, at) => point.reserved_bytes !== totals[at])) {
    const line = reserved.map((bytes, at) => `${x(at)},${y(bytes)}`).join("L");
    element(svg, "svg:path", { class: "reserved", d: `M${line}` });
    const at = reserved.length - 1;
    element(svg, "svg:text", { class: "halo", x: x(at) - 4, y: y(reserved[at]) - 6, "text-anchor": "end" }, "reserved");
  }
  if (hasLimit) {
    element(svg, "svg:line", { class: "limit-line", x1: frame.left, x2: width - frame.right, y1: y(limit), y2: y(limit) });
    const label = `the device's limit, ${sizeText(limit)}`;
    element(svg, "svg:text", { class: "limit-text halo", x: frame.left + 6, y: y(limit) - 6 }, label);
  }
  drawPhases(svg, points, x, bottom, width - frame.right);
  drawTimes(svg, times, frame, width, bottom);

  const top = y(context + totals[peak]);
  element(svg, "svg:circle", { class: "peak", cx: x(peak), cy: top, r: 4.5 });
  const isLate = x(peak) > width * 0.6;
  const words = `peak: ${sizeText(totals[peak])} allocated`;
  const beside = { class: "strong halo", x: x(peak) + (isLate ? -10 : 10), y: top + 20, "text-anchor": isLate ? "end" : "start" };
  element(svg, "svg:text", beside, words);

  const cursor = element(svg, "svg:line", { class: "cursor", y1: frame.top, y2: bottom, visibility: "hidden" });
  let at = peak;
  const choose = (index, pointer = null) => {
    at = Math.max(0, Math.min(points.length - 1, index));
    cursor.setAttribute("x1", x(at));
    cursor.setAttribute("x2", x(at));
    cursor.setAttribute("visibility", "visible");
    const point = points[at];
    const title = `step ${point.step}, ${point.phase}, ${secondsText(point.seconds)}`;
    const rows = memory.curve_components.map((name, index) => [name, sizeText(point.components[index]), colourClass(name)]);
    rows.reverse();
    rows.push(["allocated", sizeText(totals[at]), ""], ["reserved", sizeText(point.reserved_bytes), ""]);
    if (context) rows.push(["with CUDA's context", sizeText(reserved[at]), ""]);
    showTooltip(title, rows, pointer ?? cursor);
    slider.setAttribute("aria-valuenow", at);
    slider.setAttribute("aria-valuetext", `${title}: ${sizeText(totals[at])} allocated, of that ${
      memory.curve_components.map((name, index) => `${name} ${sizeText(point.components[index])}`).join(", ")}`);
  };
  const leave = () => {
    cursor.setAttribute("visibility", "hidden");
    hideTooltip();
  };
  slider.setAttribute("aria-valuenow", at);
  slider.setAttribute("aria-valuetext", `the peak: ${words}`);
  slider.addEventListener("pointermove", (event) => {
    const pointer = event.clientX - svg.getBoundingClientRect().left;
    const distances = points.map((_, index) => Math.abs(x(index) - pointer));
    choose(distances.indexOf(Math.min(...distances)), [event.clientX, event.clientY]);
  });
  slider.addEventListener("pointerleave", leave);
  slider.addEventListener("blur", leave);
  slider.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowDown: at - 1, ArrowUp: at + 1, PageDown: at - 20, PageUp: at + 20, Home: 0, End: points.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(to);
  });
}

// Where each point stands between the first and the last: by its time, or one after the other where no time passes.
function spread(seconds) {
  const first = seconds[0];
  const span = seconds[seconds.length - 1] - first;
  const shares = seconds.map((each, at) => (span > 0 ? (each - first) / span : at / Math.max(1, seconds.length - 1)));
  return { first, span, shares };
}

function drawPhases(svg, points, x, bottom, right) {
  const starts = points.map((_, at) => at).filter((at) =>
    !at || points[at].phase !== points[at - 1].phase || points[at].step !== points[at - 1].step);
  starts.forEach((start, index) => {
    const from = x(start);
    const to = index + 1 < starts.length ? x(starts[index + 1]) : right;
    const { phase, step } = points[start];
    if (to - from < 0.5) return;
    const band = element(svg, "svg:rect", {
      class: index % 2 ? "phase odd" : "phase", x: from, y: bottom + 4, width: to - from, height: 18,
    });
    element(band, "svg:title", {}, `step ${step}, ${phase}`);
    if (to - from > 7 * phase.length + 4) {
      element(svg, "svg:text", { x: (from + to) / 2, y: bottom + 17, "text-anchor": "middle" }, phase);
    }
  });
  let last = null;
  for (const at of points.keys()) {
    const step = points[at].step;
    if (step === last || !step) continue;
    last = step;
    if (x(at) > right - 44) continue;
    element(svg, "svg:line", { class: "grid", x1: x(at), x2: x(at), y1: 4, y2: bottom + 22 });
    element(svg, "svg:text", { class: "halo", x: x(at) + 4, y: 13 }, `step ${step}`);
  }
}

function drawTimes(svg, times, frame, width, bottom) {
  if (!(times.span > 0)) return;
  const inner = width - frame.left - frame.right;
  for (const tick of ticks(times.span, Math.max(2, inner / 130))) {
    const at = frame.left + (tick / times.span) * inner;
    const anchor = at > width - 26 ? "end" : "middle";
    element(svg, "svg:text", { class: "x-tick", x: at, y: bottom + 40, "text-anchor": anchor }, secondsText(times.first + tick));
  }
  const words = report.time.is_bound ? "time, at the device's roofline" : "time";
  element(svg, "svg:text", { x: frame.left + inner / 2, y: bottom + 57, "text-anchor": "middle" }, words);
}

const curvePlace = document.getElementById("curve");
drawn(curvePlace, (width) => drawCurve(curvePlace, width));
