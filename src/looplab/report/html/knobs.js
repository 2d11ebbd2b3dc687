// Knobs: parallel coordinates, importance, and the objective by one knob.

function knobValue(run, k) {
  const value = RUNS[run].knobs[k];
  return DATA.knobs[k].kind === "category" && value === null ? t("not set") : value;
}

const objectiveRange = () => extent(order.map((run) => RUNS[run].obj), 0.05, 1.2);

const MOST_DOTS = 1500;

// The objective of each measured run by the value of one knob.
class Slice extends Figure {
  constructor(host, k) {
    super(host, { label: t("objective by one knob"), focus });
    [this.left, this.right, this.top, this.bottom] = [54, 14, 8, 34];
    this.tell = (run) => describe(run, el("div", { text: `${DATA.knobs[this.k].key} ${show(knobValue(run, this.k))}` }));
    // Of very many points an even sample; the best are always drawn.
    const every = Math.ceil(order.length / MOST_DOTS);
    this.runs = order.filter((_, i) => every === 1 || i % every === 0 || i > order.length - 50);
    this.choose(k);
  }
  choose(k) {
    this.k = k;
    this.redraw();
  }
  draw() {
    this.size(190);
    const [bottom, top] = [this.height - this.bottom, this.top];
    const knob = DATA.knobs[this.k];
    const isCategory = knob.kind === "category";
    const edge = isCategory ? 50 : 12;
    const x = axisScale(knob, this.left + edge, this.width - this.right - edge, 46);
    const { low, high } = objectiveRange();
    const y = linear(low, high, bottom - 6, top + 6);
    this.yAxis(y, 4);
    this.xAxis(x, bottom, knob.key + (knob.log ? `, ${t("log scale")}` : ""));
    const size = order.length > 300 ? 2.4 : 3.4;
    for (const run of this.runs) {
      const value = knobValue(run, this.k);
      let place = value === null ? NaN : x(value);
      if (Number.isNaN(place)) continue;
      // Categories get a deterministic jitter, so that points do not hide each other.
      if (isCategory) place += ((RUNS[run].n * 0.618034) % 1) * 36 - 18;
      const isBest = run === DATA.best;
      const shape = (px, py) => SHAPES[0](px, py, isBest ? size + 1.5 : size);
      this.dot(run, place, within(y(RUNS[run].obj), bottom, top), isBest ? "d-best" : `d${rank(run)}`, shape);
    }
  }
}

const MOST_AXES = 9;
const FEWEST_LINES = 8;
const MOST_NAMES = 30;
let parallel = null;

function drawKnobs(host) {
  if (!order.length) return;
  const shares = new Map(DATA.importance.shares.map(([k, share]) => [k, share]));
  const able = DATA.knobs.map((_, k) => k).filter((k) => (DATA.knobs[k].names || []).length <= MOST_NAMES);
  const isWorth = able.length > 0 && order.length >= FEWEST_LINES; // fewer lines say nothing
  if (isWorth) drawParallel(host, able, shares);
  const side = card(t("Knob importance"), !isWorth);
  host.append(side);
  drawImportance(side);
  if (parallel) parallel.update({ tall: () => tallAs(side, parallel.host) });
}

function drawParallel(host, able, shares) {
  const clear = el("button", { text: t("clear selection"), hidden: true, onclick: () => parallel.clear() });
  const node = card(t("Knobs and objective"), false, clear);
  const place = el("div");
  node.append(place);
  host.append(node);
  const most = [...able].sort((a, b) => (shares.get(b) || 0) - (shares.get(a) || 0)).slice(0, MOST_AXES);
  const axis = (k) => ({ ...DATA.knobs[k], name: DATA.knobs[k].key, value: (run) => knobValue(run, k) });
  const chosen = able.filter((k) => most.includes(k));
  const { low, high } = objectiveRange();
  const [worst, best] = DATA.goal === "max" ? [low, high] : [high, low];
  const last = { name: DATA.metric, short: DATA.metric, kind: "number", low: worst, high: best, strong: true };
  const line = (run, k) => el("div", { class: "why", text: `${DATA.knobs[k].key}: ${show(knobValue(run, k))}` });
  parallel = new Parallel(place, {
    label: t("parallel coordinates: the knobs and the objective of each measured run"),
    axes: [...chosen.map(axis), { ...last, value: (run) => within(RUNS[run].obj, low, high) }],
    items: order,
    focus,
    style: lineStyle,
    order: drawOrder,
    tell: (run) => describe(run, ...chosen.map((k) => line(run, k))),
    onbrush: () => {
      clear.hidden = !parallel.brushes.size;
      applyFilter();
    },
  });
  const keys = [ramp(), bestKey(), el("span", { text: t("drag along an axis to keep only those runs") })];
  if (parallel.drawn < order.length) keys.push(el("span", { text: t("{n} of {m} drawn", { n: parallel.drawn, m: order.length }) }));
  if (able.length > most.length) keys.push(el("span", { text: t("{n} of {m} keys", { n: most.length, m: able.length }) }));
  node.append(el("div", { class: "under" }, ...keys));
}

// As tall as the card next to it, so that the row is aligned.
function tallAs(side, host) {
  if (innerWidth <= 980) return 330;
  const end = side.lastElementChild.getBoundingClientRect().bottom;
  return Math.max(330, Math.min(560, end - host.getBoundingClientRect().top - 24));
}

function drawImportance(side) {
  const { shares, runs, label, note: why } = DATA.importance;
  if (why) {
    side.append(el("div", { class: "empty", text: `${t("Knob importance")}: ${why}.` }));
    return;
  }
  side.querySelector(".controls").append(el("span", { class: "muted small", text: t("share of variance, {label}", { label: t(label) }) }));
  const rows = shares.slice(0, 8).map(([k, share, clear]) => {
    const bar = el("span", { class: "fill" });
    bar.style.width = `${100 * share}%`;
    const row = el(
      "button",
      { class: clear ? "row" : "row chance", title: DATA.knobs[k].key + (clear ? "" : `: ${t("no more than chance")}`) },
      el("span", { class: "name", text: DATA.knobs[k].key }),
      el("span", { class: "track" }, bar),
      el("span", { class: "share", text: `${Math.round(100 * share)} %` }),
    );
    row.addEventListener("click", () => choose(k, row));
    return row;
  });
  const place = el("div");
  const measured = RUNS.some((_, i) => isRepeat(i)) ? t("{n} measured {n|config|configs}", { n: runs }) : t("{n} measured {n|run|runs}", { n: runs });
  const fine = [measured, DATA.importance.shared ? t("knobs changed together share the credit") : null, t("grey: no more than chance")].filter(Boolean).join("; ");
  const under = el("div", { class: "under" }, el("span", { text: fine }));
  side.append(el("div", { class: "shares" }, ...rows), under, place);
  const slice = new Slice(place, shares[0][0]);
  function choose(k, row) {
    for (const other of rows) other.setAttribute("aria-pressed", String(other === row));
    slice.choose(k);
  }
  choose(shares[0][0], rows[0]);
}
