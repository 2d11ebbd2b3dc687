// All runs: a virtual table with knobs and metrics as columns; chosen runs are compared below it.

import { LineChart } from "../assets/charts.js";
import { Focus, duration, el, honest, portion, show, tick } from "../assets/dom.js";
import { Parallel } from "../assets/figures.js";
import { Table, parseFilter } from "../assets/table.js";
import { columns, every, panel, plainTable, problemText, runLink } from "./common.js";
import { Curves } from "./curves.js";
import { day, t } from "./i18n.js";
import { get } from "./store.js";

const MAX_COMPARED = 20;
const PARALLEL_FROM = 8;

export class RunsPage {
  constructor(host, app, query) {
    Object.assign(this, { host, app, selected: [] });
    this.search = el("input", { type: "search", placeholder: t("lr<0.01 by:agent verdict:keep"), "aria-label": t("Filter"), value: query.get("q") || "", oninput: () => this.filter() });
    this.fold = tick(t("one row per config"), () => this.refold(), query.get("all") !== "1");
    this.count = el("span", { class: "muted small", role: "status" });
    this.choose = el("span", {});
    this.clear = el("button", { text: t("Clear the selection"), hidden: true, onclick: () => this.table.select([]) });
    this.compared = el("div", { class: "compared" });
    this.tableHost = el("div", {});
    const card = panel(t("Runs"), this.tableHost);
    card.querySelector(".bar-top").append(this.count, el("div", { class: "controls push" }, this.clear, this.search, this.fold, this.choose));
    this.knobCard = el("div", {});
    this.belief = new BeliefCard(app);
    host.append(card, this.compared, this.knobCard, this.belief.node);
    const zoom = (query.get("zoom") || "").split(",").map(Number);
    this.zoom = zoom.length === 2 && zoom.every(Number.isFinite) && zoom[0] < zoom[1] ? zoom : null;
    this.wanted = { sort: query.get("sort"), down: query.get("down") === "1", columns: query.get("cols"), select: query.get("select") };
    if (app.store.rows.size || app.store.heard) this.build();
    this.focus = new Focus();
    this.focus.listen((what) => what.picked && app.go("run", { run: what.picked }));
  }
  destroy() {
    if (this.stopCompare) this.stopCompare();
    if (this.curves) this.curves.destroy();
    this.belief.destroy();
  }
  get isFolded() {
    return this.fold.querySelector("input").checked;
  }
  update(changed, isFresh) {
    if (!this.table || isFresh) return this.build();
    if (changed.length) {
      const shown = this.isFolded ? [...new Set(changed.map((row) => this.app.store.rows.get(row.lead) || row))] : changed;
      this.table.update(shown);
    }
    if (changed.length || this.isReading) this.showCount();
    return null;
  }
  columns() {
    const { store, study } = this.app;
    const sign = study.goal === "max";
    const metric = study.metric;
    const knobNames = new Set(store.knobs.map((key) => shortName(key, store.knobs)));
    const value = (row) => (row.lead === row.id && this.isFolded ? row.mean : row.objective) ?? (row.state === "running" ? (row.metrics[0] ?? null) : null);
    return [
      { key: "run", name: t("run"), get: (row) => row.id, sort: (row) => row.n, narrow: true, width: 104 },
      { key: "objective", name: metric || t("objective"), num: true, get: (row) => (this.isFolded && row.sd ? honest(row.mean, row.sd) : show(value(row))), sort: value, down: sign, narrow: true, width: 128 },
      { key: "seeds", name: t("seeds"), num: true, get: (row) => (row.measured ? String(row.measured) : ""), sort: (row) => row.measured ?? null, width: 66 },
      { key: "verdict", name: t("verdict"), get: (row) => (row.verdict ? t(row.verdict) : row.state === "ended" && row.status === "ok" ? "" : t(row.status || row.state)), sort: (row) => row.verdict || row.status || row.state, style: (row) => (row.verdict ? `v-${row.verdict}` : row.status || row.state), narrow: true, width: 106 },
      { key: "by", name: t("by"), get: (row) => row.by, width: 84 },
      { key: "parent", name: t("from"), get: (row) => row.parent || row.base || "", width: 104, hidden: true },
      { key: "time", name: t("time"), num: true, get: (row) => this.seconds(row) === null ? "" : duration(this.seconds(row)), sort: (row) => this.seconds(row), width: 74 },
      ...store.knobs.map((key, place) => ({ key, name: shortName(key, store.knobs), title: key, num: true, get: (row) => (row.knobs[place] === undefined || row.knobs[place] === null ? "" : show(row.knobs[place])), sort: (row) => row.knobs[place] ?? null, hidden: place >= 14 })),
      ...store.metrics.map((name, place) => ({ key: `m:${name}`, name: knobNames.has(name) ? t("{name} (last)", { name }) : name, title: t("last value of {name}", { name }), num: true, get: (row) => (row.metrics[place] === undefined || row.metrics[place] === null ? "" : show(row.metrics[place])), sort: (row) => row.metrics[place] ?? null, hidden: place === 0 || place > 6, down: true })),
      { key: "reason", name: t("why"), get: (row) => row.reason, width: 380 },
      { key: "round", name: t("round"), num: true, get: (row) => String(row.round), sort: (row) => row.round, hidden: true, width: 62 },
      { key: "role", name: t("role"), get: (row) => t(row.role), hidden: true, width: 96 },
      { key: "seed", name: t("seed"), num: true, get: (row) => (row.seed === null ? "" : String(row.seed)), sort: (row) => row.seed, hidden: true, width: 60 },
      { key: "slot", name: t("slot"), get: (row) => row.slot || "", hidden: true, width: 70 },
      { key: "status", name: t("status"), get: (row) => row.status || row.state, hidden: true, width: 84 },
      { key: "created", name: t("created"), get: (row) => day(row.created), sort: (row) => row.created, hidden: true, width: 132, down: true },
    ];
  }
  seconds(row) {
    return row.started === null ? null : (row.ended ?? this.app.store.state.at) - row.started;
  }
  rows() {
    const all = [...this.app.store.rows.values()];
    return this.isFolded ? all.filter((row) => row.lead === row.id) : all;
  }
  build() {
    if (!this.app.store.columns.length) return;
    const before = this.table ? { state: this.table.state(), selected: [...this.table.selected] } : null;
    this.tableHost.replaceChildren();
    this.all = this.columns();
    this.table = new Table(this.tableHost, {
      label: t("Runs"),
      columns: this.all,
      rows: this.rows(),
      id: (row) => row.id,
      sort: { key: "run", down: true },
      pinned: (row) => row.state === "running",
      rowClass: (row) => (row.verdict ? `row-${row.verdict}` : row.state === "running" ? "row-running" : ""),
      second: (row) => `${row.by} · ${row.reason}`,
      selectable: true,
      empty: t("no runs yet"),
      onpick: (row) => row && this.app.go("run", { run: row.id }),
      onselect: (ids) => this.select([...ids]),
      onchange: () => this.keepState(),
    });
    if (before) {
      this.table.restore(before.state);
      this.table.select(before.selected);
    } else {
      const { sort, down, columns, select } = this.wanted;
      const state = {};
      if (sort) Object.assign(state, { sort, down });
      if (columns) state.columns = columns.split(",");
      if (sort || columns) this.table.restore({ ...this.table.state(), ...state });
      if (select) this.table.select(select.split(","));
    }
    this.choose.replaceChildren(this.table.chooser());
    this.filter();
    this.drawKnobs();
  }
  keepState() {
    if (!this.table || !this.all) return;
    const { sort, down, columns } = this.table.state();
    const usual = this.all.filter((one) => !one.hidden).map((one) => one.key).join(",");
    this.app.keep({
      sort: sort === "run" && down ? null : sort,
      down: sort === "run" && down ? null : down ? "1" : null,
      cols: columns.join(",") === usual ? null : columns.join(","),
      q: this.search.value || null,
      all: this.isFolded ? null : "1",
      select: this.selected.length ? this.selected.join(",") : null,
    });
  }
  refold() {
    this.table.setRows(this.rows());
    this.filter();
  }
  filter() {
    if (!this.table) return;
    this.table.setFilter(parseFilter(this.search.value, this.all, (row) => `${row.id} ${row.by} ${row.reason} ${row.verdict || ""} ${row.status || row.state} ${row.role}`));
    this.showCount();
    this.keepState();
  }
  showCount() {
    const [shown, all] = [this.table.view.length, this.rows().length];
    const text = shown === all ? t("{n} {n|row|rows}", { n: all }) : t("{n} of {m} rows", { n: shown, m: all });
    this.isReading = !this.app.store.state.complete;
    this.count.textContent = text + (!this.isReading ? "" : ` · ${t("reading configs …")}`);
  }

  // -- the chosen runs

  select(ids) {
    const chosen = ids.slice(0, MAX_COMPARED);
    if (chosen.join() === this.selected.join()) return;
    this.selected = chosen;
    this.clear.hidden = !chosen.length;
    this.keepState();
    if (this.stopCompare) this.stopCompare();
    if (this.curves) this.curves.destroy();
    Object.assign(this, { curves: null, drawn: null });
    this.compared.replaceChildren();
    if (!chosen.length) return;
    this.curveBox = el("div", { class: "small-multiples" });
    this.diffBox = el("div", {});
    const curves = panel(t("Curves"), this.curveBox);
    const smooth = el("input", { type: "range", min: 0, max: 0.3, step: 0.01, value: 0.03, "aria-label": t("smoothing"), oninput: () => this.curves.set({ smooth: Number(smooth.value) }) });
    const logY = tick(t("log y"), (on) => this.curves.set({ log: on }));
    const logX = tick(t("log x"), (on) => this.curves.set({ logX: on }));
    const seeds = tick(t("seeds apart"), () => this.compareCurves());
    this.seeds = seeds;
    curves.querySelector(".bar-top").append(el("div", { class: "controls push" }, el("label", {}, t("smoothing"), smooth), logY, logX, seeds));
    this.curves = new Curves(this.curveBox, this.app, { smooth: Number(smooth.value), zoom: this.zoom, onzoom: (range) => this.keepZoom(range) });
    this.compared.append(curves, panel(t("Differences of the configs, and metrics"), this.diffBox));
    this.askDiff();
    this.stopCompare = every(2000, () => this.compareCurves());
  }
  members() {
    const { rows } = this.app.store;
    return this.selected.flatMap((id) => {
      const row = rows.get(id);
      return row && row.group && this.isFolded ? [...row.group].filter((one) => !one.copy).map((one) => one.id) : [id];
    });
  }
  async compareCurves() {
    const ids = this.members();
    const isLive = ids.some((id) => (this.app.store.rows.get(id) || {}).state === "running");
    const key = ids.join() + this.seeds.querySelector("input").checked;
    if (key === this.drawn && !isLive) return;
    this.drawn = key;
    await this.curves.ask({ runs: ids.slice(0, 40).join(","), seeds: this.seeds.querySelector("input").checked ? 1 : null });
  }
  keepZoom(range) {
    this.zoom = range;
    this.app.keep({ zoom: range ? range.map((one) => Number(one.toPrecision(6))).join(",") : null });
  }
  async askDiff() {
    const chosen = this.selected;
    const found = await get("compare", { study: this.app.study.name, runs: chosen.join(",") });
    if (chosen !== this.selected) return;
    const heads = [{ name: "" }, ...found.runs.map((id) => ({ name: id, num: true }))];
    const rows = [
      ...found.config.map(([key, values]) => [el("code", { text: key }), ...values.map((value) => value ?? "–")]),
      ...found.metrics.map(([name, values]) => [el("span", { class: "muted", text: name }), ...values.map((value) => show(value))]),
    ];
    this.diffBox.replaceChildren(
      el("p", { class: "muted small", text: found.config.length ? t("Only keys that differ are listed; metrics below.") : t("The configs are the same.") }),
      plainTable(heads, rows),
    );
  }

  // -- what the knobs do

  async drawKnobs() {
    if (this.asking || !this.app.study.metric) return;
    this.asking = true;
    let found = null;
    try {
      found = await get("importance", { study: this.app.study.name });
    } catch {
      return;
    } finally {
      this.asking = false;
    }
    const { store, study } = this.app;
    const leads = [...store.rows.values()].filter((row) => row.lead === row.id && row.mean !== null && row.mean !== undefined && row.role !== "imported");
    const varying = store.knobs.map((key, place) => ({ key, place, values: leads.map((row) => row.knobs[place] ?? null) })).filter((one) => new Set(one.values).size > 1);
    this.knobCard.replaceChildren();
    if (leads.length < PARALLEL_FROM || !varying.length) return;
    const shares = el("div", { class: "shares" });
    for (const one of found.shares.slice(0, 12)) {
      shares.append(el("code", { text: one.knob }), el("div", { class: "meter" }, portion(one.share)), el("span", { class: one.clear ? "number" : "number muted", text: `${Math.round(100 * one.share)} %` }), el("span", { class: "muted small", text: one.clear ? "" : t("no more than chance") }));
    }
    const order = new Map(found.shares.map((one, place) => [one.knob, place]));
    const chosen = varying.sort((a, b) => (order.get(a.key) ?? 99) - (order.get(b.key) ?? 99)).slice(0, 8);
    const byId = new Map(leads.map((row) => [row.id, row]));
    const axis = (name, short, value, strong) => {
      const values = leads.map((row) => value(row.id));
      const numbers = values.filter((one) => typeof one === "number");
      const isNumber = numbers.length && numbers.length === values.filter((one) => one !== null).length;
      const distinct = [...new Set(numbers)].sort((a, b) => a - b);
      const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
      return isNumber
        ? { name, short, kind: "number", log: low > 0 && high / low >= 100, low, high, few: distinct.length <= 7 ? distinct : null, value, strong }
        : { name, short, kind: "category", names: [...new Set(values.map((one) => (one === null ? t("not set") : String(one))))].sort(), value: (id) => { const one = value(id); return one === null ? t("not set") : String(one); }, strong };
    };
    const axes = [...chosen.map((one) => axis(one.key, shortName(one.key, store.knobs), (id) => byId.get(id).knobs[one.place] ?? null, false)), axis(study.metric, study.metric, (id) => byId.get(id).mean, true)];
    const sign = study.goal === "max" ? 1 : -1;
    const ranked = [...leads].sort((a, b) => sign * (a.mean - b.mean));
    const rank = new Map(ranked.map((row, place) => [row.id, Math.min(9, Math.floor((10 * place) / ranked.length))]));
    const figure = el("div", {});
    const left = panel(t("Which knob matters"), found.note ? el("p", { class: "muted", text: found.note }) : shares, el("p", { class: "muted small", text: t("Share of the variance of {metric} that each knob explains by itself, over {n} runs.", { metric: study.metric, n: found.runs }) }));
    const right = panel(t("Knobs and result"), figure);
    this.knobCard.append(columns([right], [left]));
    new Parallel(figure, { label: t("Knobs and result"), axes, items: ranked.map((row) => row.id), focus: this.focus, style: (id) => `s${rank.get(id)}`, order: (id) => rank.get(id), tell: (id) => [el("b", { text: id }), ` ${show(byId.get(id).mean)}`, el("div", { class: "why", text: byId.get(id).reason })] });
  }
}

// What the model of the search predicts along each knob, the others as in the config that it believes in. Asked for by
// a click, since the model is refitted for it.
class BeliefCard {
  constructor(app) {
    Object.assign(this, { app, charts: [] });
    this.ask = el("button", { text: t("Ask the model"), onclick: () => this.load() });
    this.note = el("p", { class: "muted small", role: "status", text: t("The search model's prediction along each knob, with its uncertainty.") });
    this.plots = el("div", { class: "small-multiples" });
    this.node = panel(t("What the model believes"), this.note, this.plots);
    this.node.querySelector(".bar-top").append(el("div", { class: "controls push" }, this.ask));
    this.node.hidden = !app.study.metric || app.isExport;
  }
  destroy() {
    for (const chart of this.charts) chart.destroy();
    this.charts = [];
  }
  async load() {
    this.ask.disabled = true;
    this.note.textContent = t("The model is being fitted …");
    try {
      this.draw((await get("slices", { study: this.app.study.name })).belief);
    } catch (error) {
      this.note.textContent = problemText(error);
    }
    this.ask.disabled = false;
    this.ask.textContent = t("Ask again");
  }
  draw(belief) {
    this.destroy();
    this.plots.replaceChildren();
    if (!belief) {
      this.note.textContent = t("There is no model yet: too few configs are measured, or no knob can be searched.");
      return;
    }
    const { metric } = this.app.study;
    this.note.replaceChildren(t("{metric} along each knob, the others as in {run}, the config that the model believes in; mean and 95 % interval without the noise of a run, from {n} configs. Dots: measured configs, whose other knobs differ.", { metric, run: belief.run, n: belief.points }), " ", runLink(this.app, belief.run, t("Open it")));
    const { store } = this.app;
    const leads = [...store.rows.values()].filter((row) => row.lead === row.id && row.mean !== null && row.mean !== undefined);
    for (const slice of belief.slices) {
      const figure = el("div", {});
      const place = store.knobs.indexOf(slice.path);
      const measured = place < 0 ? [] : leads.map((row) => [row.knobs[place], row.mean]).filter(([x]) => x !== null && x !== undefined);
      const title = el("figcaption", {}, shortName(slice.path, store.knobs), el("span", { class: "muted", text: ` ${t("{n} % of the predicted variance", { n: Math.round(100 * slice.importance) })}` }));
      this.plots.append(el("figure", { class: "multiple", title: slice.path }, title, figure));
      if (slice.number) this.drawLine(figure, slice, measured);
      else figure.append(plainTable([{ name: t("value") }, { name: t("predicted"), num: true }, { name: t("95 % interval"), num: true }], slice.values.map((value, i) => [el("code", { class: value === slice.at ? "changed" : null, text: String(value) }), show(slice.mean[i], 4), `${show(slice.low[i], 4)} … ${show(slice.high[i], 4)}`])));
    }
  }
  drawLine(host, slice, measured) {
    const chart = new LineChart(host, { label: t("predicted {metric} along {knob}", { metric: this.app.study.metric, knob: slice.path }), height: 190, across: slice.path, legend: false, clip: false, logX: slice.log, range: beliefRange(slice) });
    this.charts.push(chart);
    const dots = measured.filter(([x]) => typeof x === "number" && (!slice.log || x > 0)).sort((a, b) => a[0] - b[0]);
    const inRange = dots.filter(([x]) => x >= slice.values[0] && x <= slice.values[slice.values.length - 1]);
    chart.setSeries([
      { id: "mean", name: t("predicted"), colour: "c0", x: slice.values, y: slice.mean, low: slice.low, high: slice.high },
      ...(inRange.length ? [{ id: "measured", name: t("measured"), colour: "c1", dots: true, x: inRange.map(([x]) => x), y: inRange.map(([, y]) => y) }] : []),
    ]);
  }
}

// The y axis of a slice: the mean and what is near it; where nothing was measured, the interval may be very wide.
function beliefRange({ mean, low, high }) {
  const widths = high.map((one, i) => one - low[i]).sort((a, b) => a - b);
  const [least, most] = [Math.min(...mean), Math.max(...mean)];
  const room = Math.max(most - least, widths[Math.floor(widths.length / 2)]) || Math.abs(most) * 0.05 || 1;
  return [Math.max(Math.min(...low), least - room), Math.min(Math.max(...high), most + room)];
}

export function shortName(key, keys) {
  const parts = key.split(".");
  for (let length = 1; length <= parts.length; length += 1) {
    const name = parts.slice(-length).join(".");
    if (keys.filter((other) => other === name || other.endsWith("." + name)).length === 1) return name;
  }
  return key;
}
