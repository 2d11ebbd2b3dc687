// The index of exported pages: one card for each study.

const DATA = readData();
const page = document.getElementById("page");
page.append(el("header", { class: "study-head" }, el("h1", { text: DATA.lab }), el("p", { text: t("{n} {n|study|studies}", { n: DATA.studies.length }) }), languageMenu(chooseLanguage)));
page.append(el("p", {}, el("a", { href: DATA.live, text: t("The live page at that time") })));
for (const study of DATA.studies) {
  const link = el("a", { href: `${encodeURIComponent(study.name)}.html`, text: study.name });
  const node = el("section", { class: "card wide index-card", "aria-label": study.name }, el("h2", {}, link));
  if (study.headline) node.append(el("p", { class: "headline", text: `${inLanguage(study.headline)}${t(".")}` }));
  const best = study.best === null ? t("nothing measured yet") : `${study.metric} ${study.best}`;
  const facts = [best, t("{n} {n|run|runs}", { n: study.runs }), study.alarms ? t("{n} {n|alarm|alarms}", { n: study.alarms }) : null, t("as of {time}", { time: study.time })];
  node.append(el("p", { class: "muted", text: facts.filter(Boolean).join("; ") }));
  page.append(node);
}
