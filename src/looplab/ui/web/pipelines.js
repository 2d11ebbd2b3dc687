// Stages, suites and cases, with the tables and pictures that they wrote.

import { duration, el } from "../assets/dom.js";
import { every, nowrap, panel, plainTable } from "./common.js";
import { day, t } from "./i18n.js";
import { csvTable, showFile } from "./run.js";
import { get } from "./store.js";

export class PipelinesPage {
  constructor(host, app) {
    Object.assign(this, { host, app, views: new Map() });
    this.stop = every(3000, () => this.ask());
  }
  destroy() {
    this.stop();
  }
  async ask() {
    const found = await get("pipelines");
    const key = JSON.stringify(found);
    if (key === this.key) return;
    this.key = key;
    this.draw(found);
  }
  // The first text and table of a folder; then its other files, and the one that is open, below them.
  files(one) {
    const { folder, files: names = [], tables = [] } = one;
    const shown = tables.map(({ name, text }) => (name.endsWith(".csv") ? el("div", {}, el("p", { class: "muted small", text: name }), csvTable(text)) : el("p", { class: "said", text })));
    if (!names.length) return el("div", {}, ...shown);
    if (!this.views.has(folder)) this.views.set(folder, el("div", {}));
    const view = this.views.get(folder);
    const open = (name) => showFile(view, `api/artifact?${new URLSearchParams({ folder, name })}`, name);
    const links = names.map((name) => (this.app.isExport ? el("span", { text: name }) : el("button", { class: "quiet link", text: name, onclick: () => open(name) })));
    return el("div", {}, ...shown, el("details", {}, el("summary", { text: t("{n} {n|file|files}", { n: names.length }) }), el("p", { class: "links" }, ...links)), view);
  }
  stage(stage) {
    const used = [stage.seconds ? duration(stage.seconds) : null, stage.attempt > 1 ? t("attempt {n}", { n: stage.attempt }) : null];
    const why = stage.why && stage.state !== "complete" ? stage.why : null;
    return el("div", { class: `stage ${styleOf(stage.state)}`, title: stage.why }, el("b", { text: stage.stage }), el("span", { text: t(stage.state) }), el("small", { class: "muted", text: used.filter(Boolean).join(" · ") }), why ? el("small", { class: "why", text: why }) : null);
  }
  draw(found) {
    if (!found.pipelines.length && !found.suites.length && !found.cases.length) {
      this.host.replaceChildren(el("p", { class: "empty", text: t("No stage, suite or case has run in this lab.") }));
      return;
    }
    const suites = [...found.suites].reverse().map((one) =>
      panel(
        `${t("suite")} ${one.id}`,
        el("p", {}, el("span", { class: styleOf(one.state), text: t(one.state) }), el("span", { class: "muted", text: ` ${one.study} · ${day(one.began)}${one.ended ? ` · ${duration(one.ended - one.began)}` : ""}` })),
        el("div", { class: "jobs" }, ...Object.entries(one.jobs).map(([name, state]) => el("span", { class: `job ${styleOf(state)}`, title: t(state) }, name, " ", el("small", { text: t(state) })))),
        this.files(one),
      ),
    );
    for (const one of suites) one.classList.add("whole");
    const runs = [...found.pipelines].reverse().map((one) => panel(one.folder, el("div", { class: "stages" }, ...one.stages.map((stage) => this.stage(stage))), this.files(one)));
    for (const [place, one] of [...found.pipelines].reverse().entries()) if ((one.tables || []).length) runs[place].classList.add("whole");
    const cases = [...found.cases].reverse().map((one) => [one.tag, el("code", { text: one.folder }), el("span", { class: one.exit_code === 0 ? "ok" : "failed", text: String(one.exit_code) }), duration(one.ended - one.began), nowrap(day(one.began))]);
    const heads = [{ name: t("case") }, { name: t("folder"), wide: true }, { name: t("exit code"), num: true }, { name: t("time"), num: true }, { name: t("when") }];
    const last = cases.length ? [panel(t("Cases"), plainTable(heads, cases))] : [];
    for (const one of last) one.classList.add("whole");
    this.host.replaceChildren(el("div", { class: "pipelines" }, ...suites, ...runs, ...last));
  }
}

const STYLES = { complete: "ok", failed: "failed", lost: "failed", stopped: "stopped", running: "running", unfinished: "stopped", ok: "ok" };
const styleOf = (state) => STYLES[state] || "";
