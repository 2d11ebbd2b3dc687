// Agents and other proposers: said → asked → answered → guard → run → verdict → credit.

import { LineChart } from "../assets/charts.js";
import { duration, el, show } from "../assets/dom.js";
import { columns, every, nowrap, panel, plainTable, problemText, runLink, verdictMark } from "./common.js";
import { day, t } from "./i18n.js";
import { get } from "./store.js";

export class AgentsPage {
  constructor(host, app, query) {
    Object.assign(this, { host, app, open: query.get("call") });
    this.credit = el("div", {});
    this.weights = el("div", {});
    this.calls = el("div", { class: "calls" });
    this.said = el("div", {});
    host.append(columns([panel(t("Proposers and their credit"), this.credit, this.weights)], [panel(t("Messages to the agents"), this.said)]), el("h2", { class: "part", text: t("Calls") }), this.calls);
    this.cards = new Map();
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
    this.draw(await get("agents", { study: this.app.study.name }));
  }
  draw(found) {
    const spent = new Map();
    for (const call of found.calls) spent.set("agent", (spent.get("agent") || 0) + (call.usage.usd || 0));
    const rows = found.proposers.map((one) => {
      const cost = spent.get(one.name);
      return [one.name, one.proposals, el("span", { class: "v-keep", text: String(one.kept) }), one.partial, one.discarded, one.crashed, one.waiting, `${Math.round(100 * one.mean)} %`, cost ? `$${cost.toFixed(2)}` : "", cost && one.kept ? `$${(cost / one.kept).toFixed(2)}` : ""];
    });
    const names = [t("proposals"), t("kept"), t("partly"), t("discarded"), t("crashed"), t("waiting"), t("credit"), t("cost"), t("cost per keep")];
    const shown = [...spent.values()].some(Boolean) ? names : names.slice(0, -2); // no agent has a price
    const heads = [{ name: t("proposer") }, ...shown.map((name) => ({ name, num: true }))];
    this.credit.replaceChildren(plainTable(heads, rows.map((cells) => cells.slice(0, heads.length)), { empty: t("No proposals yet.") }), el("p", { class: "muted small", text: t("Credit: the chance that the next proposal is kept, estimated from earlier ones; partly: replicated, but not kept.") }));
    this.drawWeights(found.weights);
    this.said.replaceChildren(plainTable([{ name: t("when") }, { name: t("text") }], found.said.reverse().map((one) => [nowrap(day(one.at)), one.text]), { empty: t("No messages.") }));
    if (!found.calls.length) {
      this.calls.replaceChildren(el("p", { class: "empty", text: t("No agent has been called.") }));
      return;
    }
    const before = new Map(this.cards);
    this.cards = new Map();
    const nodes = found.calls.map((call) => {
      const key = JSON.stringify(call);
      const kept = before.get(call.call);
      const node = kept && kept.key === key ? kept.node : this.card(call, kept);
      this.cards.set(call.call, { key, node });
      return node;
    });
    this.calls.replaceChildren(...nodes);
  }
  drawWeights(weights) {
    const names = [...new Set(weights.flatMap((one) => Object.keys(one.weights)))];
    if (names.length < 2) return;
    if (!this.chart) this.chart = new LineChart(this.weights, { label: t("share of turns"), height: 160, across: t("proposals"), legend: true, range: [0, 1], clip: false });
    const x = weights.map((one) => one.n);
    this.chart.setSeries(names.map((name, place) => ({ id: name, name, colour: `c${place % 8}`, x, y: weights.map((one) => one.weights[name] ?? null) })));
  }
  card(call, kept) {
    const usage = call.usage;
    const tokens = (usage.input_tokens || 0) + (usage.output_tokens || 0);
    const state = call.interrupted ? ["stopped", t("interrupted")] : call.ended === null ? ["running", t("running")] : call.ok ? ["ok", t("answered")] : ["failed", t("failed")];
    const talk = el("div", { class: "talk" });
    const box = el(
      "details",
      { class: "call" },
      el("summary", {}, el("b", { text: call.call }), " ", el("span", { class: state[0], text: state[1] }), el("span", { class: "muted", text: ` ${[call.cli, day(call.at), call.seconds ? duration(call.seconds) : null, tokens ? t("{n} tokens", { n: tokens.toLocaleString() }) : null, usage.usd ? `$${usage.usd.toFixed(2)}` : null, call.n ? t("asked for {n}", { n: call.n }) : null, call.accepted === null || call.accepted === undefined ? null : t("{n} accepted by the guard", { n: call.accepted })].filter(Boolean).join(" · ")}` }), call.why && !call.ok ? el("span", { class: "refused small", text: call.why }) : null),
      call.void ? el("p", { class: "refused", text: `${t("void")}: ${call.void}` }) : null,
      ...call.refused.map((text) => el("p", { class: "muted", text: `${t("rejected by the guard")}: ${text}` })),
      talk,
    );
    const chain = call.proposals.map((one) => [el("code", { class: "wrap", text: one.edits.join("  ") }), one.reason, one.status === "rejected" ? el("span", { class: "v-discard", text: one.problems.join("; ") || t("rejected") }) : t(one.status), one.run ? runLink(this.app, one.run) : "–", one.objective === null ? t(one.state || "–") : show(one.objective), verdictMark(one.verdict)]);
    const outer = el("div", { class: "card call-box" }, box, chain.length ? plainTable([{ name: t("edits"), wide: true }, { name: t("why"), wide: true }, { name: t("guard") }, { name: t("run") }, { name: this.app.study.metric || t("objective"), num: true }, { name: t("verdict") }], chain) : "");
    box.addEventListener("toggle", () => box.open && this.loadTalk(call, talk));
    if (this.open === call.call || (kept && kept.node.querySelector("details").open)) box.open = true;
    return outer;
  }
  async loadTalk(call, talk) {
    if (talk.childElementCount && call.ended !== null) return;
    try {
      const found = await get("transcript", { study: this.app.study.name, call: call.call });
      talk.replaceChildren(
        ...found.items.map((item) => {
          if (item.kind === "message" || item.kind === "end") return el("div", { class: `say-${item.kind}`, text: item.text });
          if (item.kind === "output") return el("details", { class: "output" }, el("summary", { text: item.code ? t("output, exit code {n}", { n: item.code }) : t("output") }), el("pre", { text: item.text }));
          return el("pre", { class: `line-${item.kind}`, text: item.kind === "command" ? `$ ${item.text}` : item.text });
        }),
      );
    } catch (error) {
      talk.replaceChildren(el("p", { class: "muted", text: problemText(error) }));
    }
  }
}
