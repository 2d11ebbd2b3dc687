// Stages, suites and cases, with the tables and pictures that they wrote.

import { duration, el } from "../assets/dom.js";
import { every, panel, plainTable } from "./common.js";
import { day, t } from "./i18n.js";
import { showFile } from "./run.js";
import { get } from "./store.js";

export class PipelinesPage {
  constructor(host, app) {
    Object.assign(this, { host, app });
    this.view = el("div", {});
    this.body = el("div", {});
    host.append(this.body, this.view);
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
  files(folder, names) {
    if (!names || !names.length) return "";
    const links = names.map((name) => el("button", { class: "quiet link", text: name, onclick: () => this.open(folder, name) }));
    return el("details", {}, el("summary", { text: t("{n} {n|file|files}", { n: names.length }) }), el("p", { class: "links" }, ...links));
  }
  async open(folder, name) {
    await showFile(this.view, `api/artifact?${new URLSearchParams({ folder, name })}`, `${folder}/${name}`);
    this.view.scrollIntoView({ block: "nearest" });
  }
  draw(found) {
    if (!found.pipelines.length && !found.suites.length && !found.cases.length) {
      this.body.replaceChildren(el("p", { class: "empty", text: t("No stage, suite or case has run in this lab.") }));
      return;
    }
    const suites = found.suites.map((one) =>
      panel(
        `${t("suite")} ${one.id}`,
        el("p", {}, el("span", { class: styleOf(one.state), text: t(one.state) }), el("span", { class: "muted", text: ` ${one.study} · ${day(one.began)}${one.ended ? ` · ${duration(one.ended - one.began)}` : ""}` })),
        el("div", { class: "jobs" }, ...Object.entries(one.jobs).map(([name, state]) => el("span", { class: `job ${styleOf(state)}`, title: t(state) }, name, " ", el("small", { text: t(state) })))),
        this.files(one.folder, one.files),
      ),
    );
    const runs = [...found.pipelines].reverse().map((one) =>
      panel(
        one.folder,
        el("div", { class: "stages" }, ...one.stages.map((stage) => el("div", { class: `stage ${styleOf(stage.state)}`, title: stage.why }, el("b", { text: stage.stage }), el("span", { text: t(stage.state) }), el("small", { class: "muted", text: [stage.seconds ? duration(stage.seconds) : null, stage.attempt > 1 ? t("attempt {n}", { n: stage.attempt }) : null].filter(Boolean).join(" · ") })))),
        this.files(one.folder, one.files),
      ),
    );
    const cases = [...found.cases].reverse().map((one) => [one.tag, el("code", { text: one.folder }), el("span", { class: one.exit_code === 0 ? "ok" : "failed", text: String(one.exit_code) }), duration(one.ended - one.began), day(one.began)]);
    this.body.replaceChildren(...suites, ...runs, cases.length ? panel(t("Cases"), plainTable([{ name: t("case") }, { name: t("folder") }, { name: t("exit code"), num: true }, { name: t("time"), num: true }, { name: t("when") }], cases)) : "");
  }
}

const STYLES = { complete: "ok", failed: "failed", lost: "failed", stopped: "stopped", running: "running", unfinished: "stopped", ok: "ok" };
const styleOf = (state) => STYLES[state] || "";
