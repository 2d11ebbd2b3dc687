// The table of runs: sortable, filterable, usable by keyboard; and the panel of the picked run.

const table = { key: "n", down: false, what: "changes", words: [], status: null, repeats: false, rows: new Map() };
if (order.length) [table.key, table.down] = ["obj", DATA.goal === "max"]; // the best first

function columns() {
  const list = [
    { name: "run", key: "n", get: (run) => run.id, sort: (run) => run.n },
    { name: "round", key: "round", num: true, get: (run) => run.round },
    { name: "by", key: "by", get: (run) => run.by },
    { name: "status", key: "status", get: (run) => run.status, style: (run) => run.status },
  ];
  if (DATA.judge) {
    const style = (run) => `v-${run.verdict}`;
    const verdict = (run) => run.verdict || (run.into === null ? "–" : `${run.role} of ${RUNS[run.into].id}`);
    list.push({ name: "verdict", key: "verdict", get: verdict, style });
  }
  if (DATA.metric) {
    const down = DATA.goal === "max";
    const tone = (by) => (by === null || by === 0 ? "num" : isBetter(by, 0) ? "num better" : "num worse");
    const delta = (name, key) => {
      const value = (run) => run[key];
      const style = (run) => tone(value(run));
      return { name, key, num: true, down, get: (run) => signed(value(run)), sort: value, style };
    };
    list.push(
      { name: DATA.metric, key: "obj", num: true, down, get: objective, sort: (run) => run.obj },
      delta("Δ parent", "dp"),
      delta("Δ base", "db"),
    );
  }
  if (table.what === "changes") list.push({ name: "change", key: "change", get: changes, cell: changeCell });
  if (table.what === "knobs") list.push(...DATA.knobs.map(knobColumn));
  if (table.what === "metrics") list.push(...DATA.metrics.map(metricColumn));
  list.push(
    { name: "why", key: "why", get: (run) => run.why, cell: whyCell },
    { name: "time", key: "sec", num: true, get: (run) => duration(run.sec), sort: (run) => run.sec },
  );
  return list;
}

function knobColumn(knob, k) {
  const num = knob.kind === "number";
  const style = (run) => `value${num ? " num" : ""}${run.changed.includes(k) ? " changed" : ""}`;
  const value = (run) => run.knobs[k];
  return { name: knob.short, key: `k${k}`, title: knob.key, num, get: (run) => show(value(run)), sort: value, style };
}

function metricColumn(metric, m) {
  return { name: metric, key: `m${m}`, num: true, get: (run) => show(run.last[m]), sort: (run) => run.last[m] };
}

const changes = (run) => run.changes.map(([key, what]) => `${key}: ${what}`).join("; ");
const shortNames = new Map(DATA.knobs.map((knob) => [knob.key, knob.short]));

function changeCell(run) {
  const parts = run.changes.flatMap(([key, what], i) => [
    i ? "; " : null,
    el("span", { title: key, text: shortNames.get(key) || key }),
    ` ${what}`,
  ]);
  return el("td", { class: "change" }, el("div", {}, ...parts));
}

function whyCell(run) {
  return el("td", { class: "why", title: run.why }, el("div", { text: run.why }));
}

// -- filtering

function applyFilter() {
  const brushed = parallel ? parallel.kept() : null;
  let shown = null;
  if (brushed || table.status || table.words.length) {
    const fits = (run, i) =>
      (!brushed || brushed.has(i)) &&
      (!table.status || run.status === table.status) &&
      table.words.every((word) => haystack(run).includes(word));
    shown = new Set(RUNS.map((_, i) => i).filter((i) => fits(RUNS[i], i)));
  }
  focus.change({ shown });
  fillTable();
}

function haystack(run) {
  run.hay ??= [run.id, run.by, run.status, `round ${run.round}`, run.why, run.hyp, changes(run), ...run.notes]
    .join("\n")
    .toLowerCase();
  return run.hay;
}

// -- rows

function sortedRuns(column) {
  const value = column.sort || column.get;
  const missing = (x) => x === null || x === undefined;
  const sign = table.down ? -1 : 1;
  const indices = RUNS.map((_, i) => i).filter((i) => !focus.hides(i) && (table.repeats || !isRepeat(i)));
  return indices.sort((a, b) => {
    const [x, y] = [value(RUNS[a]), value(RUNS[b])];
    if (missing(x) || missing(y)) return missing(x) - missing(y) || a - b;
    if (typeof x === "number" && typeof y === "number") return sign * (x - y) || a - b;
    return sign * String(x).localeCompare(String(y), undefined, { numeric: true }) || a - b;
  });
}

function headCell(column, isSorted) {
  const sort = () => {
    table.down = isSorted ? !table.down : Boolean(column.down);
    table.key = column.key;
    fillTable();
    table.host.querySelector("th[aria-sort] button").focus();
  };
  const arrow = isSorted ? (table.down ? " ↓" : " ↑") : "";
  const way = isSorted ? (table.down ? "descending" : "ascending") : null;
  const button = el("button", { text: column.name + arrow, title: column.title || column.name, onclick: sort });
  return el("th", { class: column.num ? "num" : null, scope: "col", "aria-sort": way }, button);
}

function row(list, i) {
  const run = RUNS[i];
  const cells = list.map((column) => {
    if (column.cell) return column.cell(run);
    const style = column.style ? column.style(run) : column.num ? "num" : null;
    return el("td", { class: style, text: column.get(run) });
  });
  return el("tr", { tabindex: -1, class: i === DATA.best ? "best" : null, "data-run": i }, ...cells);
}

function fillTable() {
  const list = columns();
  const sorted = list.find((column) => column.key === table.key) || list[0];
  const runs = sortedRuns(sorted);
  table.rows = new Map(runs.map((i) => [i, row(list, i)]));
  if (runs.length) table.rows.get(runs[0]).tabIndex = 0;
  const head = el("thead", {}, el("tr", {}, ...list.map((column) => headCell(column, column === sorted))));
  table.host.replaceChildren(el("table", {}, head, el("tbody", {}, ...table.rows.values())));
  const some = RUNS.filter((_, i) => table.repeats || !isRepeat(i)).length;
  const all = count(some, some < RUNS.length ? "config" : "run");
  table.count.textContent = runs.length === some ? all : `${runs.length} of ${all}`;
  markRows();
}

function markRows() {
  for (const [i, node] of table.rows) {
    node.classList.toggle("hot", i === focus.hover);
    node.classList.toggle("picked", i === focus.picked);
  }
}

function drawTable(host) {
  if (!RUNS.length) return;
  const chips = DATA.counts.length < 2 ? [] : DATA.counts.map(([status, number]) => statusChip(status, number));
  const search = el("input", { type: "search", placeholder: "filter by any words", "aria-label": "filter runs" });
  search.addEventListener("input", () => {
    table.words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    applyFilter();
  });
  const names = { changes: "changes", knobs: "knobs", metrics: "metrics, last values" };
  const what = el("select", { "aria-label": "columns" });
  what.append(...Object.entries(names).map(([value, text]) => el("option", { value, text })));
  what.addEventListener("change", () => {
    table.what = what.value;
    fillTable();
  });
  const repeats = tick("replicates", (on) => {
    table.repeats = on;
    fillTable();
  });
  const node = card("Runs", true, ...chips, RUNS.some((_, i) => isRepeat(i)) ? repeats : null, what, search);
  table.count = el("span", { class: "muted small" });
  node.querySelector("h2").after(table.count);
  table.host = el("div", { class: "scroll" });
  node.append(table.host);
  host.append(node);
  listenToRows();
  fillTable();
}

function statusChip(status, number) {
  const chip = el("button", { class: "chip", text: `${status} ${number}`, "aria-pressed": "false" });
  chip.addEventListener("click", () => {
    table.status = table.status === status ? null : status;
    for (const other of document.querySelectorAll(".chip")) {
      other.setAttribute("aria-pressed", String(other === chip && table.status !== null));
    }
    applyFilter();
  });
  return chip;
}

function listenToRows() {
  const rowOf = (event) => event.target.closest("tr[data-run]");
  const runOf = (event) => (rowOf(event) ? Number(rowOf(event).dataset.run) : null);
  table.host.addEventListener("click", (event) => runOf(event) !== null && focus.pick(runOf(event)));
  table.host.addEventListener("pointerover", (event) => focus.look(runOf(event)));
  table.host.addEventListener("pointerleave", () => focus.look(null));
  table.host.addEventListener("focusin", (event) => focus.look(runOf(event)));
  table.host.addEventListener("focusout", () => focus.look(null));
  table.host.addEventListener("keydown", (event) => {
    const here = rowOf(event);
    if (!here) return;
    const next = { ArrowDown: here.nextElementSibling, ArrowUp: here.previousElementSibling }[event.key];
    if (event.key === "Enter" || event.key === " ") focus.pick(runOf(event));
    else if (next) {
      here.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    } else return;
    event.preventDefault();
  });
  focus.listen((what) => ("hover" in what || "picked" in what) && markRows());
}

// -- the picked run

const panel = el("aside", { class: "panel", hidden: true, "aria-live": "polite", "aria-label": "the picked run" });

function showPanel() {
  const i = focus.picked;
  panel.hidden = i === null;
  document.body.classList.toggle("has-panel", i !== null);
  if (i === null) return;
  const run = RUNS[i];
  const left = el("div");
  const say = (text, style) => text && left.append(el("p", { class: style, text }));
  const judged = DATA.judge && DATA.judge.entrants.find((one) => one.run === i);
  if (judged) left.append(el("p", {}, el("b", { class: `v-${judged.verdict}`, text: judged.verdict }), `: ${judged.why}`));
  if (judged) for (const flag of judged.flags) say(`flag: ${flag}`, "muted");
  say(run.why);
  say(run.hyp && `hypothesis: ${run.hyp}`, "muted");
  for (const text of run.notes) say(`note: ${text}`, "muted");
  say(run.said);
  const list = run.changes.map(([key, what]) => el("li", {}, el("code", { text: key }), ` ${what}`));
  if (!list.length) list.push(el("li", { class: "muted", text: "no change against its parent" }));
  panel.replaceChildren(el("div", { class: "inner" }, panelHead(run, i), left, el("ul", {}, ...list)));
  showRow(i);
}

function panelHead(run, i) {
  const origin = `round ${run.round}, by ${run.by}, from ${run.parent || run.base || "the base"}`;
  const status = el("span", { class: run.status, text: run.how });
  const head = el("div", { class: "head" }, el("b", { text: run.id }), status, el("span", { text: origin }));
  if (DATA.metric) {
    const parts = [`${DATA.metric} ${objective(run)}`];
    if (run.into !== null) parts.push(`${run.role} of ${RUNS[run.into].id}`);
    if (run.dp !== null) parts.push(`${signed(run.dp)} against its parent`);
    if (run.db !== null) parts.push(`${signed(run.db)} against the base`);
    head.append(el("span", { text: parts.join(", ") }));
  }
  if (run.status !== "planned") head.append(el("a", { href: `${encodeURIComponent(run.id)}/`, text: "folder" }));
  if (run.wandb && run.wandb.startsWith("https://")) {
    head.append(el("a", { href: run.wandb, target: "_blank", rel: "noopener noreferrer", text: "W&B" }));
  }
  head.append(el("button", { text: "close", onclick: () => focus.pick(i) }));
  return head;
}

// Scroll the table, not the page, to the row of a run picked elsewhere.
function showRow(i) {
  const node = table.rows.get(i);
  if (!node || node === document.activeElement) return;
  const [box, place] = [table.host.getBoundingClientRect(), node.getBoundingClientRect()];
  if (place.top < box.top + 30 || place.bottom > box.bottom) table.host.scrollTop += place.top - box.top - 60;
}
