// What the page knows of a study, kept up to date by differences: `changes?after=…` twice a second while the page is
// seen, every ten seconds while it is hidden, less often after errors. A page that was away asks for what it missed.
//
//   get(name, query), control(study, action, more)     the API; errors are thrown with the server's words
//   new Store(study); store.listen(listener); store.start(); store.stop()
//   store.rows: Map of id → row; a row has the columns of the server, `knobs`, `metrics` and, of a first run, `group`
//     with `mean`, `sd` and `measured` over the runs of its config

import { SNAPSHOT, snapshotAnswer } from "./snapshot.js";

const VISIBLE_MS = 500;
const HIDDEN_MS = 10000;
const SLOWEST_MS = 30000;

export class ApiError extends Error {
  constructor(message, status, hint) {
    super(message);
    Object.assign(this, { status, hint });
  }
}

async function answerOf(response) {
  let data = null;
  try {
    data = await response.json();
  } catch {
    // not JSON: a proxy's page
  }
  if (!response.ok || data === null) {
    throw new ApiError((data && data.error) || `HTTP ${response.status}`, response.status, data && data.hint);
  }
  return data;
}

export async function get(name, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  if (SNAPSHOT) return snapshotAnswer(name, Object.fromEntries(given));
  return answerOf(await fetch(`api/${name}?${new URLSearchParams(given)}`, { credentials: "same-origin" }));
}

export const lab = { control: null };

export async function control(study, action, more = {}) {
  return answerOf(
    await fetch("api/control", {
      method: "POST",
      credentials: "same-origin",
      headers: { "content-type": "application/json", "x-looplab-control": lab.control || "" },
      body: JSON.stringify({ study, action, ...more }),
    }),
  );
}

export class Store {
  constructor(study) {
    this.study = study;
    this.listeners = new Set();
    this.epoch = "";
    this.after = 0;
    this.state = { seq: 0, engine: null, paused: false, problem: null, complete: false };
    this.heard = 0; // when the server last answered
    this.failed = null;
    this.wait = VISIBLE_MS;
    this.reset();
    this.onvisible = () => document.visibilityState === "visible" && this.poll();
  }
  reset() {
    this.rows = new Map();
    this.knobs = [];
    this.metrics = [];
    this.columns = this.columns || [];
  }
  listen(listener) {
    this.listeners.add(listener);
  }
  start() {
    this.running = true;
    document.addEventListener("visibilitychange", this.onvisible);
    return this.poll();
  }
  stop() {
    this.running = false;
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.onvisible);
  }
  async poll() {
    if (this.asking || !this.running) return;
    clearTimeout(this.timer);
    this.asking = true;
    try {
      const found = await get("changes", { study: this.study, after: this.after, epoch: this.epoch });
      this.heard = Date.now();
      this.failed = null;
      this.wait = VISIBLE_MS;
      if (this.running) this.take(found);
    } catch (error) {
      this.failed = error;
      this.wait = Math.min(SLOWEST_MS, this.wait * 2);
      this.tell([], false);
    }
    this.asking = false;
    const pause = document.visibilityState === "visible" ? this.wait : Math.max(HIDDEN_MS, this.wait);
    if (this.running && !SNAPSHOT) this.timer = setTimeout(() => this.poll(), pause);
  }
  take(found) {
    if (found.fresh) {
      this.reset();
      this.columns = found.columns;
    }
    this.epoch = found.epoch;
    this.after = found.next;
    this.state = found;
    const isNew = found.knobs.length !== this.knobs.length || found.metrics.length !== this.metrics.length;
    this.knobs = found.knobs;
    this.metrics = found.metrics;
    const changed = new Map();
    for (const values of found.rows) {
      const row = this.rows.get(values[0]) || { knobs: [], metrics: [] };
      this.columns.forEach((column, place) => (row[column] = values[place]));
      this.rows.set(row.id, row);
      changed.set(row.id, row);
    }
    for (const [id, knobs, metrics] of found.cells) {
      const row = this.rows.get(id);
      if (!row) continue;
      row.knobs = knobs;
      row.metrics = metrics;
      changed.set(id, row);
    }
    for (const row of [...changed.values()]) {
      const lead = this.rows.get(row.lead) || row;
      if (!lead.group) lead.group = new Set();
      lead.group.add(row);
      if (lead !== row) changed.set(lead.id, lead);
    }
    for (const row of changed.values()) if (row.lead === row.id) measure(row);
    this.tell([...changed.values()], found.fresh || isNew);
  }
  tell(changed, isFresh) {
    for (const listener of this.listeners) listener(changed, isFresh);
  }
}

// The first runs of configs that were better than all before them, in order of their numbers.
export function improvements(rows, goal) {
  const sign = goal === "max" ? 1 : -1;
  const found = [];
  for (const row of [...rows].sort((a, b) => a.n - b.n)) {
    if (row.lead !== row.id || (row.mean ?? null) === null || row.role === "imported" || row.verdict === "void") continue;
    if (!found.length || sign * row.mean > sign * found[found.length - 1].mean) found.push(row);
  }
  return found;
}

function measure(row) {
  const values = [];
  for (const one of row.group) if (!one.copy && one.objective !== null) values.push(one.objective);
  row.measured = values.length;
  row.mean = values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  row.sd = null;
  if (values.length > 1) {
    row.sd = Math.sqrt(values.reduce((sum, value) => sum + (value - row.mean) ** 2, 0) / (values.length - 1));
  }
}
