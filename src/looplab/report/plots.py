"""PNG plots of a study in `outputs/<study>/plots/`, for slides and Markdown; they need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab.config.files import write_atomic
from looplab.measure.base import Batch
from looplab.report import wording
from looplab.report.curves import metrics_drawn
from looplab.report.facts import KnobFacts, RunFacts, StudyFacts
from looplab.report.importance import Importance
from looplab.untrusted import clean_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = "plots"
MISSING = "no plots: matplotlib is not installed (pip install 'looplab[plots]')"
MAX_PANELS = 9
FEW = 7
"""A knob with at most this many values has a tick at each of them."""
_BEST = "#c2500a"
_COLOURS = ("#0072b2", "#009e73", "#b8528c", "#b78300", "#3d9fd8", "#6b5bb5", "#6f7780")
_MARKERS = ("o", "s", "^", "D", "v")
_REPEAT = "#b9b2a8"
_PALE, _DEEP = (0.81, 0.85, 0.89), (0.04, 0.27, 0.5)


def available() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def write_plots(facts: StudyFacts, importance: Importance, drawn: Mapping[str, Batch], to: Path) -> list[Path]:
    """Write the plots below a folder and return their paths; empty if matplotlib is missing."""
    if not available():
        return []
    pictures = {
        "curves.png": _curves(facts, drawn),
        "best_so_far.png": _best_so_far(facts),
        "knobs.png": _knobs(facts, importance),
    }
    folder = to / FOLDER
    if folder.is_symlink():  # a run may have put it there
        folder.unlink()
    written = []
    for name, figure in pictures.items():
        path = folder / name
        if figure is None:
            path.unlink(missing_ok=True)  # an older plot would be out of date
            continue
        folder.mkdir(parents=True, exist_ok=True)
        content = BytesIO()
        figure.savefig(content, format="png", dpi=130)
        write_atomic(path, content.getvalue(), sync=False)
        written.append(path)
    return written


def _figure(width: float, height: float) -> Figure:
    # A bare Figure draws with Agg: no window, and none of pyplot's global state.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _style_axes(axes: Axes, title: str) -> None:
    axes.set_title(_literal(title), loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)


def _literal(text: str) -> str:
    """Escape text so that matplotlib does not parse it as a formula."""
    return clean_line(text).replace("\\", "/").replace("$", r"\$")


def _shade(facts: StudyFacts) -> dict[str, Any]:
    """Return a colour for each measured run by rank, the darkest for the best."""
    ranked = sorted(facts.measured, key=facts.sort_key, reverse=True)
    last = max(1, len(ranked) - 1)
    return {
        run.row.id: tuple(p + (d - p) * place / last for p, d in zip(_PALE, _DEEP, strict=True))
        for place, run in enumerate(ranked)
    }


def _curves(facts: StudyFacts, drawn: Mapping[str, Batch]) -> Figure | None:
    names = metrics_drawn(facts, drawn)[:4]
    if not names:
        return None
    shade = _shade(facts)
    best = facts.best.row.id if facts.best else None
    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    figure = _figure(5.6 * columns, 3.2 * rows)
    for place, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, place + 1)
        for run in sorted(drawn, key=lambda run: run == best):
            curve = drawn[run].get(name)
            if curve is not None and run == best:
                axes.plot(curve.steps, curve.values, color=_BEST, linewidth=1.8,
                          label=f"{'champion' if facts.judge else 'best'}: {run}")  # fmt: skip
            elif curve is not None:
                style = "-" if run in shade else "--"
                axes.plot(curve.steps, curve.values, style, color=shade.get(run, "#b9b2a8"), linewidth=0.9)
        _style_axes(axes, name)
        axes.set_xlabel("step", fontsize=8)
        if best in drawn and place == 0:
            axes.legend(fontsize=8, frameon=False)
    return figure


def _best_so_far(facts: StudyFacts) -> Figure | None:
    if not facts.measured or not facts.metric:
        return None
    figure = _figure(7.2, 3.4)
    axes = figure.add_subplot()
    proposers = list(dict.fromkeys(run.row.proposer for run in facts.measured))
    for proposer, colour, marker in zip(proposers, cycle(_COLOURS), cycle(_MARKERS), strict=False):
        own = [run for run in facts.measured if run.row.proposer == proposer]
        numbers = [run.row.n for run in own]
        axes.scatter(numbers, _objectives(own), s=14, color=colour, marker=marker, label=_literal(proposer))
    repeats = [run for run in facts.runs if run.into is not None and run.mean is not None]
    if repeats:
        axes.scatter([run.row.n for run in repeats], _objectives(repeats), s=6, color=_REPEAT, label="replicates")
    steps = [(best.n, best.objective) for best in facts.best_so_far]
    steps += [(facts.runs[-1].row.n, value) for _, value in steps[-1:]]
    axes.step([n for n, _ in steps], [value for _, value in steps], where="post", color=_BEST, linewidth=1.8)
    unmeasured = [run.row.n for run in facts.runs if run.is_failure]
    if unmeasured:
        bottom = axes.get_xaxis_transform()
        axes.plot(unmeasured, [0.0] * len(unmeasured), "x", color="#b3362b", markersize=4, clip_on=False,
                  label="failed", transform=bottom)  # fmt: skip
    _clip_outliers(axes, facts)
    title = "Champion so far, means" if facts.judge else "Best so far"
    _style_axes(axes, f"{title}: {facts.metric} ({facts.goal})")
    axes.set_xlabel("run number", fontsize=8)
    axes.legend(fontsize=8, frameon=False)
    return figure


def _clip_outliers(axes: Axes, facts: StudyFacts) -> None:
    """Limit the y axis so that a few outliers do not compress the other objectives."""
    values = sorted(_objectives(facts.measured))
    low, high = values[len(values) // 20], values[-1 - len(values) // 20]
    reach = 1.2 * (high - low)
    if len(values) >= 8 and reach > 0 and (values[0] < low - reach or values[-1] > high + reach):
        low, high = max(values[0], low - reach), min(values[-1], high + reach)
        axes.set_ylim(low - (high - low) / 20, high + (high - low) / 20)


def _objectives(runs: Sequence[RunFacts]) -> list[float]:
    return [run.mean for run in runs if run.mean is not None]


def _knobs(facts: StudyFacts, importance: Importance) -> Figure | None:
    """Plot the objective against each knob, the most important first."""
    shares = {share.knob: share.share for share in importance.shares}
    knobs = sorted(facts.varying, key=lambda knob: -shares.get(knob.key, 0.0))[:MAX_PANELS]
    if len(facts.measured) < 2 or not knobs:
        return None
    columns = min(3, len(knobs))
    rows = -(-len(knobs) // columns)
    figure = _figure(3.7 * columns, 2.7 * rows)
    shade = _shade(facts)
    for place, knob in enumerate(knobs):
        axes = figure.add_subplot(rows, columns, place + 1)
        own = [run for run in facts.measured if run.knobs.get(knob.key) is not None]
        values = [run.knobs[knob.key] for run in own]
        shown = values if knob.kind == "number" else [_literal(wording.cut(wording.shown(v), 20)) for v in values]
        axes.scatter(shown, _objectives(own), s=13, color=[shade[run.row.id] for run in own])
        if facts.best is not None and facts.best in own:
            at = own.index(facts.best)
            axes.scatter([shown[at]], _objectives([own[at]]), s=34, color=_BEST, zorder=3)
        if knob.log:
            axes.set_xscale("log")
        if knob.kind == "number" and len(set(values)) <= FEW:
            axes.set_xticks(sorted(set(values)), [wording.shown(value) for value in sorted(set(values))])
            axes.minorticks_off()
        _clip_outliers(axes, facts)
        _style_axes(axes, _panel_title(knob, shares))
        axes.set_ylabel(_literal(facts.metric or ""), fontsize=8)
    figure.supxlabel("share of the objective's variance that each knob explains alone", fontsize=8, color="#626d78")
    return figure


def _panel_title(knob: KnobFacts, shares: Mapping[str, float]) -> str:
    return knob.key + (f", {100 * shares[knob.key]:.0f} %" if knob.key in shares else "")
