// Verdicts with effects and intervals; proposers; watch rules; reproductions.

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

function drawJudged(host) {
  const judge = DATA.judge;
  if (!judge) return;
  const node = card(t("Judged"), true);
  node.append(el("p", { class: "headline", text: `${inLanguage(judge.headline)}${t(".")}` }));
  node.append(el("ul", { class: "details-list" }, ...inLanguage(judge.sentences).map((text) => el("li", { text }))));
  if (judge.alpha) node.append(alphaMeter(...judge.alpha));
  const able = judge.entrants.filter((one) => one.effect !== null);
  if (able.length) {
    const place = el("div");
    node.append(place);
    host.append(node);
    const shown = forestRows(able, MOST_EFFECTS);
    // The champion first, then in order of judgement.
    shown.sort((a, b) => (b.run === DATA.best) - (a.run === DATA.best));
    const why = (i) => able.find((one) => one.run === i);
    const tested = (one) => one.p !== null && one.n > 1;
    new Forest(place, {
      label: t("how much better each challenger was, with its 95 % interval"),
      across: t("better by, in {metric}", { metric: DATA.metric }),
      noise: judge.sigma,
      best: DATA.best,
      focus,
      rows: shown.map((one) => ({ ...one, id: one.run, name: RUNS[one.run].id, paired: tested(one) })),
      tell: (i) => describe(i, el("div", { text: why(i).why }), ...why(i).flags.map((text) => el("div", { text }))),
    });
    const keys = [...new Set(able.map((one) => one.verdict))].map((verdict) =>
      legendKey(`t-${verdict}`, SHAPES[VERDICT_SHAPES[verdict] ?? 0](6, 6, 4), t(verdict)),
    );
    if (judge.sigma) keys.push(el("span", { class: "key" }, el("i", { class: "noise-mark" }), t("the noise of one run")));
    if (shown.some((one) => !tested(one))) keys.push(el("span", { text: t("dashed: one run, no test") }));
    if (shown.some((one) => one.bar !== null)) keys.push(el("span", { text: t("p / boundary: the required p") }));
    keys.push(el("span", { text: t("each against the champion of its time, in order of judgement") }));
    if (able.length > MOST_EFFECTS) keys.push(el("span", { text: t("{n} of {m}", { n: MOST_EFFECTS, m: able.length }) }));
    node.append(el("div", { class: "under" }, ...keys));
  } else {
    const text = t("no challenger has been compared yet");
    node.append(el("div", { class: "empty", text }));
    host.append(node);
  }
}

// How much of the study's error probability is spent, and held by open tests.
function alphaMeter(alpha, spent, reserved) {
  const text = t("alpha {alpha}: {spent} spent, {reserved} reserved by open tests", { alpha: show(alpha, 2), spent: show(spent, 2), reserved: show(reserved, 2) });
  const meter = el("div", { class: "meter alpha", role: "img", "aria-label": text }, portion(spent / alpha, { class: "spent" }), portion(reserved / alpha, { class: "held" }));
  return el("div", { class: "alpha-row" }, el("span", { class: "small muted", text }), meter);
}

// -- proposers

function drawMix(host) {
  if (!DATA.mix) return;
  const { credit, names, weights } = DATA.mix;
  if (credit.length < 2) return; // one proposer proposed everything
  const mixed = names.length > 1 && weights.length > 0;
  const node = card(t("Who proposed what"), !mixed);
  const kinds = ["kept", "partly", "discarded", "crashed", "open"];
  const most = Math.max(1, ...credit.map((one) => one.slice(2).reduce((sum, n) => sum + n, 0)));
  const rows = credit.map(([name, proposals, ...fates]) => {
    const parts = fates.map((n, k) => {
      const part = el("i", { class: `fate ${kinds[k]}`, title: `${n} ${t(kinds[k])}` });
      part.style.width = `${(100 * n) / most}%`;
      return n ? part : null;
    });
    const cells = fates.map((n, k) => el("td", { class: n ? `num t-${kinds[k]}` : "num muted", text: String(n) }));
    const bar = el("td", { class: "fates" }, el("div", {}, ...parts));
    return el("tr", {}, el("td", { class: "name", text: name }), el("td", { class: "num", text: String(proposals) }), ...cells, bar);
  });
  node.append(plainTable([t("by"), t("proposals"), ...kinds.map((kind) => t(kind)), ""], rows, [t("proposals"), ...kinds.map((kind) => t(kind))]));
  const kept = DATA.judge ? t("kept: judged better") : t("kept: the best so far when it ended");
  node.append(el("div", { class: "under inset", text: `${kept}; ${t("partly: worth replicates, or undecided")}` }));
  host.append(node);
  if (mixed) drawWeights(host, names, weights);
}

let trusted = null;

function drawWeights(host, names, weights) {
  const node = card(t("Credit of each proposer"), false);
  const place = el("div");
  node.append(place);
  host.append(node);
  const steps = weights.map(([n]) => n);
  const colour = (k) => (DATA.proposers.includes(names[k]) ? DATA.proposers.indexOf(names[k]) : k) % 8;
  const percent = (value) => `${Math.round(100 * value)} %`;
  const look = { height: 190, range: [0, 1], across: t("proposals"), legend: false, format: percent };
  trusted = new LineChart(place, { label: t("the share of each proposer over time"), ...look });
  const line = (name, k) => ({ id: k, name, colour: `c${colour(k)}`, x: steps, y: weights.map(([, shares]) => shares[k]) });
  trusted.setSeries(names.map(line));
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
    const node = card(t("Watched"), true);
    const rows = DATA.watched.map(([run, id, rule, text, stops]) => {
      const what = el("td", { class: stops ? "stopped" : "muted", text: stops ? t("stopped") : t("reported") });
      const name = el("td", { class: "name" }, run === null ? id : runLink(id));
      return el("tr", {}, name, el("td", { text: rule }), what, el("td", { text }));
    });
    node.append(plainTable([t("run"), t("rule"), t("action"), t("observation")], rows));
    host.append(node);
  }
  if (DATA.reproduced.length) {
    const node = card(t("Reproductions"), true);
    const name = (id) => el("td", { class: "name" }, runLink(id));
    const rows = DATA.reproduced.map(([run, again, same, why]) => {
      const result = el("td", { class: same ? "ok" : "failed", text: same ? t("reproduced") : t("not reproduced") });
      return el("tr", {}, name(run), name(again), result, el("td", { text: why }));
    });
    node.append(plainTable([t("run"), t("repeated as"), t("result"), t("details")], rows));
    host.append(node);
  }
}
