// Curves of some runs: one chart per metric with linked cursors. Zooming asks the server for finer buckets of what is
// seen; zoom, cursor and options are kept while data is updated.
//
//   const curves = new Curves(host, app, { smooth: 0.03, zoom: [low, high] or null, onzoom: (range or null) });
//   await curves.ask({ runs: "0001-abcd,…", seeds: 1 or null })     draw, or draw again
//   curves.set({ log, logX, smooth }); curves.destroy()

import { LineChart } from "../assets/charts.js";
import { el } from "../assets/dom.js";
import { t } from "./i18n.js";
import { get } from "./store.js";

const POINTS = 500;
const FIRST = 6; // charts that are drawn before the user asks for more
const WAIT_MS = 200;

export class Curves {
  constructor(host, app, { zoom = null, onzoom = null, ...options } = {}) {
    Object.assign(this, { host, app, options, zoom, onzoom, charts: new Map(), isAll: false, fine: null });
    this.more = el("button", { hidden: true, onclick: () => this.showAll() });
    host.after(this.more);
  }
  destroy() {
    clearTimeout(this.timer);
    for (const chart of this.charts.values()) chart.destroy();
    this.charts.clear();
    this.more.remove();
  }
  set(options) {
    Object.assign(this.options, options);
    for (const chart of this.charts.values()) chart.set(options);
    if ("logX" in options && this.found) this.askFine();
  }
  async ask(query) {
    this.query = { study: this.app.study.name, points: POINTS, ...query };
    this.found = await get("curves", this.query);
    if (this.zoom) await this.askFine();
    else this.draw();
  }
  // Finer buckets of the part that is seen, unless the server has sent every step already.
  async askFine() {
    const [zoom, query] = [this.zoom, this.query];
    this.fine = null;
    if (zoom && !this.found.charts.every((one) => one.exact)) {
      try {
        const found = await get("curves", { ...query, low: zoom[0], high: zoom[1], log: this.options.logX ? 1 : null });
        if (zoom !== this.zoom || query !== this.query) return;
        this.fine = new Map(found.charts.map((one) => [one.metric, one]));
      } catch {
        // the coarse curves stay
      }
    }
    this.draw();
  }
  zoomed(range) {
    this.zoom = range;
    if (this.onzoom) this.onzoom(range);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.found && this.askFine(), WAIT_MS);
  }
  showAll() {
    this.isAll = true;
    this.draw();
  }
  draw() {
    const several = this.found.charts.filter((one) => one.x.length > 1); // a single value is not a curve: it is in the table
    const shown = several.length ? several : this.found.charts;
    const limit = this.isAll ? shown.length : FIRST;
    for (const data of shown.slice(0, limit)) this.chartOf(data.metric).setSeries(seriesOf(this.merged(data)));
    if (!shown.length && !this.charts.size) this.host.replaceChildren(el("p", { class: "empty", text: t("These runs have no curves.") }));
    this.more.hidden = shown.length <= limit;
    this.more.textContent = t("{n} more metrics", { n: shown.length - limit });
  }
  chartOf(metric) {
    let chart = this.charts.get(metric);
    if (!chart) {
      const plot = el("div", {});
      if (!this.charts.size) this.host.replaceChildren();
      this.host.append(el("figure", { class: "multiple" }, el("figcaption", { text: metric }), plot));
      chart = new LineChart(plot, { label: t("curves of {metric}", { metric }), height: 220, across: t("step"), sync: "curves", legend: true, clip: true, ...this.options, onzoom: (range) => this.zoomed(range) });
      chart.zoom = this.zoom;
      this.charts.set(metric, chart);
    }
    return chart;
  }
  // The fine buckets inside of the zoom, the coarse ones around it.
  merged(data) {
    const fine = this.fine && this.fine.get(data.metric);
    if (!fine || !fine.x.length) return data;
    const [low, high] = [fine.x[0], fine.x[fine.x.length - 1]];
    const before = data.x.findIndex((x) => x >= low);
    const head = before < 0 ? data.x.length : before;
    const after = data.x.findIndex((x) => x > high);
    const tail = after < 0 ? data.x.length : after;
    const join = (coarse, inner) => [...coarse.slice(0, head), ...inner, ...coarse.slice(tail)];
    const inside = new Map(fine.series.map((one) => [one.run, one]));
    const none = fine.x.map(() => null);
    const parts = ["mean", "low", "high"];
    const series = data.series.map((one) => {
      const own = inside.get(one.run);
      return { ...one, ...Object.fromEntries(parts.map((part) => [part, join(one[part], own ? own[part] : none)])) };
    });
    return { ...data, x: join(data.x, fine.x), series };
  }
}

function seriesOf(data) {
  return data.series.map((one, place) => ({
    id: one.run,
    name: one.runs > 1 ? t("{run} ({n} seeds)", { run: one.run, n: one.runs }) : one.run,
    colour: `c${place % 8}`,
    dash: place >= 8 ? [4, 3] : undefined,
    x: data.x,
    y: one.mean,
    low: one.low,
    high: one.high,
  }));
}
