"""`report.html`: one self-contained file with styles, scripts and data, on the modules that `looplab ui` serves.

The page sends no requests, and nothing in the data can run: its policy allows only the scripts of this folder, by hash;
`<` is escaped in the data; the scripts write text only to text nodes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import files
from math import isfinite
from typing import TYPE_CHECKING, Any

from looplab.measure.base import Batch, Curve
from looplab.report import wording
from looplab.report.bundle import MODULES, read_asset, single_file
from looplab.report.curves import band, common_grid, metrics_drawn
from looplab.report.facts import KnobFacts, RunFacts, StudyFacts, how_it_ended
from looplab.report.fanova import LABEL as FANOVA_LABEL
from looplab.report.importance import LABEL, Importance
from looplab.report.judged import Judged, MixFacts
from looplab.report.language import LANGUAGES, in_each, texts
from looplab.untrusted import dump_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_POINTS = 180_000
"""Points of all curves on a page: about three megabytes."""
MAX_GRID = 300
"""Points of one curve."""
MAX_TEXT = 1_000_000
"""Characters of all reasons, hypotheses and notes on a page."""
MAX_FAILURES = 30
MAX_REJECTED = 200
LAST_METRICS = 12
MAX_JUDGED = 400
SCRIPTS = ("study.js", "judged.js", "knobs.js", "runs.js", "page.js")
STATES = (
    "ok", "failed", "stopped", "timeout", "lost", "running", "planned", "queued", "imported", "keep", "discard",
    "inconclusive", "crash", "void", "base", "trial", "replicate", "reproduction", "continuation", "control", "last",
    "best", "first", "mean", "rounds", "runs", "wall clock", "device hours", "agents' tokens", "agents' cost", "kept",
    "partly", "discarded", "crashed", "open",
)  # fmt: skip
"""Words of the data that pages translate."""
FEW = 7
"""A knob with at most this many values has a tick at each of them."""

_BODY = """\
<main id="page"></main>
<noscript>This page draws its charts with its own script. Without scripts, read report.md next to it.</noscript>"""


def page(title: str, data: Mapping[str, Any], *scripts: str) -> str:
    """Return a self-contained page from data and scripts of this folder; they may use the shared modules."""
    parts = {"texts": _texts(), "data": data}
    return single_file(title, _BODY, parts, folder=files(__name__), scripts=("start.js", *scripts), style="page.css")


@functools.cache
def _texts() -> dict[str, dict[str, str]]:
    """Return the translations of texts that scripts of reports use, by language."""
    here = files(__name__)
    scripts = "".join(map(read_asset, MODULES)) + "".join(
        one.read_text(encoding="utf-8") for one in here.iterdir() if one.name.endswith(".js")
    )
    data = {*STATES, LABEL, FANOVA_LABEL}  # words that come with the data
    found = {}
    for name in LANGUAGES[1:]:
        found[name] = {key: text for key, text in texts(name).items() if key in data or dump_json(key) in scripts}
    return found


def study_page(
    facts: StudyFacts,
    importance: Importance,
    drawn: Mapping[str, Batch],
    label: str = LABEL,
    *,
    seeds: Mapping[str, Sequence[Batch]] | None = None,
    shared: bool = False,
) -> str:
    """Return the page of a study.

    Args:
        facts: The study.
        importance: Importance of its knobs.
        drawn: Curves of some of its runs, by run id.
        label: How the importance was measured.
        seeds: Curves of the replicates of those runs.
        shared: Whether it is read where the run folders are not, so that nothing may link to them.
    """
    knobs = facts.varying
    places = {knob.key: k for k, knob in enumerate(knobs)}
    metrics = _last_metrics(facts)
    longest = min(4000, max(200, MAX_TEXT // max(1, 3 * len(facts.runs))))
    rows = {run.row.id: place for place, run in enumerate(facts.runs)}
    best = None if facts.best is None else rows[facts.best.row.id]
    data = {
        "study": facts.study,
        "shared": shared,
        "time": wording.moment(facts.at),
        "head": facts.head,
        "metric": facts.metric,
        "goal": facts.goal,
        "at": facts.moment,
        "notes": [*facts.notes, *(f"The model: {line}" for line in facts.beliefs[:1])],
        "alarms": facts.alarms,
        "counts": sorted(facts.counts().items(), key=lambda count: -count[1]),
        "waiting": facts.waiting,
        "budget": [(part.name, part.shown, part.used / part.limit if part.limit else None) for part in facts.budget],
        "proposers": list(dict.fromkeys(run.row.proposer for run in facts.runs)),
        "best": best,
        "path": [(step.n, step.objective) for step in facts.best_so_far],
        "knobs": [
            _knob(knob, name, [*facts.entries, *facts.imported])
            for knob, name in zip(knobs, short_names(knobs), strict=True)
        ],
        "metrics": metrics,
        "runs": [_run(run, rows, knobs, places, metrics, longest) for run in facts.runs],
        "curves": _curves(facts, drawn, seeds or {}),
        "importance": {
            "label": label,
            "shared": label == LABEL,
            "runs": importance.runs,
            "note": importance.note,
            "shares": [(places[share.knob], round(share.share, 4), share.clear) for share in importance.shares],
        },
        "judge": _judge(facts.judge, rows) if facts.judge else None,
        "mix": _mix(facts.mix) if facts.mix else None,
        "watched": [
            (rows.get(one.run), one.run, one.rule, wording.cut(one.text, 400), one.stops)
            for one in reversed(facts.watched[-MAX_REJECTED:])
        ],
        "reproduced": [(one.run, one.again, one.same, one.why) for one in reversed(facts.reproduced)],
        "failures": [
            {"runs": failure.runs, "how": failure.how, "tail": failure.tail}
            for failure in sorted(facts.failures, key=lambda failure: -len(failure.runs))[:MAX_FAILURES]
        ],
        "rejected": [
            (
                f"{rejection.id}" + (f" ({rejection.times} times)" if rejection.times > 1 else ""),
                rejection.proposer,
                "  ".join(rejection.edits),
                wording.cut(rejection.why, 600),
                wording.cut(rejection.reason, 300),
            )
            for rejection in reversed(facts.rejected[-MAX_REJECTED:])
        ],
    }
    return page(f"{facts.study} – looplab", data, *SCRIPTS)


def index_page(lab: str, studies: Sequence[StudyFacts], live: str) -> str:
    """Return a page that lists studies, each with a link to its own page next to it.

    Args:
        lab: The name of the lab.
        studies: Its studies.
        live: The file with the live page.
    """
    data = {
        "lab": lab,
        "live": live,
        "studies": [
            {
                "name": one.study,
                "headline": in_each(partial(getattr, one.judge, "headline")) if one.judge else None,
                "metric": one.metric,
                "best": one.best.shown if one.best else None,
                "runs": len(one.runs),
                "alarms": len(one.alarms),
                "time": wording.moment(one.at),
            }
            for one in studies
        ],
    }
    return page(f"{lab} – looplab", data, "index.js")


def _judge(judge: Judged, rows: Mapping[str, int]) -> dict[str, Any]:
    return {
        "by": judge.by,
        "headline": in_each(lambda: judge.headline),
        "standing": in_each(lambda: judge.standing),
        "sentences": in_each(lambda: judge.sentences),
        "base": rows.get(judge.base or ""),
        "sigma": short(judge.sigma),
        "alpha": [judge.alpha, short(judge.spent), short(judge.reserved)] if judge.by == "test" else None,
        "champions": [rows[one.run] for one in judge.judgements if one.verdict == "keep" and one.run in rows],
        "entrants": [
            {
                "run": rows[one.run],
                "verdict": one.verdict,
                "effect": short(one.effect),
                "low": short(one.low),
                "high": short(one.high),
                "shown": one.interval,
                "p": short(one.p, 3),
                "bar": short(one.bar, 3),
                "n": one.n,
                "against": one.against,
                "why": wording.cut(one.why, 400),
                "flags": one.flags,
            }
            for one in judge.judgements[-MAX_JUDGED:]
            if one.run in rows
        ],
    }


def _mix(mix: MixFacts) -> dict[str, Any]:
    ranked = sorted(mix.credit.items(), key=lambda item: -item[1].mean)
    names = list(dict.fromkeys([*(name for name, _ in ranked), *(name for _, all_ in mix.weights for name in all_)]))
    return {
        "credit": [
            (name, one.proposals, one.kept, one.partial, one.discarded, one.crashed, one.waiting)
            for name, one in ranked
        ],
        "names": names,
        "weights": [(n, [short(weights.get(name, 0.0), 4) for name in names]) for n, weights in mix.weights],
    }


def _run(
    run: RunFacts,
    rows: Mapping[str, int],
    knobs: Sequence[KnobFacts],
    places: Mapping[str, int],
    metrics: Sequence[str],
    longest: int,
) -> dict[str, Any]:
    row = run.row
    return {
        "id": row.id,
        "n": row.n,
        "round": row.round,
        "by": row.proposer,
        "status": run.status,
        "how": how_it_ended(row),
        "parent": row.parent,
        "base": row.base,
        "role": row.role,
        "into": None if run.into is None else rows[run.into],
        "obj": run.mean,
        "own": run.objective,
        "sd": short(run.sd),
        "runs": run.measured,
        "dp": short(run.against_parent),
        "db": short(run.against_base),
        "verdict": row.verdict,
        "sec": None if row.seconds is None else round(row.seconds, 1),
        "why": wording.cut(row.reason, longest),
        "hyp": wording.cut(run.hypothesis, longest),
        "said": wording.cut(run.conclusion, longest),
        "notes": [wording.cut(note, longest) for note in run.notes[:3]],
        "wandb": run.wandb,
        "changes": [(key, wording.cut(wording.change(sides), 80)) for key, sides in list(run.changes.items())[:12]],
        "changed": [places[key] for key in run.changes if key in places],
        "knobs": [_value(knob, run) for knob in knobs],
        "last": [short(run.metrics[name].last) if name in run.metrics else None for name in metrics],
    }


def _value(knob: KnobFacts, run: RunFacts) -> Any:
    value = run.knobs.get(knob.key)
    return value if value is None or knob.kind == "number" else wording.cut(wording.shown(value), 60)


def _knob(knob: KnobFacts, name: str, runs: Sequence[RunFacts]) -> dict[str, Any]:
    values = [_value(knob, run) for run in runs]
    facts: dict[str, Any] = {"key": knob.key, "short": name, "kind": knob.kind, "log": knob.log}
    if knob.kind == "number":
        numbers = [value for value in values if value is not None]
        few = sorted(set(numbers)) if len(set(numbers)) <= FEW else None
        return {**facts, "low": min(numbers), "high": max(numbers), "few": few}
    return {**facts, "names": sorted({"not set" if value is None else value for value in values})}


def short_names(knobs: Sequence[KnobFacts]) -> list[str]:
    """Return the shortest suffix of each key that is unique."""
    parts = [knob.key.split(".") for knob in knobs]
    names = []
    for mine in parts:
        for length in range(1, len(mine) + 1):
            if sum(other[-length:] == mine[-length:] for other in parts) == 1:
                break
        names.append(".".join(mine[-length:]))
    return names


def _last_metrics(facts: StudyFacts) -> list[str]:
    """Return the metrics that most runs have, without the objective."""
    counts = Counter(name for run in facts.runs for name in run.metrics if name != facts.metric)
    return [name for name, _ in counts.most_common(LAST_METRICS)]


def _curves(
    facts: StudyFacts, drawn: Mapping[str, Batch], seeds: Mapping[str, Sequence[Batch]]
) -> list[tuple[str, list[float | None], list[Any]]]:
    """Return, by metric, its grid and for each config its row, mean, low, high and number of seeds."""
    names = metrics_drawn(facts, drawn)
    lines = sum(name in batch for name in names for batch in drawn.values())
    limit = min(MAX_GRID, max(40, MAX_POINTS // max(1, 2 * lines)))
    places = {run.row.id: place for place, run in enumerate(facts.runs)}
    found = []
    for name in names:
        own = {
            run: [one[name] for one in (batch, *seeds.get(run, ())) if name in one]
            for run, batch in drawn.items()
            if name in batch
        }
        grid, cells = common_grid([curve for curves in own.values() for curve in curves], limit)
        bands = ((places[run], band(curves, grid, cells=cells)) for run, curves in own.items())
        found.append(
            (
                name,
                [short(step, 9) for step in grid.tolist()],
                [(place, _packed(one.mean), _packed(one.low), _packed(one.high), one.seeds) for place, one in bands],
            )
        )
    return found


def _packed(values: NDArray[np.float64] | None) -> list[float | None] | None:
    return None if values is None else [short(value, 5) for value in values.tolist()]


def packed(curve: Curve) -> tuple[list[float | None], list[float | None]]:
    """Return steps and values with few digits."""
    return [short(step, 9) for step in curve.steps], [short(value, 6) for value in curve.values]


def short(value: float | None, digits: int = 6) -> float | None:
    """Round a number to few digits; None if it is not finite."""
    if value is None or not isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
