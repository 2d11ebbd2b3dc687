// Verdicts with effects and intervals; proposers; watch rules; reproductions.

// A shape per verdict, for readers who cannot distinguish the colours.
const VERDICTS = { keep: 0, inconclusive: 3, discard: 1, crash: 4, void: 4 };
const MOST_EFFECTS = 30;

// `right`: columns aligned to the right.
function plainTable(names, rows, right = []) {
  const head = names.map((name) => {
    const style = right.includes(name) ? "num" : null;
    return el("th", { scope: "col", class: style }, el("span", { class: "head-cell", text: name }));
  });
  const all = el("table", { class: "plain" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
  return el("div", { class: "scroll" }, all);
}

const runLink = (id) => el("a", { href: `#${id}`, text: id });

// One row per challenger: its name, its effect with the 95 % interval, and the numbers.
class Effects extends Points {
  constructor(host, entrants) {
    super(host, "how much better each challenger was, with its 95 % interval", focus);
    this.entrants = entrants;
    this.tell = (found) => {
      const one = this.entrants.find((entrant) => entrant.run === found.run);
      return describe(found.run, el("div", { text: one.why }), ...one.flags.map((text) => el("div", { text })));
    };
    this.redraw();
  }
  draw() {
    const step = 21;
    const narrow = this.width < 720;
    [this.left, this.right, this.top, this.bottom] = [84, narrow ? 84 : 350, 22, 42];
    const tall = this.top + step * this.entrants.length + this.bottom;
    this.size(tall);
    const bottom = tall - this.bottom;
    const { sigma } = DATA.judge;
    const ends = this.entrants.flatMap((one) => [one.effect, one.low ?? one.effect, one.high ?? one.effect]);
    const range = extent([...ends, 0, sigma || 0], 0.04, 1.5);
    const x = linear(Math.min(0, range.low), Math.max(0, range.high), this.left + 12, this.width - this.right - 12);
    const inside = (value) => within(x(value), this.left, this.width - this.right);
    for (const tick of x.ticks(Math.max(2, Math.floor((this.width - this.left - this.right) / 80)))) {
      const place = { x1: x(tick), x2: x(tick), y1: this.top - 4, y2: bottom };
      this.base.append(
        svg("line", { class: tick === 0 ? "zero" : "grid-line", ...place }),
        svg("text", { x: x(tick), y: bottom + 15, "text-anchor": "middle", text: show(tick, 4) }),
      );
    }
    if (sigma) {
      const [from, to] = [inside(-sigma), inside(sigma)];
      const band = { x: from, width: to - from, y: this.top - 4, height: bottom - this.top + 4 };
      this.base.prepend(svg("rect", { class: "noise", ...band }));
    }
    const middle = (this.left + this.width - this.right) / 2;
    const label = `better by, in ${DATA.metric}`;
    this.base.append(svg("text", { x: middle, y: bottom + 32, "text-anchor": "middle", text: label }));
    const columns = narrow
      ? [[8, "verdict"]]
      : [[12, "verdict"], [98, "better by, 95 %"], [254, "p"], [324, "n"]];
    const at = (offset) => this.width - this.right + offset;
    for (const [offset, text] of columns) this.base.append(svg("text", { x: at(offset), y: 12, text }));
    this.entrants.forEach((one, i) => {
      const y = this.top + step * (i + 0.5);
      const name = { x: 0, y: y + 4, class: one.run === DATA.best ? "best-name" : "title-text" };
      this.base.append(svg("text", { ...name, text: RUNS[one.run].id }));
      const cells = [one.verdict, one.shown, one.p ?? "no test", String(one.n)];
      columns.forEach(([offset], k) => {
        const style = k ? "title-text" : `t-${one.verdict}`;
        this.base.append(svg("text", { x: at(offset), y: y + 4, class: style, text: cells[k] }));
      });
      if (one.low !== null && one.high !== null) {
        const bar = { x1: inside(one.low), x2: inside(one.high), y1: y, y2: y };
        this.mark(one.run, svg("line", { class: `line bar-line l-${one.verdict}`, ...bar }));
      }
      const shape = SHAPES[VERDICTS[one.verdict] ?? 0];
      this.place(one.run, inside(one.effect), y, `t-${one.verdict}`, (px, py) => shape(px, py, 4));
    });
  }
  nearest(px, py) {
    const i = Math.floor((py - this.top) / 21);
    const one = this.entrants[i];
    const spot = one && this.spots.find((found) => found.run === one.run);
    return spot && !this.focus.hides(spot.run) ? spot : null;
  }
}

function drawJudged(host) {
  const judge = DATA.judge;
  if (!judge) return;
  const node = card("Judged", true);
  node.append(el("p", { class: "headline", text: `${judge.headline}.` }));
  node.append(el("ul", { class: "details-list" }, ...judge.sentences.map((text) => el("li", { text }))));
  const able = judge.entrants.filter((one) => one.effect !== null);
  if (able.length) {
    // Tested challengers first, then the latest.
    const ranked = [...able].sort((a, b) => (b.p !== null) - (a.p !== null) || able.indexOf(b) - able.indexOf(a));
    const chosen = new Set(ranked.slice(0, MOST_EFFECTS));
    const place = el("div");
    node.append(place);
    host.append(node);
    new Effects(place, able.filter((one) => chosen.has(one)));
    const keys = [...new Set(able.map((one) => one.verdict))].map((verdict) =>
      el("span", { class: "key" }, icon(`t-${verdict}`, SHAPES[VERDICTS[verdict] ?? 0](6, 6, 4)), verdict),
    );
    if (judge.sigma) keys.push(el("span", { class: "key" }, el("i", { class: "noise-mark" }), "the noise of one run"));
    keys.push(el("span", { text: "each against the champion of its time, in order of judgement" }));
    if (able.length > MOST_EFFECTS) keys.push(el("span", { text: `${MOST_EFFECTS} of ${able.length}` }));
    node.append(el("div", { class: "under" }, ...keys));
  } else {
    const text = "no challenger has been compared yet";
    node.append(el("div", { class: "empty", text }));
    host.append(node);
  }
}

// -- proposers

function drawMix(host) {
  if (!DATA.mix) return;
  const { credit, names, weights } = DATA.mix;
  const mixed = names.length > 1 && weights.length > 0;
  const node = card("Who proposed what", !mixed);
  const kinds = ["kept", "partly", "discarded", "crashed", "open"];
  const most = Math.max(1, ...credit.map((one) => one.slice(2).reduce((sum, n) => sum + n, 0)));
  const rows = credit.map(([name, proposals, ...fates]) => {
    const parts = fates.map((n, k) => {
      const part = el("i", { class: `fate ${kinds[k]}`, title: `${n} ${kinds[k]}` });
      part.style.width = `${(100 * n) / most}%`;
      return n ? part : null;
    });
    const cells = fates.map((n, k) => el("td", { class: n ? `num t-${kinds[k]}` : "num muted", text: String(n) }));
    const bar = el("td", { class: "fates" }, el("div", {}, ...parts));
    return el("tr", {}, el("td", { class: "name", text: name }), el("td", { class: "num", text: String(proposals) }), ...cells, bar);
  });
  node.append(plainTable(["by", "proposals", ...kinds, ""], rows, ["proposals", ...kinds]));
  const kept = DATA.judge ? "kept: judged better" : "kept: the best so far when it ended";
  node.append(el("div", { class: "under inset", text: `${kept}; partly: worth replicates, or undecided` }));
  host.append(node);
  if (mixed) drawWeights(host, names, weights);
}

function drawWeights(host, names, weights) {
  const node = card("How much each proposer is trusted", false);
  const place = el("div");
  node.append(place);
  host.append(node);
  const steps = weights.map(([n]) => n);
  const curves = names.map((_, k) => [k, steps, weights.map(([, shares]) => shares[k])]);
  const colour = (k) => (DATA.proposers.includes(names[k]) ? DATA.proposers.indexOf(names[k]) : k) % 8;
  const tell = (found) => [el("b", { text: names[found.run] }), ` ${Math.round(100 * found.value)} %`];
  const look = { style: (k) => `l${colour(k)}`, order: (k) => -k, tell };
  const options = { curves, ...look, tall: 190, range: { low: 0, high: 1 }, across: "proposals" };
  new Curves(place, "the share of each proposer over time", new Focus(), options);
  const last = weights[weights.length - 1][1];
  const keys = names.map((name, k) => {
    const mark = el("span", { class: `swatch k${colour(k)}` });
    return el("span", { class: "key" }, mark, `${name} ${Math.round(100 * last[k])} %`);
  });
  node.append(el("div", { class: "under" }, ...keys));
}

// -- watch rules and reproductions

function drawWatched(host) {
  if (DATA.watched.length) {
    const node = card("Watched", true);
    const rows = DATA.watched.map(([run, id, rule, text, stops]) => {
      const what = el("td", { class: stops ? "stopped" : "muted", text: stops ? "stopped" : "reported" });
      const name = el("td", { class: "name" }, run === null ? id : runLink(id));
      return el("tr", {}, name, el("td", { text: rule }), what, el("td", { text }));
    });
    node.append(plainTable(["run", "rule", "action", "observation"], rows));
    host.append(node);
  }
  if (DATA.reproduced.length) {
    const node = card("Reproductions", true);
    const name = (id) => el("td", { class: "name" }, runLink(id));
    const rows = DATA.reproduced.map(([run, again, same, why]) => {
      const result = el("td", { class: same ? "ok" : "failed", text: same ? "reproduced" : "not reproduced" });
      return el("tr", {}, name(run), name(again), result, el("td", { text: why }));
    });
    node.append(plainTable(["run", "repeated as", "result", "details"], rows));
    host.append(node);
  }
}
