// What people may do on the page, if it was started with --allow-control. Each action is an event in the ledger.

import { el } from "../assets/dom.js";
import { problemText } from "./common.js";
import { t } from "./i18n.js";
import { control, get, lab } from "./store.js";

const CHECK_MS = 350;

// Ask before what cannot be undone: the button turns into the question.
function sure(button, question, action) {
  const before = button.textContent;
  button.addEventListener("click", () => {
    if (button.dataset.sure) {
      delete button.dataset.sure;
      button.textContent = before;
      action();
      return;
    }
    button.dataset.sure = "1";
    button.textContent = question;
    setTimeout(() => {
      delete button.dataset.sure;
      button.textContent = before;
    }, 4000);
  });
  return button;
}

function act(app, note, action, more) {
  return control(app.study.name, action, more)
    .then((done) => {
      note.className = "done";
      note.textContent = done.did + (done.warning ? ` — ${done.warning}` : "");
      app.store.poll();
      return true;
    })
    .catch((error) => {
      note.className = "refused";
      note.textContent = problemText(error);
      return false;
    });
}

export function steeringBar(app, host) {
  if (!lab.control || !app.study) return host.replaceChildren();
  if (host.dataset.study === app.study.name) return null;
  host.dataset.study = app.study.name;
  const note = el("span", { role: "status" });
  const button = (text, title, action) => el("button", { text, title, onclick: () => act(app, note, action) });
  const said = el("input", { type: "text", class: "say", placeholder: t("Send the agent a message"), "aria-label": t("Send the agent a message"), maxlength: 2000 });
  const form = el("form", { class: "say-form" }, said, el("button", { text: t("Say") }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (said.value.trim()) act(app, note, "say", { text: said.value }).then((ok) => ok && (said.value = ""));
  });
  host.replaceChildren(
    button(t("Pause"), t("Start no new runs; running ones continue"), "pause"),
    button(t("Resume"), t("End the pause"), "resume"),
    button(t("Drain"), t("Let running trainings finish, then exit"), "drain"),
    sure(el("button", { text: t("Stop"), title: t("Stop the running trainings and the engine") }), t("Really stop all runs?"), () => act(app, note, "stop")),
    form,
    app.study.metric ? "" : objectiveForm(app, note),
    note,
  );
  return null;
}

function objectiveForm(app, note) {
  const metric = el("input", { type: "text", placeholder: t("metric"), "aria-label": t("metric"), list: "metric-names" });
  const names = el("datalist", { id: "metric-names" });
  app.store.listen(() => {
    if (names.childElementCount !== app.store.metrics.length) names.replaceChildren(...app.store.metrics.map((name) => el("option", { value: name })));
  });
  const goal = el("select", { "aria-label": t("goal") }, el("option", { value: "", text: t("by its name") }), el("option", { value: "max", text: "max" }), el("option", { value: "min", text: "min" }));
  const form = el("form", { class: "say-form" }, metric, names, goal, el("button", { text: t("Set the objective") }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act(app, note, "objective", { metric: metric.value, goal: goal.value }).then((ok) => ok && location.reload());
  });
  return form;
}

// Buttons of one run: stop it, declare it void.
export function runSteering(app, run) {
  if (!lab.control) return "";
  const note = el("span", { role: "status" });
  const why = el("input", { type: "text", placeholder: t("why is it void?"), "aria-label": t("why is it void?") });
  const parts = [];
  if (run.state === "running") parts.push(sure(el("button", { text: t("Stop this run") }), t("Really stop it?"), () => act(app, note, "stop run", { run: run.id })));
  parts.push(why, sure(el("button", { text: t("Veto"), title: t("Exclude this run from promotion") }), t("Really veto it?"), () => act(app, note, "veto", { run: run.id, why: why.value })));
  return el("div", { class: "steer inline" }, ...parts, note);
}

// A form from the knobs of the study; the guard checks it as the user types.
export function proposalForm(app) {
  const box = el("details", { class: "propose" }, el("summary", { text: t("Propose a run") }));
  box.addEventListener("toggle", () => {
    if (box.open && !box.dataset.made) {
      box.dataset.made = "1";
      get("form", { study: app.study.name })
        .then((found) => box.append(makeForm(app, found)))
        .catch((error) => {
          delete box.dataset.made;
          box.append(el("p", { class: "refused", text: problemText(error) }));
        });
    }
  });
  return box;
}

function makeForm(app, found) {
  const fields = new Map();
  const rows = found.knobs.map((knob) => {
    const now = knob.value === null || knob.value === undefined ? "" : String(knob.value);
    const field = knob.choices
      ? el("select", {}, el("option", { value: "", text: now || t("unchanged") }), ...knob.choices.map((one) => el("option", { value: one, text: one })))
      : el("input", { type: "text", placeholder: now, inputmode: "decimal" });
    field.setAttribute("aria-label", knob.key);
    fields.set(knob.key, field);
    return el("label", { class: "knob" }, el("span", { text: knob.key }), field, el("span", { class: "muted small", text: knob.rule }));
  });
  const parent = el("select", { "aria-label": t("from") }, el("option", { value: "best", text: t("the best run") }), el("option", { value: "base", text: t("the base") }));
  const reason = el("input", { type: "text", placeholder: t("why"), "aria-label": t("why"), class: "wide-input" });
  const hypothesis = el("input", { type: "text", placeholder: t("what you expect"), "aria-label": t("what you expect"), class: "wide-input" });
  const ruling = el("p", { class: "ruling", role: "status" });
  const note = el("span", { role: "status" });
  const edits = () => [...fields].filter(([, field]) => field.value.trim()).map(([key, field]) => `${key}@set=${field.value.trim()}`);
  let timer = null;
  let asked = 0;
  const check = () => {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      const wanted = edits();
      const mine = ++asked;
      if (!wanted.length) return (ruling.textContent = "");
      try {
        const answer = await get("check", { study: app.study.name, edits: JSON.stringify(wanted), parent: parent.value });
        if (mine !== asked) return null;
        ruling.className = answer.refused ? "ruling refused" : "ruling done";
        ruling.textContent = answer.refused || answer.warning || t("The guard accepts this.");
      } catch (error) {
        ruling.className = "ruling refused";
        ruling.textContent = problemText(error);
      }
      return null;
    }, CHECK_MS);
  };
  const form = el("form", { class: "proposal" }, el("div", { class: "knobs" }, ...rows), el("div", { class: "controls" }, el("label", {}, t("from"), parent), reason, hypothesis, el("button", { text: t("Queue it") })), ruling, note);
  form.addEventListener("input", check);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act(app, note, "propose", { edits: edits(), parent: parent.value, reason: reason.value, hypothesis: hypothesis.value }).then((ok) => {
      if (!ok) return;
      form.reset();
      ruling.textContent = "";
    });
  });
  return form;
}
