// The shell: header, tabs, the page of a tab, and the address, which has all state: a link is a view.

import { el, languageMenu } from "../assets/dom.js";
import { AgentsPage } from "./agents.js";
import { ago, day, keepLanguage, loadLanguage, preferredLanguage, t } from "./i18n.js";
import { JudgePage } from "./judge.js";
import { LineagePage } from "./lineage.js";
import { NowPage } from "./now.js";
import { PipelinesPage } from "./pipelines.js";
import { RecordPage } from "./record.js";
import { RunPage } from "./run.js";
import { RunsPage } from "./runs.js";
import { steeringBar } from "./steering.js";
import { SNAPSHOT } from "./snapshot.js";
import { Store, get, lab } from "./store.js";

const TABS = [
  ["now", "Now", NowPage],
  ["runs", "Runs", RunsPage],
  ["lineage", "Lineage", LineagePage],
  ["agents", "Agents", AgentsPage],
  ["judge", "Judge", JudgePage],
  ["pipelines", "Pipelines", PipelinesPage],
  ["record", "Record", RecordPage],
];
const PAGES = { ...Object.fromEntries(TABS.map(([name, , page]) => [name, page])), run: RunPage };

class App {
  isExport = SNAPSHOT !== null;

  async start() {
    await loadLanguage(preferredLanguage());
    const theme = localStorage.getItem("looplab-theme");
    if (theme) document.documentElement.dataset.theme = theme;
    const skip = document.querySelector(".skip");
    skip.textContent = t("Skip to the content");
    skip.addEventListener("click", (event) => {
      event.preventDefault(); // the address has the state of the page
      this.main.focus();
    });
    this.host = document.getElementById("page");
    await this.load();
    addEventListener("hashchange", () => this.route());
    this.route();
    setInterval(() => this.showFreshness(), 1000);
  }
  async load() {
    for (let wait = 500; ; wait = Math.min(10000, wait * 2)) {
      try {
        this.lab = await get("lab");
        break;
      } catch (error) {
        this.host.replaceChildren(el("p", { class: "empty", role: "alert", text: `${t("The server does not answer")}: ${error.message}` }));
        await new Promise((resolve) => setTimeout(resolve, wait));
      }
    }
    lab.control = this.lab.control;
    this.build();
  }

  // -- the address

  get place() {
    const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
    return { page: path in PAGES ? path : "now", query: new URLSearchParams(query || "") };
  }
  address(page, values = {}) {
    const query = new URLSearchParams();
    if (this.study && this.lab.studies.length > 1) query.set("study", this.study.name);
    for (const [key, value] of Object.entries(values)) {
      if (value !== null && value !== undefined && value !== "" && value !== false) query.set(key, value);
    }
    const text = query.toString();
    return `#/${page}${text ? "?" + text : ""}`;
  }
  go(page, values) {
    location.hash = this.address(page, values);
  }
  // Keep the state of the present page in the address, without a step in the history.
  keep(values) {
    const { page, query } = this.place;
    const all = { ...Object.fromEntries(query), ...values };
    delete all.study;
    const address = this.address(page, all);
    if (address !== location.hash) history.replaceState(null, "", address);
  }

  // -- the shell

  build() {
    document.title = `${this.lab.lab} – looplab`;
    this.tabs = new Map(TABS.map(([name, title]) => [name, el("a", { text: t(title) })]));
    this.studies = el(
      "select",
      { "aria-label": t("Study"), onchange: () => this.go(this.place.page === "run" ? "runs" : this.place.page, { study: this.studies.value }) },
      ...this.lab.studies.map((study) => el("option", { value: study.name, text: study.name })),
    );
    this.engine = el("span", { class: "pill", role: "status" });
    this.fresh = el("span", { class: "fresh", title: t("when the server last answered") });
    this.steering = el("div", { class: "steer" });
    const theme = el("button", { class: "quiet", title: t("Light or dark"), "aria-label": t("Light or dark"), text: "◐", onclick: () => this.switchTheme() });
    const languages = languageMenu((code) => this.switchLanguage(code));
    this.main = el("main", { id: "main", tabindex: "-1" });
    this.problem = el("p", { class: "problem", role: "alert", hidden: true });
    this.host.replaceChildren(
      el(
        "header",
        { class: "top" },
        el("div", { class: "brand" }, el("a", { href: "#/now", class: "lab-name", title: this.lab.folder, text: this.lab.lab }), this.lab.studies.length > 1 ? this.studies : null),
        el("nav", { class: "tabs", "aria-label": t("Pages") }, ...this.tabs.values()),
        el("div", { class: "right" }, this.engine, this.fresh, languages, theme),
        this.steering,
      ),
      this.problem,
      this.main,
    );
  }
  switchTheme() {
    const root = document.documentElement;
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
    localStorage.setItem("looplab-theme", root.dataset.theme);
    this.route(true);
  }
  async switchLanguage(code) {
    keepLanguage(code);
    await loadLanguage(code);
    document.querySelector(".skip").textContent = t("Skip to the content");
    this.build();
    this.route(true);
  }
  showFreshness() {
    const store = this.store;
    if (!store) return;
    if (this.isExport) {
      this.fresh.textContent = t("as of {time}", { time: day(SNAPSHOT.lab.at) });
      return;
    }
    const seconds = (Date.now() - store.heard) / 1000;
    const isOld = store.failed || seconds > 15;
    this.fresh.textContent = isOld ? t("no answer for {time}", { time: ago(seconds) }) : t("live");
    this.fresh.classList.toggle("stale", Boolean(isOld));
    const problem = store.failed && store.failed.status === 401 ? t("The token is no longer valid: open the address that looplab ui printed.") : store.state.problem;
    this.problem.hidden = !problem;
    this.problem.textContent = problem || "";
  }
  showState() {
    const { engine, paused } = this.store.state;
    const isOn = engine !== null;
    this.engine.textContent = !isOn ? t("no engine") : paused ? t("paused") : t("engine running");
    this.engine.title = isOn && engine ? `pid ${engine}` : "";
    this.engine.className = `pill ${!isOn ? "off" : paused ? "paused" : "on"}`;
    this.showFreshness();
  }

  // -- pages

  route(isAgain = false) {
    const { page, query } = this.place;
    const wanted = query.get("study");
    const study = this.lab.studies.find((one) => one.name === wanted) || this.lab.studies[0] || null;
    if (study && (!this.store || this.store.study !== study.name)) {
      if (this.store) this.store.stop();
      this.study = study;
      this.store = new Store(study.name);
      this.store.listen((changed, isFresh) => {
        this.showState();
        if (this.page && this.page.update) this.page.update(changed, isFresh);
      });
      this.store.start();
      isAgain = true;
    }
    this.studies.value = study ? study.name : "";
    for (const [name, tab] of this.tabs) {
      tab.href = this.address(name);
      const isHere = name === page || (name === "runs" && page === "run");
      if (isHere) tab.setAttribute("aria-current", "page");
      else tab.removeAttribute("aria-current");
      if (isHere && this.shown !== page) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    steeringBar(this, this.steering);
    if (!isAgain && this.shown === page && this.page.route) {
      this.page.route(query);
      return;
    }
    if (this.page) this.page.destroy();
    this.shown = page;
    this.main.replaceChildren();
    if (!study && !["pipelines", "record", "lineage"].includes(page)) {
      this.page = { destroy() {} };
      this.main.append(el("p", { class: "empty", text: t("This lab has no study yet.") }));
      return;
    }
    this.page = new PAGES[page](this.main, this, query);
    if (!isAgain) scrollTo(0, 0);
  }
}

new App().start();
