"use strict";
// Charts as SVG, without a library. All text goes in as text nodes: nothing from the data is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// -- numbers

function show(value, digits = 5) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "true" : "false";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return String(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}
const signed = (value) => (value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + show(value, 3));
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return seconds.toFixed(1) + " s";
  const minutes = Math.floor(seconds / 60);
  const two = (number) => String(Math.floor(number)).padStart(2, "0");
  return minutes < 60 ? `${minutes} min ${two(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
}
const quantile = (sorted, q) => sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(q * (sorted.length - 1))))];

// The range to draw: a few values far away are left to the edge, so that the rest can be told apart.
function extent(values, tail, reach) {
  const sorted = values.filter((value) => value !== null && Number.isFinite(value)).sort((a, b) => a - b);
  if (!sorted.length) return null;
  let [low, high] = [sorted[0], sorted[sorted.length - 1]];
  let cut = false;
  if (sorted.length >= 8 && reach) {
    const [a, b] = [quantile(sorted, tail), quantile(sorted, 1 - tail)];
    if (b > a) {
      const [from, to] = [a - reach * (b - a), b + reach * (b - a)];
      cut = low < from || high > to;
      [low, high] = [Math.max(low, from), Math.min(high, to)];
    }
  }
  return { low, high, cut };
}

// -- scales

function linear(low, high, from, to) {
  if (low === high) [low, high] = [low - (Math.abs(low) * 0.05 || 1), high + (Math.abs(high) * 0.05 || 1)];
  const scale = (value) => from + ((value - low) / (high - low)) * (to - from);
  scale.ticks = (count, whole) => {
    const rough = Math.max((high - low) / Math.max(1, count), whole ? 1 : 0);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999) || rough;
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
    return ticks;
  };
  return scale;
}
function logarithmic(low, high, from, to) {
  if (low === high) [low, high] = [low / 2, high * 2];
  const [a, b] = [Math.log10(low), Math.log10(high)];
  const scale = (value) => (value > 0 ? from + ((Math.log10(value) - a) / (b - a)) * (to - from) : NaN);
  scale.ticks = (count) => {
    const decades = b - a;
    if (decades < 0.7) return linear(low, high, from, to).ticks(count);
    const factors = decades <= 1.6 ? [1, 2, 5] : [1];
    const every = Math.max(1, Math.ceil(decades / count));
    const ticks = [];
    for (let power = Math.floor(a); power <= Math.ceil(b); power++) {
      if (power % every) continue;
      for (const factor of factors) {
        const tick = Number((factor * 10 ** power).toPrecision(3));
        if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
      }
    }
    return ticks;
  };
  return scale;
}
function categories(names, from, to) {
  const places = new Map(names.map((name, i) => [name, names.length < 2 ? (from + to) / 2 : from + (i / (names.length - 1)) * (to - from)]));
  const scale = (value) => (places.has(value) ? places.get(value) : NaN);
  scale.ticks = () => names;
  return scale;
}

// -- what all charts share: which run is looked at, which is picked, which are filtered out

class Focus {
  constructor() {
    this.hover = null;
    this.picked = null;
    this.shown = null;
    this.listeners = [];
  }
  listen(listener) {
    this.listeners.push(listener);
  }
  look(run) {
    if (run !== this.hover) this.change({ hover: run });
  }
  pick(run) {
    this.change({ picked: run === this.picked ? null : run });
  }
  change(what) {
    Object.assign(this, what);
    for (const listener of this.listeners) listener(what);
  }
}

const tip = el("div", { class: "tip", hidden: true, role: "status" });
function showTip(event, nodes) {
  if (!tip.isConnected) document.body.append(tip);
  tip.replaceChildren(...nodes);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const right = event.clientX + 16 + box.width < innerWidth;
  const below = event.clientY + 16 + box.height < innerHeight;
  tip.style.left = Math.max(4, right ? event.clientX + 16 : event.clientX - 12 - box.width) + "px";
  tip.style.top = Math.max(4, below ? event.clientY + 14 : event.clientY - 10 - box.height) + "px";
}
const hideTip = () => (tip.hidden = true);

// A chart redraws itself when its place changes its width. `draw` gives what can be pointed at.
class Chart {
  constructor(host, label, focus) {
    this.host = host;
    this.focus = focus;
    this.root = svg("svg", { role: "img", "aria-label": label });
    host.append(this.root);
    this.width = 0;
    this.marks = new Map();
    new ResizeObserver(() => {
      if (Math.abs(host.clientWidth - this.width) > 1) this.redraw();
    }).observe(host);
    if (focus) {
      focus.listen((what) => this.react(what));
      this.root.addEventListener("pointermove", (event) => this.point(event));
      this.root.addEventListener("pointerleave", () => this.leave());
      this.root.addEventListener("click", (event) => {
        const found = this.nearest(...this.at(event));
        if (found) focus.pick(found.run);
      });
    }
  }
  redraw() {
    this.width = this.host.clientWidth || 600;
    this.marks = new Map();
    this.root.replaceChildren();
    this.base = svg("g", { class: "base" });
    this.over = svg("g", { "pointer-events": "none" });
    this.draw();
    this.root.append(this.base, this.over);
    if (this.focus) this.react({ shown: this.focus.shown, picked: this.focus.picked });
  }
  size(height) {
    this.height = height;
    this.root.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    this.root.setAttribute("height", height);
  }
  mark(run, node) {
    if (!this.marks.has(run)) this.marks.set(run, []);
    this.marks.get(run).push(node);
    this.base.append(node);
  }
  at(event) {
    const box = this.root.getBoundingClientRect();
    return [((event.clientX - box.left) * this.width) / box.width, ((event.clientY - box.top) * this.height) / box.height];
  }
  point(event) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      const found = this.nearest(...this.at(event));
      this.found = found;
      this.focus.look(found ? found.run : null);
      if (found) showTip(event, this.tell(found));
      else hideTip();
    });
  }
  leave() {
    if (this.frame) cancelAnimationFrame(this.frame);
    this.frame = this.found = null;
    this.focus.look(null);
    hideTip();
  }
  react(what) {
    if (!this.over) return;
    const { hover, picked, shown } = this.focus;
    if ("shown" in what) {
      for (const [run, nodes] of this.marks) for (const node of nodes) node.classList.toggle("out", Boolean(shown) && !shown.has(run));
    }
    this.root.classList.toggle("quiet", hover !== null || picked !== null);
    this.over.replaceChildren();
    for (const run of new Set([picked, hover])) if (run !== null && this.marks.has(run)) this.highlight(run, this.marks.get(run));
  }
  highlight(run, nodes) {
    for (const node of nodes) {
      const copy = node.cloneNode(true);
      copy.classList.add("hot");
      copy.classList.remove("out");
      if (node.tagName === "path" && node.classList.contains("line")) this.over.append(svg("path", { class: "halo", d: node.getAttribute("d") }));
      this.over.append(copy);
      if (node.classList.contains("dot")) this.over.append(svg("circle", { class: "ring", cx: node.dataset.x, cy: node.dataset.y, r: 7 }));
    }
  }
  nearest() {
    return null;
  }
  xAxis(scale, y, label, count, whole) {
    for (const tick of scale.ticks(count, whole)) {
      this.base.append(svg("text", { x: scale(tick), y: y + 15, "text-anchor": "middle", text: show(tick, 4) }));
    }
    if (label) this.base.append(svg("text", { x: this.width - this.right, y: y + 30, "text-anchor": "end", text: label }));
  }
  yAxis(scale, count) {
    for (const tick of scale.ticks(count)) {
      const y = scale(tick);
      this.base.append(svg("line", { class: "grid-line", x1: this.left, x2: this.width - this.right, y1: y, y2: y }));
      this.base.append(svg("text", { x: this.left - 7, y: y + 4, "text-anchor": "end", text: show(tick, 4) }));
    }
  }
}

let clips = 0;

// -- curves of one metric, a line for each run

class Curves extends Chart {
  // options: curves [[run, steps, values]], style(run) → class, tell(found) → nodes, log, all, order(run) → number
  constructor(host, label, focus, options) {
    super(host, label, focus);
    Object.assign(this, { log: false, all: false, tall: 300 }, options);
    [this.left, this.right, this.top, this.bottom] = [54, 14, 8, 34];
    this.redraw();
  }
  set(options) {
    Object.assign(this, options);
    this.redraw();
  }
  draw() {
    this.size(this.tall);
    const usable = (value) => value !== null && (!this.log || value > 0);
    const values = this.curves.flatMap((curve) => curve[2].filter(usable));
    const range = extent(this.log ? values.map(Math.log10) : values, 0.01, this.all ? 0 : 1);
    this.cut = Boolean(range && range.cut);
    const steps = this.curves.flatMap((curve) => [curve[1][0], ...curve[1].slice(-1)]).concat(this.curves.flatMap((curve) => Math.max(...curve[1])));
    this.lines = [];
    if (!range) {
      this.base.append(svg("text", { x: this.width / 2, y: this.tall / 2, "text-anchor": "middle", text: "no values to draw" }));
      return;
    }
    const x = linear(Math.min(...steps), Math.max(...steps), this.left, this.width - this.right);
    const [bottom, top] = [this.tall - this.bottom, this.top];
    const y = this.log ? logarithmic(10 ** range.low, 10 ** range.high, bottom, top) : linear(range.low, range.high, bottom, top);
    this.yAxis(y, 6);
    this.xAxis(x, bottom, "step", Math.max(2, Math.floor(this.width / 90)), steps.every(Number.isInteger));
    const id = `clip${++clips}`;
    const area = { x: this.left - 2, y: top - 4, width: this.width - this.left - this.right + 4, height: bottom - top + 8 };
    this.root.append(svg("clipPath", { id }, svg("rect", area)));
    this.base.setAttribute("clip-path", "none");
    const sorted = [...this.curves].sort((a, b) => this.order(a[0]) - this.order(b[0]));
    for (const [run, runSteps, runValues] of sorted) {
      let path = "";
      let pen = "M";
      const points = [];
      runSteps.forEach((step, i) => {
        const value = runValues[i];
        if (!usable(value)) {
          pen = "M";
          points.push(null);
          return;
        }
        const [px, py] = [x(step), y(value)];
        points.push([px, py, step, value]);
        path += `${pen}${px.toFixed(1)} ${py.toFixed(1)}`;
        pen = "L";
      });
      if (!path) continue;
      if (!path.includes("L")) path += "h0.01";
      this.mark(run, svg("path", { class: `line ${this.style(run)}`, d: path, "clip-path": `url(#${id})`, "stroke-linecap": "round" }));
      this.lines.push([run, points]);
    }
  }
  nearest(px, py) {
    let best = null;
    let least = 24 * 24;
    for (const [run, points] of this.lines || []) {
      if (this.focus.shown && !this.focus.shown.has(run)) continue;
      for (let i = 0; i < points.length; i++) {
        const b = points[i];
        if (!b) continue;
        const a = points[i - 1] || b;
        const [dx, dy] = [b[0] - a[0], b[1] - a[1]];
        const length = dx * dx + dy * dy;
        const t = length ? Math.max(0, Math.min(1, ((px - a[0]) * dx + (py - a[1]) * dy) / length)) : 0;
        const distance = (a[0] + t * dx - px) ** 2 + (a[1] + t * dy - py) ** 2;
        if (distance < least) {
          least = distance;
          const end = t < 0.5 ? a : b;
          best = { run, x: end[0], y: end[1], step: end[2], value: end[3] };
        }
      }
    }
    return best;
  }
  highlight(run, nodes) {
    super.highlight(run, nodes);
    const found = this.found;
    if (found && found.run === run && this.focus.hover === run) this.over.append(svg("circle", { class: "ring", cx: found.x, cy: found.y, r: 4 }));
  }
}

// -- one point for each run

const SHAPES = [
  (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
  (x, y, r) => `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
  (x, y, r) => `M${x} ${y - 1.2 * r}l${1.25 * r} ${2.2 * r}h${-2.5 * r}z`,
  (x, y, r) => `M${x} ${y - 1.35 * r}l${1.35 * r} ${1.35 * r}l${-1.35 * r} ${1.35 * r}l${-1.35 * r} ${-1.35 * r}z`,
  (x, y, r) => `M${x} ${y + 1.2 * r}l${1.25 * r} ${-2.2 * r}h${-2.5 * r}z`,
];

class Points extends Chart {
  place(run, x, y, style, shape, size) {
    const node = svg("path", { class: `dot ${style}`, d: SHAPES[shape % SHAPES.length](x, y, size), "data-x": x, "data-y": y });
    this.spots.push({ run, x, y });
    this.mark(run, node);
  }
  nearest(px, py) {
    let best = null;
    let least = 22 * 22;
    for (const spot of this.spots || []) {
      if (this.focus.shown && !this.focus.shown.has(spot.run)) continue;
      const distance = (spot.x - px) ** 2 + (spot.y - py) ** 2;
      if (distance < least) [least, best] = [distance, spot];
    }
    return best;
  }
}
