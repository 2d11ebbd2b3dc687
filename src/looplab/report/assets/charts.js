// Line charts on uPlot: smoothed lines over a faint min–max envelope, seed bands, zoom, pan, log axes, linked cursors.
//
// uPlot is not a module: load `vendor/uPlot.iife.min.js` as a classic script (and `vendor/uPlot.min.css`) before this one.
//
//   const chart = new LineChart(host, {
//     label: "curves of accuracy",      // for screen readers
//     height: 260, across: "step",      // name of the x axis
//     sync: "run",                      // charts with the same key share cursor and zoom
//     log: false, logX: false,          // log axes; values ≤ 0 are gaps
//     smooth: 0,                        // 0 … 0.99, share of the x range over which is averaged (exponentially, in x)
//     clip: true,                       // the y axis leaves out outliers and the first steep steps
//     legend: true,                     // names below the chart, with the values at the cursor (up to 12 series)
//     range: [0, 1],                    // fixed y range
//     tell: (series, x, y) => nodes,    // tooltip, instead of the default
//     format: (value) => text,
//     onhover: (id or null), onpick: (id), onzoom: ([low, high] or null),
//   });
//   chart.setSeries([{
//     id, name,                         // id: anything; series of the same id keep their place when data is updated
//     colour: "c0",                     // a CSS variable of theme.css without dashes: c0 … c7, r0 … r9, accent, none
//     x: [...], y: [...],               // null: a gap. Series with the very same x array are not joined, which is faster
//     low: [...], high: [...],          // envelope: min–max of each bucket, or the spread between seeds
//     width: 1.5, dash: [4, 3],
//     dots: true,                       // points without a line
//   }]);                                // may be called again at any time: zoom, cursor and highlight are kept
//   chart.set({log, logX, smooth, clip, across, …})   change options and redraw
//   chart.highlight(id or null); chart.show(Set of ids or null); chart.zoom → [low, high] or null; chart.zoomTo(range)
//   chart.cut                           // whether outliers are outside the y axis
//   chart.destroy()
//
// Pointer: drag zooms, Shift and drag pans, Ctrl and wheel zooms at the pointer, a double click resets. Keys, when the
// chart is focused: left and right move the cursor, + and − zoom, Shift with arrows pans, 0 or Escape resets.
//
//   smoothed(x, y, tau) → y                           exponential average with time constant tau in units of x

import { el, hideTip, show, showTip } from "./dom.js";
import { t } from "./i18n.js";

const linkedCharts = new Map();
const MAX_LEGEND = 12;
const SAMPLED = 4000;

export function smoothed(x, y, tau) {
  if (!(tau > 0)) return y;
  let [sum, weight, last] = [0, 0, null];
  return y.map((value, i) => {
    if (value === null || value === undefined) return value;
    const keep = last === null ? 0 : Math.exp(-Math.abs(x[i] - last) / tau);
    // Each point stands for the part of x since the previous one, so that a thinned curve looks the same.
    const own = last === null ? 1e-9 : 1 - keep;
    sum = sum * keep + own * value;
    weight = weight * keep + own;
    last = x[i];
    return sum / weight;
  });
}

export const cssColour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "#888";

function faint(colour, part) {
  const hex = /^#([0-9a-f]{6})$/i.exec(colour);
  return hex ? colour + Math.round(255 * part).toString(16).padStart(2, "0") : colour;
}

export class LineChart {
  constructor(host, options) {
    const given = { label: t("chart"), height: 260, across: t("step"), log: false, logX: false, smooth: 0, clip: true };
    this.options = { ...given, legend: true, format: (value) => show(value, 5), ...options };
    this.host = host;
    this.series = [];
    this.shown = null;
    this.hot = null;
    this.zoom = null;
    this.cut = false;
    this.place = el("div", { class: "plot", tabindex: 0, role: "img", "aria-label": this.options.label });
    this.keys = el("div", { class: "under plot-legend" });
    this.said = el("div", { class: "unseen", "aria-live": "polite" });
    host.append(this.place, this.keys, this.said);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(host);
    this.theme = matchMedia("(prefers-color-scheme: dark)");
    this.repaint = () => this.rebuild();
    this.theme.addEventListener("change", this.repaint);
    this.attributes = new MutationObserver(this.repaint);
    this.attributes.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    this.place.addEventListener("keydown", (event) => this.press(event));
    if (this.options.sync) {
      if (!linkedCharts.has(this.options.sync)) linkedCharts.set(this.options.sync, new Set());
      linkedCharts.get(this.options.sync).add(this);
    }
  }
  destroy() {
    this.observer.disconnect();
    this.attributes.disconnect();
    this.theme.removeEventListener("change", this.repaint);
    linkedCharts.get(this.options.sync)?.delete(this);
    this.plot?.destroy();
    this.plot = null;
    this.place.remove();
    this.keys.remove();
    this.said.remove();
  }

  // -- data

  setSeries(series) {
    const shape = (all) => all.map((one) => `${one.id}|${one.colour}|${one.width}|${Boolean(one.low)}`).join("\n");
    const isSame = this.plot && shape(series) === shape(this.series);
    this.series = series;
    if (!isSame) return this.rebuild();
    const data = this.data();
    this.plot.setData(data, this.zoom === null);
    if (this.zoom !== null) this.plot.setScale("x", { min: this.zoom[0], max: this.zoom[1] });
    this.drawLegend();
  }
  set(options) {
    Object.assign(this.options, options);
    this.rebuild();
  }
  // Columns for uPlot: x, then for each series its line, and its high and low if it has an envelope.
  data() {
    const { log, logX, smooth } = this.options;
    const usable = (value) => (value === null || !Number.isFinite(value) || (log && value <= 0) ? null : value);
    const clean = (values) => values.map(usable);
    const ends = this.series.flatMap((one) => (one.x.length ? [one.x[0], one.x[one.x.length - 1]] : []));
    const [low, high] = [Math.min(...ends), Math.max(...ends)];
    const tau = smooth ? (smooth * (high - low)) / 10 : 0;
    const parts = this.series.map((one) => {
      const y = clean(one.y);
      const columns = [tau ? smoothed(one.x, y, tau) : y];
      if (one.low) columns.push(clean(one.high), clean(one.low));
      else if (tau) columns.push(y, y);
      return { x: one.x, columns };
    });
    if (!parts.length) return [[]];
    const isOneGrid = parts.every((part) => part.x === parts[0].x);
    let data = isOneGrid
      ? [parts[0].x, ...parts.flatMap((part) => part.columns)]
      : globalThis.uPlot.join(parts.map((part) => [part.x, ...part.columns]));
    if (logX && data[0].some((value) => value <= 0)) {
      const from = data[0].findIndex((value) => value > 0);
      data = data.map((column) => (from < 0 ? [] : Array.from(column).slice(from)));
    }
    return data;
  }

  // -- drawing

  rebuild() {
    if (!globalThis.uPlot) throw new Error("vendor/uPlot.iife.min.js must be loaded before charts.js is used");
    const cursor = this.plot?.cursor.idx ?? null;
    this.plot?.destroy();
    this.plot = null;
    const data = this.data();
    if (!this.series.length || !data[0].length) {
      this.place.replaceChildren(el("div", { class: "empty", text: t("no values to draw") }));
      this.keys.replaceChildren();
      return;
    }
    this.place.replaceChildren();
    this.width = this.host.clientWidth || 600;
    this.plot = new globalThis.uPlot(this.layout(), data, this.place);
    if (this.zoom) this.plot.setScale("x", { min: this.zoom[0], max: this.zoom[1] });
    if (cursor !== null && cursor < data[0].length) this.moveCursor(cursor);
    this.drawLegend();
  }
  layout() {
    const { across, height, log, logX, sync, smooth } = this.options;
    const [muted, grid] = [cssColour("muted"), cssColour("grid")];
    const font = "11px system-ui, sans-serif";
    const axis = { stroke: muted, font, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const isInteger = this.series.every((one) => one.x.every(Number.isInteger));
    // A log axis has lines at the powers of ten alone, unless it spans less than two of them.
    const powers = (plot, ticks) => (plot.scales.x.max / plot.scales.x.min < 100 ? ticks : ticks.map((value) => (Math.abs(Math.log10(value) % 1) < 1e-6 ? value : null)));
    const gridX = logX ? { ...axis.grid, filter: powers } : axis.grid;
    const wanted = (plot, ticks) => ticks.map((value) => (value === null ? "" : show(value, 5)));
    this.columns = []; // uPlot series → ours; null for envelopes
    const series = [{}];
    const bands = [];
    for (const one of this.series) {
      const colour = cssColour(one.colour || "c0");
      this.columns.push(one);
      const look = { stroke: colour, width: one.width || 1.5, dash: one.dash, points: { show: one.dots || one.x.length < 2, size: one.dots ? 4 : 5 } };
      if (one.dots) Object.assign(look, { paths: () => null, points: { ...look.points, fill: faint(colour, 0.5), stroke: colour } });
      series.push({ ...look, spanGaps: false, show: !this.shown || this.shown.has(one.id) });
      if (one.low || smooth) {
        const at = series.length;
        const none = { stroke: null, width: 0, points: { show: false }, show: !this.shown || this.shown.has(one.id) };
        const edge = one.low ? none : { ...none, stroke: faint(colour, 0.28), width: 1 };
        series.push(edge, { ...none });
        this.columns.push(null, null);
        if (one.low) bands.push({ series: [at, at + 1], fill: faint(colour, 0.16), dir: -1 });
      }
    }
    const link = sync ? { key: sync, setSeries: false, scales: ["x", null] } : undefined;
    return {
      width: this.width,
      height,
      series,
      bands,
      legend: { show: false },
      scales: {
        x: { time: false, distr: logX ? 3 : 1, range: (plot, low, high) => this.xRange(low, high) },
        y: { distr: log ? 3 : 1, range: (plot, low, high) => this.yRange(plot, low, high) },
      },
      axes: [
        { ...axis, grid: gridX, label: across, labelSize: 16, labelFont: font, labelGap: 0, size: 26, values: wanted, incrs: isInteger ? WHOLE : undefined },
        { ...axis, size: 54, values: wanted },
      ],
      focus: { alpha: 0.25 },
      cursor: { dataIdx: nearestValue, sync: link, focus: { prox: 26 }, drag: { x: true, y: false, setScale: false, dist: 6 }, points: { size: 6 } },
      hooks: {
        init: [(plot) => this.listen(plot)],
        setSelect: [(plot) => this.selected(plot)],
        setCursor: [(plot) => this.pointed(plot)],
        setSeries: [(plot, at) => this.near(plot, at)],
      },
    };
  }
  // Exactly what was asked for: uPlot would round a log axis to powers of ten.
  xRange(low, high) {
    if (low !== high || low === null) return [low, high];
    return this.options.logX ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  }
  // The y axis: all values in view, or without outliers: what lies far outside the middle nine tenths is cut.
  yRange(plot, low, high) {
    if (this.options.range) return this.options.range;
    this.cut = false;
    if (low === null || high === null) return [0, 1];
    if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) high = low; // constant up to rounding
    else if (this.options.clip) {
      const values = this.inView(plot);
      if (values.length >= 8) {
        values.sort((a, b) => a - b);
        const at = (part) => values[Math.round(part * (values.length - 1))];
        const log = this.options.log;
        const [a, b] = log ? [Math.log(at(0.04)), Math.log(at(0.96))] : [at(0.04), at(0.96)];
        if (a < b) {
          const back = (value) => (log ? Math.exp(value) : value);
          const [from, to] = [back(a - 0.5 * (b - a)), back(b + 0.5 * (b - a))];
          this.cut = low < from || high > to;
          [low, high] = [Math.max(low, from), Math.min(high, to)];
        }
      }
    }
    if (this.options.log) return low === high ? [low / 2, high * 2] : [low * 0.95, high * 1.05];
    const pad = low === high ? Math.abs(low) * 0.05 || 1 : 0.04 * (high - low);
    return [low - pad, high + pad];
  }
  inView(plot) {
    const [first, last] = plot.series[0].idxs ?? [0, plot.data[0].length - 1]; // the scale itself is set after this
    const columns = this.columns.map((one, i) => (one && plot.series[i + 1].show ? plot.data[i + 1] : null)).filter(Boolean);
    const step = Math.max(1, Math.floor(((last - first) * columns.length) / SAMPLED));
    const values = [];
    let k = 0;
    for (const column of columns) {
      for (let i = first; i <= last; i++) {
        if (column[i] === null || column[i] === undefined) continue;
        if (k++ % step === 0) values.push(column[i]);
      }
    }
    return values;
  }
  resize() {
    if (!this.plot || Math.abs(this.host.clientWidth - this.width) <= 1 || !this.host.clientWidth) return;
    this.width = this.host.clientWidth;
    this.plot.setSize({ width: this.width, height: this.options.height });
  }

  // -- highlight, filter, legend

  highlight(id) {
    if (!this.plot || id === this.hot) return;
    this.hot = id;
    const at = this.columns.findIndex((one) => one && one.id === id);
    this.isQuiet = true;
    if (at >= 0) this.plot.setSeries(at + 1, { focus: true });
    else this.plot.setSeries(null, { focus: true });
    this.isQuiet = false;
  }
  show(ids) {
    this.shown = ids;
    this.rebuild();
  }
  drawLegend(at = null) {
    if (!this.options.legend || this.series.length > MAX_LEGEND) return this.keys.replaceChildren();
    const nodes = this.series.map((one) => {
      const column = this.columns.indexOf(one);
      const value = at === null ? null : this.plot.data[column + 1][at];
      const text = value === null || value === undefined ? one.name : `${one.name} ${this.options.format(value)}`;
      const mark = el("span", { class: `swatch k-${one.colour || "c0"}` });
      return el("span", { class: "key" }, mark, text);
    });
    this.keys.replaceChildren(...nodes);
  }

  // -- pointer and keyboard

  listen(plot) {
    const over = plot.over;
    over.addEventListener("dblclick", () => this.zoomTo(null));
    over.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return; // the page scrolls
      event.preventDefault();
      const box = over.getBoundingClientRect();
      this.zoomAt((event.clientX - box.left) / box.width, event.deltaY < 0 ? 0.8 : 1.25);
    });
    over.addEventListener("mousedown", (event) => {
      if (!event.shiftKey || event.button) return;
      event.preventDefault();
      event.stopImmediatePropagation();
      const [from, width] = [this.view(), over.clientWidth];
      const move = (next) => this.zoomTo(this.shifted(from, (event.clientX - next.clientX) / width));
      const end = () => {
        removeEventListener("mousemove", move);
        removeEventListener("mouseup", end);
      };
      addEventListener("mousemove", move);
      addEventListener("mouseup", end);
    }, true);
    over.addEventListener("click", () => {
      if (this.found && this.options.onpick) this.options.onpick(this.found.id);
    });
    over.addEventListener("mousemove", (event) => {
      this.event = event;
      this.look(this.found ?? null);
      this.pointed(plot);
    });
    over.addEventListener("mouseleave", () => {
      this.event = null;
      this.look(null);
    });
  }
  view() {
    const { min, max } = this.plot.scales.x;
    return [min, max];
  }
  // Positions in the drawn scale, so that zoom and pan work on a log axis too.
  shifted([low, high], by) {
    const [a, b] = this.options.logX ? [Math.log(low), Math.log(high)] : [low, high];
    const moved = [a + by * (b - a), b + by * (b - a)];
    return this.options.logX ? moved.map(Math.exp) : moved;
  }
  zoomAt(part, factor) {
    const [low, high] = this.options.logX ? this.view().map(Math.log) : this.view();
    const center = low + part * (high - low);
    const next = [center - (center - low) * factor, center + (high - center) * factor];
    this.zoomTo(this.options.logX ? next.map(Math.exp) : next);
  }
  zoomTo(range) {
    const group = this.options.sync ? linkedCharts.get(this.options.sync) : [this];
    for (const chart of group) chart.applyZoom(range);
    if (this.options.onzoom) this.options.onzoom(range);
  }
  applyZoom(range) {
    const x = this.plot?.data[0];
    if (!x) return;
    const isAll = range && range[0] <= x[0] && range[1] >= x[x.length - 1];
    this.zoom = !range || isAll ? null : range;
    const [min, max] = this.zoom || [x[0], x[x.length - 1]];
    this.plot.setScale("x", { min, max });
  }
  selected(plot) {
    const { left, width } = plot.select;
    if (width > 5) this.zoomTo([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }
  moveCursor(at) {
    const x = this.plot.data[0][at];
    this.plot.setCursor({ left: this.plot.valToPos(x, "x"), top: this.plot.over.clientHeight / 2 });
  }
  near(plot, at) {
    if (this.isQuiet) return;
    this.found = at ? this.columns[at - 1] : null;
    if (!this.event) return;
    this.look(this.found);
  }
  look(series) {
    if (this.options.onhover) this.options.onhover(series ? series.id : null);
    if (!series) hideTip();
    this.hot = series ? series.id : null;
  }
  pointed(plot) {
    const at = plot.cursor.idx;
    this.drawLegend(at ?? null);
    if (!this.event || !this.found || at === null || at === undefined) return hideTip();
    const column = this.columns.indexOf(this.found);
    const index = plot.cursor.idxs?.[column + 1] ?? at;
    const [x, y] = [plot.data[0][index], plot.data[column + 1][index]];
    if (y === null || y === undefined) return hideTip();
    const tell = this.options.tell || ((series) => [el("div", {}, el("b", { text: series.name }))]);
    const where = el("div", { text: `${this.options.across} ${show(x, 8)}: ${this.options.format(y)}` });
    const parts = this.options.tell ? tell(this.found, x, y) : [...tell(this.found), where];
    showTip(this.event, parts);
  }
  press(event) {
    if (!this.plot) return;
    const x = this.plot.data[0];
    const at = this.plot.cursor.idx ?? 0;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && event.shiftKey) this.zoomTo(this.shifted(this.view(), 0.15 * step));
    else if (step) {
      const next = Math.max(0, Math.min(x.length - 1, at + step * Math.max(1, Math.round(x.length / 100))));
      this.moveCursor(next);
      const named = this.series.slice(0, 5).map((one) => [one.name, this.plot.data[this.columns.indexOf(one) + 1][next]]);
      const values = named.filter(([, value]) => value !== null && value !== undefined);
      this.said.textContent = `${this.options.across} ${show(x[next], 8)}: ${values.map(([name, value]) => `${name} ${this.options.format(value)}`).join(", ")}`;
    } else if (event.key === "+" || event.key === "=") this.zoomAt(0.5, 0.7);
    else if (event.key === "-") this.zoomAt(0.5, 1.4);
    else if (event.key === "0" || (event.key === "Escape" && this.zoom)) this.zoomTo(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

// The index of the nearest value of a series: on a joined grid most places of a series are empty.
function nearestValue(plot, at, index) {
  const column = plot.data[at];
  const has = (i) => column[i] !== null && column[i] !== undefined;
  for (let by = 0; by < 60; by++) {
    if (has(index - by)) return index - by;
    if (has(index + by)) return index + by;
  }
  return index;
}

const WHOLE = [1, 2, 5].flatMap((factor) => [...Array(13).keys()].map((power) => factor * 10 ** power)).sort((a, b) => a - b);
