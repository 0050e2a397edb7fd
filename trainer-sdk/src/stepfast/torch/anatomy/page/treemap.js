
// Memory at the peak by module: nested boxes whose areas are bytes (squarified: Bruls, Huizing, van Wijk, 2000).

const MOST_GROUPS = 80; // boxes to choose from; the smaller ones share one
const DOMINANT = 0.35; // a module with more of the whole is replaced by what is in it
const LEAST_SPLIT = 1600; // square pixels: smaller boxes are not divided

function moduleTree(modules) {
  const node = (name, path, parent) => ({ name, path, parent, kind: "", own: {}, children: [], byName: new Map() });
  const root = node(report.title || "model", "", null);
  for (const module of modules) {
    let at = root;
    for (const part of module.name ? module.name.split(".") : []) {
      if (!at.byName.has(part)) {
        const child = node(part, at.path ? `${at.path}.${part}` : part, at);
        at.byName.set(part, child);
        at.children.push(child);
      }
      at = at.byName.get(part);
    }
    at.kind = module.kind;
    for (const [name, size] of Object.entries(module.components)) at.own[name] = (at.own[name] ?? 0) + size;
  }
  finish(root);
  return root;
}

// Adds up components from below, and gives what a module holds itself a box of its own.
function finish(node) {
  node.children.forEach(finish);
  node.components = { ...node.own };
  for (const child of node.children) {
    for (const [name, size] of Object.entries(child.components)) node.components[name] = (node.components[name] ?? 0) + size;
  }
  node.total = sum(Object.values(node.components));
  const own = sum(Object.values(node.own));
  if (own && node.children.length) {
    const name = node.parent ? "(itself)" : "(no submodule)";
    const path = node.path ? `${node.path} ${name}` : name;
    node.children.push({ name, path, parent: node, kind: node.kind, components: node.own, total: own, children: [] });
  }
  node.children = node.children.filter((child) => child.total > 0).sort((a, b) => b.total - a.total);
}

// The boxes of a view: the children, with those that are most of it replaced by theirs.
function groupsOf(root) {
  let groups = root.children.length ? root.children : [root];
  for (;;) {
    const large = groups.find((group) => group.total > DOMINANT * root.total && group.children.length);
    if (!large) break;
    groups = groups.flatMap((group) => (group === large ? group.children : [group]));
  }
  groups.sort((a, b) => b.total - a.total);
  if (groups.length <= MOST_GROUPS) return groups;
  const rest = groups.slice(MOST_GROUPS - 1);
  const components = {};
  for (const each of rest) {
    for (const [name, size] of Object.entries(each.components)) components[name] = (components[name] ?? 0) + size;
  }
  const name = `${rest.length} others`;
  const others = { name, path: name, parent: root, kind: "", components, total: sum(Object.values(components)), children: rest };
  return [...groups.slice(0, MOST_GROUPS - 1), others].sort((a, b) => b.total - a.total);
}

// [node, x, y, width, height] for nodes in falling order of size, filling the box.
function squarify(nodes, x, y, width, height) {
  const boxes = [];
  let left = sum(nodes.map((node) => node.total));
  for (let begin = 0; begin < nodes.length;) {
    const isWide = width >= height;
    const side = Math.min(width, height);
    const scale = (width * height) / left;
    let end = begin, row = 0, worst = Infinity;
    for (; end < nodes.length; end++) {
      const area = (row + nodes[end].total) * scale;
      const ratio = Math.max((side ** 2 * nodes[begin].total * scale) / area ** 2, area ** 2 / (side ** 2 * nodes[end].total * scale));
      if (ratio > worst) break;
      worst = ratio;
      row += nodes[end].total;
    }
    const thickness = side > 0 ? (row * scale) / side : 0;
    let along = 0;
    for (const node of nodes.slice(begin, end)) {
      const length = (node.total / row) * side;
      boxes.push(isWide ? [node, x, y + along, thickness, length] : [node, x + along, y, length, thickness]);
      along += length;
    }
    if (isWide) [x, width] = [x + thickness, Math.max(0, width - thickness)];
    else [y, height] = [y + thickness, Math.max(0, height - thickness)];
    left -= row;
    begin = end;
  }
  return boxes;
}

// The boxes that a box is divided into, down to the smallest that can be told apart.
function cellsOf(box) {
  const [node, x, y, width, height] = box;
  if (!node.children.length || width * height < LEAST_SPLIT) return [box];
  return squarify(node.children, x, y, width, height).flatMap(cellsOf);
}

function stripes(components, isWide) {
  const total = sum(Object.values(components));
  const order = Object.keys(components).sort((a, b) => COMPONENTS.indexOf(a) - COMPONENTS.indexOf(b));
  let at = 0;
  const stops = order.filter((name) => components[name]).map((name) => {
    const from = at;
    at += (100 * components[name]) / total;
    return `${colour(name)} ${from}% ${at}%`;
  });
  return `linear-gradient(${isWide ? "to right" : "to bottom"}, ${stops.join(", ")})`;
}

const moduleHues = ["weights", "activations", "gradients", "optimizer", "temporary", "communication", "inputs", "buffers"];

class Treemap {
  constructor(place, modules) {
    this.top = this.root = moduleTree(modules);
    if (!this.top.total) {
      element(place, "p", { class: "empty" }, "Nothing is held at the peak: there is no module to show.");
      return;
    }
    const tools = element(place, "div", { class: "tools" });
    this.crumbs = element(tools, "nav", { class: "crumbs", "aria-label": "The module that is shown" });
    this.addSwitch(tools);
    this.legend = legend(place, Object.keys(memory.peak_components).filter((name) => memory.peak_components[name]));
    this.map = element(place, "div", { class: "map", role: "group", "aria-label": "Memory at the peak by module" });
    this.map.addEventListener("pointermove", (event) => this.hover(event.target, [event.clientX, event.clientY]));
    this.map.addEventListener("pointerleave", hideTooltip);
    this.map.addEventListener("focusin", (event) => this.focused(event.target));
    this.map.addEventListener("focusout", hideTooltip);
    this.map.addEventListener("keydown", (event) => this.key(event));
    this.map.addEventListener("click", (event) => this.zoom(this.groups.get(event.target.closest(".group"))));
    drawn(this.map, () => this.draw());
  }

  addSwitch(tools) {
    const set = element(tools, "fieldset", { class: "switch" });
    element(set, "legend", {}, "coloured by");
    for (const by of ["component", "module"]) {
      const label = element(set, "label");
      const input = element(label, "input", { type: "radio", name: "colour", value: by });
      input.checked = by === "component";
      input.addEventListener("change", () => this.draw());
      label.append(by);
      if (by === "component") this.byComponent = input;
    }
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.map;
    const boxes = squarify(groupsOf(this.root), 0, 0, width, height);
    this.groups = new Map();
    this.cells = new Map();
    this.map.replaceChildren();
    boxes.forEach((box, index) => this.drawGroup(box, index));
    this.legend.hidden = !this.byComponent.checked;
    this.drawCrumbs();
  }

  drawGroup(box, index) {
    const [node, x, y, width, height] = box;
    const group = element(this.map, "button", {
      class: "group", type: "button", tabindex: index ? -1 : 0,
      "aria-label": `${node.path || node.name}: ${sizeText(node.total)}, ${shareText(node.total / this.top.total)} of the peak`,
    });
    if (!node.children.length) group.setAttribute("aria-disabled", "true");
    setBox(group, x, y, width, height);
    this.groups.set(group, node);
    const hasLabel = width > 36 && height > 24;
    for (const [cellNode, cx, cy, cw, ch] of cellsOf(box)) {
      const cell = element(group, "span", { class: "cell" });
      setBox(cell, cx - x, cy - y, cw, ch);
      const hue = moduleHues[index % moduleHues.length];
      cell.style.background = this.byComponent.checked ? stripes(cellNode.components, cw >= ch) : colour(hue);
      this.cells.set(cell, cellNode);
      const isBelow = cy - y >= 22 || ch > 44;
      if (cellNode !== node && cw > 58 && ch > 22 && isBelow) {
        element(cell, "span", { class: "label bottom" }, shortened(relative(cellNode.path, node.path).replace(/ \(itself\)$/, ""), cw));
      }
    }
    if (hasLabel) {
      element(group, "span", { class: "label top" }, shortened(relative(node.path, this.root.path) || node.name, width));
    }
  }

  drawCrumbs() {
    const path = [];
    for (let node = this.root; node; node = node.parent) path.unshift(node);
    this.crumbs.replaceChildren();
    for (const node of path) {
      const button = element(this.crumbs, "button", { type: "button" }, node.name);
      if (node === this.root) button.setAttribute("aria-current", "true");
      else button.addEventListener("click", () => this.zoom(node));
    }
    if (path.length > 1) this.crumbs.lastChild.append(` · ${sizeText(this.root.total)}`);
  }

  zoom(node) {
    if (!node?.children.length || node === this.root) return;
    const hadFocus = this.map.contains(document.activeElement);
    this.root = node;
    hideTooltip();
    this.draw();
    if (hadFocus) this.map.firstChild.focus();
  }

  key(event) {
    const groups = [...this.groups.keys()];
    const at = groups.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: groups.length - 1 }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      groups[Math.max(0, Math.min(groups.length - 1, to))].focus();
    } else if ((event.key === "Escape" || event.key === "Backspace") && this.root.parent) {
      event.preventDefault();
      this.zoom(this.root.parent);
    }
  }

  focused(group) {
    for (const each of this.groups.keys()) each.tabIndex = each === group ? 0 : -1;
    if (!group.matches(":focus-visible")) return;
    this.tell(this.groups.get(group), group);
  }

  hover(target, pointer) {
    const node = this.cells.get(target.closest(".cell")) ?? this.groups.get(target.closest(".group"));
    if (node) this.tell(node, pointer);
    else hideTooltip();
  }

  tell(node, at) {
    const held = Object.entries(node.components).filter(([, size]) => size).sort((a, b) => b[1] - a[1]);
    const rows = held.map(([name, size]) => [name, sizeText(size), colourClass(name)]);
    rows.push(["together", `${sizeText(node.total)}, ${shareText(node.total / this.top.total)}`, ""]);
    if (node.kind) rows.push(["class", node.kind, ""]);
    showTooltip(node.path || node.name, rows, at);
  }
}

function setBox(box, x, y, width, height) {
  Object.assign(box.style, { left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${height}px` });
}

// Without its first parts where it is too long for the box: a module's last parts tell it from its neighbours.
function shortened(path, width) {
  const parts = path.split(".");
  let from = 0;
  while (from < parts.length - 1 && (parts.slice(from).join(".").length + 1) * 7 > width - 16) from++;
  return from ? `…${parts.slice(from).join(".")}` : path;
}

function relative(path, base) {
  return base && path.startsWith(base) ? path.slice(base.length).replace(/^[. ]/, "") : path;
}

new Treemap(document.getElementById("treemap"), memory.modules);
