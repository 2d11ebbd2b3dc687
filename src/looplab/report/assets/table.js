// One virtual table: only the visible rows are in the page, so 100,000 rows sort and scroll like a hundred.
//
//   const table = new Table(host, {
//     label: "runs",                    // for screen readers
//     columns: [{                       // all columns that can be shown
//       key: "obj", name: "accuracy",   // the key is what state(), sorting and filters use
//       title, num, width,              // tooltip of the head; right-aligned; width in px (default by content, sampled)
//       get: (row) => "0.973",          // text of the cell
//       sort: (row) => 0.973,           // sort key: number, string or null (last); default: get
//       style: (row) => "better",       // class of the cell
//       cell: (row) => node,            // its content, instead of the text of get
//       down: true,                     // the first click sorts descending
//       hidden: true,                   // not shown until it is chosen
//       narrow: true,                   // shown if the table is narrower than 560 px
//     }],
//     rows, id: (row) => row.id,        // any objects, each with a unique id
//     sort: { key: "obj", down: true },
//     pinned: (row) => bool,            // these rows stay on top, whatever the sorting
//     rowClass: (row) => "best",        // verdicts: `row-keep`, `row-discard`, … colour the edge of a row
//     second: (row) => "text",          // second line of a row in a narrow table
//     selectable: true,                 // a column of check boxes; Space and Shift with arrows select too
//     empty: "no runs yet",
//     onpick, onhover (row or null), onselect (Set of ids), onchange (sorting, columns: see state())
//   });
//   table.setRows(rows)                 // all rows; selection, focus, scrolling and filter are kept
//   table.update(rows)                  // add these rows, or replace those with the same id
//   table.setFilter((row) => bool)      // null: all rows
//   table.sortBy(key, down); table.show(keys); table.select(ids); table.reveal(id); table.pick(id)
//   table.state() → {sort, down, columns}   to be kept in an address; pass it to table.restore(state)
//   table.view                          // the rows that pass the filter, sorted
//   table.chooser()                     // a node with a check box for each column
//
//   parseFilter("lr<0.01 by:agent -verdict:discard muon", columns, text) → (row) => bool, or null if nothing is asked;
//     text(row) is what bare words are searched in. Comparisons: < <= > >= = != and `:` (contains).
//
// Keys: Tab reaches the heads and one row; arrows, Page Up and Down, Home and End move between rows; Enter picks; Space
// selects; Alt with left or right moves the column of a head.

import { el } from "./dom.js";
import { t } from "./i18n.js";

const ROW_HEIGHT = 27;
const NARROW_HEIGHT = 46;
const OVERSCAN = 8;
const NARROW = 560;
const collator = new Intl.Collator(undefined, { numeric: true });
const isMissing = (value) => value === null || value === undefined || Number.isNaN(value);

export class Table {
  constructor(host, options) {
    this.host = host;
    Object.assign(this, { rows: [], columns: [], selectable: false, label: t("table"), empty: t("nothing to show") }, options);
    this.id = options.id || ((row) => row.id);
    this.sorting = { key: null, down: false, ...options.sort };
    this.filter = null;
    this.selected = new Set();
    this.picked = null;
    this.hot = null;
    this.keys = new Map(); // column key → {values} or ranks, until the rows change
    this.chosen = this.columns.filter((column) => !column.hidden).map((column) => column.key);
    this.anchor = null;
    this.build();
    this.setRows(this.rows);
  }

  // -- data

  setRows(rows) {
    this.rows = rows;
    this.places = new Map(rows.map((row, place) => [this.id(row), place]));
    this.keys.clear();
    this.refresh();
  }
  update(changed) {
    if (!changed.length) return;
    for (const row of changed) {
      const place = this.places.get(this.id(row));
      if (place === undefined) {
        this.places.set(this.id(row), this.rows.length);
        this.rows.push(row);
      } else this.rows[place] = row;
    }
    this.keys.clear();
    this.refresh();
  }
  setFilter(filter) {
    this.filter = filter;
    this.refresh();
  }
  sortBy(key, down) {
    this.sorting = { key, down };
    this.refresh();
    this.scroller.scrollTop = 0;
    this.report();
  }
  show(keys) {
    this.chosen = keys.filter((key) => this.columns.some((column) => column.key === key));
    this.widths = null;
    this.refresh();
    this.report();
  }
  // Replace the columns that can be shown; those chosen before stay chosen.
  setColumns(columns, chosen) {
    this.columns = columns;
    this.keys.clear();
    const known = new Set(columns.map((column) => column.key));
    const kept = (chosen || this.chosen).filter((key) => known.has(key));
    this.chosen = kept.length ? kept : columns.filter((column) => !column.hidden).map((column) => column.key);
    this.widths = null;
    this.refresh();
  }
  select(ids) {
    this.selected = new Set(ids);
    this.render();
    if (this.onselect) this.onselect(this.selected);
  }
  pick(id) {
    this.picked = id;
    this.render();
  }
  hover(id) {
    this.hot = id;
    for (const node of this.body.querySelectorAll("tr.hot")) node.classList.remove("hot");
    const node = this.nodeOf(id);
    if (node) node.classList.add("hot");
  }
  state() {
    return { sort: this.sorting.key, down: this.sorting.down, columns: [...this.chosen] };
  }
  restore({ sort, down, columns }) {
    if (sort && this.columns.some((column) => column.key === sort)) this.sorting = { key: sort, down: Boolean(down) };
    if (columns && columns.length) this.chosen = columns.filter((key) => this.columns.some((one) => one.key === key));
    this.widths = null;
    this.refresh();
  }
  report() {
    if (this.onchange) this.onchange(this.state());
  }

  // Sort keys of all rows, as numbers: a string is replaced by its rank among the strings of the column.
  sortKeys(column) {
    if (this.keys.has(column.key)) return this.keys.get(column.key);
    const value = column.sort || column.get;
    const raw = this.rows.map(value);
    const keys = new Float64Array(raw.length);
    const words = new Set();
    for (const one of raw) if (!isMissing(one) && typeof one !== "number" && typeof one !== "boolean") words.add(String(one));
    const ranks = new Map([...words].sort(collator.compare).map((word, rank) => [word, rank]));
    raw.forEach((one, place) => {
      if (isMissing(one)) keys[place] = NaN;
      else keys[place] = typeof one === "number" || typeof one === "boolean" ? Number(one) : ranks.get(String(one));
    });
    this.keys.set(column.key, keys);
    return keys;
  }
  refresh() {
    let order = [];
    this.rows.forEach((row, place) => {
      if (!this.filter || this.filter(row)) order.push(place);
    });
    const column = this.columns.find((one) => one.key === this.sorting.key);
    if (column) {
      const keys = this.sortKeys(column);
      const sign = this.sorting.down ? -1 : 1;
      order.sort((a, b) => {
        const [x, y] = [keys[a], keys[b]];
        if (x === y) return a - b;
        if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a - b;
        return sign * (x - y);
      });
    }
    if (this.pinned) {
      const isPinned = order.map((place) => this.pinned(this.rows[place]));
      const top = order.filter((_, i) => isPinned[i]);
      if (top.length) order = top.concat(order.filter((_, i) => !isPinned[i]));
    }
    this.view = order.map((place) => this.rows[place]);
    this.index = new Map(this.view.map((row, i) => [this.id(row), i]));
    this.drawHead();
    this.render();
  }

  // -- drawing

  build() {
    this.head = el("thead");
    this.body = el("tbody");
    this.group = el("colgroup");
    this.node = el("table", { class: "virtual", role: "grid", "aria-label": this.label }, this.group, this.head, this.body);
    if (this.selectable) this.node.setAttribute("aria-multiselectable", "true");
    this.scroller = el("div", { class: "scroll virtual-scroll" }, this.node);
    this.host.append(this.scroller);
    this.scroller.addEventListener("scroll", () => this.later());
    this.width = 0;
    new ResizeObserver(() => {
      const width = this.scroller.clientWidth;
      const isOther = Math.abs(width - this.width) > 1;
      this.width = width;
      if (isOther) this.widths = null;
      if (isOther) this.drawHead();
      this.later();
    }).observe(this.scroller);
    this.listen();
  }
  later() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.render();
    });
  }
  isNarrow() {
    return (this.scroller.clientWidth || innerWidth) < NARROW && this.columns.some((column) => column.narrow);
  }
  visible() {
    const byKey = new Map(this.columns.map((column) => [column.key, column]));
    const chosen = this.chosen.map((key) => byKey.get(key)).filter(Boolean);
    if (!this.isNarrow()) return chosen;
    const few = chosen.filter((column) => column.narrow);
    return few.length ? few : chosen.slice(0, 3);
  }
  // Widths by the longest text of a sample, so that columns do not jump while one scrolls.
  measure(columns) {
    const step = Math.max(1, Math.floor(this.rows.length / 200));
    const sample = this.rows.filter((_, place) => place % step === 0);
    const longest = (column) =>
      sample.reduce((most, row) => Math.max(most, String(column.get(row) ?? "").length), column.name.length + 2);
    const widths = columns.map((column) => column.width || Math.min(340, Math.max(column.num ? 72 : 48, 20 + 7.3 * longest(column))));
    const room = (this.scroller.clientWidth || 900) - (this.selectable ? 34 : 0);
    const total = widths.reduce((sum, width) => sum + width, 0);
    if (this.isNarrow()) return widths.map((width) => (width * room) / total);
    const loose = columns.map((column) => !column.width && !column.num);
    if (total >= room) {
      // Long texts give way, as far as they stay readable.
      const spare = widths.reduce((sum, width, i) => sum + (loose[i] ? Math.max(0, width - 130) : 0), 0);
      const part = spare ? Math.min(1, (total - room) / spare) : 0;
      return widths.map((width, i) => (loose[i] ? width - part * Math.max(0, width - 130) : width));
    }
    const growing = widths.reduce((sum, width, i) => sum + (loose[i] ? width : 0), 0);
    return widths.map((width, i) => (growing ? (loose[i] ? width + ((room - total) * width) / growing : width) : width * (room / total)));
  }
  drawHead() {
    const columns = this.visible();
    this.widths ??= this.measure(columns);
    const width = this.widths.reduce((sum, one) => sum + one, this.selectable ? 34 : 0);
    this.node.style.width = `${Math.round(width)}px`;
    const cols = this.widths.map((one) => {
      const col = el("col");
      col.style.width = `${one}px`;
      return col;
    });
    const boxes = el("col");
    boxes.style.width = "34px";
    this.group.replaceChildren(...(this.selectable ? [boxes] : []), ...cols);
    const cells = columns.map((column) => this.headCell(column));
    if (this.selectable) {
      const all = el("input", { type: "checkbox", "aria-label": t("select all") });
      all.checked = this.selected.size > 0 && this.selected.size >= this.view.length;
      all.indeterminate = this.selected.size > 0 && !all.checked;
      all.addEventListener("change", () => this.select(all.checked ? this.view.map(this.id) : []));
      cells.unshift(el("th", { class: "box", scope: "col" }, all));
    }
    const held = this.head.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.head.replaceChildren(el("tr", { "aria-rowindex": 1 }, ...cells));
    if (held) this.head.querySelector(`button[data-key=${CSS.escape(held)}]`)?.focus();
    this.node.setAttribute("aria-rowcount", this.view.length + 1);
    this.node.setAttribute("aria-colcount", cells.length);
  }
  headCell(column) {
    const isSorted = column.key === this.sorting.key;
    const way = isSorted ? (this.sorting.down ? "descending" : "ascending") : null;
    const arrow = isSorted ? (this.sorting.down ? " ↓" : " ↑") : "";
    const sort = () => this.sortBy(column.key, isSorted ? !this.sorting.down : Boolean(column.down));
    const names = { title: column.title || column.name, "data-key": column.key, onclick: sort };
    const button = el("button", { type: "button", ...names, text: column.name + arrow });
    return el("th", { class: column.num ? "num" : null, scope: "col", "aria-sort": way }, button);
  }
  render() {
    const isNarrow = this.isNarrow();
    const tall = isNarrow && this.second ? NARROW_HEIGHT : ROW_HEIGHT;
    this.tall = tall;
    this.node.classList.toggle("narrow", isNarrow);
    const room = this.scroller.clientHeight || 600;
    const top = this.scroller.scrollTop;
    const first = Math.max(0, Math.floor(top / tall) - OVERSCAN);
    const last = Math.min(this.view.length, Math.ceil((top + room) / tall) + OVERSCAN);
    const columns = this.visible();
    const focused = document.activeElement?.closest?.("tr[data-id]");
    const held = focused && this.body.contains(focused) ? focused.dataset.id : null;
    const rows = [this.spacer(first * tall, columns.length)];
    for (let i = first; i < last; i++) rows.push(this.rowNode(this.view[i], i, columns));
    rows.push(this.spacer((this.view.length - last) * tall, columns.length));
    if (!this.view.length) rows.splice(1, 0, this.emptyRow(columns.length));
    this.body.replaceChildren(...rows);
    const inside = this.body.querySelector("tr[data-id]");
    const current = this.nodeOf(held ?? this.current) || inside;
    if (current) current.tabIndex = 0;
    if (held !== null && this.nodeOf(held)) this.nodeOf(held).focus({ preventScroll: true });
  }
  spacer(height, columns) {
    const node = el("tr", { class: "space", "aria-hidden": "true" }, el("td", { colspan: columns + (this.selectable ? 1 : 0) }));
    node.style.height = `${height}px`;
    node.hidden = height === 0;
    return node;
  }
  emptyRow(columns) {
    const text = this.rows.length ? t("no row passes the filter") : this.empty;
    return el("tr", {}, el("td", { class: "empty", colspan: columns + (this.selectable ? 1 : 0), text }));
  }
  rowNode(row, i, columns) {
    const id = this.id(row);
    const cells = columns.map((column) => {
      const style = [column.num ? "num" : null, column.style ? column.style(row) : null].filter(Boolean).join(" ");
      if (column.cell) return el("td", { class: style || null }, column.cell(row));
      const text = String(column.get(row) ?? "–");
      return el("td", { class: style || null, title: text.length > 24 ? text : null, text });
    });
    if (this.node.classList.contains("narrow") && this.second && cells.length) {
      cells[0].append(el("div", { class: "second", text: this.second(row) }));
    }
    const isSelected = this.selected.has(id);
    if (this.selectable) {
      const box = el("input", { type: "checkbox", tabindex: -1, "aria-label": t("select {id}", { id }), checked: isSelected });
      cells.unshift(el("td", { class: "box" }, box));
    }
    const style = [this.rowClass ? this.rowClass(row) : "", id === this.picked ? "picked" : "", id === this.hot ? "hot" : ""];
    const attributes = { tabindex: -1, class: style.filter(Boolean).join(" ") || null, "data-id": id, "aria-rowindex": i + 2 };
    if (this.selectable) attributes["aria-selected"] = String(isSelected);
    return el("tr", attributes, ...cells);
  }
  nodeOf(id) {
    return id === null || id === undefined ? null : this.body.querySelector(`tr[data-id="${CSS.escape(String(id))}"]`);
  }
  // Scroll the table, not the page, to a row.
  reveal(id) {
    const i = this.index.get(id);
    if (i === undefined) return;
    const head = this.head.offsetHeight;
    const [top, room] = [this.scroller.scrollTop, this.scroller.clientHeight - head];
    if (i * this.tall < top) this.scroller.scrollTop = i * this.tall;
    else if ((i + 1) * this.tall > top + room) this.scroller.scrollTop = (i + 1) * this.tall - room;
    this.render();
  }
  chooser() {
    const list = el("div", { class: "column-list" });
    const fill = () => {
      const boxes = this.columns.map((column) => {
        const box = el("input", { type: "checkbox" });
        box.checked = this.chosen.includes(column.key);
        box.addEventListener("change", () => {
          const rest = this.chosen.filter((key) => key !== column.key);
          const order = this.columns.map((one) => one.key);
          if (!box.checked) return this.show(rest);
          const after = rest.findLastIndex((key) => order.indexOf(key) < order.indexOf(column.key));
          rest.splice(after + 1, 0, column.key);
          this.show(rest);
        });
        return el("label", { title: column.title || column.name }, box, column.name);
      });
      list.replaceChildren(...boxes);
    };
    const node = el("details", { class: "columns" }, el("summary", { text: t("columns") }), list);
    node.addEventListener("toggle", () => node.open && fill());
    node.addEventListener("keydown", (event) => event.key === "Escape" && (node.open = false));
    return node;
  }

  // -- pointer and keyboard

  listen() {
    const idOf = (event) => event.target.closest("tr[data-id]")?.dataset.id ?? null;
    const rowOf = (event) => this.view[this.index.get(this.realId(idOf(event)))] ?? null;
    this.body.addEventListener("click", (event) => {
      const row = rowOf(event);
      if (!row || event.target.closest("a")) return;
      if (event.target.closest("td.box")) return this.toggle(this.id(row), event.shiftKey);
      if (this.selectable && (event.ctrlKey || event.metaKey || event.shiftKey)) return this.toggle(this.id(row), event.shiftKey);
      this.current = this.id(row);
      if (this.onpick) this.onpick(row);
    });
    let seen = null;
    const look = (row) => {
      if (!this.onhover || row === seen) return;
      seen = row;
      this.onhover(row);
    };
    this.body.addEventListener("pointerover", (event) => look(rowOf(event)));
    this.body.addEventListener("pointerleave", () => look(null));
    this.body.addEventListener("focusin", (event) => {
      const row = rowOf(event);
      if (row) this.current = this.id(row);
      look(row);
    });
    this.body.addEventListener("focusout", () => look(null));
    this.body.addEventListener("keydown", (event) => this.press(event, rowOf(event)));
    this.head.addEventListener("keydown", (event) => this.moveColumn(event));
  }
  realId(text) {
    if (text === null || this.index.has(text)) return text;
    const number = Number(text);
    return this.index.has(number) ? number : null;
  }
  press(event, row) {
    if (!row) return;
    const here = this.index.get(this.id(row));
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / this.tall) - 2);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in moves) {
      const next = Math.max(0, Math.min(this.view.length - 1, here + moves[event.key]));
      const id = this.id(this.view[next]);
      if (event.shiftKey && this.selectable) this.select([...this.selected, this.id(row), id]);
      this.current = id;
      this.reveal(id);
      this.nodeOf(id)?.focus({ preventScroll: true });
    } else if (event.key === " " && this.selectable) this.toggle(this.id(row), event.shiftKey);
    else if (event.key === "Enter" || event.key === " ") this.onpick?.(row);
    else return;
    event.preventDefault();
  }
  toggle(id, isRange) {
    const next = new Set(this.selected);
    if (isRange && this.anchor !== null && this.index.has(this.anchor)) {
      const [a, b] = [this.index.get(this.anchor), this.index.get(id)].sort((x, y) => x - y);
      for (const row of this.view.slice(a, b + 1)) next.add(this.id(row));
    } else if (!next.delete(id)) next.add(id);
    this.anchor = id;
    this.select(next);
    this.drawHead();
  }
  moveColumn(event) {
    const key = event.target.dataset?.key;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!key || !by || !event.altKey) return;
    event.preventDefault();
    const from = this.chosen.indexOf(key);
    const to = from + by;
    if (to < 0 || to >= this.chosen.length) return;
    const next = [...this.chosen];
    next.splice(to, 0, ...next.splice(from, 1));
    this.show(next);
  }
}

// -- filters

const COMPARE = {
  "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b,
  "=": (a, b) => a === b, "!=": (a, b) => a !== b,
};

export function parseFilter(text, columns, haystack) {
  const tests = (text.match(/"[^"]*"|\S+/g) || []).map((token) => filterTest(token, columns, haystack));
  return tests.length ? (row) => tests.every((test) => test(row)) : null;
}

function filterTest(token, columns, haystack) {
  const [, no, key, sign, wanted] = /^(-?)([^<>=!:"]+)(<=|>=|!=|<|>|=|:)(.+)$/.exec(token) || [];
  const column = key && columns.find((one) => one.key === key || one.name === key);
  if (!column) {
    const isNot = token.startsWith("-") && token.length > 1 && !/^-[\d.]/.test(token);
    const word = token.slice(isNot ? 1 : 0).replaceAll('"', "").toLowerCase();
    return (row) => haystack(row).toLowerCase().includes(word) !== isNot;
  }
  const value = column.sort || column.get;
  const word = wanted.replaceAll('"', "").toLowerCase();
  const number = Number(word);
  const test = (row) => {
    const own = value(row);
    if (sign === ":") return String(column.get(row) ?? "").toLowerCase().includes(word);
    if (isMissing(own)) return sign === "!=";
    if (typeof own === "number" && word !== "" && !Number.isNaN(number)) return COMPARE[sign](own, number);
    return COMPARE[sign](String(column.get(row)).toLowerCase(), word);
  };
  return no ? (row) => !test(row) : test;
}
