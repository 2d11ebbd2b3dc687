// Where the champion comes from: champions as the trunk, the others as branches; and the versions of code.

import { Focus, el, honest, show, signed } from "../assets/dom.js";
import { Lineage } from "../assets/figures.js";
import { facts, panel, plainTable, runLink, verdictMark } from "./common.js";
import { day, t } from "./i18n.js";
import { showFile } from "./run.js";
import { get, improvements } from "./store.js";

export class LineagePage {
  constructor(host, app) {
    Object.assign(this, { host, app });
    this.focus = new Focus();
    this.focus.listen((what) => what.picked && app.go("run", { run: what.picked }));
    this.tree = el("div", {});
    this.path = el("div", {});
    this.versions = el("div", {});
    if (app.study) host.append(panel(app.study.metric ? t("{metric} over run number", { metric: app.study.metric }) : t("Lineage"), this.tree, el("p", { class: "under", text: t("Filled: kept or discarded; hollow: inconclusive; orange: champions. A line leads from a run to the runs derived from it.") })), panel(t("The path to the champion"), this.path));
    host.append(this.versions);
    this.ask();
    this.askVersions();
  }
  destroy() {
    this.isEnded = true;
  }
  update(changed, isFresh) {
    if (changed.length || isFresh) this.ask();
  }
  async ask() {
    this.isStale = true; // drawn again when the last drawing is over
    if (!this.app.study || this.waiting || this.isEnded) return;
    this.waiting = true;
    this.isStale = false;
    let champions = [];
    try {
      const found = await get("now", { study: this.app.study.name, since: 0 });
      champions = (found.judge && found.judge.champions) || [];
    } catch {
      // drawn without champions
    }
    this.draw(new Set(champions.map((one) => one.run)));
    setTimeout(() => {
      this.waiting = false;
      if (this.isStale) this.ask();
    }, 1500);
  }
  draw(champions) {
    const { store, study } = this.app;
    const leads = [...store.rows.values()].filter((row) => row.lead === row.id && row.role !== "imported");
    const lead = (id) => (store.rows.get(id) || {}).lead || id;
    const base = leads.find((row) => row.role === "base");
    if (!champions.size) for (const row of improvements(leads, study.goal)) champions.add(row.id);
    const nodes = leads.map((row) => ({ id: row.id, name: row.id, parent: row.parent ? lead(row.parent) : base && row !== base ? base.id : null, n: row.n, value: row.mean ?? null, verdict: row.verdict, isChampion: champions.has(row.id) }));
    if (!nodes.some((node) => node.value !== null)) {
      this.figure = null;
      this.tree.replaceChildren(el("p", { class: "empty", text: t("No run has ended yet.") }));
    } else if (this.figure) this.figure.update({ nodes });
    else {
      this.tree.replaceChildren();
      this.figure = new Lineage(this.tree, { label: t("Lineage"), nodes, focus: this.focus, goal: study.goal, across: t("run number"), tell: (id) => this.tell(id) });
    }
    const way = [];
    let at = leads.filter((row) => champions.has(row.id)).sort((a, b) => a.n - b.n).pop();
    for (const seen = new Set(); at && !seen.has(at.id); at = at.parent ? store.rows.get(lead(at.parent)) : at === base ? null : base) {
      seen.add(at.id);
      way.push(at);
    }
    const rows = way.map((row, place) => {
      const before = way[place + 1];
      const changed = before ? store.knobs.map((key, k) => [key, before.knobs[k] ?? null, row.knobs[k] ?? null]).filter(([, a, b]) => a !== b).map(([key, a, b]) => `${key}: ${show(a)} → ${show(b)}`) : [];
      return [runLink(this.app, row.id), row.measured ? honest(row.mean, row.sd) : "–", before && row.mean !== null && before.mean !== null ? signed(row.mean - before.mean) : "", verdictMark(row.verdict), row.by, el("code", { class: "wrap", text: changed.join("  ") }), row.reason];
    });
    this.path.replaceChildren(plainTable([{ name: t("run") }, { name: study.metric || t("objective"), num: true }, { name: "Δ", num: true }, { name: t("verdict") }, { name: t("by") }, { name: t("changed") }, { name: t("why"), wide: true }], rows));
  }
  tell(id) {
    const row = this.app.store.rows.get(id);
    return [el("b", { text: id }), ` ${row.by}`, el("div", { text: `${honest(row.mean, row.sd)} ${row.verdict ? t(row.verdict) : ""}` }), el("div", { class: "why", text: row.reason })];
  }
  async askVersions() {
    const found = await get("versions");
    if (!found.length) return;
    const cards = found.map((one) => {
      const view = el("div", {});
      const address = (name) => `api/artifact?${new URLSearchParams({ folder: one.folder, name })}`;
      return el(
        "section",
        { class: `card version ${one.champion ? "champion" : ""}` },
        el("h2", {}, `v${one.version}${one.attempt > 1 ? `.${one.attempt}` : ""} `, verdictMark(one.verdict), one.champion ? el("span", { class: "best-name", text: ` ${t("champion")}` }) : ""),
        facts([[one.metric || t("metric"), one.value === null ? null : show(one.value)], [t("state"), t(one.state)], [t("why"), one.why], [t("when"), one.ended ? day(one.ended) : null]]),
        one.note ? el("p", { class: "note", text: one.note }) : null,
        ...(this.app.isExport ? [] : one.pictures.slice(0, 2)).map((name) => el("img", { src: address(name), alt: name, class: "shown", loading: "lazy" })),
        el("p", { class: "links" }, ...(this.app.isExport ? [] : [...one.notes, ...one.pictures.slice(2)]).map((name) => el("button", { class: "quiet link", text: name, onclick: () => showFile(view, address(name), name) }))),
        view,
      );
    });
    this.versions.replaceChildren(el("h2", { class: "part", text: t("Versions of the code") }), el("div", { class: "cards" }, ...cards.reverse()));
  }
}
