"""`report.md`: a study for people and agents, readable raw or rendered.

Text from configs, proposers and logs is escaped, so that it cannot become a heading, a link, a table or HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from looplab.ledger.roles import Origin
from looplab.measure.summary import MetricSummary
from looplab.report import wording
from looplab.report.facts import RunFacts, StudyFacts
from looplab.report.importance import LABEL, Importance
from looplab.report.wording import NOTHING
from looplab.untrusted import clean_text

MANY = 60
"""A round with more runs than this shows only its best and its latest."""
SHOWN = 25
"""Runs in a shortened list."""
MAX_FAILURES = 12
MAX_REJECTED = 40
MAX_CHANGES = 4
OTHER_METRICS = 8
_SPECIAL = re.compile(r"([\\`*\[\]<|]|~(?=~))")
_WIDEST = 56
"""Cells are padded up to this width, so that raw tables are aligned and fit a screen."""


def render(facts: StudyFacts, importance: Importance, plots: Sequence[str] = (), label: str = LABEL) -> str:
    """Return the report.

    Args:
        facts: The study.
        importance: Importance of its knobs.
        plots: Paths of plots to include, relative to the report.
        label: How the importance was measured.
    """
    parts = [
        [f"# Report of study {text(facts.study)}"],
        _summary_section(facts),
        _judged(facts),
        _front(facts),
        _beliefs(facts),
        _pictures(plots),
        _metrics(facts),
        _knobs(facts, importance, label),
        *(_round(facts, n, runs) for n, runs in facts.rounds().items()),
        _imported(facts),
        _reproduced(facts),
        _proposers(facts),
        _watched(facts),
        _conclusions(facts),
        _rejected(facts),
        _calls(facts),
        _failures(facts),
        _links(facts),
        [f"Head of the record: `{facts.head}`. Keep a copy elsewhere and check it with `looplab verify --against`."],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def text(raw: str) -> str:
    """Return untrusted text on one line, escaped."""
    return _SPECIAL.sub(r"\\\1", _one_line(raw))


def _one_line(raw: str) -> str:
    return " ".join(clean_text(raw).split())


def code(raw: str) -> str:
    """Return untrusted text as inline code, safe in a table."""
    one_line = _one_line(raw).replace("|", "\\|")
    fence = "`" * (max((len(run) for run in re.findall("`+", one_line)), default=0) + 1)
    pad = " " if one_line[:1] == "`" or one_line[-1:] == "`" else ""
    return f"{fence}{pad}{one_line}{pad}{fence}" if one_line else NOTHING


def block(raw: str) -> list[str]:
    """Return untrusted text as a code block."""
    fence = "`" * max(3, max((len(run) for run in re.findall("`+", raw)), default=0) + 1)
    return [f"{fence}text", clean_text(raw), fence]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> list[str]:
    """Return a table with aligned columns; a last column of text is not padded.

    Args:
        columns: Headings.
        rows: Cells.
        numbers: Indices of columns that are aligned to the right.
    """
    right = set(numbers)
    listed = [list(columns), *map(list, rows)]
    last = len(columns) - 1
    widths = [min(_WIDEST, max(3, *(len(row[i]) for row in listed))) for i in range(len(columns))]
    if last not in right:
        widths[last] = 3

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if i in right else cell.ljust(width) if i < last else cell
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * (width - 1) + ":" if i in right else "-" * width for i, width in enumerate(widths)]
    return [line(listed[0]), "| " + " | ".join(rule) + " |", *map(line, listed[1:])]


def run_link(run: RunFacts) -> str:
    """Return a link to the folder of a run."""
    return f"[{run.row.id}]({quote(run.row.id)}/)"


def _summary_section(facts: StudyFacts) -> list[str]:
    lines = [f"As of {wording.moment(facts.at)}.", ""]
    if facts.metric:
        way = "larger is better" if facts.goal == "max" else "smaller is better"
        ties = ""
        if facts.tie_break is not None:
            then = "larger is better" if facts.tie_break.goal == "max" else "smaller is better"
            ties = f"; exact ties by {code(facts.tie_break.metric)}, {facts.tie_break.at} value, {then}"
        lines.append(f"- **Objective:** {code(facts.metric)}, {facts.moment} value, {way}{ties}")
    else:
        lines.append("- **Objective:** none; set `objective:` in lab.yaml to compare runs")
    best = facts.best
    if facts.judge is not None:
        lines.append(f"- **Result:** {facts.judge.headline}.")
    lines += [f"- **ALARM:** {text(alarm)}" for alarm in facts.alarms]
    if best is not None:
        since = "" if best.against_base is None else f", {wording.signed(best.against_base)} against its base"
        word, hint = ("Champion", "") if facts.judge else ("Best", " (one run is a hint, not a result)")
        lines.append(f"- **{word}:** {run_link(best)} with **{best.shown}**{since}{hint}")
        if best.row.reason:
            lines.append(f"- **Its reason:** {text(best.row.reason)}")
    elif facts.runs and facts.judge is None:
        lines.append("- **Best:** no run has measured the objective yet")
    counts = ", ".join(f"{count} {status}" for status, count in sorted(facts.counts().items(), key=lambda c: -c[1]))
    lines.append(f"- **Runs:** {counts or 'none yet; `looplab run` starts the study'}")
    lines.append("- **Used:** " + "; ".join(f"{part.name} {part.shown}" for part in facts.budget))
    if facts.waiting:
        lines.append(f"- **Waiting:** {wording.plural(facts.waiting, 'proposal')} in the queue")
    lines += [f"- **Note:** {text(note)}" for note in facts.notes]
    return lines


def _front(facts: StudyFacts) -> list[str]:
    front = facts.front
    if front is None:
        return []
    linked = ((facts.run(id_), id_, values) for id_, values in front.runs)
    rows = [(run_link(run) if run else id_, *map(wording.number, values)) for run, id_, values in linked]
    return [
        "## Pareto front",
        "",
        f"{wording.plural(len(rows), 'run')} of {front.measured} that no other run beats in every objective; "
        f"hypervolume {wording.number(front.hypervolume)}.",
        "",
        *table(["run", *(code(metric) for metric in front.metrics)], rows, range(1, len(front.metrics) + 1)),
    ]


def _beliefs(facts: StudyFacts) -> list[str]:
    lines = []
    if facts.beliefs_before:
        lines += ["## What the model believed before the first run", ""]
        lines += ["From earlier studies of these knobs:", "", *(f"- {text(line)}" for line in facts.beliefs_before), ""]
    if facts.beliefs:
        lines += ["## What the model believes", "", *(f"- {text(line)}" for line in facts.beliefs)]
    return lines


def _judged(facts: StudyFacts) -> list[str]:
    judge = facts.judge
    if judge is None:
        return []
    lines = ["## Judged", "", f"{judge.headline}.", "", *(f"- {text(sentence)}" for sentence in judge.sentences)]
    if judge.judgements:
        shown = judge.judgements[-MANY:]
        rows = [
            [
                _run_name(facts, one.run) + (" (base)" if one.run == judge.base else ""),
                f"**{one.verdict}**" if one.run == judge.champion else one.verdict,
                one.interval,
                wording.number(one.p, 2),
                str(one.n or NOTHING),
                wording.mean(one.mean, one.sd, one.runs),
                text(one.why + (f" ({'; '.join(one.flags)})" if one.flags else "")),
            ]
            for one in shown
        ]
        columns = ["run", "verdict", "better by, 95 % interval", "p", "n", "mean ± sd", "why"]
        lines += ["", *table(columns, rows, [2, 3, 4, 5])]
        if len(shown) < len(judge.judgements):
            lines += ["", f"The latest {len(shown)} of {len(judge.judgements)}; the ledger has all of them."]
    return lines


def _run_name(facts: StudyFacts, id_: str) -> str:
    run = facts.run(id_)
    return text(id_) if run is None else run_link(run)


def _reproduced(facts: StudyFacts) -> list[str]:
    if not facts.reproduced:
        return []
    lines = [
        f"- {_run_name(facts, one.run)} as {_run_name(facts, one.again)}: "
        f"{'reproduced' if one.same else '**not reproduced**'}. {text(one.why)}"
        for one in facts.reproduced
    ]
    return ["## Reproductions", "", *lines]


def _proposers(facts: StudyFacts) -> list[str]:
    if facts.mix is None:
        return []
    mixed = bool(facts.mix.weights)
    rows = [
        [
            text(name),
            *map(str, (one.proposals, one.kept, one.partial, one.discarded, one.crashed, one.waiting)),
            *([_share_over_time(facts, name)] if mixed else []),
        ]
        for name, one in sorted(facts.mix.credit.items(), key=lambda item: -item[1].mean)
    ]
    columns = [
        "by",
        "proposals",
        "kept",
        "partly",
        "discarded",
        "crashed",
        "open",
        *(["share over time"] if mixed else []),
    ]
    better = "kept: judged better" if facts.judge else "kept: the best so far when it ended"
    return ["## Who proposed what", "", *table(columns, rows, range(1, 7)), "",
            f"{better}; partly: not kept, but worth replicates, or undecided."]  # fmt: skip


def _share_over_time(facts: StudyFacts, name: str) -> str:
    assert facts.mix is not None
    over_time = [weights.get(name, 0.0) for _, weights in facts.mix.weights]
    return f"{wording.bars(over_time[-24:])} {100 * over_time[-1]:.0f} %"


def _watched(facts: StudyFacts) -> list[str]:
    if not facts.watched:
        return []
    shown = facts.watched[-MAX_REJECTED:]
    rows = [[_run_name(facts, one.run), text(one.rule), "stopped" if one.stops else "reported", text(one.text)]
            for one in shown]  # fmt: skip
    lines = ["## Watched", "", *table(["run", "rule", "action", "observation"], rows)]
    older = len(facts.watched) - len(shown)
    return lines + (["", f"{older} older ones are in the ledger."] if older > 0 else [])


def _pictures(plots: Sequence[str]) -> list[str]:
    return [f"![{name.rpartition('/')[2].partition('.')[0].replace('_', ' ')}]({name})" for name in plots]


def key_metrics(facts: StudyFacts, run: RunFacts) -> list[str]:
    """Return the main metrics of a run: the objective, then metrics that changed, then constant ones."""

    def rank(name: str) -> int:
        summary = run.metrics[name]
        return 0 if name == facts.metric else 1 if summary.n > 1 and summary.min != summary.max else 2

    return sorted(run.metrics, key=rank)[: OTHER_METRICS + 1]


def _metrics(facts: StudyFacts) -> list[str]:
    run = facts.best or next((run for run in reversed(facts.runs) if run.metrics and not run.is_imported), None)
    if run is None or not run.metrics:
        return []
    bases = (r for r in facts.runs if r.row.proposer == Origin.BASE and r.row.base == run.row.base)
    base = next((r for r in bases if r.metrics), None)
    if base is run:
        base = None
    columns = ["metric", "first", "last", "best", "at step", *(["last of the base"] if base else [])]
    rows = []
    for name in key_metrics(facts, run):
        summary = run.metrics[name]
        rows.append([code(name), *_summary(summary), *([_last_of(base, name)] if base else [])])
    which = ("the champion" if facts.judge else "the best run") if facts.best else "the latest run"
    more = len(run.metrics) - len(rows)
    lines = [f"## Metrics of {which}, {run_link(run)}", "", *table(columns, rows, range(1, len(columns)))]
    return lines + (["", f"{wording.plural(more, 'more metric')} in its `summary.json`."] if more > 0 else [])


def _summary(summary: MetricSummary) -> list[str]:
    last = wording.number(summary.last) + (" (then not finite)" if summary.last_is_nan and summary.n else "")
    return [wording.number(summary.first), last, wording.number(summary.best), wording.number(summary.best_step, 8)]


def _last_of(run: RunFacts, name: str) -> str:
    summary = run.metrics.get(name)
    return NOTHING if summary is None else wording.number(summary.last)


def _knobs(facts: StudyFacts, importance: Importance, label: str) -> list[str]:
    if not facts.runs or not facts.metric:
        return []
    lines = ["## Knobs", ""]
    if importance.note:
        lines.append(f"Share of the objective's variance by knob: {importance.note}.")
    else:
        # fANOVA models all knobs together; groups by one knob do not.
        shared = " Knobs that were changed together share the credit." if label == LABEL else ""
        basis = f"{label}, over {importance.runs} measured {_what(facts)}"
        lines += [f"Share of the objective's variance {basis}.{shared}", ""]
        rows = [
            [code(share.knob), f"{100 * share.share:.0f} %", "" if share.clear else "no more than chance"]
            for share in importance.shares
        ]
        lines += table(["knob", "explains", "note"], rows, [1])
    untouched = [code(knob.key) for knob in facts.knobs if knob.declared and not knob.varies]
    if untouched:
        lines += ["", f"Never changed: {', '.join(untouched)}."]
    return lines


def _what(facts: StudyFacts) -> str:
    return "configs" if len(facts.entries) < len(facts.runs) else "runs"


def _round(facts: StudyFacts, n: int, runs: Sequence[RunFacts]) -> list[str]:
    shown, left_out = list(runs), 0
    if len(runs) > MANY:
        leaders = sorted(runs, key=facts.sort_key)[:SHOWN]
        selected = {run.row.id for run in [*leaders, *runs[-SHOWN:]]}
        shown = [run for run in runs if run.row.id in selected]
        left_out = len(runs) - len(shown)
    rows = []
    for run in shown:
        is_best = facts.best is not None and run.row.id == facts.best.row.id
        rows.append(
            [
                run_link(run),
                text(run.row.proposer),
                run.status,
                *([run.row.verdict or NOTHING] if facts.judge else []),
                f"**{run.shown}**" if is_best else run.shown,
                wording.signed(run.against_parent),
                wording.signed(run.against_base),
                _changes(run.changes),
                text(wording.cut(run.row.reason, 300)),
            ]
        )
    objective = code(facts.metric) if facts.metric else "objective"
    columns = ["run", "by", "status", *(["verdict"] if facts.judge else []), objective, "Δ parent", "Δ base", "change"]
    first = columns.index(objective)
    lines = [f"## Round {n}", "", *table([*columns, "why"], rows, range(first, first + 3))]
    if left_out:
        lines += ["", f"The best {SHOWN} and the latest {SHOWN}; {left_out} more are in summary.json and report.html."]
    return lines


def _imported(facts: StudyFacts) -> list[str]:
    found = facts.imported
    if not found:
        return []
    shown = found[:SHOWN]
    rows = [[run_link(run), run.shown, _changes(run.changes), text(wording.cut(run.row.reason, 300))] for run in shown]
    objective = code(facts.metric) if facts.metric else "objective"
    lines = [
        "## Imported runs",
        "",
        "Recorded by other tools, not run here: hints for search and agents, never judged, not part of any budget.",
        "",
        *table(["run", objective, "against the base", "from"], rows, [1]),
    ]
    return lines + (["", f"The best {len(shown)} of {len(found)}."] if len(shown) < len(found) else [])


def _changes(changes: Mapping[str, Mapping[str, Any]]) -> str:
    if not changes:
        return NOTHING
    parts = [f"{code(key)} {text(wording.cut(wording.change(sides), 60))}" for key, sides in changes.items()]
    more = len(parts) - MAX_CHANGES
    return "; ".join(parts[:MAX_CHANGES]) + (f"; {more} more" if more > 0 else "")


def _conclusions(facts: StudyFacts) -> list[str]:
    lines: list[str] = []
    for run in facts.runs:
        if run.conclusion:
            lines += ["", f"### {run_link(run)}", "", *map(_quoted, run.conclusion.splitlines())]
    return ["## Notes of people and agents", *lines] if lines else []


def _quoted(line: str) -> str:
    shown = text(line)
    return f"> \\{shown}" if shown.startswith("#") else f"> {shown}".rstrip()


def _rejected(facts: StudyFacts) -> list[str]:
    if not facts.rejected:
        return []
    shown = facts.rejected[-MAX_REJECTED:]
    rows = [
        [
            str(rejection.id) + (f" ({rejection.times} times)" if rejection.times > 1 else ""),
            text(rejection.proposer),
            "; ".join(map(code, rejection.edits)),
            text(rejection.why),
            text(wording.cut(rejection.reason, 200)),
        ]
        for rejection in shown
    ]
    lines = ["## Rejected proposals", "", *table(["proposal", "by", "edits", "why not", "its reason"], rows)]
    older = len(facts.rejected) - len(shown)
    return lines + (["", f"{older} older ones are in the ledger."] if older > 0 else [])


def _calls(facts: StudyFacts) -> list[str]:
    if not facts.unusable_calls:
        return []
    shown = facts.unusable_calls[-MAX_REJECTED:]
    rows = [
        [wording.moment(one.at), code(one.call), "failed" if one.failed else "answer refused", text(one.why)]
        for one in shown
    ]
    lines = ["## Agent calls without a usable answer", "", *table(["time", "call", "what", "why"], rows)]
    older = len(facts.unusable_calls) - len(shown)
    return lines + (["", f"{older} older ones are in the ledger."] if older > 0 else [])


def _failures(facts: StudyFacts) -> list[str]:
    if not facts.failures:
        return []
    lines = ["## Failures"]
    for failure in sorted(facts.failures, key=lambda failure: -len(failure.runs))[:MAX_FAILURES]:
        newest = [facts.run(id_) for id_ in failure.runs[-5:]]
        named = ", ".join(run_link(run) for run in newest if run)
        more = len(failure.runs) - len(newest)
        count = wording.plural(len(failure.runs), "run")
        lines += ["", f"### {count}: {text(failure.how)}", "", named + (f" and {more} before" if more else "")]
        newest_run = newest[-1]
        for note in newest_run.notes if newest_run else ():
            lines.append(f"- {text(note)}")
        lines += ["", *(block(failure.tail) if failure.tail else ["No output."])]
    more = len(facts.failures) - MAX_FAILURES
    return lines + (["", f"{more} more kinds of failure; see `looplab logs RUN`."] if more > 0 else [])


def _links(facts: StudyFacts) -> list[str]:
    found = [run for run in facts.runs if run.wandb]
    if not found:
        return []
    shown = found[-SHOWN:]
    if facts.best is not None and facts.best.wandb and facts.best not in shown:
        shown = [facts.best, *shown]
    lines = ["## W&B", "", *(f"- {run.row.id}: <{quote(run.wandb or '', safe=':/?&=%-_.~')}>" for run in shown)]
    more = len(found) - len(shown)
    return lines + (["", f"{more} more are in summary.json."] if more > 0 else [])
