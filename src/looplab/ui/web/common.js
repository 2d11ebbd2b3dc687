// Parts that several pages share.
//
//   runLink(app, id)            a link to the page of a run
//   verdictMark(verdict)        a verdict as a word with its colour and shape
//   effectText(effect, low, high)   0.21 [0.18, 0.25], with decimals that fit the interval
//   evidenceText(verdict)       its p and the boundary that it had to pass
//   panel(title, ...children)   a card; columns(left, right) two columns of them; facts(pairs) a list of names and values; plainTable(heads, rows), where a head {name, num, wide: true} makes rows of a narrow page stack
//   every(ms, ask)              call ask now and again while the page is seen; returns a function that ends it

import { el, pValue, show } from "../assets/dom.js";
import { SHAPES, VERDICT_SHAPES, icon } from "../assets/figures.js";
import { t } from "./i18n.js";

export function runLink(app, id, text) {
  if (!id) return el("span", { class: "muted", text: "–" });
  return el("a", { href: app.address("run", { run: id }), class: "run-link", text: text || id });
}

export function verdictMark(verdict) {
  if (!verdict) return el("span", { class: "muted", text: "–" });
  const shape = SHAPES[VERDICT_SHAPES[verdict] ?? 4];
  return el("span", { class: `key nowrap v-${verdict}` }, icon(`t-${verdict} l-${verdict}`, shape(6, 6, 4)), t(verdict));
}

export function effectText(effect, low, high) {
  if (effect === null || effect === undefined) return "–";
  if (low === null || low === undefined || high === null || high === undefined) return show(effect, 3);
  const width = high - low;
  if (!(width > 1e-6 && width < 1e6)) return `${show(effect, 3)} [${show(low, 3)}, ${show(high, 3)}]`;
  const decimals = Math.max(0, Math.min(9, -Math.floor(Math.log10(width / 4))));
  const fixed = (value) => value.toFixed(decimals).replace(/^-(0(\.0*)?)$/, "$1").replace("-", "−");
  return `${fixed(effect)} [${fixed(low)}, ${fixed(high)}]`;
}

export const evidenceText = (one) => (one.p === null ? t("no test") : `${pValue(one.p)} / ${one.boundary === null ? "–" : pValue(one.boundary)}`);

export function panel(title, ...children) {
  return el("section", { class: "card", "aria-label": title }, title ? el("div", { class: "bar-top" }, el("h2", { text: title })) : null, ...children);
}

// Two columns of cards, which fill up independently of each other; one below the other on a narrow page.
export function columns(left, right) {
  return el("div", { class: "two-columns" }, el("div", {}, ...left), el("div", {}, ...right));
}

export function facts(pairs) {
  const list = el("dl", { class: "facts" });
  for (const [name, value] of pairs) {
    if (value === null || value === undefined || value === "") continue;
    list.append(el("dt", { text: name }), el("dd", {}, value instanceof Node ? value : String(value)));
  }
  return list;
}

export const nowrap = (text) => el("span", { class: "nowrap", text });

export function plainTable(heads, rows, options = {}) {
  const head = el("tr", {}, ...heads.map((one) => el("th", { scope: "col", class: one.num ? "num head" : "head", text: one.name ?? one })));
  const named = (head, cell) => ({ class: [head.num ? "num" : "", head.wide ? "wide" : "", cell === "" ? "none" : ""].join(" ").trim() || null, "data-name": head.name ?? head });
  const body = rows.map((cells) => el("tr", {}, ...cells.map((cell, place) => el("td", named(heads[place], cell), cell instanceof Node ? cell : String(cell ?? "–")))));
  if (!rows.length) return el("p", { class: "empty", text: options.empty || t("nothing yet") });
  const label = heads.map((one) => one.name ?? one).filter(Boolean).join(", ");
  return el("div", { class: "table-box" }, el("table", { class: heads.some((one) => one.wide) ? "plain stacked" : "plain", "aria-label": label }, el("thead", {}, head), el("tbody", {}, ...body)));
}

export function every(ms, ask) {
  let timer = null;
  let ended = false;
  const round = async () => {
    if (ended) return;
    if (document.visibilityState === "visible") {
      try {
        await ask();
      } catch (error) {
        if (error.status === undefined) console.debug(error);
      }
    }
    if (!ended) timer = setTimeout(round, ms);
  };
  round();
  return () => {
    ended = true;
    clearTimeout(timer);
  };
}

export function problemText(error) {
  return [error.message, error.hint].filter(Boolean).join(" — ");
}
