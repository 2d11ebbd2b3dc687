// The comparison page: runs side by side.

const DATA = readData();
const RUNS = DATA.runs;
const page = document.getElementById("page");
const swatch = (i) => el("span", { class: `swatch k${i % 8}` });

// A table with one column per run.
function sideBySide(first, rows) {
  const heads = RUNS.map((run, i) =>
    el("th", { class: "num", scope: "col" }, el("span", { class: "head-cell" }, swatch(i), ` ${run.id}`)),
  );
  const corner = el("th", { scope: "col" }, el("span", { class: "head-cell", text: first }));
  const head = el("thead", {}, el("tr", {}, corner, ...heads));
  return el("div", { class: "scroll" }, el("table", { class: "plain" }, head, el("tbody", {}, ...rows)));
}

function drawRuns(host) {
  const rows = RUNS.map((run, i) =>
    el(
      "tr",
      {},
      el("td", {}, swatch(i), ` ${run.id}`),
      el("td", { class: run.status, text: t(run.status) }),
      el("td", { text: `${t("round {n}", { n: run.round })}, ${run.by}` }),
      el("td", { text: run.why }),
    ),
  );
  const node = card(t("Runs"), true);
  node.append(el("table", { class: "plain" }, el("tbody", {}, ...rows)));
  host.append(node);
}

function drawConfig(host) {
  const node = card(t("Where the configs differ"), true);
  host.append(node);
  if (!DATA.config.length) {
    node.append(el("div", { class: "empty", text: t("The configs are the same.") }));
    return;
  }
  const cell = (value, first) => el("td", { class: value === first ? "num" : "num changed", text: value ?? "–" });
  const rows = DATA.config.map(([key, values]) =>
    el("tr", {}, el("td", {}, el("code", { text: key })), ...values.map((value) => cell(value, values[0]))),
  );
  node.append(sideBySide(t("key"), rows));
}

function drawMetrics(host) {
  if (!DATA.metrics.length) return;
  const node = card(t("What they measured"), true);
  const meaning = t("last value; difference to the first run; best value");
  node.querySelector(".controls").append(el("span", { class: "muted small", text: meaning }));
  const rows = DATA.metrics.map(([metric, goal, known, last, best]) => {
    const name = el("td", {}, el("code", { text: metric }));
    const way = ` ${goal === "max" ? t("larger is better") : t("smaller is better")}`;
    if (known) name.append(el("span", { class: "muted small", text: way }));
    return el("tr", {}, name, ...last.map((value, i) => metricCell(value, last[0], best[i], i, known ? goal : null)));
  });
  node.append(sideBySide(t("metric"), rows));
  host.append(node);
}

// A difference is called better or worse only if the study defines which direction is better.
function metricCell(value, first, best, i, goal) {
  const cell = el("td", { class: "num" }, el("div", { text: show(value) }));
  const under = el("div", { class: "small" });
  if (i && value !== null && first !== null) {
    const delta = value - first;
    const tone = delta === 0 || !goal ? "muted" : (goal === "max") === delta > 0 ? "better" : "worse";
    under.append(el("span", { class: tone, text: signed(delta) }));
  }
  if (best !== null && best !== value) {
    under.append(el("span", { class: "muted", text: `${under.childNodes.length ? " · " : ""}${t("best")} ${show(best)}` }));
  }
  if (under.childNodes.length) cell.append(under);
  return cell;
}

function tell(series, x, y) {
  const run = RUNS[series.id];
  const rows = [
    el("div", {}, el("b", { text: run.id }), ` · ${run.by} · ${t(run.status)}`),
    el("div", { text: `${t("step {n}", { n: show(x, 8) })}: ${show(y, 6)}` }),
  ];
  if (run.why) rows.push(el("div", { class: "why", text: cut(run.why, 160) }));
  return rows;
}

const charts = [];

function drawCurves(host) {
  for (const [metric, curves] of DATA.curves) {
    const positive = curves.some((curve) => curve[2].some((value) => value > 0));
    const node = card(metric, false, positive ? tick(t("log scale"), (on) => chart.set({ log: on })) : null);
    const place = el("div");
    node.append(place);
    host.append(node);
    const chart = new LineChart(place, { label: t("curves of {metric}", { metric }), height: 240, sync: "compare", tell });
    chart.setSeries(curves.map(([run, x, y]) => ({ id: run, name: RUNS[run].id, colour: `c${run % 8}`, x, y })));
    charts.push(chart);
  }
}

const title = t("{study}: {n} runs side by side", { study: DATA.study, n: RUNS.length });
const meaning = t("the other runs are compared with the first");
page.append(el("header", { class: "study-head" }, el("h1", { text: title }), el("p", { text: meaning }), languageMenu(chooseLanguage)));
const grid = el("div", { class: "grid halves" });
page.append(grid);
drawRuns(grid);
drawConfig(grid);
drawMetrics(grid);
drawCurves(grid);
