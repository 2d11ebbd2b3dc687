// Nodes, text and shared state of the pages. Used by `looplab ui` (served as modules) and by report.html (inlined).
//
// The modules of this folder are native ES modules without a build step. Rules, which keep them usable in both places:
// - Text reaches the page through textContent and attributes only, never as HTML.
// - No style attribute is written; sizes are set through the style object, so `style-src 'self'` is enough.
// - Imports are single lines at the top, and top-level names are unique in this folder: for the single-file report,
//   `looplab.report.bundle` removes the words `import … from` and `export` and joins the files.
//
//   el(tag, {class, text, title, onclick, …}, ...children)   an HTML node; null attributes and children are left out
//   svg(tag, attributes, ...children)                        the same for SVG
//   show(value, digits), honest(mean, spread), signed(value), pValue(p), duration(seconds), cut(text, n)
//   showTip(event, nodes), hideTip()                         one tooltip for the page
//   new Focus()                                              the hovered, picked and filtered items that figures share
//   card(title, wide, ...controls), tick(name, change)       a section with a heading; a labelled check box
//   portion(share, attributes)                               a part of a bar
//   languageMenu(change)                                     a menu of the languages; `change` gets the code of the chosen one

import { LANGUAGES, language, t } from "./i18n.js";

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
export const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// -- numbers and text

export function show(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "true" : "false";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (value === 0 || (Number.isInteger(value) && size < 1e7)) return String(value);
  if (size >= 1e6 || size < 1e-4) {
    return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  }
  return String(Number(value.toPrecision(digits)));
}

// The spread with one digit (two if it begins with 1), and the mean with as many decimals: 0.973 ± 0.002.
export function honest(mean, spread) {
  if (mean === null || mean === undefined) return "–";
  if (!spread || !Number.isFinite(spread)) return show(mean);
  const size = Math.floor(Math.log10(spread) + 1e-9);
  const first = Math.floor(spread / 10 ** size + 1e-9);
  const decimals = (first === 1 ? 1 : 0) - size;
  if (decimals < 0 || decimals > 9) return `${show(mean)} ± ${show(spread, 2)}`;
  return `${mean.toFixed(decimals)} ± ${spread.toFixed(decimals)}`;
}

export function signed(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : "") + show(value, digits).replace("-", "−");
}

export function pValue(p) {
  if (p === null || p === undefined) return t("no test");
  if (p < 1e-12) return "< 1e-12";
  return p < 0.0001 ? p.toExponential(0) : String(Number(p.toPrecision(2)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return seconds.toFixed(1) + "s";
  const minutes = Math.floor(seconds / 60);
  const two = (number) => String(Math.floor(number)).padStart(2, "0");
  if (minutes < 60) return `${minutes}m${two(seconds % 60)}s`;
  return `${Math.floor(minutes / 60)}h${two(minutes % 60)}m`;
}

export const cut = (words, length) => (words.length > length ? words.slice(0, length) + "…" : words);
export const within = (value, low, high) => Math.min(Math.max(low, high), Math.max(Math.min(low, high), value));

// -- parts of a page

// A box with a title, and controls on the right.
export function card(title, wide, ...controls) {
  const right = el("div", { class: "controls push" }, ...controls);
  const top = el("div", { class: "bar-top" }, el("h2", { text: title }), right);
  return el("section", { class: wide ? "card wide" : "card", "aria-label": title }, top);
}

export function tick(name, change, checked = false) {
  const box = el("input", { type: "checkbox", checked, onchange: () => change(box.checked) });
  return el("label", {}, box, name);
}

export function languageMenu(change) {
  const options = Object.entries(LANGUAGES).map(([code, name]) => el("option", { value: code, text: name, selected: code === language }));
  const menu = el("select", { class: "quiet language", "aria-label": t("Language"), onchange: () => change(menu.value) }, ...options);
  return menu;
}

// A part of a bar, as wide as its share of it.
export function portion(share, attributes) {
  const node = el("div", attributes);
  node.style.width = `${100 * within(share, 0, 1)}%`;
  return node;
}

const tip = el("div", { class: "tip", hidden: true, role: "status" });
export const hideTip = () => (tip.hidden = true);

// Show these nodes next to the pointer.
export function showTip(event, nodes) {
  if (!tip.isConnected) document.body.append(tip);
  tip.replaceChildren(...nodes);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width < innerWidth ? event.clientX + 16 : event.clientX - 12 - box.width;
  const top = event.clientY + 16 + box.height < innerHeight ? event.clientY + 14 : event.clientY - 10 - box.height;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

// State shared by tables and figures: the hovered item, the picked item, the items that a filter keeps (null: all).
export class Focus {
  hover = null;
  picked = null;
  shown = null;
  listeners = [];

  listen(listener) {
    this.listeners.push(listener);
  }
  look(item) {
    if (item !== this.hover) this.change({ hover: item });
  }
  pick(item) {
    this.change({ picked: item === this.picked ? null : item });
  }
  change(what) {
    Object.assign(this, what);
    for (const listener of this.listeners) listener(what);
  }
  hides(item) {
    return this.shown !== null && !this.shown.has(item);
  }
}
