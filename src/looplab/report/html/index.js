// The index of exported pages: one card for each study.

const DATA = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
page.append(el("header", {}, el("h1", { text: DATA.lab }), el("p", { text: count(DATA.studies.length, "study").replace("studys", "studies") })));
for (const study of DATA.studies) {
  const link = el("a", { href: `${encodeURIComponent(study.name)}.html`, text: study.name });
  const node = el("section", { class: "card wide index-card", "aria-label": study.name }, el("h2", {}, link));
  if (study.headline) node.append(el("p", { class: "headline", text: `${study.headline}.` }));
  const best = study.best === null ? "nothing measured yet" : `${study.metric} ${study.best}`;
  const alarms = study.alarms ? `, ${count(study.alarms, "alarm")}` : "";
  node.append(el("p", { class: "muted", text: `${best}; ${count(study.runs, "run")}${alarms}; as of ${study.time}` }));
  page.append(node);
}
