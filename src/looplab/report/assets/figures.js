// Figures in SVG: few marks, real text, printable. Forest plot, parallel coordinates, timeline, lineage, progress.
//
// All take a host node, data and a Focus (dom.js) whose items are the ids in the data: pointing at a mark hovers the item
// everywhere, a click picks it, filtered items are faint. Each redraws itself when its width changes; `update(data)`
// redraws it with other data.
//
//   new Forest(host, {label, rows, focus, across, noise, tell, best})
//     rows: [{id, name, verdict, effect, low, high, paired, p, bar, n, shown}]; p beside the bar that it had to pass;
//     intervals of single runs (paired: false) are thin and dashed. noise: half-width of the grey band, or null.
//   new Parallel(host, {label, axes, items, focus, style, order, tell})
//     axes: [{name, short, kind: "number" | "category", log, low, high, few, names, value: (id) => value, strong}]
//     items: ids. Dragging along an axis selects: `onbrush` is called, kept() → Set or null, clear() removes all.
//     At most 400 lines are drawn, evenly sampled by `order`.
//   new Timeline(host, {label, lanes, from, to, focus, tell})
//     lanes: [{name, bars: [{id, from, to, kind, text}]}]; times in seconds; kind: a verdict or status, `agent` or `wait`.
//   new Lineage(host, {label, nodes, focus, across, tell, goal})
//     nodes: [{id, parent, n, value, verdict, isChampion, edits}]; champions form the trunk, rejected ones are stubs.
//   new Progress(host, {label, points, path, focus, across, tell, log})
//     points: [{id, n, value, shape, style, size}], value null: below the axis; path: [[n, value]], the best so far.
//
//   linear, logarithmic, categories (low, high, from, to)    scales: value → coordinate, with .ticks(wanted)
//   extent(values, tail, reach) → {low, high, cut}           a range that leaves out a few outliers
//   SHAPES, CROSS, VERDICT_SHAPES, icon(style, path)         marks, and a mark for a legend

import { cut, el, hideTip, pValue, show, showTip, svg, within } from "./dom.js";
import { t } from "./i18n.js";

// The range to draw. A few outliers are clipped to the edge, so that they do not compress the rest.
export function extent(values, tail, reach) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const at = (part) => sorted[Math.round(part * (sorted.length - 1))];
  const [low, high] = [at(0), at(1)];
  const [a, b] = [at(tail), at(1 - tail)];
  if (sorted.length < 8 || !reach || a === b) return { low, high, cut: false };
  const [from, to] = [a - reach * (b - a), b + reach * (b - a)];
  return { low: Math.max(low, from), high: Math.min(high, to), cut: low < from || high > to };
}

// -- scales

export function linear(low, high, from, to) {
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

export function logarithmic(low, high, from, to) {
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

export function categories(names, from, to) {
  const place = (i) => (names.length < 2 ? (from + to) / 2 : from + (i / (names.length - 1)) * (to - from));
  const places = new Map(names.map((name, i) => [name, place(i)]));
  const scale = (value) => (places.has(value) ? places.get(value) : NaN);
  scale.ticks = () => names;
  return scale;
}

// -- marks

export const SHAPES = [
  (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
  (x, y, r) => `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
  (x, y, r) => `M${x} ${y - 1.2 * r}l${1.25 * r} ${2.2 * r}h${-2.5 * r}z`,
  (x, y, r) => `M${x} ${y - 1.35 * r}l${1.35 * r} ${1.35 * r}l${-1.35 * r} ${1.35 * r}l${-1.35 * r} ${-1.35 * r}z`,
  (x, y, r) => `M${x} ${y + 1.2 * r}l${1.25 * r} ${-2.2 * r}h${-2.5 * r}z`,
];
export const CROSS = (x, y, r) => `M${x - r} ${y - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`;
// A shape per verdict, for readers who cannot distinguish the colours.
export const VERDICT_SHAPES = { keep: 0, inconclusive: 3, discard: 1, crash: 4, void: 4 };

export function icon(style, path) {
  return svg("svg", { class: "icon", viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("path", { class: style, d: path }));
}

// -- the base of all figures

export class Figure {
  constructor(host, options) {
    this.host = host;
    Object.assign(this, options);
    this.root = svg("svg", { role: "img", "aria-label": this.label });
    this.width = 0;
    this.marks = new Map();
    host.append(this.root);
    this.observer = new ResizeObserver(() => {
      if (Math.abs(host.clientWidth - this.width) > 1) this.redraw();
    });
    this.observer.observe(host);
    this.focus.listen((what) => this.react(what));
    this.root.addEventListener("pointermove", (event) => this.point(event));
    this.root.addEventListener("pointerleave", () => this.leave());
    this.root.addEventListener("click", (event) => {
      const found = this.nearest(...this.at(event));
      if (found || this.focus.picked !== null) this.focus.pick(found ? found.id : this.focus.picked);
    });
  }
  update(data) {
    Object.assign(this, data);
    this.redraw();
  }
  redraw() {
    this.width = this.host.clientWidth || 600;
    this.marks = new Map();
    this.spots = [];
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
  mark(id, node) {
    if (!this.marks.has(id)) this.marks.set(id, []);
    this.marks.get(id).push(node);
    this.base.append(node);
  }
  // A dot that can be pointed at.
  dot(id, x, y, style, shape) {
    this.spots.push({ id, x, y });
    this.mark(id, svg("path", { class: `dot ${style}`, d: shape(x, y), "data-x": x, "data-y": y }));
  }
  text(x, y, words, attributes) {
    this.base.append(svg("text", { x, y, text: words, ...attributes }));
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
      this.focus.look(this.found ? this.found.id : null);
      this.react({});
      if (this.found && this.tell) showTip(event, this.tell(this.found.id, this.found));
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
      for (const [id, nodes] of this.marks) {
        for (const node of nodes) node.classList.toggle("out", this.focus.hides(id));
      }
    }
    const mine = [...new Set([picked, hover])].filter((id) => this.marks.has(id));
    this.root.classList.toggle("quiet", mine.length > 0);
    this.over.replaceChildren();
    for (const id of mine) this.highlight(id, this.marks.get(id));
  }
  highlight(id, nodes) {
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
  nearest(px, py) {
    let found = null;
    let least = 22 * 22;
    for (const spot of this.spots) {
      const distance = (spot.x - px) ** 2 + (spot.y - py) ** 2;
      if (distance < least && !this.focus.hides(spot.id)) [least, found] = [distance, spot];
    }
    return found;
  }
  xAxis(scale, y, label, whole) {
    const wanted = Math.max(2, Math.floor((this.width - this.left - this.right) / 90));
    for (const value of scale.ticks(wanted, whole)) {
      this.text(scale(value), y + 15, show(value, 4), { "text-anchor": "middle" });
    }
    this.text(this.width - this.right, y + 30, label, { "text-anchor": "end" });
  }
  yAxis(scale, wanted) {
    for (const value of scale.ticks(wanted)) {
      const y = scale(value);
      this.base.append(svg("line", { class: "grid-line", x1: this.left, x2: this.width - this.right, y1: y, y2: y }));
      this.text(this.left - 7, y + 4, show(value, 4), { "text-anchor": "end" });
    }
  }
}

// -- effects with their intervals, one row each

const FOREST_STEP = 22;

const LETTER = 6.3; // width of a letter of a figure, in pixels
const textWidth = (words) => [...words].reduce((sum, letter) => sum + (letter.charCodeAt(0) > 0x2e80 ? 2 : 1), 0);

// The challengers that a forest has room for, in their order: promoted ones, then tested ones, then the latest.
export function forestRows(all, limit) {
  const weight = (one) => (one.verdict === "keep" ? 2 : 0) + (one.p !== null ? 1 : 0);
  const ranked = all.map((one, place) => ({ one, place })).sort((a, b) => weight(b.one) - weight(a.one) || b.place - a.place);
  const chosen = new Set(ranked.slice(0, limit).map(({ one }) => one));
  return all.filter((one) => chosen.has(one));
}

export class Forest extends Figure {
  constructor(host, options) {
    super(host, { across: t("better by"), noise: null, best: null, ...options });
    this.redraw();
  }
  draw() {
    const isNarrow = this.width < 720;
    const cellsOf = (one) => {
      const p = pValue(one.p) + (one.p === null || one.bar === null || one.bar === undefined ? "" : ` / ${pValue(one.bar)}`);
      return isNarrow ? [one.p === null ? t(one.verdict) : `p ${p}`] : [t(one.verdict), one.shown, p, String(one.n)];
    };
    const heads = isNarrow ? [t("verdict")] : [t("verdict"), t("better by, 95 %"), t("p / boundary"), "n"];
    const cells = this.rows.map(cellsOf);
    const columns = [];
    let side = isNarrow ? 6 : 12;
    heads.forEach((words, k) => {
      columns.push([side, words]);
      side += Math.max(30, 16 + LETTER * Math.max(...[words, ...cells.map((row) => row[k])].map(textWidth)));
    });
    [this.left, this.right, this.top, this.bottom] = [isNarrow ? 76 : 90, isNarrow ? Math.max(90, side) : side, 22, 40];
    const tall = this.top + FOREST_STEP * this.rows.length + this.bottom;
    this.size(tall);
    const bottom = tall - this.bottom;
    const ends = this.rows.flatMap((one) => [one.effect, one.low ?? one.effect, one.high ?? one.effect]);
    const range = extent([...ends, 0, this.noise || 0], 0.1, 1.5);
    const x = linear(Math.min(0, range.low), Math.max(0, range.high), this.left + 8, this.width - this.right - 8);
    const inside = (value) => within(x(value), this.left, this.width - this.right);
    for (const value of x.ticks(Math.max(2, Math.floor((this.width - this.left - this.right) / 80)))) {
      const place = { x1: x(value), x2: x(value), y1: this.top - 4, y2: bottom };
      this.base.append(svg("line", { class: value === 0 ? "zero" : "grid-line", ...place }));
      this.text(x(value), bottom + 15, show(value, 4), { "text-anchor": "middle" });
    }
    if (this.noise) {
      const [from, to] = [inside(-this.noise), inside(this.noise)];
      const band = { x: from, width: to - from, y: this.top - 4, height: bottom - this.top + 4 };
      this.base.prepend(svg("rect", { class: "noise", ...band }));
    }
    this.text((this.left + this.width - this.right) / 2, bottom + 32, this.across, { "text-anchor": "middle" });
    const at = (offset) => this.width - this.right + offset;
    for (const [offset, words] of columns) this.text(at(offset), 12, words);
    this.rows.forEach((one, i) => {
      const y = this.top + FOREST_STEP * (i + 0.5);
      this.text(0, y + 4, cut(one.name, 12), { class: one.id === this.best ? "best-name" : "title-text" });
      columns.forEach(([offset], k) => this.text(at(offset), y + 4, cells[i][k], { class: k ? "title-text" : `t-${one.verdict}` }));
      if (one.low !== null && one.high !== null) {
        const style = one.paired === false ? "single-line" : "bar-line";
        const bar = { x1: inside(one.low), x2: inside(one.high), y1: y, y2: y };
        this.mark(one.id, svg("line", { class: `line ${style} l-${one.verdict}`, ...bar }));
      }
      const shape = SHAPES[VERDICT_SHAPES[one.verdict] ?? 0];
      const hollow = one.paired === false ? `hollow l-${one.verdict}` : `t-${one.verdict}`;
      this.dot(one.id, inside(one.effect), y, hollow, (px, py) => shape(px, py, 4));
    });
  }
  nearest(px, py) {
    const one = this.rows[Math.floor((py - this.top) / FOREST_STEP)];
    const spot = one && this.spots.find((found) => found.id === one.id);
    return spot && !this.focus.hides(spot.id) ? spot : null;
  }
}

// -- parallel coordinates

const MAX_LINES = 400;

// The values whose labels do not overlap; always the last one.
function apart(values, scale, room) {
  const kept = [values[values.length - 1]];
  for (const value of values.slice(0, -1)) {
    if (kept.every((other) => Math.abs(scale(value) - scale(other)) >= room)) kept.push(value);
  }
  return kept;
}

export function axisScale(axis, from, to, room) {
  if (axis.kind === "category") return categories(axis.names, from, to);
  const scale = (axis.log ? logarithmic : linear)(axis.low, axis.high, from, to);
  if (axis.few) scale.ticks = () => apart(axis.few, scale, room);
  return scale;
}

export class Parallel extends Figure {
  constructor(host, options) {
    super(host, { style: () => "s5", order: () => 0, onbrush: () => {}, tall: () => 330, ...options });
    this.brushes = new Map(); // axis → selected range, from 0 at the top to 1
    this.redraw();
  }
  draw() {
    this.size(this.tall());
    const [top, bottom] = [40, this.height - 22];
    const space = this.width < 700 ? 34 : 60;
    const gap = (this.width - 2 * space - 10) / Math.max(1, this.axes.length - 1);
    this.places = this.axes.map((axis, i) => ({ ...axis, x: space + i * gap, top, bottom, scale: axisScale(axis, bottom, top, 13) }));
    const points = (id) =>
      this.places.map((axis) => {
        const value = axis.value(id);
        const y = value === null || value === undefined ? NaN : axis.scale(value);
        return [axis.x, Number.isNaN(y) ? bottom + 12 : within(y, top, bottom)];
      });
    const sorted = [...this.items].sort((a, b) => this.order(a) - this.order(b));
    this.all = sorted.map((id) => [id, points(id)]);
    // Evenly spaced from the end, so that what is drawn last and on top is always drawn.
    const every = Math.max(1, sorted.length / MAX_LINES);
    const chosen = new Set([...Array(Math.min(MAX_LINES, sorted.length)).keys()].map((i) => sorted.length - 1 - Math.floor(i * every)));
    this.lines = this.all.filter((_, i) => chosen.has(i));
    this.drawn = this.lines.length;
    for (const [id, own] of this.lines) {
      const path = "M" + own.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
      this.mark(id, svg("path", { class: `line ${this.style(id)}`, d: path }));
    }
    this.places.forEach((axis, i) => this.drawAxis(axis, i));
  }
  drawAxis(axis, i) {
    const group = svg("g");
    group.append(svg("line", { class: "axis-line", x1: axis.x, x2: axis.x, y1: axis.top, y2: axis.bottom }));
    const ticks = axis.scale.ticks(5);
    const every = Math.ceil(ticks.length / 12);
    const last = i === this.axes.length - 1;
    for (const value of ticks.filter((_, place) => place % every === 0)) {
      const text = cut(show(value, 4), 13);
      const y = axis.scale(value);
      const width = text.length * 6.1 + 6;
      const left = last && axis.x + width > this.width;
      const back = { class: "label-back", x: left ? axis.x - width : axis.x + 0.5, y: y - 7, width, height: 14 };
      const place = { x: left ? axis.x - 5 : axis.x + 5, y: y + 4, "text-anchor": left ? "end" : "start" };
      group.append(svg("rect", back), svg("text", { ...place, text }));
    }
    group.append(this.title(axis, i));
    if (this.brushes.has(i)) {
      const [from, to] = this.brushes.get(i).map((part) => axis.top + part * (axis.bottom - axis.top));
      group.append(svg("rect", { class: "brush", x: axis.x - 6, width: 12, y: from, height: to - from }));
    }
    const place = { x: axis.x - 9, width: 18, y: axis.top - 6, height: axis.bottom - axis.top + 12 };
    const area = svg("rect", { class: "brush-area", ...place });
    area.addEventListener("pointerdown", (event) => this.drag(event, i, area));
    area.addEventListener("click", (event) => event.stopPropagation());
    group.append(area);
    this.base.append(group);
  }
  // Names that are too long for one line alternate between two.
  title(axis, i) {
    const share = this.width / this.axes.length;
    const crowded = this.axes.some((one) => one.short.length * 6.6 > share);
    const room = Math.max(6, Math.floor(((crowded ? 1.7 : 1) * share) / 6.6));
    const text = axis.short.length > room ? "…" + axis.short.slice(1 - room) : axis.short;
    const [first, last] = [i === 0, i === this.axes.length - 1];
    const attributes = {
      class: axis.strong ? "title-text strong" : "title-text",
      x: first ? Math.max(0, axis.x - 40) : last ? this.width : axis.x,
      y: crowded && i % 2 ? 30 : 14,
      "text-anchor": first ? "start" : last ? "end" : "middle",
    };
    return svg("text", attributes, svg("title", { text: axis.name }), text);
  }
  drag(event, i, area) {
    event.preventDefault();
    area.setPointerCapture(event.pointerId);
    const axis = this.places[i];
    const part = (one) => within((this.at(one)[1] - axis.top) / (axis.bottom - axis.top), 0, 1);
    const start = part(event);
    const shade = svg("rect", { class: "brush", x: axis.x - 6, width: 12 });
    this.base.append(shade);
    const move = (next) => {
      const now = part(next);
      if (Math.abs(now - start) < 0.01) this.brushes.delete(i);
      else this.brushes.set(i, [Math.min(start, now), Math.max(start, now)]);
      shade.setAttribute("y", axis.top + Math.min(start, now) * (axis.bottom - axis.top));
      shade.setAttribute("height", Math.abs(now - start) * (axis.bottom - axis.top));
    };
    area.addEventListener("pointermove", move);
    const end = (next) => {
      move(next);
      this.redraw();
      this.onbrush();
    };
    area.addEventListener("pointerup", end, { once: true });
  }
  clear() {
    this.brushes.clear();
    this.redraw();
    this.onbrush();
  }
  // The items inside all brushes; null if there is no brush.
  kept() {
    if (!this.brushes.size) return null;
    const inside = ([, points]) =>
      [...this.brushes].every(([i, [from, to]]) => {
        const { top, bottom } = this.places[i];
        const part = (points[i][1] - top) / (bottom - top);
        return part >= from - 0.01 && part <= to + 0.01;
      });
    return new Set(this.all.filter(inside).map(([id]) => id));
  }
  nearest(px, py) {
    let found = null;
    let least = 14;
    for (const [id, points] of this.lines) {
      if (this.focus.hides(id)) continue;
      const i = points.findIndex(([x]) => x >= px);
      if (i < 1) continue;
      const [a, b] = [points[i - 1], points[i]];
      const distance = Math.abs(a[1] + ((px - a[0]) / (b[0] - a[0])) * (b[1] - a[1]) - py);
      if (distance < least) [least, found] = [distance, { id }];
    }
    return found;
  }
}

// -- lanes over time

const LANE_STEP = 26;

export class Timeline extends Figure {
  constructor(host, options) {
    super(host, { ...options });
    this.redraw();
  }
  draw() {
    [this.left, this.right, this.top, this.bottom] = [this.width < 560 ? 56 : 84, 8, 4, 22];
    const tall = this.top + LANE_STEP * Math.max(1, this.lanes.length) + this.bottom;
    this.size(tall);
    const x = linear(this.from, this.to, this.left, this.width - this.right);
    const bottom = tall - this.bottom;
    this.timeTicks(x, bottom);
    this.lanes.forEach((lane, i) => {
      const y = this.top + LANE_STEP * i + 3;
      const tall = LANE_STEP - 6;
      this.base.append(svg("rect", { class: "lane", x: this.left, y, width: this.width - this.left - this.right, height: tall }));
      this.text(this.left - 8, y + 14, cut(lane.name, 12), { "text-anchor": "end", class: "title-text" });
      for (const bar of lane.bars) {
        const from = within(x(bar.from), this.left, this.width - this.right);
        const to = within(x(bar.to), this.left, this.width - this.right);
        if (to < this.left || from > this.width - this.right || bar.to < this.from) continue;
        const width = Math.max(1.5, to - from - 1);
        this.mark(bar.id, svg("rect", { class: `span span-${bar.kind || "none"}`, x: from, y, width, height: tall, rx: 2 }));
        this.spots.push({ id: bar.id, from, to: from + width, y, bar });
        if (width > 7 * String(bar.text || "").length + 6) {
          this.text(from + 4, y + 14, bar.text, { class: "span-text", "pointer-events": "none" });
        }
      }
    });
  }
  timeTicks(x, bottom) {
    const steps = [1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
    const wanted = Math.max(2, (this.width - this.left) / 100);
    const step = steps.find((size) => (this.to - this.from) / size <= wanted) || steps[steps.length - 1];
    const zone = new Date(this.from * 1000).getTimezoneOffset() * 60;
    for (let at = Math.ceil((this.from - zone) / step) * step + zone; at <= this.to; at += step) {
      const time = new Date(at * 1000);
      const two = (number) => String(number).padStart(2, "0");
      const clock = `${two(time.getHours())}:${two(time.getMinutes())}${step < 60 ? `:${two(time.getSeconds())}` : ""}`;
      const text = step >= 86400 ? `${time.getDate()}.${time.getMonth() + 1}.` : clock;
      this.base.append(svg("line", { class: "grid-line", x1: x(at), x2: x(at), y1: this.top, y2: bottom }));
      this.text(x(at), bottom + 15, text, { "text-anchor": "middle" });
    }
  }
  nearest(px, py) {
    return this.spots.find((spot) => px >= spot.from - 2 && px <= spot.to + 2 && py >= spot.y - 3 && py <= spot.y + LANE_STEP) || null;
  }
}

// -- lineage: champions are the trunk, the others stubs

export class Lineage extends Figure {
  constructor(host, options) {
    super(host, { across: t("run number"), goal: "max", ...options });
    this.redraw();
  }
  draw() {
    [this.left, this.right, this.top, this.bottom] = [54, 14, 10, 34];
    const tall = 320;
    this.size(tall);
    const measured = this.nodes.filter((node) => node.value !== null);
    if (!measured.length) return this.text(this.width / 2, tall / 2, t("nothing has been measured yet"), { "text-anchor": "middle" });
    const range = extent(measured.map((node) => node.value), 0.2, 1.5);
    const y = linear(range.low, range.high, tall - this.bottom - 6, this.top + 12);
    const x = linear(Math.min(...measured.map((node) => node.n)), Math.max(...measured.map((node) => node.n)), this.left + 10, this.width - this.right - 10);
    this.yAxis(y, 6);
    this.xAxis(x, tall - this.bottom, this.across, true);
    const places = new Map(measured.map((node) => [node.id, [x(node.n), within(y(node.value), this.top, tall - this.bottom)]]));
    const trunk = measured.filter((node) => node.isChampion);
    for (const node of measured) {
      const [from, to] = [places.get(node.parent), places.get(node.id)];
      if (!from || node.isChampion) continue;
      this.mark(node.id, svg("path", { class: `line branch l-${node.verdict || "none"}`, d: curvePath(from, to) }));
    }
    for (const node of trunk) {
      const [from, to] = [places.get(node.parent), places.get(node.id)];
      if (from) this.mark(node.id, svg("path", { class: "line trunk", d: curvePath(from, to) }));
    }
    const size = measured.length > 300 ? 2.4 : 4;
    for (const node of measured) {
      const [px, py] = places.get(node.id);
      const shape = SHAPES[VERDICT_SHAPES[node.verdict] ?? 0];
      const style = node.isChampion ? "d-best" : node.verdict === "inconclusive" ? "hollow l-inconclusive" : `t-${node.verdict || "none"}`;
      this.dot(node.id, px, py, style, (a, b) => shape(a, b, node.isChampion ? 5.5 : size));
    }
    trunk.forEach((node, i) => {
      const [px, py] = places.get(node.id);
      const before = trunk[i - 1] && places.get(trunk[i - 1].id);
      if (before && px - before[0] < 64 && i < trunk.length - 1) return;
      const end = px > this.width - 70;
      this.text(px + (end ? -8 : 8), py - 8, node.name || node.id, { class: "best-name", "text-anchor": end ? "end" : "start" });
    });
  }
}

const curvePath = ([ax, ay], [bx, by]) => {
  const middle = (ax + bx) / 2;
  return `M${ax.toFixed(1)} ${ay.toFixed(1)}C${middle.toFixed(1)} ${ay.toFixed(1)} ${middle.toFixed(1)} ${by.toFixed(1)} ${bx.toFixed(1)} ${by.toFixed(1)}`;
};

// -- the value of each run, and the best so far

const MAX_DOTS = 2500;

export class Progress extends Figure {
  constructor(host, options) {
    super(host, { across: t("run number"), log: false, ...options });
    [this.left, this.right, this.top, this.bottom] = [54, 14, 8, 52];
    this.redraw();
  }
  draw() {
    const tall = 300;
    this.size(tall);
    const [bottom, top] = [tall - this.bottom, this.top];
    const last = this.points.reduce((most, point) => Math.max(most, point.n), 2);
    const x = linear(1, last, this.left + 6, this.width - this.right - 6);
    // Of very many points an even sample is drawn, and always those on the path.
    const every = Math.ceil(this.points.length / MAX_DOTS);
    const onPath = new Set(this.path.map(([n]) => n));
    const points = this.points.filter((point, i) => every === 1 || i % every === 0 || onPath.has(point.n) || point.size > 5);
    this.drawn = points.length;
    const usable = (value) => value !== null && (!this.log || value > 0);
    const values = this.points.map((point) => point.value).filter(usable);
    if (values.length) this.drawValues(points.filter((point) => usable(point.value)), values, { x, bottom, top, last });
    this.base.append(
      svg("line", { class: "axis-line", x1: this.left, x2: this.width - this.right, y1: bottom + 1, y2: bottom + 1 }),
    );
    for (const point of points) {
      if (point.value !== null) continue;
      this.dot(point.id, x(point.n), bottom + 10, point.style, (px, py) => point.shape(px, py, 3));
    }
    this.xAxis(x, bottom + 14, this.across, true);
  }
  drawValues(points, values, { x, bottom, top, last }) {
    const range = extent(this.log ? values.map(Math.log10) : values, 0.05, 1.2);
    this.cut = range.cut;
    const y = this.log
      ? logarithmic(10 ** range.low, 10 ** range.high, bottom - 8, top + 8)
      : linear(range.low, range.high, bottom - 8, top + 8);
    this.yAxis(y, 6);
    const inside = (place) => Math.min(bottom - 2, Math.max(top + 2, place));
    for (const point of points) {
      this.dot(point.id, x(point.n), inside(y(point.value)), point.style, (px, py) => point.shape(px, py, point.size));
    }
    let path = "";
    for (const [n, value] of this.path) {
      if (Number.isNaN(y(value))) continue;
      const [px, py] = [x(n).toFixed(1), inside(y(value)).toFixed(1)];
      path += path ? `H${px}V${py}` : `M${px} ${py}`;
    }
    if (path) path += `H${x(last).toFixed(1)}`;
    this.base.append(svg("path", { class: "bestline", d: path, "pointer-events": "none" }));
  }
}

// A legend entry: a mark and a word.
export const legendKey = (style, path, word) => el("span", { class: "key" }, icon(style, path), word);
