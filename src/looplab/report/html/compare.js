// The page of a comparison: runs side by side.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const focus = new Focus();
const page = document.getElementById("page");
const colour = (run) => run % 8;

function card(title, wide) {
  return el(
    "section",
    { class: wide ? "card wide" : "card", "aria-label": title },
    el("div", { class: "bar-top" }, el("h2", { text: title }), el("div", { class: "controls push" })),
  );
}

function tell(found) {
  const run = RUNS[found.run];
  return [
    el("div", {}, el("b", { text: run.id }), document.createTextNode(` · ${run.by} · ${run.status}`)),
    el("div", { text: `step ${show(found.step, 8)}: ${show(found.value, 6)}` }),
    run.why ? el("div", { class: "why", text: run.why.slice(0, 160) }) : null,
  ].filter(Boolean);
}

function runHead(i) {
  return el("th", { class: "num", scope: "col" }, el("span", { class: "head-cell" }, el("span", { class: `swatch k${colour(i)}` }), document.createTextNode(` ${RUNS[i].id}`)));
}

function drawRuns(host) {
  const node = card("Runs", true);
  const rows = RUNS.map((run, i) =>
    el(
      "tr",
      {},
      el("td", {}, el("span", { class: `swatch k${colour(i)}` }), document.createTextNode(` ${run.id}`)),
      el("td", { class: run.status, text: run.status }),
      el("td", { text: `round ${run.round}, ${run.by}` }),
      el("td", { text: run.why }),
    ),
  );
  node.append(el("table", { class: "plain" }, el("tbody", {}, ...rows)));
  host.append(node);
}

function drawConfig(host) {
  const node = card("Where the configs differ", true);
  host.append(node);
  if (!DATA.config.length) {
    node.append(el("div", { class: "empty", text: "the configs are the same" }));
    return;
  }
  const head = el("tr", {}, el("th", { scope: "col" }, el("span", { class: "head-cell", text: "key" })), ...RUNS.map((_, i) => runHead(i)));
  const rows = DATA.config.map(([key, values]) =>
    el(
      "tr",
      {},
      el("td", {}, el("code", { text: key })),
      ...values.map((value, i) => el("td", { class: i && value !== values[0] ? "num changed" : "num", text: value === null ? "–" : value })),
    ),
  );
  node.append(el("div", { class: "scroll" }, el("table", { class: "plain" }, el("thead", {}, head), el("tbody", {}, ...rows))));
}

function drawMetrics(host) {
  if (!DATA.metrics.length) return;
  const node = card("What they measured", true);
  node.querySelector(".controls").append(el("span", { class: "muted small", text: "last value, difference to the first run, best value" }));
  const head = el("tr", {}, el("th", { scope: "col" }, el("span", { class: "head-cell", text: "metric" })), ...RUNS.map((_, i) => runHead(i)));
  const rows = DATA.metrics.map(([metric, goal, last, best]) =>
    el(
      "tr",
      {},
      el("td", {}, el("code", { text: metric }), el("span", { class: "muted", text: ` ${goal}` })),
      ...last.map((value, i) => {
        const delta = i && value !== null && last[0] !== null ? value - last[0] : null;
        const better = delta === null || delta === 0 ? "muted" : (goal === "max") === delta > 0 ? "better" : "worse";
        const parts = [el("div", { text: show(value) })];
        if (delta !== null) parts.push(el("div", { class: `${better} small`, text: signed(delta) }));
        if (best[i] !== null && best[i] !== value) parts.push(el("div", { class: "muted small", text: `best ${show(best[i])}` }));
        return el("td", { class: "num" }, ...parts);
      }),
    ),
  );
  node.append(el("div", { class: "scroll" }, el("table", { class: "plain" }, el("thead", {}, head), el("tbody", {}, ...rows))));
  host.append(node);
}

function drawCurves(host) {
  for (const [metric, curves] of Object.entries(DATA.curves)) {
    const node = card(metric, false);
    const place = el("div");
    node.append(place);
    host.append(node);
    const options = { curves, style: (run) => `l${colour(run)}`, order: (run) => -run, tall: 240 };
    const chart = new Curves(place, `curves of ${metric}`, focus, options);
    chart.tell = tell;
    if (!curves.some((curve) => curve[2].some((value) => value !== null && value > 0))) continue;
    const box = el("input", { type: "checkbox", onchange: () => chart.set({ log: box.checked }) });
    node.querySelector(".controls").append(el("label", {}, box, document.createTextNode("log scale")));
  }
}

page.append(
  el(
    "header",
    {},
    el("h1", { text: `${DATA.study}: ${RUNS.length} runs side by side` }),
    el("p", { text: "the first run is what the others are measured against" }),
  ),
);
const grid = el("div", { class: "grid halves" });
page.append(grid);
drawRuns(grid);
drawConfig(grid);
drawMetrics(grid);
drawCurves(grid);
