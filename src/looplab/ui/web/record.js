// The chain of events, live; whether it is whole, and where its head was published.

import { el } from "../assets/dom.js";
import { every, facts, panel, runLink } from "./common.js";
import { ago, day, t } from "./i18n.js";
import { get } from "./store.js";

const MAX_SHOWN = 2000;

export class RecordPage {
  constructor(host, app, query) {
    Object.assign(this, { host, app, newest: 0, oldest: null });
    this.state = el("div", {});
    this.kind = el("input", { type: "search", placeholder: t("kind, such as judged"), "aria-label": t("Kind of event"), value: query.get("kind") || "", onchange: () => this.restart() });
    this.body = el("tbody", {});
    this.more = el("button", { text: t("Older events"), onclick: () => this.older() });
    const heads = ["#", t("when"), t("event"), t("run"), t("data"), t("hash")];
    const table = el("table", { class: "plain events stacked", "aria-label": t("Events") }, el("thead", {}, el("tr", {}, ...heads.map((name) => el("th", { scope: "col", class: "head", text: name })))), this.body);
    const card = panel(t("Events"), el("div", { class: "table-box" }, table), this.more);
    card.querySelector(".bar-top").append(el("div", { class: "controls push" }, this.kind));
    host.append(panel(t("The record"), this.state), card);
    this.stop = every(1000, () => this.ask());
  }
  destroy() {
    this.stop();
  }
  restart() {
    this.app.keep({ kind: this.kind.value || null });
    this.body.replaceChildren();
    this.newest = 0;
    this.oldest = null;
    this.ask();
  }
  async ask() {
    const kind = this.kind.value.trim() || null;
    const found = await get("record", { after: this.newest, kind, limit: this.newest ? 500 : 200 });
    if (kind !== (this.kind.value.trim() || null)) return;
    this.body.prepend(...found.events.map((one) => this.row(one)));
    while (this.body.childElementCount > MAX_SHOWN) this.body.lastElementChild.remove();
    if (found.events.length) {
      this.newest = found.events[0].seq;
      if (this.oldest === null) this.oldest = found.events[found.events.length - 1].seq;
    }
    this.more.hidden = this.oldest === null || this.oldest <= 1;
    this.drawState(found);
  }
  async older() {
    const found = await get("record", { before: this.oldest, kind: this.kind.value.trim() || null, limit: 200 });
    this.body.append(...found.events.map((one) => this.row(one)));
    this.oldest = found.events.length ? found.events[found.events.length - 1].seq : 1;
    this.more.hidden = this.oldest <= 1;
  }
  row(one) {
    const isHere = this.app.study && one.study === this.app.study.name;
    return el("tr", {}, el("td", { class: "num", "data-name": "#", text: String(one.seq) }), el("td", { class: "nowrap", text: day(one.at) }), el("td", { class: "nowrap", text: one.kind }), el("td", {}, one.run && isHere ? runLink(this.app, one.run) : one.run || ""), el("td", { class: "wide" }, el("code", { class: "wrap clip", title: one.data, text: one.data })), el("td", {}, el("code", { class: "muted", text: one.hash })));
  }
  drawState({ head, chain, anchor, path }) {
    if (!head) {
      this.state.replaceChildren(el("p", { class: "muted", text: t("There is no ledger yet.") }));
      return;
    }
    const isWhole = !chain.broken && chain.checked >= head.seq;
    const text = chain.broken ? `${t("The chain is broken")}: ${chain.broken}` : isWhole ? t("The chain is intact: {n} events", { n: head.seq }) : t("checked {n} of {m} events …", { n: chain.checked, m: head.seq });
    const key = JSON.stringify([head, chain, anchor, Math.floor(Date.now() / 30000)]);
    if (key === this.key) return;
    this.key = key;
    this.state.replaceChildren(
      el("p", { class: `big ${chain.broken ? "v-discard" : isWhole ? "v-keep" : "muted"}`, role: "status", text }),
      facts([
        [t("head"), el("code", { text: `${head.seq}:${head.hash}` })],
        [t("last anchor"), anchor ? t("event {n}, {time} ago: {where}", { n: anchor.seq, time: ago(Date.now() / 1000 - anchor.at), where: (anchor.where || []).join(", ") }) : t("never: anyone who can write the ledger could rewrite it; looplab anchor publishes its head")],
        [t("ledger"), el("code", { text: path })],
        [t("files of the runs"), t("compared by looplab verify")],
      ]),
    );
  }
}
