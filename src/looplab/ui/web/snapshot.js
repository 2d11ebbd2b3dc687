// An exported page: answers come from the file itself, as a server would have given them. See ui/export.py.
//
//   SNAPSHOT        the answers; null: the page has a server
//   snapshotAnswer(name, query)

import { setLanguage, t } from "../assets/i18n.js";

export const SNAPSHOT = readSnapshot();

function readSnapshot() {
  const node = document.getElementById("snapshot");
  return node ? JSON.parse(node.textContent) : null;
}

// Stands for the function of i18n.js, which asks the server.
export async function loadLanguage(wanted) {
  setLanguage(wanted, wanted === "en" ? {} : SNAPSHOT.texts[wanted]);
}

export function snapshotAnswer(name, query) {
  if (name in SNAPSHOT) return name === "record" ? recordOf(query) : SNAPSHOT[name];
  const study = SNAPSHOT.studies[query.study];
  if (name === "changes") return Number(query.after) > 0 ? { ...study.changes, fresh: false, columns: null, rows: [], cells: [] } : study.changes;
  if (name === "transcript") return known(study.transcripts[query.call]);
  if (name === "compare") return compared(query.runs.split(",").map((id) => study.runs[id]).filter(Boolean));
  if (name === "curves") return curvesOf(query.runs.split(",").map((id) => study.runs[id]).filter(Boolean), query);
  if (name in study) return study[name];
  return known((study.runs[query.run] || {})[name]);
}

function known(answer) {
  if (answer === undefined) throw Object.assign(new Error(t("Not in the exported file, which has only the champions, the best and the latest runs.")), { status: 400 });
  return answer;
}

function recordOf(query) {
  const fits = (one) => (!query.study || one.study === query.study) && (!query.kind || one.kind === query.kind) && one.seq > Number(query.after || 0) && (!query.before || one.seq < Number(query.before));
  return { ...SNAPSHOT.record, events: SNAPSHOT.record.events.filter(fits) };
}

function compared(runs) {
  const configs = runs.map((one) => new Map(one.run.config));
  const metrics = runs.map((one) => new Map(one.run.metrics.map((metric) => [metric.metric, metric.last])));
  const keys = (maps) => [...new Set(maps.flatMap((one) => [...one.keys()]))];
  const row = (maps, key) => [key, maps.map((one) => one.get(key) ?? null)];
  const config = keys(configs).map((key) => row(configs, key)).filter(([, values]) => new Set(values).size > 1);
  return { runs: runs.map((one) => one.run.run.id), config, metrics: keys(metrics).map((key) => row(metrics, key)) };
}

// The curves of several runs on the steps of all of them, with straight lines between the points of each.
function curvesOf(runs, query) {
  const wanted = query.metrics ? JSON.parse(query.metrics) : null;
  const names = [...new Set(runs.flatMap((one) => one.curves.charts.map((chart) => chart.metric)))].filter((name) => !wanted || wanted.includes(name));
  const charts = names.map((metric) => {
    const own = runs.map((one) => one.curves.charts.find((chart) => chart.metric === metric)).filter(Boolean);
    const x = [...new Set(own.flatMap((chart) => chart.x))].sort((a, b) => a - b);
    const series = own.flatMap((chart) => chart.series.map((one) => ({ ...one, mean: placed(chart.x, one.mean, x), low: placed(chart.x, one.low, x), high: placed(chart.x, one.high, x) })));
    return { metric, x, exact: true, series };
  });
  return { metrics: names, charts, problems: {} };
}

function placed(from, values, onto) {
  if (from.length === onto.length) return values;
  let i = 0;
  return onto.map((x) => {
    while (i < from.length - 1 && from[i + 1] <= x) i += 1;
    if (x < from[0] || x > from[from.length - 1] || values[i] === null) return null;
    if (from[i] === x || i === from.length - 1 || values[i + 1] === null) return values[i];
    return values[i] + ((values[i + 1] - values[i]) * (x - from[i])) / (from[i + 1] - from[i]);
  });
}
