"use strict";
// SVG charts without a library. All text is inserted as text nodes: data is never parsed as HTML.

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

// -- numbers and text

function show(value, digits = 5) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "true" : "false";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (value === 0 || (Number.isInteger(value) && size < 1e7)) return String(value);
  if (size >= 1e6 || size < 1e-4) {
    return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  }
  return String(Number(value.toPrecision(digits)));
}

function signed(value) {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : "") + show(value, 3);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return seconds.toFixed(1) + "s";
  const minutes = Math.floor(seconds / 60);
  const two = (number) => String(Math.floor(number)).padStart(2, "0");
  if (minutes < 60) return `${minutes}m${two(seconds % 60)}s`;
  return `${Math.floor(minutes / 60)}h${two(minutes % 60)}m`;
}

const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
const cut = (words, length) => (words.length > length ? words.slice(0, length) + "…" : words);

// A box with a title, and controls on the right.
function card(title, wide, ...controls) {
  const right = el("div", { class: "controls push" }, ...controls);
  const top = el("div", { class: "bar-top" }, el("h2", { text: title }), right);
  return el("section", { class: wide ? "card wide" : "card", "aria-label": title }, top);
}

// The range to draw. A few outliers are clipped to the edge, so that they do not compress the rest.
function extent(values, tail, reach) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const at = (part) => sorted[Math.round(part * (sorted.length - 1))];
  let [low, high] = [at(0), at(1)];
  const [a, b] = [at(tail), at(1 - tail)];
  if (sorted.length < 8 || !reach || a === b) return { low, high, cut: false };
  const [from, to] = [a - reach * (b - a), b + reach * (b - a)];
  return { low: Math.max(low, from), high: Math.min(high, to), cut: low < from || high > to };
}

// -- scales: a function from a value to a coordinate, with its ticks

function linear(low, high, from, to) {
  if (low === high) [low, high] = [low - (Math.abs(low) * 0.05 || 1), high + (Math.abs(high) * 0.05 || 1)];
  const scale = (value) => from + ((value - low) / (high - low)) * (to - from);
  const [least, most] = [Math.min(low, high), Math.max(low, high)];
  scale.ticks = (wanted, whole) => {
    const rough = Math.max((most - least) / Math.max(1, wanted), whole ? 1 : 0);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999) || rough;
    const ticks = [];
    for (let i = Math.ceil(least / step - 1e-9); i * step <= most + step * 1e-9; i++) {
      ticks.push(Number((i * step).toPrecision(12)));
    }
    return ticks;
  };
  return scale;
}

function logarithmic(low, high, from, to) {
  if (low === high) [low, high] = [low / 2, high * 2];
  const [a, b] = [Math.log10(low), Math.log10(high)];
  const scale = (value) => (value > 0 ? from + ((Math.log10(value) - a) / (b - a)) * (to - from) : NaN);
  scale.ticks = (wanted) => {
    const decades = b - a;
    if (decades < 0.7) return linear(low, high, from, to).ticks(wanted);
    const factors = decades <= 1.6 ? [1, 2, 5] : [1];
    const every = Math.max(1, Math.ceil(decades / wanted));
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
  const place = (i) => (names.length < 2 ? (from + to) / 2 : from + (i / (names.length - 1)) * (to - from));
  const places = new Map(names.map((name, i) => [name, place(i)]));
  const scale = (value) => (places.has(value) ? places.get(value) : NaN);
  scale.ticks = () => names;
  return scale;
}

// -- state shared by all charts: the hovered run, the picked run, the filtered runs

class Focus {
  hover = null;
  picked = null;
  shown = null;
  listeners = [];

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
  hides(run) {
    return this.shown !== null && !this.shown.has(run);
  }
}

const tip = el("div", { class: "tip", hidden: true, role: "status" });
const hideTip = () => (tip.hidden = true);

function showTip(event, nodes) {
  if (!tip.isConnected) document.body.append(tip);
  tip.replaceChildren(...nodes);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width < innerWidth ? event.clientX + 16 : event.clientX - 12 - box.width;
  const top = event.clientY + 16 + box.height < innerHeight ? event.clientY + 14 : event.clientY - 10 - box.height;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

// A chart redraws itself when the width of its container changes. Its marks can be hovered and picked.
class Chart {
  constructor(host, label, focus) {
    this.host = host;
    this.focus = focus;
    this.root = svg("svg", { role: "img", "aria-label": label });
    this.width = 0;
    this.marks = new Map();
    host.append(this.root);
    new ResizeObserver(() => {
      if (Math.abs(host.clientWidth - this.width) > 1) this.redraw();
    }).observe(host);
    focus.listen((what) => this.react(what));
    this.root.addEventListener("pointermove", (event) => this.point(event));
    this.root.addEventListener("pointerleave", () => this.leave());
    this.root.addEventListener("click", (event) => {
      const found = this.nearest(...this.at(event));
      focus.pick(found ? found.run : focus.picked);
    });
  }

  redraw() {
    this.width = this.host.clientWidth || 600;
    this.marks = new Map();
    this.base = svg("g", { class: "base" });
    this.over = svg("g", { "pointer-events": "none" });
    this.root.replaceChildren(this.base, this.over);
    this.draw();
    this.react({ shown: this.focus.shown });
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

  // The position of an event, in the units of the drawing.
  at(event) {
    const box = this.root.getBoundingClientRect();
    return [
      ((event.clientX - box.left) * this.width) / box.width,
      ((event.clientY - box.top) * this.height) / box.height,
    ];
  }
  point(event) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.found = this.nearest(...this.at(event));
      this.focus.look(this.found ? this.found.run : null);
      this.react({});
      if (this.found) showTip(event, this.tell(this.found));
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
    const { hover, picked } = this.focus;
    if ("shown" in what) {
      for (const [run, nodes] of this.marks) {
        for (const node of nodes) node.classList.toggle("out", this.focus.hides(run));
      }
    }
    const mine = [...new Set([picked, hover])].filter((run) => this.marks.has(run));
    this.root.classList.toggle("quiet", mine.length > 0);
    this.over.replaceChildren();
    for (const run of mine) this.highlight(run, this.marks.get(run));
  }
  highlight(run, nodes) {
    for (const node of nodes) {
      const copy = node.cloneNode(true);
      copy.classList.add("hot");
      copy.classList.remove("out");
      if (node.classList.contains("line")) {
        const halo = node.cloneNode(true);
        halo.setAttribute("class", "halo");
        this.over.append(halo);
      }
      this.over.append(copy);
      if (node.dataset.x) {
        this.over.append(svg("circle", { class: "ring", cx: node.dataset.x, cy: node.dataset.y, r: 7 }));
      }
    }
  }
  nearest() {
    return null;
  }

  xAxis(scale, y, label, whole) {
    const wanted = Math.max(2, Math.floor(this.width / 90));
    for (const tick of scale.ticks(wanted, whole)) {
      const text = show(tick, 4);
      this.base.append(svg("text", { x: scale(tick), y: y + 15, "text-anchor": "middle", text }));
    }
    this.base.append(svg("text", { x: this.width - this.right, y: y + 30, "text-anchor": "end", text: label }));
  }
  yAxis(scale, wanted) {
    for (const tick of scale.ticks(wanted)) {
      const y = scale(tick);
      this.base.append(
        svg("line", { class: "grid-line", x1: this.left, x2: this.width - this.right, y1: y, y2: y }),
        svg("text", { x: this.left - 7, y: y + 4, "text-anchor": "end", text: show(tick, 4) }),
      );
    }
  }
}

// -- curves of one metric, one line per run

let clips = 0;

// options: curves [[run, steps, values]], style(run) → class, order(run) → number, tell(found) → nodes, log, all,
// tall, across: name of the steps, range: {low, high} of the values if it is fixed
class Curves extends Chart {
  constructor(host, label, focus, options) {
    super(host, label, focus);
    [this.left, this.right, this.top, this.bottom] = [54, 14, 8, 34];
    this.set({ log: false, all: false, tall: 300, across: "step", ...options });
  }
  set(options) {
    Object.assign(this, options);
    this.redraw();
  }

  draw() {
    this.size(this.tall);
    this.lines = [];
    const usable = (step, value) => step !== null && value !== null && (!this.log || value > 0);
    const values = this.curves.flatMap(([, steps, own]) => own.filter((value, i) => usable(steps[i], value)));
    const range = this.range || extent(this.log ? values.map(Math.log10) : values, 0.01, this.all ? 0 : 1);
    this.cut = range !== null && Boolean(range.cut);
    if (!range) {
      const text = "no values to draw";
      this.base.append(svg("text", { x: this.width / 2, y: this.tall / 2, "text-anchor": "middle", text }));
      return;
    }
    const ends = this.curves.flatMap(([, steps]) => [Math.min(...steps), Math.max(...steps)]);
    const x = linear(Math.min(...ends), Math.max(...ends), this.left, this.width - this.right);
    const [bottom, top] = [this.tall - this.bottom, this.top];
    const y = this.log
      ? logarithmic(10 ** range.low, 10 ** range.high, bottom, top)
      : linear(range.low, range.high, bottom, top);
    this.yAxis(y, 6);
    this.xAxis(x, bottom, this.across, ends.every(Number.isInteger));
    const clip = this.clip(bottom, top);
    for (const [run, steps, own] of [...this.curves].sort((a, b) => this.order(a[0]) - this.order(b[0]))) {
      const points = steps.map((step, i) => (usable(step, own[i]) ? [x(step), y(own[i]), step, own[i]] : null));
      const path = this.path(points);
      if (!path) continue;
      const style = `line ${this.style(run)}`;
      this.mark(run, svg("path", { class: style, d: path, "clip-path": clip, "stroke-linecap": "round" }));
      this.lines.push([run, points]);
    }
  }
  clip(bottom, top) {
    const id = `clip${++clips}`;
    const width = this.width - this.left - this.right + 4;
    const area = svg("rect", { x: this.left - 2, y: top - 4, width, height: bottom - top + 8 });
    this.root.append(svg("clipPath", { id }, area));
    return `url(#${id})`;
  }
  // A line with gaps at missing values; a single point is a dot.
  path(points) {
    let path = "";
    points.forEach((point, i) => {
      if (!point) return;
      path += `${points[i - 1] ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
      if (!points[i - 1] && !points[i + 1]) path += "h0.01";
    });
    return path;
  }

  nearest(px, py) {
    let found = null;
    let least = 24 * 24;
    for (const [run, points] of this.lines || []) {
      if (this.focus.hides(run)) continue;
      points.forEach((b, i) => {
        if (!b) return;
        const a = points[i - 1] || b;
        const [dx, dy] = [b[0] - a[0], b[1] - a[1]];
        const length = dx * dx + dy * dy;
        const along = length ? ((px - a[0]) * dx + (py - a[1]) * dy) / length : 0;
        const part = Math.max(0, Math.min(1, along));
        const distance = (a[0] + part * dx - px) ** 2 + (a[1] + part * dy - py) ** 2;
        if (distance >= least) return;
        least = distance;
        const [x, y, step, value] = part < 0.5 ? a : b;
        found = { run, x, y, step, value };
      });
    }
    return found;
  }
  highlight(run, nodes) {
    super.highlight(run, nodes);
    const found = this.found;
    if (!found || found.run !== run) return;
    this.over.append(svg("circle", { class: "ring", cx: found.x, cy: found.y, r: 4 }));
  }
}

// -- one mark per run

const SHAPES = [
  (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
  (x, y, r) => `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
  (x, y, r) => `M${x} ${y - 1.2 * r}l${1.25 * r} ${2.2 * r}h${-2.5 * r}z`,
  (x, y, r) => `M${x} ${y - 1.35 * r}l${1.35 * r} ${1.35 * r}l${-1.35 * r} ${1.35 * r}l${-1.35 * r} ${-1.35 * r}z`,
  (x, y, r) => `M${x} ${y + 1.2 * r}l${1.25 * r} ${-2.2 * r}h${-2.5 * r}z`,
];
const CROSS = (x, y, r) => `M${x - r} ${y - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`;

class Points extends Chart {
  redraw() {
    this.spots = [];
    super.redraw();
  }
  place(run, x, y, style, shape) {
    this.spots.push({ run, x, y });
    this.mark(run, svg("path", { class: `dot ${style}`, d: shape(x, y), "data-x": x, "data-y": y }));
  }
  nearest(px, py) {
    let found = null;
    let least = 22 * 22;
    for (const spot of this.spots) {
      const distance = (spot.x - px) ** 2 + (spot.y - py) ** 2;
      if (distance < least && !this.focus.hides(spot.run)) [least, found] = [distance, spot];
    }
    return found;
  }
}
