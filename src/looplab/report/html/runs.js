// The table of runs, its filter, and the panel of the picked run.

const isShown = { words: "", status: null, repeats: false };
let table = null;
let counted = null;

function columns() {
  const list = [
    { name: t("run"), key: "run", get: (run) => run.id, sort: (run) => run.n, narrow: true, width: 112 },
  ];
  if (DATA.metric) {
    const down = DATA.goal === "max";
    const tone = (by) => (by === null || by === 0 ? null : isBetter(by, 0) ? "better" : "worse");
    const delta = (name, key) => ({
      name, key, num: true, down, get: (run) => signed(run[key]), sort: (run) => run[key], style: (run) => tone(run[key]),
    });
    list.push({ name: DATA.metric, key: "obj", num: true, down, get: objective, sort: (run) => run.obj, narrow: true });
    list.push(verdictColumn(), delta(t("Δ parent"), "dp"), { ...delta(t("Δ base"), "db"), hidden: true });
  } else list.push(verdictColumn());
  list.push({ name: t("change"), key: "change", get: changes, cell: changeCell }, { name: t("why"), key: "why", get: (run) => run.why });
  list.push({ name: t("by"), key: "by", get: (run) => run.by });
  list.push({ name: t("round"), key: "round", num: true, get: (run) => run.round, sort: (run) => run.round, hidden: true });
  list.push({ name: t("time"), key: "time", num: true, get: (run) => duration(run.sec), sort: (run) => run.sec });
  list.push(...DATA.knobs.map(knobColumn), ...DATA.metrics.map(metricColumn));
  return list;
}

// The verdict; without one, what the run is or how it ended, if that is not well.
function verdictColumn() {
  const text = (run) => {
    if (run.status !== "ok") return t(run.status);
    if (run.verdict) return t(run.verdict);
    return run.into === null ? "–" : t("{role} of {run}", { role: t(run.role), run: RUNS[run.into].id });
  };
  const style = (run) => (run.status === "ok" ? `v-${run.verdict}` : run.status);
  return { name: DATA.judge ? t("verdict") : t("status"), key: "verdict", get: text, style, narrow: true };
}

function knobColumn(knob, k) {
  const num = knob.kind === "number";
  const style = (run) => (run.changed.includes(k) ? "value changed" : "value");
  const value = (run) => run.knobs[k];
  return { name: knob.short, key: knob.key, title: knob.key, num, get: (run) => show(value(run)), sort: value, style, hidden: true };
}

function metricColumn(metric, m) {
  const value = (run) => run.last[m];
  return { name: metric, key: `last:${metric}`, title: t("last value of {name}", { name: metric }), num: true, get: (run) => show(value(run)), sort: value, hidden: true };
}

const changes = (run) => run.changes.map(([key, what]) => `${shortNames.get(key) || key} ${what}`).join("; ");
const shortNames = new Map(DATA.knobs.map((knob) => [knob.key, knob.short]));

function changeCell(run) {
  const parts = run.changes.flatMap(([key, what], i) => [
    i ? "; " : null,
    el("span", { class: "muted", title: key, text: shortNames.get(key) || key }),
    ` ${what}`,
  ]);
  return el("span", { title: changes(run) }, ...parts);
}

// -- filtering

function applyFilter() {
  const brushed = parallel ? parallel.kept() : null;
  const test = parseFilter(isShown.words, table.columns, haystack);
  const fits = (run) =>
    (!brushed || brushed.has(run.i)) && (!isShown.status || run.status === isShown.status) && (!test || test(run));
  const isAsked = brushed || isShown.status || test;
  focus.change({ shown: isAsked ? new Set(RUNS.filter(fits).map((run) => run.i)) : null });
  fillTable();
}

function haystack(run) {
  run.hay ??= [run.id, run.by, run.status, `round ${run.round}`, run.why, run.hyp, changes(run), ...run.notes].join("\n");
  return run.hay;
}

function fillTable() {
  table.setFilter((run) => !focus.hides(run.i) && (isShown.repeats || run.into === null));
  const some = RUNS.filter((run) => isShown.repeats || run.into === null).length;
  const all = some < RUNS.length ? t("{n} {n|config|configs}", { n: some }) : t("{n} {n|run|runs}", { n: some });
  counted.textContent = table.view.length === some ? all : t("{n} of {m}", { n: table.view.length, m: all });
}

// -- the table

function drawTable(host) {
  if (!RUNS.length) return;
  const chips = DATA.counts.length < 2 ? [] : DATA.counts.map(([status, number]) => statusChip(status, number));
  const hint = t("words, or lr<0.01 by:agent -verdict:discard");
  const search = el("input", { type: "search", placeholder: hint, title: hint, "aria-label": t("filter runs") });
  search.addEventListener("input", () => {
    isShown.words = search.value;
    applyFilter();
  });
  const repeats = tick(t("replicates"), (on) => {
    isShown.repeats = on;
    fillTable();
  });
  const place = el("div");
  table = new Table(place, {
    label: t("Runs"),
    columns: columns(),
    rows: RUNS,
    id: (run) => run.i,
    sort: order.length ? { key: "obj", down: DATA.goal === "max" } : { key: "run", down: false }, // the best first
    rowClass: (run) => [run.i === DATA.best ? "best" : "", run.verdict ? `row-${run.verdict}` : ""].join(" ").trim(),
    second: (run) => changes(run) || run.why,
    onpick: (run) => focus.pick(run.i),
    onhover: (run) => focus.look(run ? run.i : null),
  });
  const node = card(t("Runs"), true, ...chips, RUNS.some((_, i) => isRepeat(i)) ? repeats : null, table.chooser(), search);
  counted = el("span", { class: "muted small" });
  node.querySelector("h2").after(counted);
  node.append(place);
  host.append(node);
  focus.listen((what) => {
    if ("hover" in what) table.hover(focus.hover);
    if ("picked" in what) table.pick(focus.picked);
  });
  fillTable();
}

function statusChip(status, number) {
  const chip = el("button", { class: "chip", text: `${t(status)} ${number}`, "aria-pressed": "false" });
  chip.addEventListener("click", () => {
    isShown.status = isShown.status === status ? null : status;
    for (const other of document.querySelectorAll(".chip")) {
      other.setAttribute("aria-pressed", String(other === chip && isShown.status !== null));
    }
    applyFilter();
  });
  return chip;
}

// -- the picked run

const panel = el("aside", { class: "panel", hidden: true, "aria-live": "polite", "aria-label": t("the picked run") });

function showPanel() {
  const i = focus.picked;
  panel.hidden = i === null;
  document.body.classList.toggle("has-panel", i !== null);
  if (i === null) return;
  const run = RUNS[i];
  const left = el("div");
  const say = (text, style) => text && left.append(el("p", { class: style, text }));
  const judged = DATA.judge && DATA.judge.entrants.find((one) => one.run === i);
  if (judged) left.append(el("p", {}, el("b", { class: `v-${judged.verdict}`, text: t(judged.verdict) }), `. ${judged.why}`));
  if (judged) for (const flag of judged.flags) say(`${t("flag")}: ${flag}`, "muted");
  say(run.why);
  say(run.hyp && `${t("hypothesis")}: ${run.hyp}`, "muted");
  for (const text of run.notes) say(`${t("note")}: ${text}`, "muted");
  say(run.said);
  const list = run.changes.map(([key, what]) => el("li", {}, el("code", { text: key }), ` ${what}`));
  if (!list.length) list.push(el("li", { class: "muted", text: t("no change against its parent") }));
  panel.replaceChildren(el("div", { class: "inner" }, panelHead(run, i), left, el("ul", {}, ...list)));
  if (table && table.nodeOf(i) !== document.activeElement) table.reveal(i);
}

function panelHead(run, i) {
  const from = run.parent && places.has(run.parent) ? runLink(run.parent) : run.base || t("the base");
  const origin = el("span", {}, `${t("round {n}", { n: run.round })}, ${t("by {name}, from", { name: run.by })} `, from);
  const status = el("span", { class: run.status, text: run.how });
  const head = el("div", { class: "head" }, el("b", { text: run.id }), status, origin);
  if (DATA.metric) {
    const parts = [`${DATA.metric} ${objective(run)}`];
    if (run.into !== null) parts.push(t("{role} of {run}", { role: t(run.role), run: RUNS[run.into].id }));
    if (run.dp !== null) parts.push(t("{delta} against its parent", { delta: signed(run.dp) }));
    if (run.db !== null) parts.push(t("{delta} against the base", { delta: signed(run.db) }));
    head.append(el("span", { text: parts.join(", ") }));
  }
  if (run.status !== "planned" && !DATA.shared) head.append(el("a", { href: `${encodeURIComponent(run.id)}/`, text: t("folder") }));
  if (run.wandb && run.wandb.startsWith("https://")) {
    head.append(el("a", { href: run.wandb, target: "_blank", rel: "noopener noreferrer", text: "W&B" }));
  }
  head.append(el("button", { text: t("close"), onclick: () => focus.pick(i) }));
  return head;
}
