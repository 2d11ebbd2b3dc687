// The glance: what happened since you last looked, the champion, what runs, what waits and why, what it costs.

import { LineChart } from "../assets/charts.js";
import { Focus, duration, el, honest, portion, show } from "../assets/dom.js";
import { Progress, SHAPES, Timeline, VERDICT_SHAPES } from "../assets/figures.js";
import { columns, effectText, every, evidenceText, nowrap, panel, plainTable, runLink, verdictMark } from "./common.js";
import { ago, clock, day, inLanguage, t } from "./i18n.js";
import { proposalForm } from "./steering.js";
import { get, improvements, lab } from "./store.js";

const WINDOWS = [["600", "10 min"], ["3600", "1 h"], ["21600", "6 h"], ["86400", "24 h"]];
const AWAY_MS = 5 * 60 * 1000;

// The last event that this person has seen: it moves on when they come back after some minutes, not at every reload.
class Visit {
  constructor(study) {
    this.key = `looplab-seen-${location.pathname}-${study}`;
    const kept = JSON.parse(localStorage.getItem(this.key) || "null") || { since: 0, seq: 0, at: 0 };
    if (Date.now() - kept.at > AWAY_MS) kept.since = kept.seq;
    this.kept = kept;
  }
  get since() {
    return this.kept.since;
  }
  saw(seq) {
    this.kept.seq = seq;
    this.kept.at = Date.now();
    localStorage.setItem(this.key, JSON.stringify(this.kept));
  }
  seenAll() {
    this.kept.since = this.kept.seq;
    localStorage.setItem(this.key, JSON.stringify(this.kept));
  }
}

export class NowPage {
  constructor(host, app) {
    Object.assign(this, { host, app, visit: new Visit(app.study.name) });
    this.chosenWindow = app.place.query.get("window");
    this.window = this.chosenWindow || this.usualWindow();
    this.focus = new Focus();
    this.focus.listen((what) => what.picked && !String(what.picked).startsWith("call:") && app.go("run", { run: what.picked }));
    this.headline = el("div", { class: "since" });
    this.alarms = el("div", {});
    this.tiles = el("div", { class: "tiles" });
    this.progress = el("div", {});
    this.lanes = el("div", {});
    this.running = el("div", { class: "running-list" });
    this.queue = el("div", {});
    this.verdicts = el("div", {});
    this.windows = el(
      "select",
      { "aria-label": t("Period"), onchange: () => this.choose(this.windows.value) },
      ...WINDOWS.map(([value, text]) => el("option", { value, text, selected: value === this.window })),
    );
    const metric = app.study.metric;
    const progress = panel(metric ? t("{metric}: every run, and the champion so far", { metric }) : t("Runs"), this.progress);
    const lanes = panel(t("Slots"), this.lanes);
    lanes.querySelector(".bar-top").append(el("div", { class: "controls push" }, this.windows));
    const running = panel(t("Running"), this.running);
    const queue = panel(t("Queue"), this.queue);
    const verdicts = panel(t("Last verdicts"), this.verdicts);
    host.append(this.headline, this.alarms, this.tiles, columns([progress, lanes], [running, queue]), verdicts);
    this.charts = new Map();
    this.seq = -1;
    this.asked = 0;
    this.stop = every(1000, () => this.ask());
    this.stopCurves = every(3000, () => this.askCurves());
  }
  destroy() {
    this.stop();
    this.stopCurves();
    for (const chart of this.charts.values()) chart.chart.destroy();
  }
  choose(value) {
    this.chosenWindow = value;
    this.window = value;
    this.app.keep({ window: value });
    this.asked = 0;
    this.ask();
  }
  // Ask again if something happened, if something runs, and now and then.
  async ask() {
    if (!this.app.store.heard) return; // how long the study has run is not known yet
    if (!this.chosenWindow) this.windows.value = this.window = this.usualWindow();
    const { seq, engine } = this.app.store.state;
    const isNew = seq !== this.seq || (engine !== null && Date.now() - this.asked > 2000);
    if (!isNew && Date.now() - this.asked < 15000) return;
    this.asked = Date.now();
    this.seq = seq;
    const found = await get("now", { study: this.app.study.name, since: this.visit.since, window: this.window });
    this.visit.saw(found.seq);
    this.found = found;
    this.draw();
  }
  update(changed) {
    if (!this.asked) this.ask();
    if (!changed.length || this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = null;
      this.drawProgress();
    });
  }
  draw() {
    const found = this.found;
    this.drawHeadline(found);
    this.alarms.replaceChildren(
      ...(found.alarms || []).map((text) => el("p", { class: "alarm", role: "alert" }, el("b", { text: t("alarm") }), text)),
    );
    this.drawTiles(found);
    this.drawLanes(found);
    this.drawRunning(found);
    this.drawQueue(found);
    this.drawVerdicts(found);
    this.drawProgress();
  }
  drawHeadline(found) {
    const since = found.happened;
    const isFirst = !since || found.is_first;
    const parts = [];
    if (since) {
      const tried = since.tried ? t("{n} {n|idea|ideas} tried", { n: since.tried }) : t("No new idea tried");
      const kept = since.verdicts.keep || 0;
      parts.push(t("{tried}, {kept}.", { tried, kept: kept ? t("{n} kept", { n: kept }) : t("none kept") }));
      if (since.champion && since.effect) {
        const [effect, low, high, against] = since.effect;
        parts.push(t("The champion is now {run}: better than {against} by {effect}.", { run: since.champion, against: against || t("the base"), effect: effectText(effect, low, high) }));
      } else if (found.judge && found.judge.champion) {
        parts.push(t("The champion is still {run}.", { run: found.judge.champion }));
      }
      const cost = [t("{n} device hours", { n: show(since.device_hours, 2) })];
      if (since.usd) cost.push(`$${since.usd.toFixed(2)}`);
      else if (since.calls) cost.push(t("{n} {n|agent call|agent calls}", { n: since.calls }));
      parts.push(t("It cost {cost}.", { cost: cost.join(", ") }));
      if (since.failed) parts.push(t("{n} {n|run|runs} failed.", { n: since.failed }));
      const alarms = isFirst ? found.alarms.length : since.alarms;
      parts.push(alarms ? t("{n} {n|alarm|alarms}.", { n: alarms }) : t("No alarms."));
    }
    const when = !isFirst ? t("Since your last visit, {time} ago", { time: ago(found.at - since.since) }) : t("So far");
    const needs = (found.needs || []).map((one) => el("li", { text: inLanguage(one.sentence) }));
    this.headline.replaceChildren(
      el("p", { class: "when" }, !isFirst ? el("button", { class: "quiet", title: t("Start counting from now"), onclick: () => this.markSeen(), text: when + " ✓" }) : when),
      el("h1", { text: parts.join(" ") || t("Nothing has run yet.") }),
      needs.length ? el("ul", { class: "needs", "aria-label": t("Needs attention") }, ...needs) : el("p", { class: "muted calm", text: t("Nothing needs attention.") }),
    );
  }
  // The shortest period that has the whole study, up to an hour.
  usualWindow() {
    const first = this.app.store.rows.values().next().value;
    const age = first ? Date.now() / 1000 - first.created : Infinity;
    return (WINDOWS.find(([seconds]) => Number(seconds) > age || seconds === "3600") || WINDOWS[1])[0];
  }
  markSeen() {
    this.visit.seenAll();
    this.asked = 0;
    this.seq = -1;
    this.ask();
  }
  drawTiles(found) {
    const { study } = this.app;
    const judge = found.judge;
    const tiles = [];
    const tile = (label, value, style, ...notes) =>
      el("div", { class: "tile" }, el("div", { class: "label", text: label }), el("div", { class: `value ${style}` }, value), ...notes.filter(Boolean).map((note) => el("div", { class: "note" }, note)));
    if (judge && judge.champion) {
      const gain = judge.gain;
      const better = gain ? t("better than the base by {effect}", { effect: effectText(gain.effect, gain.low, gain.high) }) : judge.champion === judge.base ? t("the base: nothing has beaten it yet") : null;
      tiles.push(tile(t("champion") + (study.metric ? ` · ${study.metric}` : ""), honest(judge.mean, judge.sd), "best", el("span", {}, runLink(this.app, judge.champion), ` · n ${judge.runs}`), better));
    } else if (study.metric) {
      const best = improvements(this.app.store.rows.values(), study.goal).pop();
      if (best) tiles.push(tile(t("best so far") + ` · ${study.metric}`, honest(best.mean, best.sd), "best", el("span", {}, runLink(this.app, best.id), ` · n ${best.measured}`), judge ? t("noise of the base: {have} of {needed} runs", { have: judge.floor[0], needed: judge.floor[1] }) : best.measured > 1 ? null : t("one run is a hint")));
    }
    if (judge) {
      const tests = judge.tests.map((test) => el("span", {}, runLink(this.app, test.run), " " + t("look {look}, {n} {n|run|runs}", { look: test.look, n: test.runs })));
      tiles.push(tile(t("under test"), tests.length ? String(tests.length) : t("nothing"), tests.length ? "" : "calm", ...(tests.length ? tests.slice(0, 3) : [judge.sigma === null ? t("the noise is not known yet") : t("noise between seeds: {sd}", { sd: show(judge.sigma, 2) })])));
      if (judge.by === "test") {
        const left = Math.max(0, judge.alpha - judge.spent - judge.reserved);
        const parts = [portion(judge.spent / judge.alpha, { class: "spent" }), portion(judge.reserved / judge.alpha, { class: "held" })];
        const bar = el("div", { class: "meter parts", role: "img", "aria-label": t("alpha spent {spent} of {alpha}", { spent: show(judge.spent, 2), alpha: judge.alpha }) }, ...parts);
        tiles.push(tile(t("alpha left"), show(left, 2), "", bar, t("{spent} of {alpha} spent", { spent: show(judge.spent, 2), alpha: judge.alpha }) + (judge.reserved ? ` · ${t("{n} reserved", { n: show(judge.reserved, 2) })}` : ""), judge.held_out ? t("held-out metric read {n} of {limit} times", { n: judge.held_out[0], limit: judge.held_out[1] }) : null));
      }
    }
    const rows = (found.budget || []).filter((one) => one.limit !== null || one.used);
    if (rows.length) {
      const list = el("div", { class: "budget-list" });
      for (const one of rows) {
        const left = one.left_s !== null && found.engine !== null ? t("{time} left", { time: ago(one.left_s) }) : "";
        list.append(el("div", { class: "budget-row" }, el("span", { class: "muted", text: t(one.name) }), el("span", { text: one.shown }), el("span", { class: "muted left", text: left })));
        if (one.limit) list.append(el("div", { class: "meter" }, portion(one.used / one.limit)));
      }
      tiles.push(el("div", { class: "tile" }, el("div", { class: "label", text: t("budget, at this pace") }), list));
    }
    const counts = Object.entries(found.counts || {}).map(([name, n]) => `${n} ${t(name)}`);
    tiles.push(tile(t("runs"), String(this.app.store.rows.size), "", counts.join(" · ") || t("none yet"), found.waiting ? t("{n} {n|proposal waits|proposals wait}", { n: found.waiting }) : null));
    this.tiles.replaceChildren(...tiles);
  }
  drawProgress() {
    const { store, study } = this.app;
    if (!store.rows.size || !study.metric) {
      this.figure = null;
      this.progress.replaceChildren(el("p", { class: "empty", text: study.metric ? t("No run has ended yet.") : t("The study has no objective.") }));
      return;
    }
    const champions = new Map(((this.found && this.found.judge && this.found.judge.champions) || []).map((one) => [one.run, one]));
    const points = [];
    const ordered = [...store.rows.values()].sort((a, b) => a.n - b.n);
    const path = champions.size ? [] : improvements(ordered, study.goal).map((row) => [row.n, row.mean]);
    for (const row of ordered) {
      if (row.state !== "ended") continue;
      const isLead = row.lead === row.id;
      const shape = SHAPES[VERDICT_SHAPES[row.verdict] ?? 0];
      const isChampion = champions.has(row.id);
      points.push({ id: row.id, n: row.n, value: row.objective, shape, size: isChampion ? 5.5 : isLead ? 3.6 : 2.2, style: isChampion ? "d-best" : !isLead ? "repeat" : row.verdict ? `t-${row.verdict}` : row.objective === null ? "t-crash" : "d6" });
    }
    for (const one of champions.values()) {
      if (one.mean === null || !store.rows.has(one.run)) continue;
      const before = ordered.filter((row) => row.ended !== null && row.ended <= one.at);
      const n = path.length ? Math.max(...before.map((row) => row.n), 1) : store.rows.get(one.run).n;
      path.push([n, one.mean]);
    }
    if (!points.length) {
      this.figure = null;
      this.progress.replaceChildren(el("p", { class: "empty", text: t("No run has ended yet.") }));
      return;
    }
    const key = JSON.stringify([points.length, points[points.length - 1], path]);
    if (this.figure && key === this.progressKey) return;
    this.progressKey = key;
    if (this.figure) this.figure.update({ points, path });
    else {
      this.progress.replaceChildren();
      this.figure = new Progress(this.progress, { label: t("objective of every run"), points, path, focus: this.focus, across: t("run number"), tell: (id) => this.tell(id) });
    }
  }
  tell(id) {
    const row = this.app.store.rows.get(id);
    if (!row) return [el("b", { text: id })];
    const lead = this.app.store.rows.get(row.lead) || row;
    return [
      el("b", { text: row.id }),
      ` ${row.by}${row.lead !== row.id ? ` · ${t("replicate of {run}", { run: row.lead })}` : ""}`,
      el("div", { text: `${show(row.objective)}${lead.measured > 1 ? `  (${honest(lead.mean, lead.sd)}, n ${lead.measured})` : ""} ${row.verdict ? t(row.verdict) : row.status || row.state}` }),
      el("div", { class: "why", text: row.reason }),
    ];
  }
  drawLanes(found) {
    const window = Number(this.window);
    const [from, to] = [found.at - window, found.at];
    const lanes = (found.lanes || []).map((lane) => {
      const isAgents = lane.bars.some((bar) => bar.kind === "agent");
      const bars = lane.bars.map((bar) => ({ id: isAgents ? `call:${bar.id}` : bar.id, from: bar.begin, to: bar.end || found.at, kind: bar.kind, text: bar.id }));
      return isAgents ? { name: t("agents"), bars } : { name: lane.name, bars: this.withGaps(lane.name, bars, from) };
    });
    if (!lanes.length) {
      this.timeline = null;
      this.lanes.replaceChildren(el("p", { class: "empty", text: t("Nothing ran in this period.") }));
      return;
    }
    if (this.timeline) this.timeline.update({ lanes, from, to });
    else {
      this.lanes.replaceChildren();
      this.timeline = new Timeline(this.lanes, { label: t("runs by slot over time"), lanes, from, to, focus: this.focus, tell: (id, spot) => this.tellLane(id, spot.bar) });
      this.lanes.append(
        el(
          "div",
          { class: "under" },
          ...[["keep", "keep"], ["inconclusive", "inconclusive"], ["discard", "discard"], ["failed", "failed"], ["replicate", "replicate"], ["running", "running"], ["agent", "agent"], ["wait", "waiting"]].map(([style, word]) => el("span", { class: "key" }, el("i", { class: `square sq-${style}` }), t(word))),
        ),
      );
    }
  }
  // Time between two runs of a slot, from a tenth of a second on, is waiting.
  withGaps(name, bars, from) {
    const ordered = [...bars].sort((a, b) => a.from - b.from);
    const gaps = [];
    ordered.forEach((bar, i) => {
      const next = ordered[i + 1];
      if (next && next.from - bar.to > 0.1) gaps.push({ id: `gap:${name}:${bar.id}`, from: Math.max(from, bar.to), to: next.from, kind: "wait", text: "" });
    });
    return [...gaps, ...ordered];
  }
  tellLane(id, bar) {
    const span = `${clock(bar.from)} – ${clock(bar.to)}, ${duration(bar.to - bar.from)}`;
    if (bar.kind === "wait") return [el("b", { text: t("waiting") }), el("div", { text: span })];
    if (String(id).startsWith("call:")) return [el("b", { text: t("agent call {call}", { call: bar.text }) }), el("div", { text: span })];
    return [...this.tell(id), el("div", { text: span })];
  }
  drawRunning(found) {
    const runs = found.running || [];
    const ids = new Set(runs.map((one) => one.run));
    for (const [id, kept] of this.charts) {
      if (!ids.has(id)) {
        kept.chart.destroy();
        kept.box.remove();
        this.charts.delete(id);
      }
    }
    if (!runs.length) {
      this.running.replaceChildren(el("p", { class: "empty", text: found.engine === null ? t("No engine is running.") : t("Nothing is running.") }));
      return;
    }
    const shown = runs.slice(0, 8);
    const nodes = shown.map((one) => {
      let kept = this.charts.get(one.run);
      if (!kept) {
        const head = el("div", { class: "run-head" });
        const plot = el("div", { class: "spark" });
        const box = el("div", { class: "running-run" }, head, plot);
        kept = { box, head, chart: new LineChart(plot, { label: one.run, height: 64, across: "", legend: false, clip: true }) };
        this.charts.set(one.run, kept);
      }
      const seconds = one.started === null ? null : found.at - one.started;
      const left = one.usual !== null && seconds !== null && one.usual > seconds ? t("about {time} left", { time: ago(one.usual - seconds) }) : null;
      kept.head.replaceChildren(
        el("span", {}, runLink(this.app, one.run), ` ${one.slot || ""}`),
        el("span", { class: "number", text: one.objective === null ? "" : show(one.objective) }),
        el("span", { class: "muted small", text: [one.step === null ? null : t("step {n}", { n: show(one.step) }), duration(seconds), left].filter(Boolean).join(" · ") }),
        el("span", { class: "muted small why", text: one.twin ? t("{role} of {run}", { role: t(one.role), run: one.twin }) : one.reason }),
      );
      return kept.box;
    });
    if (runs.length > shown.length) nodes.push(el("p", { class: "muted small", text: t("and {n} more", { n: runs.length - shown.length }) }));
    this.running.replaceChildren(...nodes);
  }
  async askCurves() {
    const ids = [...this.charts.keys()];
    if (!ids.length || !this.app.study.metric) return;
    const found = await get("curves", { study: this.app.study.name, runs: ids.join(","), metrics: JSON.stringify([this.app.study.metric]), points: 120, seeds: 1 });
    for (const chart of found.charts) {
      for (const series of chart.series) {
        const kept = this.charts.get(series.run);
        if (kept) kept.chart.setSeries([{ id: series.run, name: series.run, colour: "c0", x: chart.x, y: series.mean, low: series.low, high: series.high }]);
      }
    }
  }
  drawQueue(found) {
    const reason = found.engine === null ? t("no engine is running") : found.paused ? t("the study is paused") : t("all slots are busy, or the judge's replicates come first");
    const rows = (found.queue || []).map((one) =>
      el("li", {}, el("code", { class: "wrap", text: one.what }), el("span", { class: "muted small", text: [one.name, one.by, one.why].filter(Boolean).join(" · ") })),
    );
    const planned = (found.counts || {}).planned || 0;
    this.queue.replaceChildren(
      rows.length ? el("p", { class: "muted small", text: t("{n} planned, {m} waiting: {reason}.", { n: planned, m: found.waiting, reason }) }) : el("p", { class: "muted small", text: t("No proposal is waiting; proposers are called when a slot is free.") }),
      rows.length ? el("ol", { class: "queue" }, ...rows) : "",
      lab.control && !this.form ? (this.form = proposalForm(this.app)) : this.form || "",
    );
  }
  drawVerdicts(found) {
    const rows = (found.verdicts || []).map((one) => [
      nowrap(day(one.at)),
      runLink(this.app, one.run),
      verdictMark(one.verdict),
      effectText(one.effect, one.low, one.high),
      evidenceText(one),
      one.n || "",
      el("span", {}, one.why, one.flags.length ? el("span", { class: "muted", text: ` (${one.flags.join("; ")})` }) : ""),
    ]);
    const heads = [{ name: t("when") }, { name: t("run") }, { name: t("verdict") }, { name: t("better by, 95 %"), num: true }, { name: t("p / boundary"), num: true }, { name: "n", num: true }, { name: t("why"), wide: true }];
    this.verdicts.replaceChildren(found.judge ? plainTable(heads, rows, { empty: t("No verdict yet.") }) : el("p", { class: "empty", text: t("This study has no judge.") }));
  }
}

