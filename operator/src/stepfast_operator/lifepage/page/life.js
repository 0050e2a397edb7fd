
// A job's life on one axis of time: attempts and recoveries, steps, stalls of saves, times until steps were committed.

const COLOURED = ["training", "starting", "detect", "flush", "schedule", "restore", "resume", "save", "dropped"];
const colourClass = (name) => `c-${COLOURED.includes(name) ? name : "other"}`;
const place = document.getElementById("timeline");
const life = data;
const LENGTH = Math.max(life.length, 0.001);
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
const isCommitted = (save) => save[5] === "Committed";

let view = [0, LENGTH];
let width = 0;

const moment = (at) => new Date((life.begin + at) * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";

// A length of time, as the page's tables say it: "0.4 s", "35 s", "2.5 min".
function spanText(seconds) {
  for (const [size, unit] of UNITS.slice(0, 3)) if (seconds >= size) return `${(seconds / size).toFixed(1)} ${unit}`;
  return `${Math.max(0, seconds).toFixed(seconds >= 10 ? 0 : 1)} s`;
}

const shortText = (seconds) => (seconds < 1 ? `${(seconds * 1000).toFixed(1)} ms` : spanText(seconds));

// Round lengths of time, so that about `count` of them fill what is seen.
function timeTicks([from, to], count) {
  const rough = (to - from) / count;
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000];
  const step = steps.find((each) => each >= rough) ?? 864000 * Math.ceil(rough / 864000);
  const fine = rough < 1 ? [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1].find((each) => each >= rough) : step;
  const first = Math.ceil(from / fine - 1e-9);
  return Array.from({ length: Math.max(0, Math.floor(to / fine + 1e-9) - first + 1) }, (_, index) => (first + index) * fine);
}

function tickText(seconds) {
  if (!seconds) return "0";
  const [size, unit] = UNITS.find(([each]) => seconds >= each) ?? [1, "s"];
  return `${+(seconds / size).toFixed(2)} ${unit}`;
}

function zooms() {
  const around = (from, to) => {
    const room = Math.max(0.5, 0.6 * (to - from));
    return [Math.max(0, from - room), Math.min(LENGTH, to + room)];
  };
  return life.recoveries.filter((each) => each.phases.length).map((each) => ({
    name: each.inPlace === null ? `${each.attempt} → ${each.attempt + 1}` : `${each.attempt}, in place`,
    range: around(each.failed, each.phases[each.phases.length - 1][2]),
  }));
}

function show(range) {
  view = range[1] - range[0] > 1e-3 ? range : [0, LENGTH];
  draw();
}

function drawZooms() {
  const found = [{ name: "whole life", range: [0, LENGTH] }, ...zooms()];
  const bar = element(place, "div", { class: "zoom", role: "group", "aria-label": "What the timeline shows" });
  for (const { name, range } of found) {
    const isShown = range[0] === view[0] && range[1] === view[1];
    const button = element(bar, "button", { type: "button", "aria-pressed": isShown }, name);
    button.addEventListener("click", () => {
      show(range);
      place.querySelectorAll(".zoom button")[found.findIndex((each) => each.name === name)].focus();
    });
  }
}

function draw() {
  place.replaceChildren();
  if (!life.attempts.length && !life.saves.length) {
    element(place, "p", { class: "empty" }, "No attempt has begun yet: there is nothing to draw.");
    return;
  }
  drawZooms();
  legend(place, ["training", "starting", ...new Set(life.recoveries.flatMap((each) => each.phases.map(([name]) => name)))]);
  const isNarrow = width < 560;
  const panels = [
    { name: "attempts", height: 26, draw: drawAttempts },
    { name: "step", height: isNarrow ? 150 : 210, draw: drawSteps },
    { name: "stall per save", height: 84, draw: (svg, frame) => drawSaves(svg, frame, 2) },
    { name: "until committed", height: 84, draw: (svg, frame) => drawSaves(svg, frame, 3) },
  ].filter((panel, index) => index < 2 || life.saves.length);
  const left = 64, right = width - 10, gap = 30;
  const height = sum(panels.map((panel) => panel.height + gap)) + 34;
  const plot = element(place, "div", {
    class: "plot", role: "slider", tabindex: 0, "aria-label": "The job's life: a moment of it", "aria-valuemin": 0,
    "aria-valuemax": Math.round(LENGTH), "aria-valuenow": 0, "aria-valuetext": "the job's begin",
  });
  const svg = element(plot, "svg:svg", { height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const clip = element(element(svg, "svg:defs"), "svg:clipPath", { id: "seen" });
  element(clip, "svg:rect", { x: left, y: 0, width: Math.max(1, right - left), height });
  const x = (at) => left + ((at - view[0]) / (view[1] - view[0])) * (right - left);
  let top = 0;
  for (const panel of panels) {
    element(svg, "svg:text", { class: "panel", x: left, y: top + 15 }, panel.name);
    top += gap - 8;
    panel.draw(svg, { x, left, right, top, bottom: top + panel.height });
    top += panel.height + 8;
  }
  drawAxis(svg, x, left, right, top);
  const failed = life.recoveries.map((each) => each.failed).filter((at) => at >= view[0] && at <= view[1]);
  for (const at of failed) element(svg, "svg:line", { class: "failed", x1: x(at), x2: x(at), y1: 20, y2: top });
  listen(plot, svg, x, left, right, top);
}

function drawAxis(svg, x, left, right, top) {
  for (const tick of timeTicks(view, Math.max(2, (right - left) / 110))) {
    element(svg, "svg:line", { class: "grid", x1: x(tick), x2: x(tick), y1: top, y2: top + 5 });
    const anchor = x(tick) > right - 24 ? "end" : x(tick) < left + 24 ? "start" : "middle";
    element(svg, "svg:text", { class: "x-tick", x: x(tick), y: top + 19, "text-anchor": anchor }, tickText(tick));
  }
  element(svg, "svg:text", { x: right, y: 15, "text-anchor": "end" }, `since ${moment(0)}`);
}

const seen = (begin, end) => end >= view[0] && begin <= view[1];

function drawAttempts(svg, { x, top, bottom }) {
  const lane = element(svg, "svg:g", { "clip-path": "url(#seen)" });
  const band = (name, begin, end, words, isSure = true) => {
    if (!seen(begin, end)) return;
    const rect = element(lane, "svg:rect", {
      class: `band ${colourClass(name)}${isSure ? "" : " unsure"}`, "data-name": name, x: x(begin), y: top,
      width: Math.max(1, x(end) - x(begin)), height: bottom - top,
    });
    element(rect, "svg:title", {}, words);
  };
  for (const each of life.attempts) {
    const training = each.training ?? each.begin;
    if (each.training !== null) band("starting", each.begin, training, `attempt ${each.attempt}: starting`);
    band("training", training, Math.max(training, each.end), `attempt ${each.attempt}`, each.known[0] && each.known[1]);
  }
  for (const each of life.recoveries) {
    for (const [name, begin, end] of each.phases) {
      if (end > begin) band(name, begin, end, `${each.cause}: ${name} ${shortText(end - begin)}`);
    }
  }
  for (const each of life.attempts) {
    const [from, to] = [Math.max(x(each.begin), x(view[0])), Math.min(x(each.end), x(view[1]))];
    if (to - from > 24) element(svg, "svg:text", { class: "strong halo", x: from + 6, y: bottom - 8 }, each.attempt);
  }
}

// Draws the scale at the left, and returns where a value stands.
function scaleOf(svg, { left, right, top, bottom }, least, most, words) {
  const span = Math.max(most - least, 1e-9);
  const y = (value) => bottom - ((value - least) / span) * (bottom - top);
  const step = ticks(span, Math.max(2, (bottom - top) / 42));
  const first = step[1] ? Math.ceil(least / step[1] - 1e-9) * step[1] : least;
  for (let tick = first, index = 0; tick <= most + span * 1e-9 && index < 20; index++, tick = first + index * (step[1] || span)) {
    element(svg, "svg:line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) });
    element(svg, "svg:text", { class: "y-tick", x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, words(tick));
  }
  return y;
}

function drawSteps(svg, frame) {
  const lines = life.lines.map(([, points]) => points).filter((points) => seen(points[0][0], points[points.length - 1][0]));
  const inside = lines.flatMap((points) => points.filter(([at], index) =>
    seen(at, at) || seen(at, points[index + 1]?.[0] ?? at) || seen(points[index - 1]?.[0] ?? at, at)));
  const steps = inside.map(([, step]) => step);
  const isWhole = view[0] === 0 && view[1] === LENGTH;
  const least = isWhole || !steps.length ? 0 : Math.min(...steps);
  const y = scaleOf(svg, frame, least, Math.max(least + 1, ...steps.slice(0, 1), steps.reduce((most, step) => Math.max(most, step), 0)), (step) =>
    step >= 1e4 ? withUnit(step, "").trim() : String(+step.toFixed(2)));
  const group = element(svg, "svg:g", { "clip-path": "url(#seen)" });
  for (const points of lines) {
    const path = points.map(([at, step]) => `${frame.x(at).toFixed(2)},${y(step).toFixed(2)}`).join("L");
    element(group, "svg:path", { class: "steps", d: `M${path}${points.length === 1 ? "h0" : ""}` });
  }
}

function drawSaves(svg, frame, field) {
  const found = life.saves.filter((save) => save[field] !== null && seen(save[0], save[0]));
  const most = found.reduce((highest, save) => Math.max(highest, save[field]), 0) || 0.001;
  const y = scaleOf(svg, frame, 0, most * 1.05, (seconds) => (seconds ? tickSeconds(seconds) : "0"));
  const group = element(svg, "svg:g", { "clip-path": "url(#seen)" });
  for (const [name, saves] of [["save", found.filter(isCommitted)], ["dropped", found.filter((save) => !isCommitted(save))]]) {
    if (!saves.length) continue;
    const path = saves.map((save) => `M${frame.x(save[0]).toFixed(2)},${y(save[field]).toFixed(2)}h0`).join("");
    element(group, "svg:path", { class: `dots ${colourClass(name)}`, "data-name": name, "data-count": saves.length, d: path });
  }
}

const tickSeconds = (seconds) => (seconds < 1 ? `${+(seconds * 1000).toPrecision(3)} ms` : tickText(seconds));

const rowsOf = (at) => {
  const rows = [];
  const attempt = life.attempts.findLast((each) => each.begin <= at && at <= each.end);
  if (attempt) rows.push(["attempt", String(attempt.attempt), ""]);
  for (const each of life.recoveries) {
    const phase = each.phases.find(([, begin, end]) => begin <= at && at < end);
    if (phase) rows.push([`${phase[0]}, after ${each.cause}`, shortText(phase[2] - phase[1]), colourClass(phase[0])]);
  }
  return rows;
};

function saveRows(save) {
  const rows = [["step", String(save[1]), ""], ["stall", shortText(save[2]), ""]];
  rows.push([save[5] === "Committed" ? "until committed" : save[5], save[3] === null ? "–" : shortText(save[3]), colourClass(isCommitted(save) ? "save" : "dropped")]);
  rows.push(["size", sizeText(save[4]), ""]);
  return rows;
}

// What there is to see, one moment after the other, for keys.
function moments() {
  const times = [0, LENGTH, ...life.attempts.flatMap((each) => [each.begin, each.end]), ...life.saves.map((save) => save[0]),
    ...life.recoveries.flatMap((each) => each.phases.map(([, begin]) => begin)), ...life.happenings.map(([at]) => at)];
  return [...new Set(times)].sort((one, other) => one - other).filter((at) => seen(at, at));
}

function nearest(list, at, reach) {
  let best = null;
  for (const each of list) if (Math.abs(each[0] - at) <= reach && (!best || Math.abs(each[0] - at) < Math.abs(best[0] - at))) best = each;
  return best;
}

function listen(plot, svg, x, left, right, bottom) {
  const cursor = element(svg, "svg:line", { class: "cursor", y1: 20, y2: bottom, visibility: "hidden" });
  const range = element(svg, "svg:rect", { class: "range", y: 20, height: bottom - 20, width: 0, visibility: "hidden" });
  const perPixel = (view[1] - view[0]) / (right - left);
  const at = (event) => {
    const box = svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) * (width / box.width) - left) / (right - left);
    return view[0] + Math.max(0, Math.min(1, share)) * (view[1] - view[0]);
  };
  let chosen = null;
  const choose = (time, pointer, reach) => {
    const save = nearest(life.saves, time, reach);
    const happening = nearest(life.happenings, time, reach);
    chosen = save ? save[0] : time;
    const rows = [...rowsOf(chosen), ...(save ? saveRows(save) : []), ...(happening ? [[happening[2], happening[3], ""]] : [])];
    const title = `${moment(chosen)}, after ${spanText(chosen)}`;
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(chosen));
    cursor.setAttribute("visibility", "visible");
    showTooltip(title, rows, pointer ?? cursor);
    plot.setAttribute("aria-valuenow", Math.round(chosen));
    plot.setAttribute("aria-valuetext", [title, ...rows.map(([name, value]) => `${name} ${value}`)].join(", "));
  };
  const leave = () => {
    cursor.setAttribute("visibility", "hidden");
    hideTooltip();
  };
  let held = null;
  plot.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button === 0) held = at(event);
  });
  plot.addEventListener("pointermove", (event) => {
    choose(at(event), [event.clientX, event.clientY], 6 * perPixel);
    if (held === null) return;
    const [from, to] = [held, at(event)].sort((one, other) => one - other);
    range.setAttribute("x", x(from));
    range.setAttribute("width", x(to) - x(from));
    range.setAttribute("visibility", "visible");
  });
  plot.addEventListener("pointerup", (event) => {
    const [from, to] = [held ?? at(event), at(event)].sort((one, other) => one - other);
    held = null;
    if ((to - from) / perPixel > 8) show([from, to]);
  });
  plot.addEventListener("pointerleave", () => {
    held = null;
    range.setAttribute("visibility", "hidden");
    leave();
  });
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    const all = moments();
    const now = all.findIndex((each) => each >= (chosen ?? view[0]) - 1e-9);
    const to = { ArrowLeft: now - 1, ArrowRight: chosen === null ? now : now + 1, PageDown: now - 20, PageUp: now + 20, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(all[Math.max(0, Math.min(all.length - 1, to))], null, 1e-9);
  });
}

drawn(place, (wide) => {
  width = wide;
  draw();
});
