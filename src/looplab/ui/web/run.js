// One run: why it was made, what it changed, how it went, what the judge said of it and by which bar.

import { duration, el, honest, pValue, show, svg } from "../assets/dom.js";
import { linear } from "../assets/figures.js";
import { columns, effectText, every, facts, panel, plainTable, problemText, runLink, verdictMark } from "./common.js";
import { Curves } from "./curves.js";
import { day, t } from "./i18n.js";
import { runSteering } from "./steering.js";
import { get } from "./store.js";

const MAX_LOG = 400_000; // characters that are kept on the page

export class RunPage {
  constructor(host, app, query) {
    Object.assign(this, { host, app });
    this.show(query.get("run") || "LATEST");
  }
  route(query) {
    const wanted = query.get("run") || "LATEST";
    if (wanted !== this.id) this.show(wanted);
  }
  destroy() {
    if (this.stop) this.stop();
    if (this.stopLog) this.stopLog();
    if (this.stopCurves) this.stopCurves();
    if (this.charts) this.charts.destroy();
  }
  async show(id) {
    this.destroy();
    Object.assign(this, { id, charts: null, found: null, next: null, logOver: false, curvesOver: false });
    this.head = el("div", { class: "run-title" });
    this.story = el("div", {});
    this.verdict = el("div", {});
    this.curves = el("div", { class: "small-multiples" });
    this.log = el("pre", { class: "log", tabindex: 0, "aria-label": t("Log") });
    this.logNote = el("span", { class: "muted small" });
    this.config = el("div", {});
    this.rest = el("div", {});
    this.files = el("div", {});
    const log = panel(t("Log"), this.log);
    log.querySelector(".bar-top").append(this.logNote);
    const curves = panel(t("Curves"), this.curves);
    this.host.replaceChildren(this.head, columns([this.story], [this.verdict]), curves, log, columns([this.config], [this.rest]), this.files);
    this.stop = every(2500, () => this.ask());
    this.stopLog = every(1000, () => this.askLog());
    this.stopCurves = every(2000, () => this.askCurves());
  }
  get isOver() {
    return this.found && this.found.run.state === "ended";
  }
  async ask() {
    const seq = this.app.store.state.seq;
    if (this.found && this.isOver && this.seq === seq) return;
    try {
      this.found = await get("run", { study: this.app.study.name, run: this.id });
    } catch (error) {
      if (error.status === 400) this.host.replaceChildren(el("p", { class: "empty", role: "alert", text: problemText(error) }));
      throw error;
    }
    this.seq = seq;
    this.draw();
  }
  draw() {
    const { run, lead } = this.found;
    const { metric } = this.app.study;
    const key = JSON.stringify([this.found, Math.floor(Date.now() / 10000)]);
    if (key === this.key) return;
    this.key = key;
    const row = this.app.store.rows.get(lead) || {};
    this.head.replaceChildren(
      el("h1", {}, run.id, " ", el("span", { class: run.status || run.state, text: t(run.status || run.state) })),
      el("p", { class: "muted", text: [t("round {n}", { n: run.round }), run.slot, day(run.created), run.seconds === null ? null : duration(run.seconds), run.seed === null ? null : t("seed {n}", { n: run.seed })].filter(Boolean).join(" · ") }),
      metric ? el("p", { class: "big" }, el("span", { class: "muted", text: `${metric} ` }), show(run.objective), row.measured > 1 ? el("span", { class: "muted", text: `  ${honest(row.mean, row.sd)}, n ${row.measured}` }) : "") : "",
      runSteering(this.app, run),
    );
    this.drawStory();
    this.drawVerdict();
    this.drawConfig();
    this.drawRest();
  }
  drawStory() {
    const { run, lead, hypothesis, edits, notes, changes, call, watched } = this.found;
    const made = [];
    made.push([t("why"), run.reason], [t("hypothesis"), hypothesis], [t("proposed by"), call ? el("span", {}, `${run.proposer}, `, el("a", { href: this.app.address("agents", { call }), text: t("the conversation") })) : run.proposer]);
    made.push([t("role"), lead !== run.id ? el("span", {}, t("{role} of", { role: t(run.role) }), " ", runLink(this.app, lead)) : t(run.role)]);
    made.push([t("from"), run.parent ? runLink(this.app, run.parent) : run.base], [t("weights of"), run.warm]);
    if (edits.length) made.push([t("edits"), el("code", { text: edits.join("  ") })]);
    if (this.found.arguments) made.push([t("extra arguments"), el("code", { text: this.found.arguments })]);
    const rows = changes.map((one) => [el("code", { text: one.key }), one.old ?? "–", one.new ?? t("(gone)")]);
    this.story.replaceChildren(
      panel(
        t("Why this run"),
        facts(made),
        rows.length ? plainTable([{ name: t("changed from its parent") }, { name: t("was"), num: true }, { name: t("is"), num: true }], rows) : el("p", { class: "muted small", text: t("Its config is that of its parent.") }),
        ...watched.map((one) => el("p", { class: "noteline", text: `${one.rule}: ${one.text}${one.stops ? ` (${t("stopped")})` : ""}` })),
        ...notes.map((note) => el("p", { class: "muted small", text: note })),
      ),
    );
  }
  drawVerdict() {
    const { verdict, replicates, run, lead } = this.found;
    const box = panel(t("Verdict"));
    if (!verdict) {
      box.append(el("p", { class: "muted", text: run.state === "ended" ? t("No verdict: the run was not judged, or its test is not over.") : t("The run has not ended.") }));
    } else {
      const bar = verdict.p === null ? t("no test") : verdict.boundary === null ? pValue(verdict.p) : t("p {p}, needed at most {bar}", { p: pValue(verdict.p), bar: pValue(verdict.boundary) });
      box.append(
        el("p", { class: "big" }, verdictMark(verdict.verdict), lead !== run.id ? el("span", { class: "muted small", text: ` ${t("of {run}", { run: lead })}` }) : ""),
        el("p", { text: verdict.why }),
        facts([
          [t("better by, 95 %"), verdict.effect === null ? null : effectText(verdict.effect, verdict.low, verdict.high)],
          [t("evidence and its boundary"), bar],
          [t("against"), verdict.against ? runLink(this.app, verdict.against) : null],
          [t("runs, looks"), verdict.n ? `${verdict.n}, ${verdict.look}` : null],
          [t("alpha of the test"), verdict.alpha === null ? null : show(verdict.alpha, 2)],
          [t("noise between seeds"), verdict.sigma === null ? null : show(verdict.sigma, 2)],
          [t("cost relative to its rival"), verdict.cost === null ? null : `× ${show(verdict.cost, 2)}`],
          [t("remarks"), verdict.flags.join("; ")],
        ]),
      );
    }
    if (replicates.filter((one) => one.value !== null).length > 1) box.append(replicatePlot(replicates, this.app, this.verdict.clientWidth - 28));
    this.verdict.replaceChildren(box);
  }
  drawConfig() {
    const { config, metrics, base_changes } = this.found;
    const changed = new Set(base_changes.map((one) => one.key));
    const rows = config.map(([key, value]) => [el("code", { class: changed.has(key) ? "changed" : null, text: key }), value]);
    const measured = metrics.map((one) => [one.metric, show(one.first), show(one.last), show(one.best), one.best_step === null ? "" : show(one.best_step), one.n]);
    this.config.replaceChildren(
      panel(
        t("Metrics and config"),
        metrics.length ? plainTable([{ name: t("metric") }, { name: t("first"), num: true }, { name: t("last"), num: true }, { name: t("best"), num: true }, { name: t("at step"), num: true }, { name: "n", num: true }], measured) : el("p", { class: "muted small", text: t("Metrics are summarised when the run has ended.") }),
        el("details", {}, el("summary", { text: t("Config, {n} keys; changed from the base in bold", { n: config.length }) }), plainTable([{ name: t("key") }, { name: t("value"), num: true }], rows)),
      ),
    );
  }
  drawRest() {
    const { capsule, reproduce, folder, events, files, status } = this.found;
    const copy = el("button", { text: t("Copy"), onclick: () => navigator.clipboard && navigator.clipboard.writeText(reproduce) });
    const used = [status.cpu_s ? t("{n} CPU seconds", { n: show(status.cpu_s, 3) }) : null, status.max_rss_mb ? `${Math.round(status.max_rss_mb)} MB` : null, status.reason].filter(Boolean).join(" · ");
    this.rest.replaceChildren(
      panel(
        t("Repeat it"),
        el("p", { class: "copy" }, el("code", { text: reproduce }), copy),
        facts([[t("folder"), el("code", { text: folder })], [t("used"), used], ...capsule.slice(0, 1).map(([name, text]) => [t(name), el("code", { text })])]),
        capsule.length > 1 ? el("details", {}, el("summary", { text: t("Capsule: code, machine, packages") }), facts(capsule.slice(1).map(([name, text]) => [t(name), el("code", { text })]))) : "",
        el("details", {}, el("summary", { text: t("{n} {n|event|events}", { n: events.length }) }), plainTable([{ name: "#", num: true }, { name: t("when") }, { name: t("event") }, { name: "" }], events.map((one) => [one.seq, day(one.at), one.kind, el("code", { class: "wrap", text: one.data })]))),
      ),
    );
    this.drawFiles(files);
  }
  drawFiles(files) {
    const key = files.map((one) => one.name + one.bytes).join();
    if (key === this.filesKey) return;
    this.filesKey = key;
    const view = el("div", {});
    const list = el("ul", { class: "files" }, ...files.map((one) => el("li", {}, this.app.isExport ? one.name : el("button", { class: "quiet link", text: one.name, onclick: () => this.openFile(one.name, view) }), el("span", { class: "muted small", text: ` ${bytes(one.bytes)}` }))));
    const card = panel(t("Files"), files.length ? list : el("p", { class: "muted", text: t("no files yet") }), view);
    this.files.replaceChildren(card);
  }
  async openFile(name, view) {
    await showFile(view, `api/file?${new URLSearchParams({ study: this.app.study.name, run: this.found.run.id, name })}`, name);
  }
  async askLog() {
    if (this.logOver) return;
    const found = await get("log", { study: this.app.study.name, run: this.id, from: this.next });
    if (found.reset) this.log.textContent = "";
    this.next = found.next;
    this.logOver = found.over && !found.more;
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 30;
    if (found.text) {
      const text = (this.log.textContent + found.text).slice(-MAX_LOG);
      this.log.textContent = text;
      if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
    } else if (!this.log.textContent) this.log.textContent = "";
    this.logNote.textContent = found.size ? `${bytes(found.size)}${found.start && found.reset ? ` · ${t("its end")}` : ""} · ${t("lines with secrets are hidden")}` : t("nothing was printed yet");
  }
  async askCurves() {
    if (this.curvesOver) return;
    const isOver = this.isOver;
    if (!this.charts) this.charts = new Curves(this.curves, this.app, { smooth: 0.02, legend: false });
    await this.charts.ask({ runs: this.id });
    this.curvesOver = isOver;
  }
}

function bytes(n) {
  return n < 1000 ? `${n} B` : n < 1e6 ? `${(n / 1e3).toPrecision(3)} kB` : `${(n / 1e6).toPrecision(3)} MB`;
}

// A text or a picture that a run has written: text nodes and pictures of checked types only.
export async function showFile(view, address, name) {
  const response = await fetch(address, { credentials: "same-origin" });
  const kind = response.headers.get("content-type") || "";
  const title = el("p", { class: "small" }, el("b", { text: name }));
  if (response.ok && kind.startsWith("image/")) view.replaceChildren(title, el("img", { src: address, alt: name, class: "shown" }));
  else if (response.ok && name.endsWith(".csv")) view.replaceChildren(title, csvTable(await response.text()));
  else if (response.ok) view.replaceChildren(title, el("pre", { class: "log", tabindex: 0, "aria-label": name, text: await response.text() }));
  else view.replaceChildren(title, el("p", { class: "muted", text: ((await response.json().catch(() => null)) || {}).error || `HTTP ${response.status}` }));
}

const MAX_ROWS = 200;

// The first rows of a CSV file as a table; numbers on the right, with four digits.
export function csvTable(text) {
  const lines = csvRows(text).filter((cells) => cells.some((cell) => cell.trim()));
  const [head = [], ...rows] = lines;
  const isNumber = (cell) => cell !== undefined && cell.trim() !== "" && Number.isFinite(Number(cell));
  const heads = head.map((name, place) => ({ name, num: rows.some((cells) => isNumber(cells[place])) }));
  const shown = rows.slice(0, MAX_ROWS).map((cells) => head.map((_, place) => (isNumber(cells[place]) ? show(Number(cells[place])) : cells[place] ?? "")));
  const more = rows.length > shown.length ? el("p", { class: "muted small", text: t("{n} of {m} rows", { n: shown.length, m: rows.length }) }) : "";
  return el("div", {}, plainTable(heads, shown), more);
}

function csvRows(text) {
  const rows = [[""]];
  let isQuoted = false;
  for (const [place, letter] of [...text].entries()) {
    const row = rows[rows.length - 1];
    if (letter === '"') {
      isQuoted = !isQuoted;
      if (isQuoted && text[place - 1] === '"') row[row.length - 1] += letter;
    } else if (letter === "," && !isQuoted) row.push("");
    else if (letter === "\n" && !isQuoted) rows.push([""]);
    else if (letter !== "\r") row[row.length - 1] += letter;
  }
  return rows;
}

// The values of this config and of its rival, by seed: pairs are joined by a line.
function replicatePlot(replicates, app, space) {
  const measured = replicates.filter((one) => one.value !== null);
  const [width, height, left, top] = [Math.max(260, Math.min(560, space || 420)), 150, 54, 12];
  const values = measured.map((one) => one.value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  const y = linear(low - room, high + room, height - 26, top);
  const seeds = [...new Set(measured.map((one) => one.seed))].sort((a, b) => (a ?? -1) - (b ?? -1));
  const x = (one) => left + ((width - left - 10) * (seeds.indexOf(one.seed) + 0.5)) / seeds.length;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "replicates", role: "img", "aria-label": t("values by seed, this config and its rival") });
  for (const value of y.ticks(4)) {
    root.append(svg("line", { class: "grid-line", x1: left, x2: width - 8, y1: y(value), y2: y(value) }), svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", text: show(value, 4) }));
  }
  for (const one of measured) {
    const pair = !one.rival && measured.find((other) => other.rival && other.seed === one.seed);
    if (pair) root.append(svg("line", { class: "pair", x1: x(one), x2: x(pair), y1: y(one.value), y2: y(pair.value) }));
  }
  for (const one of measured) {
    const dot = svg("circle", { cx: x(one), cy: y(one.value), r: one.first ? 5 : 4, class: one.rival ? "rival" : one.first ? "own first" : "own" }, svg("title", { text: `${one.run}: ${show(one.value)}${one.seed === null ? "" : `, ${t("seed {n}", { n: one.seed })}`}` }));
    dot.addEventListener("click", () => app.go("run", { run: one.run }));
    root.append(dot);
  }
  seeds.forEach((seed, place) => root.append(svg("text", { x: left + ((width - left - 10) * (place + 0.5)) / seeds.length, y: height - 8, "text-anchor": "middle", text: seed === null ? "" : String(seed) })));
  const keys = [["own", t("this config (hollow: its first run, which is not tested)")]];
  if (measured.some((one) => one.rival)) keys.push(["rival", t("its rival")]);
  return el("figure", { class: "plain-figure" }, root, el("figcaption", { class: "under" }, el("span", { text: t("by seed") }), ...keys.map(([style, words]) => el("span", { class: "key" }, el("i", { class: `dot-key ${style}` }), words))));
}
