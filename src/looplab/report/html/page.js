// What went wrong, what was refused, and the whole page in its order.

function drawFailures(host) {
  if (!DATA.failures.length) return;
  const node = card("Failures", true);
  for (const failure of DATA.failures) {
    const before = failure.runs.length - 6;
    const named = failure.runs.slice(-6).join(", ") + (before > 0 ? ` and ${before} before` : "");
    const head = el("span", { class: "failed", text: `${count(failure.runs.length, "run")}: ${failure.how}` });
    const tail = failure.tail
      ? el("pre", { tabindex: 0, text: failure.tail })
      : el("p", { class: "muted", text: "printed nothing" });
    node.append(el("details", { open: DATA.failures.length === 1 }, el("summary", {}, head, ` – ${named}`), tail));
  }
  host.append(node);
}

function drawRejected(host) {
  if (!DATA.rejected.length) return;
  const node = card("Rejected proposals", true);
  const names = ["proposal", "by", "edits", "why not", "its reason"];
  const rows = DATA.rejected.map(([id, by, edits, why, reason]) =>
    el(
      "tr",
      {},
      el("td", { text: id }),
      el("td", { text: by }),
      el("td", {}, el("code", { text: edits })),
      el("td", { text: why }),
      el("td", { class: "muted", text: reason }),
    ),
  );
  node.append(plainTable(names, rows));
  host.append(node);
}

const grid = el("div", { class: "grid" });
drawHead();
page.append(grid);
drawJudged(grid);
drawCurves(grid);
drawBest(grid);
drawKnobs(grid);
if (!order.length) drawFailures(grid); // then they are what matters most
drawTable(grid);
drawMix(grid);
drawSeen(grid);
if (order.length) drawFailures(grid);
drawRejected(grid);
const origin = "Written by looplab from the ledger and the run folders: they are the record, this is a view.";
page.append(el("footer", {}, `${origin} Head of the record: `, el("code", { text: DATA.head })));
document.body.append(panel);

focus.listen((what) => {
  if (!("picked" in what)) return;
  showPanel();
  history.replaceState(null, "", focus.picked === null ? "#" : `#${RUNS[focus.picked].id}`);
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && focus.picked !== null) focus.pick(focus.picked);
});

// A link to `report.html#0007-k3f9` opens with that run picked.
function pickFromAddress() {
  const run = RUNS.findIndex((one) => `#${one.id}` === location.hash);
  if (run >= 0 && run !== focus.picked) focus.pick(run);
}
addEventListener("hashchange", pickFromAddress);
pickFromAddress();
