// Knobs: parallel coordinates, importance, and the objective by one knob.

function knobScale(knob, from, to, room) {
  if (knob.kind === "category") return categories(knob.names, from, to);
  const scale = (knob.log ? logarithmic : linear)(knob.low, knob.high, from, to);
  if (knob.few) scale.ticks = () => apart(knob.few, scale, room);
  return scale;
}

// The values whose labels do not overlap; always the last one.
function apart(values, scale, room) {
  const last = values[values.length - 1];
  const kept = [last];
  for (const value of values.slice(0, -1)) {
    if (kept.every((other) => Math.abs(scale(value) - scale(other)) >= room)) kept.push(value);
  }
  return kept;
}

function knobValue(run, k) {
  const value = RUNS[run].knobs[k];
  return DATA.knobs[k].kind === "category" && value === null ? "not set" : value;
}

const objectiveRange = () => extent(order.map((run) => RUNS[run].obj), 0.05, 1.2);
const within = (value, low, high) => Math.min(Math.max(low, high), Math.max(Math.min(low, high), value));

class Parallel extends Chart {
  // axes: [{k, name, short}], k < 0 for the objective; the last one
  constructor(host, axes) {
    super(host, "parallel coordinates: the knobs and the objective of each measured run", focus);
    this.axes = axes;
    this.brushes = new Map(); // axis → selected range, from 0 at the top to 1
    const knobs = axes.filter((axis) => axis.k >= 0);
    const line = (run, axis) => el("div", { class: "why", text: `${axis.name}: ${show(knobValue(run, axis.k))}` });
    this.tell = (found) => describe(found.run, ...knobs.map((axis) => line(found.run, axis)));
    this.redraw();
  }

  draw() {
    this.size(this.tall());
    const [top, bottom] = [40, this.height - 22];
    const space = this.width < 700 ? 40 : 60;
    const gap = (this.width - 2 * space - 10) / Math.max(1, this.axes.length - 1);
    const { low, high } = objectiveRange();
    this.places = this.axes.map((axis, i) => {
      const x = space + i * gap;
      if (axis.k >= 0) {
        const scale = knobScale(DATA.knobs[axis.k], bottom, top, 13);
        return { ...axis, x, top, bottom, scale, value: (run) => knobValue(run, axis.k) };
      }
      const [worst, best] = DATA.goal === "max" ? [low, high] : [high, low];
      const scale = linear(worst, best, bottom, top);
      return { ...axis, x, top, bottom, scale, value: (run) => within(RUNS[run].obj, low, high) };
    });
    this.lines = [...order].sort((a, b) => drawOrder(a) - drawOrder(b)).map((run) => {
      const points = this.places.map((axis) => {
        const value = axis.value(run);
        const y = value === null ? NaN : axis.scale(value);
        return [axis.x, Number.isNaN(y) ? bottom + 12 : y];
      });
      const path = "M" + points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
      this.mark(run, svg("path", { class: `line ${lineStyle(run)}`, d: path }));
      return [run, points];
    });
    this.places.forEach((axis, i) => this.drawAxis(axis, i));
  }
  // As tall as the card next to it, so that the row is aligned.
  tall() {
    if (!this.neighbour || innerWidth <= 980) return 330;
    const end = this.neighbour.lastElementChild.getBoundingClientRect().bottom;
    return Math.max(330, Math.min(560, end - this.host.getBoundingClientRect().top - 24));
  }

  drawAxis(axis, i) {
    const group = svg("g");
    group.append(svg("line", { class: "axis-line", x1: axis.x, x2: axis.x, y1: axis.top, y2: axis.bottom }));
    const ticks = axis.scale.ticks(5);
    const every = Math.ceil(ticks.length / 12);
    for (const value of ticks.filter((_, place) => place % every === 0)) {
      const text = cut(show(value, 4), 13);
      const y = axis.scale(value);
      const back = { class: "label-back", x: axis.x + 0.5, y: y - 7, width: text.length * 6.1 + 6, height: 14 };
      group.append(svg("rect", back), svg("text", { x: axis.x + 5, y: y + 4, text }));
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
    const room = Math.max(8, Math.floor(((crowded ? 1.7 : 1) * share) / 6.6));
    const text = axis.short.length > room ? "…" + axis.short.slice(1 - room) : axis.short;
    const [first, last] = [i === 0, i === this.axes.length - 1];
    const attributes = {
      class: axis.k < 0 ? "title-text strong" : "title-text",
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
    const part = (one) => Math.max(0, Math.min(1, (this.at(one)[1] - axis.top) / (axis.bottom - axis.top)));
    const start = part(event);
    const move = (next) => {
      const now = part(next);
      if (Math.abs(now - start) < 0.01) this.brushes.delete(i);
      else this.brushes.set(i, [Math.min(start, now), Math.max(start, now)]);
      shade.setAttribute("y", axis.top + Math.min(start, now) * (axis.bottom - axis.top));
      shade.setAttribute("height", Math.abs(now - start) * (axis.bottom - axis.top));
    };
    const shade = svg("rect", { class: "brush", x: axis.x - 6, width: 12 });
    this.base.append(shade);
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
  // The runs inside all brushes; null if there is no brush.
  kept() {
    if (!this.brushes.size) return null;
    const inside = ([, points]) =>
      [...this.brushes].every(([i, [from, to]]) => {
        const { top, bottom } = this.places[i];
        const part = (points[i][1] - top) / (bottom - top);
        return part >= from - 0.01 && part <= to + 0.01;
      });
    return new Set(this.lines.filter(inside).map(([run]) => run));
  }

  nearest(px, py) {
    let found = null;
    let least = 14;
    for (const [run, points] of this.lines) {
      if (this.focus.hides(run)) continue;
      const i = points.findIndex(([x]) => x >= px);
      if (i < 1) continue;
      const [a, b] = [points[i - 1], points[i]];
      const distance = Math.abs(a[1] + ((px - a[0]) / (b[0] - a[0])) * (b[1] - a[1]) - py);
      if (distance < least) [least, found] = [distance, { run }];
    }
    return found;
  }
}

// The objective of each measured run by the value of one knob.
class Slice extends Points {
  constructor(host, k) {
    super(host, "objective by one knob", focus);
    [this.left, this.right, this.top, this.bottom] = [54, 14, 8, 34];
    this.tell = (found) => {
      const text = `${DATA.knobs[this.k].key} ${show(knobValue(found.run, this.k))}`;
      return describe(found.run, el("div", { text }));
    };
    this.choose(k);
  }
  choose(k) {
    this.k = k;
    this.redraw();
  }
  draw() {
    this.size(190);
    const [bottom, top] = [this.height - this.bottom, this.top];
    const knob = DATA.knobs[this.k];
    const isCategory = knob.kind === "category";
    const edge = isCategory ? 50 : 12;
    const x = knobScale(knob, this.left + edge, this.width - this.right - edge, 46);
    const { low, high } = objectiveRange();
    const y = linear(low, high, bottom - 6, top + 6);
    this.yAxis(y, 4);
    this.xAxis(x, bottom, knob.key + (knob.log ? ", log scale" : ""));
    const size = order.length > 300 ? 2.4 : 3.4;
    for (const run of order) {
      const value = knobValue(run, this.k);
      let place = value === null ? NaN : x(value);
      if (Number.isNaN(place)) continue;
      // Categories get a deterministic jitter, so that points do not hide each other.
      if (isCategory) place += ((RUNS[run].n * 0.618034) % 1) * 36 - 18;
      const isBest = run === DATA.best;
      const shape = (px, py) => SHAPES[0](px, py, isBest ? size + 1.5 : size);
      this.place(run, place, within(y(RUNS[run].obj), bottom, top), isBest ? "d-best" : `d${rank(run)}`, shape);
    }
  }
}

const MOST_AXES = 9;
const MOST_NAMES = 30;
let parallel = null;

function drawKnobs(host) {
  if (!order.length) return;
  const shares = new Map(DATA.importance.shares.map(([k, share]) => [k, share]));
  const able = DATA.knobs.map((_, k) => k).filter((k) => (DATA.knobs[k].names || []).length <= MOST_NAMES);
  if (able.length) drawParallel(host, able, shares);
  const side = card("Knob importance", !able.length);
  host.append(side);
  drawImportance(side);
  if (parallel) {
    parallel.neighbour = side;
    parallel.redraw();
  }
}

function drawParallel(host, able, shares) {
  const clear = el("button", { text: "clear selection", hidden: true, onclick: () => parallel.clear() });
  const node = card("Knobs and objective", false, clear);
  const place = el("div");
  node.append(place);
  host.append(node);
  const most = [...able].sort((a, b) => (shares.get(b) || 0) - (shares.get(a) || 0)).slice(0, MOST_AXES);
  const axis = (k) => ({ k, name: DATA.knobs[k].key, short: DATA.knobs[k].short });
  const axes = able.filter((k) => most.includes(k)).map(axis);
  parallel = new Parallel(place, [...axes, { k: -1, name: DATA.metric, short: DATA.metric }]);
  parallel.onbrush = () => {
    clear.hidden = !parallel.brushes.size;
    applyFilter();
  };
  const keys = [ramp(), bestKey(), el("span", { text: "drag along an axis to keep only those runs" })];
  if (able.length > most.length) keys.push(el("span", { text: `${most.length} of ${able.length} keys` }));
  node.append(el("div", { class: "under" }, ...keys));
}

function drawImportance(side) {
  const { shares, runs, label, note: why } = DATA.importance;
  if (why) {
    side.append(el("div", { class: "empty", text: `Knob importance: ${why}.` }));
    return;
  }
  side.querySelector(".controls").append(el("span", { class: "muted small", text: `share of variance, ${label}` }));
  const rows = shares.slice(0, 8).map(([k, share, clear]) => {
    const bar = el("span", { class: "fill" });
    bar.style.width = `${100 * share}%`;
    const row = el(
      "button",
      { class: clear ? "row" : "row chance", title: DATA.knobs[k].key + (clear ? "" : ": no more than chance") },
      el("span", { class: "name", text: DATA.knobs[k].key }),
      el("span", { class: "track" }, bar),
      el("span", { class: "share", text: `${Math.round(100 * share)} %` }),
    );
    row.addEventListener("click", () => choose(k, row));
    return row;
  });
  const place = el("div");
  const what = RUNS.some((_, i) => isRepeat(i)) ? "measured config" : "measured run";
  const shared = DATA.importance.shared ? " knobs changed together share the credit;" : "";
  const fine = `${count(runs, what)};${shared} grey: no more than chance`;
  const under = el("div", { class: "under" }, el("span", { text: fine }));
  side.append(el("div", { class: "shares" }, ...rows), under, place);
  const slice = new Slice(place, shares[0][0]);
  function choose(k, row) {
    for (const other of rows) other.setAttribute("aria-pressed", String(other === row));
    slice.choose(k);
  }
  choose(shares[0][0], rows[0]);
}
