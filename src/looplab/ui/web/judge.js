// The account of the judge: every verdict with its interval and its bar, alpha, noise, held-out reads, drift.

import { LineChart } from "../assets/charts.js";
import { Focus, el, honest, portion, show, svg } from "../assets/dom.js";
import { Forest, forestRows, linear } from "../assets/figures.js";
import { columns, effectText, every, evidenceText, facts, nowrap, panel, plainTable, runLink, verdictMark } from "./common.js";
import { day, inLanguage, t } from "./i18n.js";
import { get } from "./store.js";

const FOREST_ROWS = 40;

export class JudgePage {
  constructor(host, app) {
    Object.assign(this, { host, app });
    this.focus = new Focus();
    this.focus.listen((what) => what.picked && app.go("run", { run: what.picked }));
    this.stop = every(2000, () => this.ask());
  }
  destroy() {
    this.stop();
    if (this.chart) this.chart.destroy();
  }
  async ask() {
    const seq = this.app.store.state.seq;
    if (this.seq === seq) return;
    this.seq = seq;
    const found = await get("judge", { study: this.app.study.name });
    const key = JSON.stringify(found);
    if (key !== this.key) this.draw(found);
    this.key = key;
  }
  draw(found) {
    if (this.chart) this.chart.destroy();
    this.chart = null;
    const judge = found.judge;
    if (!judge) {
      this.host.replaceChildren(el("p", { class: "empty", text: t("This study has no judge: the best single run counts, and it may be luck.") }));
      return;
    }
    const compared = found.entries.filter((one) => one.effect !== null && !one.is_base);
    const forest = el("div", {});
    const forestCard = panel(t("Every challenger against the champion of its time"), compared.length ? forest : el("p", { class: "empty", text: t("No challenger has been judged yet.") }), el("p", { class: "under", text: t("Solid: pairs of the same seed. Dashed and hollow: one run, which is a hint, not a test. The grey band is the noise between seeds. p must not exceed its boundary.") + (compared.length > FOREST_ROWS ? ` ${t("{n} of {m} rows", { n: FOREST_ROWS, m: compared.length })}.` : "") }));
    const alpha = el("div", {});
    const noise = el("div", {});
    const drift = el("div", {});
    this.host.replaceChildren(el("p", { class: "headline", text: inLanguage(judge.headline) }), forestCard, columns([panel(t("Alpha: the chance of any false promotion"), alpha), panel(t("Drift: the same config over time"), drift)], [panel(t("Noise floor"), noise), this.reads(found)]), this.tests(found));
    if (compared.length) {
      const rows = forestRows(compared, FOREST_ROWS).map((one) => ({ id: one.run, name: one.run, verdict: one.verdict, effect: one.effect, low: one.low, high: one.high, paired: one.paired, p: one.p, bar: one.boundary, n: one.n, shown: effectText(one.effect, one.low, one.high) }));
      new Forest(forest, { label: t("effects with their intervals"), rows: rows.reverse(), focus: this.focus, noise: judge.sigma, best: judge.champion, across: t("better by ({metric})", { metric: this.app.study.metric }), tell: (id) => this.tell(compared.find((one) => one.run === id)) });
    }
    this.drawAlpha(alpha, found);
    this.drawNoise(noise, found);
    this.drawDrift(drift, found);
  }
  tell(one) {
    return [el("b", { text: one.run }), ` ${t(one.verdict)}`, el("div", { text: `${effectText(one.effect, one.low, one.high)}${one.p === null ? "" : `, p ${evidenceText(one)}`}` }), el("div", { class: "why", text: one.why })];
  }
  drawAlpha(host, { judge, entries }) {
    if (judge.by !== "test") {
      host.append(el("p", { class: "muted", text: t("The judge decides by {rule}, without a test: a promotion may be luck.", { rule: judge.by }) }));
      return;
    }
    const bar = el("div", { class: "meter tall parts", role: "img", "aria-label": t("alpha spent {spent} of {alpha}", { spent: show(judge.spent, 2), alpha: judge.alpha }) });
    const tested = entries.filter((one) => one.alpha !== null && one.verdict !== "keep");
    const part = (alpha, style, title) => bar.append(portion(alpha / judge.alpha, { class: style, title }));
    for (const one of tested) part(one.alpha, "spent", `${one.run}: ${show(one.alpha, 2)}`);
    part(judge.spent - tested.reduce((sum, one) => sum + one.alpha, 0), "spent", t("tests that ended without a p"));
    part(judge.reserved, "held", t("reserved by open tests"));
    host.append(
      bar,
      facts([
        [t("for the whole study"), show(judge.alpha, 2)],
        [t("spent by tests that promoted nothing"), show(judge.spent, 2)],
        [t("reserved by open tests"), show(judge.reserved, 2)],
        [t("left"), show(Math.max(0, judge.alpha - judge.spent - judge.reserved), 2)],
        [t("challengers"), Object.entries(judge.counts).map(([verdict, n]) => `${n} ${t(verdict)}`).join(", ") || t("none yet")],
      ]),
    );
  }
  drawNoise(host, { judge, entries }) {
    host.append(
      facts([
        [t("between seeds (standard deviation)"), judge.sigma === null ? t("not known yet") : show(judge.sigma, 3)],
        [t("from"), judge.noise_runs ? t("{n} runs of {m} {m|config|configs}", { n: judge.noise_runs, m: judge.noise_points }) : null],
        [t("seeds of the base"), `${judge.floor[0]} / ${judge.floor[1]}`],
      ]),
    );
    const known = entries.filter((one) => one.sigma !== null && one.at);
    if (known.length > 2) {
      const plot = el("div", {});
      host.append(plot);
      const first = known[0].at;
      const [unit, across] = known[known.length - 1].at - first < 5400 ? [60, t("minutes")] : [3600, t("hours")];
      this.chart = new LineChart(plot, { label: t("noise over time"), height: 140, across, legend: false, clip: false });
      this.chart.setSeries([{ id: "sigma", name: t("noise"), colour: "c0", x: known.map((one) => (one.at - first) / unit), y: known.map((one) => one.sigma) }]);
    }
  }
  drawDrift(host, { drift, judge }) {
    if (drift.length < 3) {
      host.append(el("p", { class: "muted", text: t("Too few repeats of the base or the champion yet.") }));
      return;
    }
    const [width, height, left] = [Math.max(260, Math.min(560, host.clientWidth - 28 || 520)), 170, 54];
    const values = drift.map((one) => one.value);
    const times = drift.map((one) => one.at);
    const room = (Math.max(...values) - Math.min(...values) || 1) * 0.08;
    const y = linear(Math.min(...values) - room, Math.max(...values) + room, height - 24, 10);
    const x = linear(Math.min(...times), Math.max(...times), left + 8, width - 10);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "drawn", role: "img", "aria-label": t("values of the base and the champion over time") });
    for (const value of y.ticks(4)) root.append(svg("line", { class: "grid-line", x1: left, x2: width - 8, y1: y(value), y2: y(value) }), svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", text: show(value, 4) }));
    for (const one of drift) {
      const style = one.of === judge.champion && judge.champion !== judge.base ? "own" : "rival";
      root.append(svg("circle", { cx: x(one.at), cy: y(one.value), r: 3.6, class: style }, svg("title", { text: `${one.run}: ${show(one.value)}, ${day(one.at)}` })));
    }
    root.append(svg("text", { x: left + 8, y: height - 6, text: day(Math.min(...times)) }), svg("text", { x: width - 10, y: height - 6, "text-anchor": "end", text: day(Math.max(...times)) }));
    host.append(root, el("p", { class: "under" }, el("span", { class: "key" }, el("i", { class: "dot-key rival" }), t("the base")), judge.champion !== judge.base ? el("span", { class: "key" }, el("i", { class: "dot-key own" }), t("the champion")) : "", el("span", { text: t("A trend here does not come from the config: check the machine or the data.") })));
  }
  reads({ judge, reads, restarts, changes: recorded }) {
    const changes = recorded.filter((one) => !one.budget_only);
    const budgets = recorded.filter((one) => one.budget_only);
    const rows = reads.map((one) => [nowrap(day(one.at)), runLink(this.app, one.run), runLink(this.app, one.against)]);
    return panel(
      t("Held-out reads"),
      judge.held_out ? el("p", { text: t("Read {n} of {limit} times. Its values are never sent to this page.", { n: judge.held_out[0], limit: judge.held_out[1] }) }) : el("p", { class: "muted", text: t("The study has no held-out metric.") }),
      rows.length ? plainTable([{ name: t("when") }, { name: t("challenger") }, { name: t("champion") }], rows) : "",
      ...judge.alarms.map((text) => el("p", { class: "alarm", text })),
      ...restarts.map((one) => el("p", { class: "noteline", text: `${day(one.at)}: ${t("the judge started over")}: ${one.why}` })),
      changes.length ? el("details", {}, el("summary", { text: t("The configuration was changed {n} {n|time|times}", { n: changes.length }) }), ...changes.map((one) => el("p", { class: "small", text: `${day(one.at)}: ${one.text}` }))) : "",
      ...budgets.map((one) => el("p", { class: "small muted", text: `${day(one.at)}: ${one.text}` })),
    );
  }
  tests({ judge, entries }) {
    const open = judge.tests.map((one) => [runLink(this.app, one.run), nowrap(t("under test")), one.look, one.runs, "", "", "", one.alpha === null ? "" : show(one.alpha, 2), "", ""]);
    const rows = [...entries].reverse().map((one) => [runLink(this.app, one.run), verdictMark(one.verdict), one.look || "", one.n || "", honest(one.mean, one.sd), effectText(one.effect, one.low, one.high), evidenceText(one), one.alpha === null ? "" : show(one.alpha, 2), one.at ? nowrap(day(one.at)) : "", el("span", {}, one.why)]);
    return panel(t("All verdicts"), plainTable([{ name: t("run") }, { name: t("verdict") }, { name: t("looks"), num: true }, { name: "n", num: true }, { name: t("mean"), num: true }, { name: t("better by, 95 %"), num: true }, { name: t("p / boundary"), num: true }, { name: t("alpha"), num: true }, { name: t("when") }, { name: t("why"), wide: true }], [...open, ...rows]));
  }
}
