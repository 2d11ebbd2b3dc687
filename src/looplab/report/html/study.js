// The page of one study: header, curves and best so far; page.js assembles it with knobs.js and table.js.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const focus = new Focus();
const page = document.getElementById("page");
const isBetter = (a, b) => (DATA.goal === "max" ? a > b : a < b);
const isOpen = (status) => status === "running" || status === "planned";

// A run that repeats another is part of its mean, not a challenger.
const isRepeat = (run) => RUNS[run].into !== null;
const bestWord = DATA.judge ? "champion" : "best run";
const objective = (run) =>
  run.sd === null ? show(run.obj) : `${show(run.obj, 4)} ± ${show(run.sd, 2)} (n ${run.runs})`;
// The measured runs, worst first. Colours are by rank, since by value one bad run would use up the whole ramp.
const order = RUNS.map((_, i) => i).filter((i) => RUNS[i].obj !== null && !isRepeat(i));
order.sort((a, b) => (DATA.goal === "max" ? RUNS[a].obj - RUNS[b].obj : RUNS[b].obj - RUNS[a].obj));
const heights = new Map(order.map((run, place) => [run, place]));
const rank = (run) => (order.length < 2 ? 9 : Math.round((9 * heights.get(run)) / (order.length - 1)));
const lineStyle = (run) => (run === DATA.best ? "best" : heights.has(run) ? `ranked s${rank(run)}` : "ranked none");
const drawOrder = (run) => (run === DATA.best ? 1e9 : heights.get(run) ?? -1);

// The tooltip of a run; `lines` follow its name.
function describe(run, ...lines) {
  const facts = RUNS[run];
  const head = el("div", {}, el("b", { text: facts.id }), ` · ${facts.by} · `);
  head.append(el("span", { class: facts.status, text: facts.status }));
  const rows = [head, ...lines];
  if (DATA.metric) rows.push(el("div", { text: `${DATA.metric} ${objective(facts)}` }));
  if (isRepeat(run)) rows.push(el("div", { text: `${facts.role} of ${RUNS[facts.into].id}` }));
  if (facts.verdict) rows.push(el("div", {}, el("span", { class: `v-${facts.verdict}`, text: facts.verdict })));
  if (facts.why) rows.push(el("div", { class: "why", text: cut(facts.why, 160) }));
  return rows;
}

function tick(name, change) {
  const box = el("input", { type: "checkbox", onchange: () => change(box.checked) });
  return el("label", {}, box, name);
}

function ramp() {
  if (order.length < 2) return null;
  const blocks = [...Array(10).keys()].map((i) => el("i", { class: `b${i}` }));
  return el("span", { class: "key" }, "worse", el("span", { class: "ramp" }, ...blocks), "better, by rank");
}

function bestKey() {
  return DATA.best === null ? null : el("span", { class: "key" }, el("span", { class: "best-mark" }), bestWord);
}

// -- header

function drawHead() {
  const way = DATA.goal === "max" ? "larger" : "smaller";
  const goal = DATA.metric ? `${DATA.metric}, ${DATA.at} value, ${way} is better` : "no objective is set";
  const time = el("p", { class: "small", text: `as of ${DATA.time}` });
  page.append(el("header", {}, el("h1", { text: DATA.study }), el("p", { text: goal }), time));
  page.append(el("div", { class: "tiles" }, bestTile(), runsTile(), changeTile(), usedTile()));
  for (const alarm of DATA.alarms) {
    page.append(el("div", { class: "alarm", role: "alert" }, el("b", { text: "Alarm" }), ` ${alarm}`));
  }
  for (const note of DATA.notes) page.append(el("div", { class: "noteline", text: note }));
}

const tile = (label, ...rest) => el("div", { class: "tile" }, el("div", { class: "label", text: label }), ...rest);
const note = (...children) => el("div", { class: "note" }, ...children);

function bestTile() {
  if (DATA.judge) return championTile();
  if (DATA.best === null) {
    const why = RUNS.length ? "no run has measured the objective" : "no runs yet";
    return tile("best", el("div", { class: "value", text: "–" }), note(why));
  }
  const best = RUNS[DATA.best];
  const gain = best.db === null ? "" : `, ${signed(best.db)} against its base`;
  return tile(
    "best",
    el("div", { class: "value best", text: show(best.obj) }),
    note(el("a", { href: `#${best.id}`, text: best.id }), gain),
    note("one run is a hint, not a result"),
  );
}

function championTile() {
  const { headline, standing } = DATA.judge;
  if (DATA.best === null) return tile("champion", el("div", { class: "value", text: "–" }), note(headline));
  const best = RUNS[DATA.best];
  const spread = best.sd === null ? null : el("span", { class: "spread", text: ` ± ${show(best.sd, 2)}` });
  return tile(
    "champion",
    el("div", { class: "value best" }, show(best.obj), spread),
    note(el("a", { href: `#${best.id}`, text: best.id }), `, mean of ${count(best.runs, "run")}`),
    note(standing),
  );
}

function runsTile() {
  const counts = DATA.counts.map(([status, number]) => [status, `${number} ${status}`]);
  if (DATA.waiting) counts.push(["planned", `${DATA.waiting} proposed`]);
  const parts = counts.flatMap(([status, text], i) => [i ? ", " : null, el("span", { class: status, text })]);
  return tile("runs", el("div", { class: "value", text: String(RUNS.length) }), note(...parts));
}

function changeTile() {
  const best = DATA.best === null ? null : RUNS[DATA.best];
  if (!best || !best.changes.length) return null;
  const lines = best.changes.slice(0, 3).map(([key, what]) => note(`${key}: ${what}`));
  if (best.changes.length > 3) lines.push(note(`${best.changes.length - 3} more`));
  if (best.why) lines.push(note(`“${cut(best.why, 140)}”`));
  return tile(`what the ${bestWord} changed${best.parent ? `, from ${best.parent}` : ""}`, ...lines);
}

function usedTile() {
  const list = el("div", { class: "budget" });
  for (const [name, text, part] of DATA.budget) {
    list.append(el("span", { class: "muted", text: name }), el("span", { text }));
    if (part === null) continue;
    const bar = el("div");
    bar.style.width = `${Math.min(100, 100 * part)}%`;
    list.append(el("div", { class: "meter bar" }, bar));
  }
  return tile("used", list);
}

// -- curves

function drawCurves(host) {
  const drawn = new Map(DATA.curves);
  if (!drawn.size) {
    const node = card("Curves", true);
    const why = RUNS.length ? "no run has left a curve yet" : "no runs yet; “looplab run” starts the study";
    node.append(el("div", { class: "empty", text: why }));
    host.append(node);
    return;
  }
  const menu = el("select", { "aria-label": "metric", onchange: () => update() });
  menu.append(...[...drawn.keys()].map((name) => el("option", { value: name, text: name })));
  const log = tick("log scale", () => update());
  const all = tick("all values", () => update());
  const node = card("Curves", !order.length, menu, log, all);
  const place = el("div");
  const under = el("div", { class: "under" });
  node.append(place, under);
  host.append(node);
  const point = (found) => `step ${show(found.step, 8)}: ${show(found.value, 6)}`;
  const tell = (found) => describe(found.run, el("div", { text: point(found) }));
  const options = { curves: drawn.get(menu.value), style: lineStyle, order: drawOrder, tell };
  const chart = new Curves(place, "curves of the runs", focus, options);

  function update() {
    const curves = drawn.get(menu.value);
    const positive = curves.some((curve) => curve[2].some((value) => value > 0));
    log.firstChild.disabled = !positive;
    chart.set({ curves, log: positive && log.firstChild.checked, all: all.firstChild.checked });
    all.hidden = !chart.cut && !chart.all;
    const tried = RUNS.filter((_, i) => !isRepeat(i)).length;
    const what = tried < RUNS.length ? "config" : "run";
    let which = count(curves.length, what);
    if (curves.length < tried) which = `${curves.length} of ${count(tried, what)}: the best, the latest, a spread`;
    if (tried < RUNS.length) which += ", first runs only";
    const keys = [el("span", { text: which }), ramp(), bestKey()];
    if (chart.cut) keys.push(el("span", { text: "outliers are clipped" }));
    under.replaceChildren(...keys.filter(Boolean));
  }
  update();
}

// -- best so far

class BestSoFar extends Points {
  log = false;

  constructor(host) {
    super(host, "objective of each run, and the best so far", focus);
    [this.left, this.right, this.top, this.bottom] = [54, 14, 8, 52];
    this.tell = (found) => describe(found.run);
    this.redraw();
  }
  draw() {
    const tall = 300;
    this.size(tall);
    const [bottom, top] = [tall - this.bottom, this.top];
    const last = RUNS[RUNS.length - 1].n;
    const x = linear(1, Math.max(2, last), this.left + 6, this.width - this.right - 6);
    this.drawMeasured(x, bottom, top);
    this.base.append(
      svg("line", { class: "axis-line", x1: this.left, x2: this.width - this.right, y1: bottom + 1, y2: bottom + 1 }),
    );
    RUNS.forEach((run, i) => {
      if (run.obj !== null) return;
      const shape = isOpen(run.status) ? SHAPES[0] : CROSS;
      this.place(i, x(run.n), bottom + 10, `cross x-${run.status}`, (px, py) => shape(px, py, 3));
    });
    this.xAxis(x, bottom + 14, "run number", true);
  }
  drawMeasured(x, bottom, top) {
    const values = RUNS.map((run) => run.obj).filter((value) => value !== null && (!this.log || value > 0));
    const range = extent(this.log ? values.map(Math.log10) : values, 0.05, 1.2);
    this.cut = range.cut;
    const y = this.log
      ? logarithmic(10 ** range.low, 10 ** range.high, bottom - 8, top + 8)
      : linear(range.low, range.high, bottom - 8, top + 8);
    this.yAxis(y, 6);
    const inside = (place) => Math.min(bottom - 2, Math.max(top + 2, place));
    const size = RUNS.length > 400 ? 2.2 : RUNS.length > 120 ? 2.8 : 4;
    RUNS.forEach((run, i) => {
      if (run.obj === null || !isRepeat(i) || Number.isNaN(y(run.obj))) return;
      this.place(i, x(run.n), inside(y(run.obj)), "repeat", (px, py) => SHAPES[0](px, py, 1.8));
    });
    RUNS.forEach((run, i) => {
      if (run.obj === null || isRepeat(i) || Number.isNaN(y(run.obj))) return;
      const kind = DATA.proposers.indexOf(run.by);
      const big = i === DATA.best ? size + 1.5 : size;
      const shape = (px, py) => SHAPES[kind % SHAPES.length](px, py, big);
      this.place(i, x(run.n), inside(y(run.obj)), `f${kind % 8}`, shape);
    });
    let path = "";
    for (const [n, value] of DATA.path) {
      if (Number.isNaN(y(value))) continue;
      const [px, py] = [x(n).toFixed(1), inside(y(value)).toFixed(1)];
      path += path ? `H${px}V${py}` : `M${px} ${py}`;
    }
    const end = x(RUNS[RUNS.length - 1].n);
    if (path) path += `H${end.toFixed(1)}`;
    this.base.append(svg("path", { class: "bestline", d: path, "pointer-events": "none" }));
  }
}

function icon(style, path) {
  return svg("svg", { class: "icon", viewBox: "0 0 12 12" }, svg("path", { class: style, d: path }));
}

function drawBest(host) {
  if (!order.length) return;
  const log = tick("log scale", (on) => {
    chart.log = on;
    chart.redraw();
  });
  const node = card(DATA.judge ? "Champion so far" : "Best so far", !DATA.curves.length, RUNS.some((run) => run.obj > 0) ? log : null);
  node.querySelector("h2").after(el("span", { class: "muted small", text: DATA.metric + (DATA.judge ? ", means" : "") }));
  const place = el("div");
  node.append(place);
  host.append(node);
  const chart = new BestSoFar(place);
  const own = new Set(order.map((run) => RUNS[run].by));
  const keys = DATA.proposers.flatMap((name, kind) => {
    const shape = SHAPES[kind % SHAPES.length](6, 6, 4);
    return own.has(name) ? [el("span", { class: "key" }, icon(`f${kind % 8}`, shape), name)] : [];
  });
  if (RUNS.some((run, i) => isRepeat(i) && run.obj !== null)) {
    keys.push(el("span", { class: "key" }, icon("repeat", SHAPES[0](6, 6, 2)), "replicates"));
  }
  for (const status of new Set(RUNS.filter((run) => run.obj === null).map((run) => run.status))) {
    const shape = isOpen(status) ? SHAPES[0] : CROSS;
    const name = status === "ok" ? "ok, but not measured" : status;
    keys.push(el("span", { class: "key" }, icon(`cross x-${status}`, shape(6, 6, 3)), name));
  }
  if (chart.cut) keys.push(el("span", { text: "outliers are clipped to the edge" }));
  node.append(el("div", { class: "under" }, ...keys));
}
