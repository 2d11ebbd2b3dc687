// The page of one study: what stands where, and how the parts follow each other.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const focus = new Focus();
const page = document.getElementById("page");
const isBetter = (a, b) => (DATA.goal === "max" ? a > b : a < b);

// The rank of a run among the measured ones, 0 … 9: values would let one bad run take up the whole ramp.
const order = RUNS.map((_, i) => i).filter((i) => RUNS[i].obj !== null).sort((a, b) => (DATA.goal === "max" ? RUNS[a].obj - RUNS[b].obj : RUNS[b].obj - RUNS[a].obj));
const ranks = new Array(RUNS.length).fill(-1);
order.forEach((run, place) => (ranks[run] = order.length < 2 ? 9 : Math.round((9 * place) / (order.length - 1))));
const heights = new Array(RUNS.length).fill(-1);
order.forEach((run, place) => (heights[run] = place));
const lineStyle = (run) => (run === DATA.best ? "best" : ranks[run] < 0 ? "none" : `s${ranks[run]}`);
const drawOrder = (run) => (run === DATA.best ? 1e9 : heights[run]);

function describe(run, ...first) {
  const facts = RUNS[run];
  const head = el("div", {}, el("b", { text: facts.id }), document.createTextNode(` · ${facts.by} · `), el("span", { class: facts.status, text: facts.status }));
  const objective = DATA.metric ? el("div", { text: `${DATA.metric} ${show(facts.obj)}` }) : null;
  const why = facts.why ? el("div", { class: "why", text: facts.why.length > 160 ? facts.why.slice(0, 160) + "…" : facts.why }) : null;
  return [head, ...first, objective, why].filter(Boolean);
}
const card = (title, wide, ...controls) => el("section", { class: wide ? "card wide" : "card", "aria-label": title }, el("div", { class: "bar-top" }, el("h2", { text: title }), el("div", { class: "controls push" }, ...controls)));
const tick = (name, checked, change) => {
  const box = el("input", { type: "checkbox", checked, onchange: () => change(box.checked) });
  return el("label", {}, box, document.createTextNode(name));
};
const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
const ramp = () => order.length < 2 ? null : el("span", { class: "key" }, document.createTextNode("worse"), el("span", { class: "ramp" }, ...[...Array(10).keys()].map((i) => el("i", { class: `b${i}` }))), document.createTextNode("better, by rank"));

// -- head

function drawHead() {
  const goal = DATA.metric ? `${DATA.metric}, ${DATA.at} value, ${DATA.goal === "max" ? "larger" : "smaller"} is better` : "no objective is set";
  page.append(el("header", {}, el("h1", { text: DATA.study }), el("p", { text: goal }), el("p", { class: "small", text: `as of ${DATA.time}` })));
  const best = DATA.best === null ? null : RUNS[DATA.best];
  const bestTile = el("div", { class: "tile" }, el("div", { class: "label", text: "best" }));
  if (best) {
    const gain = best.db === null ? "" : `, ${signed(best.db)} against its base`;
    bestTile.append(el("div", { class: "value best", text: show(best.obj) }), el("div", { class: "note" }, el("a", { href: `#${best.id}`, text: best.id }), document.createTextNode(gain)), el("div", { class: "note", text: best.verdict ? `verdict: ${best.verdict}` : "one run is a hint, not a result" }));
  } else bestTile.append(el("div", { class: "value", text: "–" }), el("div", { class: "note", text: RUNS.length ? "no run has measured the objective" : "no runs yet" }));
  const runs = el("div", { class: "tile" }, el("div", { class: "label", text: "runs" }), el("div", { class: "value", text: String(RUNS.length) }));
  const counts = el("div", { class: "note" });
  DATA.counts.forEach(([status, count], i) => counts.append(document.createTextNode(i ? ", " : ""), el("span", { class: status, text: `${count} ${status}` })));
  if (DATA.waiting) counts.append(document.createTextNode(`${DATA.counts.length ? ", " : ""}${DATA.waiting} proposed`));
  runs.append(counts);
  const used = el("div", { class: "tile" }, el("div", { class: "label", text: "used" }), el("div", { class: "budget" }));
  for (const [name, text, part] of DATA.budget) {
    used.lastChild.append(el("span", { class: "muted", text: name }), el("span", { text }));
    if (part !== null) {
      const bar = el("div");
      bar.style.width = `${Math.min(100, 100 * part)}%`;
      used.lastChild.append(el("div", { class: "meter bar" }, bar));
    }
  }
  const tiles = [bestTile, runs];
  if (best && best.changes.length) {
    const list = best.changes.slice(0, 3).map(([key, what]) => el("div", { class: "note", text: `${key}: ${what}` }));
    if (best.changes.length > 3) list.push(el("div", { class: "note", text: `${best.changes.length - 3} more` }));
    tiles.push(el("div", { class: "tile" }, el("div", { class: "label", text: `what the best run changed${best.parent ? `, from ${best.parent}` : ""}` }), ...list, best.why ? el("div", { class: "note", text: `“${best.why.slice(0, 140)}${best.why.length > 140 ? "…" : ""}”` }) : null));
  }
  page.append(el("div", { class: "tiles" }, ...tiles, used));
  for (const note of DATA.notes) page.append(el("div", { class: "noteline", text: note }));
}

// -- curves

function drawCurves(host) {
  const names = Object.keys(DATA.curves);
  if (!names.length) {
    const node = card("Curves", true);
    node.append(el("div", { class: "empty", text: RUNS.length ? "no run has left a curve yet" : "no runs yet; `looplab run` starts the study" }));
    host.append(node);
    return;
  }
  const menu = el("select", { "aria-label": "metric" }, ...names.map((name) => el("option", { value: name, text: name })));
  let chart = null;
  const all = tick("all values", false, (on) => chart.set({ all: on }));
  const log = tick("log scale", false, (on) => update({ log: on }));
  const node = card("Curves", false, menu, log, all);
  const place = el("div");
  const under = el("div", { class: "under" });
  node.append(place, under);
  host.append(node);
  const tell = (found) => describe(found.run, el("div", { text: `step ${show(found.step, 8)}: ${show(found.value, 6)}` }));
  chart = new Curves(place, "curves of the runs", focus, { curves: DATA.curves[names[0]], style: lineStyle, tell, order: drawOrder });
  chart.tell = tell;
  function update(options) {
    const curves = DATA.curves[menu.value];
    const positive = curves.some((curve) => curve[2].some((value) => value !== null && value > 0));
    log.firstChild.disabled = !positive;
    chart.set({ curves, ...options, log: positive && log.firstChild.checked });
    all.hidden = !chart.cut && !chart.all;
    const drawn = new Set(curves.map((curve) => curve[0])).size;
    under.replaceChildren(el("span", { text: drawn < RUNS.length ? `${drawn} of ${RUNS.length} runs: the best, the latest, a spread` : count(drawn, "run") }), ...[ramp()].filter(Boolean), el("span", { class: "key best-key" }, el("span", { class: "best-mark" }), document.createTextNode("best run")));
    if (chart.cut) under.append(el("span", { text: "values far off are cut" }));
  }
  menu.addEventListener("change", () => update({}));
  update({});
}

// -- best so far

class BestSoFar extends Points {
  constructor(host) {
    super(host, "objective of each run, and the best so far", focus);
    [this.left, this.right, this.top, this.bottom] = [54, 14, 8, 52];
    this.log = false;
    this.tell = (found) => describe(found.run);
    this.redraw();
  }
  draw() {
    const tall = 300;
    this.size(tall);
    this.spots = [];
    const values = RUNS.map((run) => run.obj).filter((value) => value !== null && (!this.log || value > 0));
    const range = extent(this.log ? values.map(Math.log10) : values, 0.05, 1.2);
    const [bottom, top] = [tall - this.bottom, this.top];
    const last = RUNS.length ? RUNS[RUNS.length - 1].n : 1;
    const x = linear(1, Math.max(2, last), this.left + 6, this.width - this.right - 6);
    if (range) {
      const y = this.log ? logarithmic(10 ** range.low, 10 ** range.high, bottom - 8, top + 8) : linear(range.low, range.high, bottom - 8, top + 8);
      this.yAxis(y, 6);
      const size = RUNS.length > 400 ? 2.2 : RUNS.length > 120 ? 2.8 : 4;
      let path = "";
      DATA.path.forEach(([n, value], i) => {
        const height = Math.min(bottom, Math.max(top, y(value)));
        if (!Number.isNaN(height)) path += path ? `H${x(n).toFixed(1)}V${height.toFixed(1)}` : `M${x(n).toFixed(1)} ${height.toFixed(1)}`;
        if (i === DATA.path.length - 1 && path) path += `H${x(last).toFixed(1)}`;
      });
      RUNS.forEach((run, i) => {
        if (run.obj === null) return;
        const height = y(run.obj);
        if (Number.isNaN(height)) return;
        const kind = DATA.proposers.indexOf(run.by);
        this.place(i, x(run.n), Math.min(bottom - 2, Math.max(top + 2, height)), `f${kind % 8}`, kind, i === DATA.best ? size + 1.5 : size);
      });
      this.base.append(svg("path", { class: "bestline", d: path, "pointer-events": "none" }));
      this.cut = range.cut;
    }
    this.base.append(svg("line", { class: "axis-line", x1: this.left, x2: this.width - this.right, y1: bottom + 1, y2: bottom + 1 }));
    RUNS.forEach((run, i) => {
      if (run.obj !== null) return;
      const [px, py] = [x(run.n), bottom + 10];
      const ended = run.status !== "running" && run.status !== "planned";
      const shape = ended ? `M${px - 3} ${py - 3}l6 6m0 -6l-6 6` : `M${px - 3} ${py}a3 3 0 1 0 6 0a3 3 0 1 0 -6 0`;
      this.spots.push({ run: i, x: px, y: py });
      this.mark(i, svg("path", { class: `dot cross x-${run.status}`, d: shape, "data-x": px, "data-y": py }));
    });
    this.xAxis(x, bottom + 14, "run number", Math.max(2, Math.floor(this.width / 90)), true);
  }
}

function drawBest(host) {
  if (!order.length) return;
  let chart = null;
  const positive = RUNS.some((run) => run.obj !== null && run.obj > 0);
  const node = card("Best so far", false, positive ? tick("log scale", false, (on) => { chart.log = on; chart.redraw(); }) : null);
  node.querySelector("h2").after(el("span", { class: "muted small", text: DATA.metric }));
  const place = el("div");
  node.append(place);
  host.append(node);
  chart = new BestSoFar(place);
  const keys = DATA.proposers.map((name, i) => el("span", { class: "key" }, svgKey(i), document.createTextNode(name)));
  const others = [...new Set(RUNS.filter((run) => run.obj === null).map((run) => run.status))];
  for (const status of others) {
    const ended = status !== "running" && status !== "planned";
    const icon = svg("svg", { viewBox: "0 0 12 12", width: 12, height: 12 }, svg("path", { class: `cross x-${status}`, d: ended ? "M3 3l6 6m0 -6l-6 6" : "M3 6a3 3 0 1 0 6 0a3 3 0 1 0 -6 0" }));
    icon.style.width = "12px";
    keys.push(el("span", { class: "key" }, icon, document.createTextNode(status === "ok" ? "ok, but not measured" : status)));
  }
  node.append(el("div", { class: "under" }, ...keys, chart.cut ? el("span", { text: "values far off stand at the edge" }) : null));
}
function svgKey(kind) {
  const icon = svg("svg", { viewBox: "0 0 12 12", width: 12, height: 12 }, svg("path", { class: `f${kind % 8}`, d: SHAPES[kind % SHAPES.length](6, 6, 4) }));
  icon.style.width = "12px";
  return icon;
}

// -- knobs

const knobScale = (knob, from, to) => {
  if (knob.kind === "category") return categories(knob.names, from, to);
  const scale = knob.log ? logarithmic(knob.low, knob.high, from, to) : linear(knob.low, knob.high, from, to);
  if (knob.few) scale.ticks = () => apart(knob.few, scale, 13);
  return scale;
};
// Of some values those whose places leave room for a label, both ends among them.
function apart(values, scale, room) {
  const kept = [];
  const end = scale(values[values.length - 1]);
  values.forEach((value, i) => {
    const place = scale(value);
    const free = (other) => Math.abs(place - other) >= room;
    if (i === values.length - 1 || (kept.every((one) => free(scale(one))) && free(end))) kept.push(value);
  });
  return kept;
}
const knobValue = (run, k) => {
  const value = RUNS[run].knobs[k];
  return DATA.knobs[k].kind === "category" ? (value === null ? "not set" : show(value)) : value;
};

class Parallel extends Chart {
  constructor(host, axes) {
    super(host, "parallel coordinates: the knobs and the objective of each measured run", focus);
    this.axes = axes;
    this.brushes = new Map();
    this.tell = (found) => describe(found.run, ...this.axes.filter((axis) => axis.k >= 0).map((axis) => el("div", { class: "why", text: `${axis.name}: ${show(knobValue(found.run, axis.k))}` })));
    this.redraw();
  }
  draw() {
    const tall = this.tall();
    this.size(tall);
    const [top, bottom] = [40, tall - 22];
    const space = this.width < 700 ? 40 : 60;
    const objective = extent(order.map((run) => RUNS[run].obj), 0.05, 1.2);
    this.places = this.axes.map((axis, i) => {
      const x = this.axes.length < 2 ? this.width / 2 : space + (i / (this.axes.length - 1)) * (this.width - 2 * space - 10);
      if (axis.k >= 0) return { ...axis, x, scale: knobScale(DATA.knobs[axis.k], bottom, top), value: (run) => knobValue(run, axis.k) };
      const flip = DATA.goal === "min";
      const scale = linear(objective.low, objective.high, flip ? top : bottom, flip ? bottom : top);
      return { ...axis, x, scale, value: (run) => Math.min(objective.high, Math.max(objective.low, RUNS[run].obj)) };
    });
    this.lines = [];
    for (const run of [...order].sort((a, b) => drawOrder(a) - drawOrder(b))) {
      const points = this.places.map((axis) => {
        const y = axis.scale(axis.value(run));
        return [axis.x, axis.value(run) === null || Number.isNaN(y) ? bottom + 12 : y];
      });
      const path = "M" + points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
      this.mark(run, svg("path", { class: `line ${lineStyle(run)}`, d: path }));
      this.lines.push([run, points]);
    }
    this.places.forEach((axis, i) => this.drawAxis(axis, i, top, bottom));
  }
  // As tall as the card beside it, so that the row ends in one line.
  tall() {
    const beside = this.beside && innerWidth > 980 ? this.beside.lastElementChild.getBoundingClientRect().bottom - this.host.getBoundingClientRect().top : 0;
    return Math.max(330, Math.min(560, beside - 24));
  }
  drawAxis(axis, i, top, bottom) {
    const group = svg("g");
    group.append(svg("line", { class: "axis-line", x1: axis.x, x2: axis.x, y1: top, y2: bottom }));
    const ticks = axis.scale.ticks(5);
    const every = Math.ceil(ticks.length / 12);
    ticks.forEach((value, place) => {
      if (place % every) return;
      const text = String(show(value, 4));
      const label = svg("text", { x: axis.x + 5, y: axis.scale(value) + 4, text: text.length > 14 ? text.slice(0, 13) + "…" : text });
      const wide = Math.min(text.length, 14) * 6.1 + 4;
      group.append(svg("rect", { class: "label-back", x: axis.x + 0.5, y: axis.scale(value) - 7, width: wide + 2, height: 14 }), label);
    });
    const room = Math.max(8, Math.floor(((this.crowded() ? 1.7 : 1) * this.width) / this.axes.length / 6.6));
    const short = axis.short.length > room ? "…" + axis.short.slice(-(room - 1)) : axis.short;
    const title = svg("text", { class: axis.k < 0 ? "title-text strong" : "title-text", x: axis.x, y: i % 2 && this.crowded() ? 30 : 14, "text-anchor": i === 0 ? "start" : i === this.axes.length - 1 ? "end" : "middle" }, svg("title", { text: axis.name }), document.createTextNode(short));
    if (i === 0) title.setAttribute("x", Math.max(0, axis.x - 40));
    if (i === this.axes.length - 1) title.setAttribute("x", this.width);
    group.append(title);
    const range = this.brushes.get(i);
    if (range) group.append(svg("rect", { class: "brush", x: axis.x - 6, width: 12, y: range[0], height: range[1] - range[0] }));
    const area = svg("rect", { class: "brush-area", x: axis.x - 9, width: 18, y: top - 6, height: bottom - top + 12 });
    area.addEventListener("pointerdown", (event) => this.drag(event, i, area));
    area.addEventListener("click", (event) => event.stopPropagation());
    group.append(area);
    this.base.append(group);
  }
  crowded() {
    return this.axes.some((axis) => axis.short.length * 6.6 > this.width / this.axes.length);
  }
  drag(event, i, area) {
    event.preventDefault();
    const start = this.at(event)[1];
    area.setPointerCapture(event.pointerId);
    const shade = svg("rect", { class: "brush", x: this.places[i].x - 6, width: 12, y: start, height: 0 });
    this.base.append(shade);
    const move = (next) => {
      const y = this.at(next)[1];
      shade.setAttribute("y", Math.min(start, y));
      shade.setAttribute("height", Math.abs(y - start));
    };
    area.addEventListener("pointermove", move);
    area.addEventListener("pointerup", (next) => {
      const y = this.at(next)[1];
      if (Math.abs(y - start) < 4) this.brushes.delete(i);
      else this.brushes.set(i, [Math.min(start, y), Math.max(start, y)]);
      this.redraw();
      this.onbrush();
    }, { once: true });
  }
  clear() {
    this.brushes.clear();
    this.redraw();
    this.onbrush();
  }
  // The runs inside all brushes; null where there is no brush.
  kept() {
    if (!this.brushes.size) return null;
    const inside = this.lines.filter(([, points]) => [...this.brushes].every(([i, [low, high]]) => points[i][1] >= low - 1 && points[i][1] <= high + 1));
    return new Set(inside.map(([run]) => run));
  }
  nearest(px, py) {
    let best = null;
    let least = 14;
    for (const [run, points] of this.lines || []) {
      if (this.focus.shown && !this.focus.shown.has(run)) continue;
      for (let i = 1; i < points.length; i++) {
        const [a, b] = [points[i - 1], points[i]];
        if (px < a[0] || px > b[0]) continue;
        const distance = Math.abs(a[1] + ((px - a[0]) / (b[0] - a[0])) * (b[1] - a[1]) - py);
        if (distance < least) [least, best] = [distance, { run }];
      }
    }
    return best;
  }
}

class Slice extends Points {
  constructor(host) {
    super(host, "objective by one knob", focus);
    [this.left, this.right, this.top, this.bottom] = [54, 14, 8, 34];
    this.tell = (found) => describe(found.run, el("div", { text: `${DATA.knobs[this.k].key} ${show(knobValue(found.run, this.k))}` }));
  }
  draw() {
    const tall = 190;
    this.size(tall);
    this.spots = [];
    const range = extent(order.map((run) => RUNS[run].obj), 0.05, 1.2);
    const [bottom, top] = [tall - this.bottom, this.top];
    const knob = DATA.knobs[this.k];
    const edge = knob.kind === "category" ? 50 : 12;
    const x = knobScale(knob, this.left + edge, this.width - this.right - edge);
    if (knob.few) x.ticks = () => apart(knob.few, x, 46);
    const y = linear(range.low, range.high, bottom - 6, top + 6);
    this.yAxis(y, 4);
    this.xAxis(x, bottom, knob.key + (knob.log ? ", log scale" : ""), knob.kind === "category" ? 99 : Math.max(2, Math.floor(this.width / 90)));
    const size = order.length > 300 ? 2.4 : 3.4;
    for (const run of order) {
      let px = x(knobValue(run, this.k));
      if (Number.isNaN(px)) continue;
      // Categories are spread a little, always in the same way, so that points do not hide each other.
      if (knob.kind === "category") px += ((RUNS[run].n * 0.618034) % 1) * 36 - 18;
      const style = run === DATA.best ? "d-best" : `d${ranks[run]}`;
      this.place(run, px, Math.min(bottom, Math.max(top, y(RUNS[run].obj))), style, 0, run === DATA.best ? size + 1.5 : size);
    }
  }
}

let parallel = null;
function drawKnobs(host) {
  if (!order.length) return;
  const shares = new Map(DATA.importance.shares.map(([k, share]) => [k, share]));
  const varying = DATA.knobs.map((_, k) => k).filter((k) => DATA.knobs[k].kind !== "category" || DATA.knobs[k].names.length <= 30);
  if (varying.length) {
    const clear = el("button", { text: "clear selection", hidden: true, onclick: () => parallel.clear() });
    const node = card("Knobs and objective", false, clear);
    const place = el("div");
    node.append(place);
    host.append(node);
    const most = [...varying].sort((a, b) => (shares.get(b) || 0) - (shares.get(a) || 0)).slice(0, 9);
    const axes = varying.filter((k) => most.includes(k)).map((k) => ({ k, name: DATA.knobs[k].key, short: DATA.knobs[k].short }));
    parallel = new Parallel(place, [...axes, { k: -1, name: DATA.metric, short: DATA.metric }]);
    parallel.onbrush = () => {
      clear.hidden = !parallel.brushes.size;
      applyFilter();
    };
    node.append(el("div", { class: "under" }, ramp(), el("span", { text: "drag along an axis to keep only those runs" }), varying.length > most.length ? el("span", { text: `${most.length} of ${varying.length} keys` }) : null));
  }
  const side = card("Knob importance", !varying.length);
  host.append(side);
  side.querySelector(".controls").append(el("span", { class: "muted small", text: DATA.importance.note ? "" : `share of variance, ${DATA.importance.label}` }));
  if (DATA.importance.note) {
    side.append(el("div", { class: "empty", text: `Knob importance ${DATA.importance.note}.` }));
  } else {
    const list = el("div", { class: "shares" });
    const slice = el("div");
    const chart = new Slice(slice);
    const rows = DATA.importance.shares.slice(0, 8).map(([k, share, clear]) => {
      const bar = el("div", { class: "fill" });
      bar.style.width = `${100 * share}%`;
      const row = el("button", { class: clear ? "row" : "row chance", "aria-pressed": "false", title: DATA.knobs[k].key + (clear ? "" : ": no more than chance") }, el("span", { class: "name", text: DATA.knobs[k].key }), el("span", { class: "track" }, bar), el("span", { class: "share", text: `${Math.round(100 * share)} %` }));
      bar.style.display = "block";
      row.querySelector(".track").style.display = "block";
      row.addEventListener("click", () => choose(k, row));
      return row;
    });
    const choose = (k, row) => {
      for (const other of rows) other.setAttribute("aria-pressed", String(other === row));
      chart.k = k;
      chart.redraw();
    };
    list.append(...rows);
    side.append(list, el("div", { class: "under" }, el("span", { text: `${count(DATA.importance.runs, "measured run")}; knobs changed together share the credit; grey: no more than chance` })), slice);
    choose(DATA.importance.shares[0][0], rows[0]);
  }
  if (parallel) {
    parallel.beside = side;
    parallel.redraw();
  }
}

// -- table

const table = { rows: [], key: DATA.metric && order.length ? "obj" : "n", down: false, what: "changes", text: "", status: null };
table.down = table.key === "obj" && DATA.goal === "max";
function columns() {
  const value = (name, get, options) => ({ name, get, ...options });
  const list = [
    value("run", (run) => run.id, { key: "n", sort: (run) => run.n }),
    value("round", (run) => run.round, { key: "round", num: true }),
    value("by", (run) => run.by, { key: "by" }),
    value("status", (run) => run.status, { key: "status", style: (run) => run.status }),
  ];
  if (DATA.metric) {
    const tone = (delta) => (delta === null || delta === 0 ? "num" : isBetter(delta, 0) ? "num better" : "num worse");
    list.push(
      value(DATA.metric, (run) => show(run.obj), { key: "obj", num: true, sort: (run) => run.obj, down: DATA.goal === "max" }),
      value("Δ parent", (run) => signed(run.dp), { key: "dp", num: true, sort: (run) => run.dp, style: (run) => tone(run.dp), down: DATA.goal === "max" }),
      value("Δ base", (run) => signed(run.db), { key: "db", num: true, sort: (run) => run.db, style: (run) => tone(run.db), down: DATA.goal === "max" }),
    );
  }
  if (table.what === "changes") {
    list.push(value("change", (run) => run.changes.map(([key, what]) => `${key}: ${what}`).join("; "), { key: "change", style: () => "change", cell: changeCell }));
  } else if (table.what === "knobs") {
    DATA.knobs.forEach((knob, k) => list.push(value(knob.short, (run) => show(run.knobs[k]), { key: `k${k}`, title: knob.key, num: knob.kind === "number", sort: (run) => run.knobs[k], style: (run) => `value${knob.kind === "number" ? " num" : ""}${run.changed.includes(k) ? " changed" : ""}` })));
  } else {
    DATA.metrics.forEach((metric, m) => list.push(value(metric, (run) => show(run.last[m]), { key: `m${m}`, num: true, sort: (run) => run.last[m] })));
  }
  list.push(value("why", (run) => run.why, { key: "why", why: true }), value("time", (run) => duration(run.sec), { key: "sec", num: true, sort: (run) => run.sec }));
  return list;
}
function changeCell(run) {
  const names = new Map(DATA.knobs.map((knob) => [knob.key, knob.short]));
  const parts = run.changes.flatMap(([key, what], i) => [i ? document.createTextNode("; ") : null, el("span", { title: key, text: `${names.get(key) || key} ` }), document.createTextNode(what)]);
  return el("div", {}, ...parts);
}

function applyFilter() {
  const words = table.text.toLowerCase().split(/\s+/).filter(Boolean);
  const brushed = parallel ? parallel.kept() : null;
  if (!words.length && !table.status && !brushed) focus.change({ shown: null });
  else {
    const shown = new Set();
    RUNS.forEach((run, i) => {
      if (brushed && !brushed.has(i)) return;
      if (table.status && run.status !== table.status) return;
      run.hay ??= [run.id, run.by, run.status, run.why, run.hyp, `round ${run.round}`, ...run.changes.map(([key, what]) => `${key}: ${what}`), ...run.notes].join("\n").toLowerCase();
      if (words.every((word) => run.hay.includes(word))) shown.add(i);
    });
    focus.change({ shown });
  }
  fillTable();
}

function fillTable() {
  const list = columns();
  const sorted = list.find((column) => column.key === table.key) || list[0];
  const by = sorted.sort || sorted.get;
  const indices = RUNS.map((_, i) => i).filter((i) => !focus.shown || focus.shown.has(i));
  const sign = table.down ? -1 : 1;
  indices.sort((a, b) => {
    const [x, y] = [by(RUNS[a]), by(RUNS[b])];
    if (x === null || x === undefined || y === null || y === undefined) return (x === null || x === undefined) - (y === null || y === undefined) || a - b;
    if (typeof x === "number" && typeof y === "number") return sign * (x - y) || a - b;
    return sign * String(x).localeCompare(String(y), undefined, { numeric: true }) || a - b;
  });
  const head = el("tr", {}, ...list.map((column) => {
    const mine = column.key === sorted.key;
    const arrow = mine ? (table.down ? " ↓" : " ↑") : "";
    const button = el("button", { text: column.name + arrow, title: column.title || column.name, onclick: () => { table.down = mine ? !table.down : Boolean(column.down); table.key = column.key; fillTable(); table.host.querySelector("th[aria-sort] button").focus(); } });
    return el("th", { class: column.num ? "num" : null, scope: "col", "aria-sort": mine ? (table.down ? "descending" : "ascending") : null }, button);
  }));
  table.rows = new Map();
  const body = el("tbody");
  indices.forEach((i, place) => {
    const run = RUNS[i];
    const row = el("tr", { tabindex: place ? -1 : 0, class: i === DATA.best ? "best" : null });
    for (const column of list) {
      const cell = column.cell ? el("td", { class: "change" }, column.cell(run)) : column.why ? el("td", { class: "why", title: column.get(run) }, el("div", { text: column.get(run) })) : el("td", { class: column.style ? column.style(run) : column.num ? "num" : null, text: column.get(run) });
      row.append(cell);
    }
    row.dataset.run = i;
    table.rows.set(i, row);
    body.append(row);
  });
  table.host.replaceChildren(el("table", {}, el("thead", {}, head), body));
  table.count.textContent = indices.length === RUNS.length ? count(RUNS.length, "run") : `${indices.length} of ${count(RUNS.length, "run")}`;
  markRows();
}
function markRows() {
  for (const [i, row] of table.rows) {
    row.classList.toggle("hot", i === focus.hover);
    row.classList.toggle("picked", i === focus.picked);
  }
}

function drawTable(host) {
  if (!RUNS.length) return;
  const search = el("input", { type: "search", placeholder: "filter by any words", "aria-label": "filter runs", oninput: () => { table.text = search.value; applyFilter(); } });
  const chips = DATA.counts.length < 2 ? [] : DATA.counts.map(([status, count]) => el("button", { text: `${status} ${count}`, "aria-pressed": "false", onclick: (event) => {
    table.status = table.status === status ? null : status;
    for (const chip of chips) chip.setAttribute("aria-pressed", String(chip === event.currentTarget && table.status !== null));
    applyFilter();
  } }));
  const what = el("select", { "aria-label": "columns", onchange: () => { table.what = what.value; fillTable(); } }, el("option", { value: "changes", text: "changes" }), el("option", { value: "knobs", text: "knobs" }), el("option", { value: "metrics", text: "metrics, last values" }));
  const node = card("Runs", true, ...chips, what, search);
  table.count = el("span", { class: "muted small" });
  node.querySelector("h2").after(table.count);
  table.host = el("div", { class: "scroll" });
  node.append(table.host);
  host.append(node);
  const runOf = (event) => {
    const row = event.target.closest("tr[data-run]");
    return row ? Number(row.dataset.run) : null;
  };
  table.host.addEventListener("click", (event) => runOf(event) !== null && !event.target.closest("a") && focus.pick(runOf(event)));
  table.host.addEventListener("pointerover", (event) => focus.look(runOf(event)));
  table.host.addEventListener("pointerleave", () => focus.look(null));
  table.host.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr[data-run]");
    if (!row) return;
    if (event.key === "Enter" || event.key === " ") focus.pick(Number(row.dataset.run));
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const next = event.key === "ArrowDown" ? row.nextElementSibling : row.previousElementSibling;
      if (!next) return;
      row.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    } else return;
    event.preventDefault();
  });
  table.host.addEventListener("focusin", (event) => {
    const row = event.target.closest("tr[data-run]");
    if (row) focus.look(Number(row.dataset.run));
  });
  focus.listen((what) => ("hover" in what || "picked" in what) && markRows());
  fillTable();
}

// -- the run that was picked

const panel = el("aside", { class: "panel", hidden: true, "aria-live": "polite", "aria-label": "the picked run" });
function showPanel() {
  const i = focus.picked;
  panel.hidden = i === null;
  document.body.classList.toggle("has-panel", i !== null);
  if (i === null) return;
  const run = RUNS[i];
  const head = el("div", { class: "head" }, el("b", { text: run.id }), el("span", { class: run.status, text: run.how }), el("span", { text: `round ${run.round}, by ${run.by}, ${run.parent ? `from ${run.parent}` : `from ${run.base || "the base"}`}` }));
  if (DATA.metric) head.append(el("span", { text: `${DATA.metric} ${show(run.obj)}` + (run.dp === null ? "" : `, ${signed(run.dp)} against its parent`) + (run.db === null ? "" : `, ${signed(run.db)} against the base`) }));
  if (run.status !== "planned") head.append(el("a", { href: `${encodeURIComponent(run.id)}/`, text: "folder" }));
  if (/^https:\/\//.test(run.wandb || "")) head.append(el("a", { href: run.wandb, target: "_blank", rel: "noopener noreferrer", text: "W&B" }));
  head.append(el("button", { text: "close", onclick: () => focus.pick(i) }));
  const left = el("div", {}, run.why ? el("p", { text: run.why }) : null, run.hyp ? el("p", { class: "muted", text: `hypothesis: ${run.hyp}` }) : null, ...run.notes.map((note) => el("p", { class: "muted", text: `note: ${note}` })), run.said ? el("p", { text: run.said }) : null);
  const right = el("ul", {}, ...run.changes.map(([key, what]) => el("li", {}, el("code", { text: key }), document.createTextNode(` ${what}`))));
  if (!run.changes.length) right.append(el("li", { class: "muted", text: "no change against its parent" }));
  panel.replaceChildren(el("div", { class: "inner" }, head, left, right));
  const row = table.rows.get(i);
  if (row && document.activeElement !== row) {
    const box = table.host.getBoundingClientRect();
    const place = row.getBoundingClientRect();
    if (place.top < box.top + 30 || place.bottom > box.bottom) table.host.scrollTop += place.top - box.top - 60;
  }
}

// -- the rest

function drawFailures(host) {
  if (DATA.failures.length) {
    const node = card("Failures", true);
    for (const failure of DATA.failures) {
      const named = failure.runs.slice(-6).join(", ") + (failure.runs.length > 6 ? ` and ${failure.runs.length - 6} before` : "");
      node.append(el("details", { open: DATA.failures.length === 1 }, el("summary", {}, el("span", { class: "failed", text: `${count(failure.runs.length, "run")}: ${failure.how}` }), document.createTextNode(` — ${named}`)), failure.tail ? el("pre", { text: failure.tail }) : el("p", { class: "muted", text: "printed nothing" })));
    }
    host.append(node);
  }
}
function drawRejected(host) {
  if (DATA.rejected.length) {
    const node = card("Rejected proposals", true);
    const rows = DATA.rejected.map(([id, by, edits, why, reason]) => el("tr", {}, el("td", { text: id }), el("td", { text: by }), el("td", {}, el("code", { text: edits })), el("td", { text: why }), el("td", { class: "muted", text: reason })));
    node.append(el("div", { class: "scroll" }, el("table", { class: "plain" }, el("thead", {}, el("tr", {}, ...["proposal", "by", "edits", "why not", "its reason"].map((name) => el("th", { scope: "col" }, el("button", { text: name, disabled: true }))))), el("tbody", {}, ...rows))));
    host.append(node);
  }
}

drawHead();
const grid = el("div", { class: "grid" });
page.append(grid);
drawCurves(grid);
drawBest(grid);
drawKnobs(grid);
if (!order.length) drawFailures(grid); // then they are what matters most
drawTable(grid);
if (order.length) drawFailures(grid);
drawRejected(grid);
page.append(el("footer", { text: `Written by looplab from the ledger and the run folders, which are the record; this page is a view of them.` }));
document.body.append(panel);
focus.listen((what) => {
  if (!("picked" in what)) return;
  showPanel();
  history.replaceState(null, "", focus.picked === null ? " " : `#${RUNS[focus.picked].id}`);
});
addEventListener("keydown", (event) => event.key === "Escape" && focus.picked !== null && focus.pick(focus.picked));
const fromAddress = () => {
  const run = RUNS.findIndex((one) => one.id === decodeURIComponent(location.hash.slice(1)));
  if (run >= 0 && run !== focus.picked) focus.pick(run);
};
addEventListener("hashchange", fromAddress);
fromAddress();
