// The page of one study: header, curves, lineage and best so far; page.js assembles it with knobs.js and runs.js.

const DATA = readData();
const RUNS = DATA.runs;
RUNS.forEach((run, i) => (run.i = i));
const places = new Map(RUNS.map((run) => [run.id, run.i]));
const focus = new Focus();
const page = document.getElementById("page");
const isBetter = (a, b) => (DATA.goal === "max" ? a > b : a < b);
const isOpen = (status) => status === "running" || status === "planned";

// A run that repeats another is part of its mean, not a challenger.
const isRepeat = (run) => RUNS[run].into !== null;
const bestWord = DATA.judge ? t("champion") : t("best run");
const objective = (run) => (run.sd === null ? show(run.obj) : `${honest(run.obj, run.sd)} (n ${run.runs})`);
// The measured runs, worst first. Colours are by rank, since by value one bad run would use up the whole ramp.
const order = RUNS.map((_, i) => i).filter((i) => RUNS[i].obj !== null && !isRepeat(i));
order.sort((a, b) => (DATA.goal === "max" ? RUNS[a].obj - RUNS[b].obj : RUNS[b].obj - RUNS[a].obj));
const heights = new Map(order.map((run, place) => [run, place]));
const rank = (run) => (order.length < 2 ? 9 : Math.round((9 * heights.get(run)) / (order.length - 1)));
const lineColour = (run) => (run === DATA.best ? "accent" : heights.has(run) ? `r${rank(run)}` : "none");
const lineStyle = (run) => (run === DATA.best ? "best" : heights.has(run) ? `ranked s${rank(run)}` : "ranked none");
const drawOrder = (run) => (run === DATA.best ? 1e9 : heights.get(run) ?? -1);

// The tooltip of a run; `lines` follow its name.
function describe(run, ...lines) {
  const facts = RUNS[run];
  const head = el("div", {}, el("b", { text: facts.id }), ` · ${facts.by} · `);
  head.append(el("span", { class: facts.status, text: t(facts.status) }));
  const rows = [head, ...lines];
  if (DATA.metric) rows.push(el("div", { text: `${DATA.metric} ${objective(facts)}` }));
  if (isRepeat(run)) rows.push(el("div", { text: t("{role} of {run}", { role: t(facts.role), run: RUNS[facts.into].id }) }));
  if (facts.verdict) rows.push(el("div", {}, el("span", { class: `v-${facts.verdict}`, text: t(facts.verdict) })));
  if (facts.why) rows.push(el("div", { class: "why", text: cut(facts.why, 160) }));
  return rows;
}

function ramp() {
  if (order.length < 2) return null;
  const blocks = [...Array(10).keys()].map((i) => el("i", { class: `b${i}` }));
  return el("span", { class: "key" }, t("worse"), el("span", { class: "ramp" }, ...blocks), t("better, by rank"));
}

function bestKey() {
  return DATA.best === null ? null : el("span", { class: "key" }, el("span", { class: "best-mark" }), bestWord);
}

// -- header

function drawHead() {
  const values = { metric: DATA.metric, at: t(DATA.at) };
  const way = DATA.goal === "max" ? t("{metric}, {at} value, larger is better", values) : t("{metric}, {at} value, smaller is better", values);
  const goal = DATA.metric ? way : t("no objective is set");
  const time = el("p", { class: "small", text: t("as of {time}", { time: DATA.time }) });
  page.append(el("header", { class: "study-head" }, el("h1", { text: DATA.study }), el("p", { text: goal }), time, languageMenu(chooseLanguage)));
  page.append(el("div", { class: "tiles" }, bestTile(), runsTile(), changeTile(), usedTile()));
  for (const alarm of DATA.alarms) {
    page.append(el("div", { class: "alarm", role: "alert" }, el("b", { text: t("Alarm") }), ` ${alarm}`));
  }
  for (const note of DATA.notes) page.append(el("div", { class: "noteline", text: note }));
}

const tile = (label, ...rest) => el("div", { class: "tile" }, el("div", { class: "label", text: label }), ...rest);
const note = (...children) => el("div", { class: "note" }, ...children);

function bestTile() {
  if (DATA.judge) return championTile();
  if (DATA.best === null) {
    const why = RUNS.length ? t("no run has measured the objective") : t("no runs yet");
    return tile(t("best"), el("div", { class: "value", text: "–" }), note(why));
  }
  const best = RUNS[DATA.best];
  const gain = best.db === null ? "" : `, ${t("{delta} against its base", { delta: signed(best.db) })}`;
  return tile(
    t("best"),
    el("div", { class: "value best", text: show(best.obj) }),
    note(el("a", { href: `#${best.id}`, text: best.id }), gain),
    note(t("one run is a hint, not a result")),
  );
}

function championTile() {
  const { headline, standing } = DATA.judge;
  if (DATA.best === null) return tile(t("champion"), el("div", { class: "value", text: "–" }), note(inLanguage(headline)));
  const best = RUNS[DATA.best];
  const [value, spread] = honest(best.obj, best.sd).split(" ± ");
  return tile(
    t("champion"),
    el("div", { class: "value best" }, value, spread ? el("span", { class: "spread", text: ` ± ${spread}` }) : null),
    note(el("a", { href: `#${best.id}`, text: best.id }), `, ${t("mean of {n} {n|run|runs}", { n: best.runs })}`),
    note(inLanguage(standing)),
  );
}

function runsTile() {
  const counts = DATA.counts.map(([status, number]) => [status, `${number} ${t(status)}`]);
  if (DATA.waiting) counts.push(["planned", t("{n} proposed", { n: DATA.waiting })]);
  const parts = counts.flatMap(([status, text], i) => [i ? ", " : null, el("span", { class: status, text })]);
  return tile(t("runs"), el("div", { class: "value", text: String(RUNS.length) }), note(...parts));
}

function changeTile() {
  const best = DATA.best === null ? null : RUNS[DATA.best];
  if (!best || !best.changes.length) return null;
  const lines = best.changes.slice(0, 3).map(([key, what]) => note(`${key}: ${what}`));
  if (best.changes.length > 3) lines.push(note(t("{n} more", { n: best.changes.length - 3 })));
  if (best.why) lines.push(note(`“${cut(best.why, 140)}”`));
  return tile(best.parent ? t("what the {best} changed, from {run}", { best: bestWord, run: best.parent }) : t("what the {best} changed", { best: bestWord }), ...lines);
}

function usedTile() {
  const list = el("div", { class: "budget" });
  for (const [name, text, part] of DATA.budget) {
    list.append(el("span", { class: "muted", text: t(name) }), el("span", { text }));
    if (part !== null) list.append(el("div", { class: "meter bar" }, portion(part)));
  }
  return tile(t("used"), list);
}

// -- curves

let curves = null;

function drawCurves(host) {
  const drawn = new Map(DATA.curves.map(([name, x, lines]) => [name, { x, lines }]));
  if (!drawn.size) {
    const node = card(t("Curves"), true);
    const why = RUNS.length ? t("no run has left a curve yet") : t("no runs yet; “looplab run” starts the study");
    node.append(el("div", { class: "empty", text: why }));
    host.append(node);
    return;
  }
  const menu = el("select", { "aria-label": t("metric"), onchange: () => update() });
  menu.append(...[...drawn.keys()].map((name) => el("option", { value: name, text: name })));
  const log = tick(t("log scale"), () => update());
  const smooth = tick(t("smooth"), () => update());
  const all = tick(t("all values"), () => update());
  const reset = el("button", { text: t("reset zoom"), hidden: true, onclick: () => curves.zoomTo(null) });
  const node = card(t("Curves"), !order.length, menu, log, smooth, all, reset);
  const place = el("div");
  const under = el("div", { class: "under" });
  node.append(place, under);
  host.append(node);
  const point = (series, x, y) => el("div", { text: `${t("step {n}", { n: show(x, 8) })}: ${show(y, 5)}${spreadAt(series, x)}` });
  curves = new LineChart(place, {
    label: t("curves of the runs"),
    height: 300,
    tell: (series, x, y) => describe(series.id, point(series, x, y)),
    onhover: (run) => focus.look(run),
    onpick: (run) => focus.pick(run),
    onzoom: () => (reset.hidden = curves.zoom === null),
  });
  focus.listen((what) => {
    if ("shown" in what) curves.show(focus.shown);
    else if (!curves.event) curves.highlight(focus.hover ?? focus.picked);
  });

  function update() {
    const { x, lines } = drawn.get(menu.value);
    const isPositive = lines.some(([, y]) => y.some((value) => value > 0));
    log.firstChild.disabled = !isPositive;
    const options = { log: isPositive && log.firstChild.checked, clip: !all.firstChild.checked };
    Object.assign(curves.options, options, { smooth: smooth.firstChild.checked ? 0.3 : 0 });
    const series = [...lines]
      .sort((a, b) => drawOrder(a[0]) - drawOrder(b[0]))
      .map(([run, y, low, high, seeds]) => ({
        id: run,
        name: RUNS[run].id,
        colour: lineColour(run),
        width: run === DATA.best ? 2.4 : 1.4,
        dash: heights.has(run) || !order.length ? undefined : [4, 3],
        x,
        y,
        ...(low ? { low, high } : {}),
        seeds,
      }));
    curves.series = [];
    curves.setSeries(series);
    all.hidden = !curves.cut && !all.firstChild.checked;
    const tried = RUNS.filter((_, i) => !isRepeat(i)).length;
    const isFolded = tried < RUNS.length;
    let which = isFolded ? t("{n} {n|config|configs}", { n: lines.length }) : t("{n} {n|run|runs}", { n: lines.length });
    if (lines.length < tried) which = t("{n} of {m}: the best, the latest, a spread", { n: lines.length, m: tried });
    const keys = [el("span", { text: which }), ramp(), bestKey()];
    if (lines.some((line) => line[4] > 1)) keys.push(el("span", { text: t("bands: lowest to highest seed") }));
    if (curves.cut) keys.push(el("span", { text: t("outliers are clipped") }));
    keys.push(el("span", { class: "fine", text: t("drag zooms, a double click resets") }));
    under.replaceChildren(...keys.filter(Boolean));
  }
  update();
}

function spreadAt(series, x) {
  const at = series.x.indexOf(x);
  if (!series.low || at < 0 || series.low[at] === null) return "";
  return ` [${show(series.low[at], 4)}, ${show(series.high[at], 4)}]${series.seeds > 1 ? `, ${t("{n} seeds", { n: series.seeds })}` : ""}`;
}

// -- lineage

const MOST_BRANCHES = 400;

function drawLineage(host) {
  const tried = order.filter((i) => !isRepeat(i));
  if (tried.length < 3 || !(DATA.judge || tried.some((i) => RUNS[i].parent !== null))) return;
  const champions = new Set(DATA.judge ? [...DATA.judge.champions, DATA.judge.base] : DATA.path.map(([n]) => RUNS.findIndex((run) => run.n === n)));
  // Very many branches: the champions with their ancestors, and an even sample of the others.
  const kept = new Set();
  for (const i of champions) for (let at = i; at !== undefined && at !== null && !kept.has(at); at = places.get(RUNS[at]?.parent)) kept.add(at);
  const every = Math.ceil(tried.length / MOST_BRANCHES);
  const byNumber = [...tried].sort((a, b) => RUNS[a].n - RUNS[b].n).filter((i, k) => every === 1 || k % every === 0 || kept.has(i));
  const base = DATA.judge ? DATA.judge.base : null;
  const nodes = byNumber.map((i) => {
    const run = RUNS[i];
    const parent = run.parent === null ? base : places.get(run.parent) ?? null;
    const verdict = run.verdict || (DATA.judge ? null : champions.has(i) ? "keep" : null);
    return { id: i, parent: parent === i ? null : parent, n: run.n, value: run.obj, verdict, isChampion: champions.has(i), name: run.id };
  });
  const node = card(t("Lineage"), true);
  node.querySelector("h2").after(el("span", { class: "muted small", text: `${DATA.metric}${DATA.judge ? `, ${t("means")}` : ""}; ${t("each config joined to the one it changes")}` }));
  const place = el("div");
  node.append(place);
  host.append(node);
  new Lineage(place, { label: t("lineage: champions and what was tried from them"), nodes, focus, goal: DATA.goal, tell: (i) => describe(i, ...changeLines(i)) });
  const keys = [legendKey("d-best", SHAPES[0](6, 6, 5), DATA.judge ? t("champions") : t("the best so far"))];
  for (const verdict of new Set(nodes.filter((one) => !one.isChampion && one.verdict).map((one) => one.verdict))) {
    const style = verdict === "inconclusive" ? "dot hollow l-inconclusive" : `t-${verdict}`;
    keys.push(legendKey(style, SHAPES[VERDICT_SHAPES[verdict] ?? 0](6, 6, 4), t(verdict)));
  }
  if (nodes.length < tried.length) keys.push(el("span", { text: t("{n} of {m} drawn", { n: nodes.length, m: tried.length }) }));
  node.append(el("div", { class: "under" }, ...keys));
}

const changeLines = (i) => RUNS[i].changes.slice(0, 4).map(([key, what]) => el("div", { class: "why", text: `${key}: ${what}` }));

// -- best so far

function drawBest(host) {
  if (!order.length) return;
  const log = tick(t("log scale"), (on) => chart.update({ log: on }));
  const node = card(DATA.judge ? t("Champion so far") : t("Best so far"), !DATA.curves.length, RUNS.some((run) => run.obj > 0) ? log : null);
  node.querySelector("h2").after(el("span", { class: "muted small", text: DATA.metric + (DATA.judge ? `, ${t("means")}` : "") }));
  const place = el("div");
  node.append(place);
  host.append(node);
  const chart = new Progress(place, {
    label: t("objective of each run, and the best so far"),
    points: RUNS.map(progressPoint),
    path: DATA.path,
    focus,
    tell: (i) => describe(i),
  });
  const own = new Set(order.map((run) => RUNS[run].by));
  const keys = DATA.proposers.flatMap((name, kind) => {
    const shape = SHAPES[kind % SHAPES.length](6, 6, 4);
    return own.has(name) ? [legendKey(`f${kind % 8}`, shape, name)] : [];
  });
  if (RUNS.some((run, i) => isRepeat(i) && run.obj !== null)) {
    keys.push(legendKey("repeat", SHAPES[0](6, 6, 2), t("replicates")));
  }
  for (const status of new Set(RUNS.filter((run) => run.obj === null).map((run) => run.status))) {
    const shape = isOpen(status) ? SHAPES[0] : CROSS;
    const name = status === "ok" ? t("ok, but not measured") : t(status);
    keys.push(legendKey(`cross x-${status}`, shape(6, 6, 3), name));
  }
  if (chart.cut) keys.push(el("span", { text: t("outliers are clipped to the edge") }));
  if (chart.drawn < RUNS.length) keys.push(el("span", { text: t("{n} of {m} drawn", { n: chart.drawn, m: RUNS.length }) }));
  node.append(el("div", { class: "under" }, ...keys));
}

function progressPoint(run, i) {
  const kind = DATA.proposers.indexOf(run.by);
  if (run.obj === null) {
    return { id: i, n: run.n, value: null, style: `cross x-${run.status}`, shape: isOpen(run.status) ? SHAPES[0] : CROSS, size: 3 };
  }
  if (isRepeat(i)) return { id: i, n: run.n, value: run.obj, style: "repeat", shape: SHAPES[0], size: 1.8 };
  const size = RUNS.length > 400 ? 2.2 : RUNS.length > 120 ? 2.8 : 4;
  const big = i === DATA.best ? size + 1.5 : size;
  return { id: i, n: run.n, value: run.obj, style: `f${kind % 8}`, shape: SHAPES[kind % SHAPES.length], size: big };
}
