"""Decisions in a study for reports and tables: points, verdicts, proposers, watch rules, reproductions.

A point is one config: a challenger's first run with its replicates under other seeds. Reports list points, so that
replicates do not look like challengers, and a mean is not mistaken for one lucky run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from looplab.config.lab import StudyConfig
from looplab.decide.mix import Credit, credit
from looplab.judge import stats
from looplab.ledger.roles import COPIES, DECIDED, Role
from looplab.ledger.view import RunRow, StudyView
from looplab.report import wording
from looplab.report.language import t


@dataclass(frozen=True, slots=True)
class ReplicatedConfig:
    """All runs of one config from the same start."""

    run: RunRow
    """The first one, which identifies it."""
    runs: tuple[RunRow, ...]
    """All runs that count, including the first."""
    copies: tuple[RunRow, ...] = ()
    """Repeats with the same seed; they carry no information about the noise."""

    @property
    def values(self) -> list[float]:
        return [run.objective for run in self.runs if run.objective is not None]

    @property
    def mean(self) -> float | None:
        values = self.values
        return stats.mean(values) if values else None

    @property
    def sd(self) -> float | None:
        """Standard deviation between its runs; None for a single run."""
        values = self.values
        return stats.spread(values) if len(values) > 1 else None

    @property
    def shown(self) -> str:
        return wording.mean(self.mean, self.sd, len(self.values))


def points(rows: Sequence[RunRow]) -> dict[str, ReplicatedConfig]:
    """Return the points of a study by the id of their first run, in order."""
    leads: dict[str, RunRow] = {}
    owner: dict[tuple[str, str | None], str] = {}
    for row in rows:
        if row.role == Role.IMPORTED:
            leads[row.id] = row  # from another tool: never part of another point
        elif row.role in DECIDED:
            leads[row.id] = row
            if row.role == Role.CONTINUATION:
                owner[row.point, row.warm] = row.id  # the training as far as it got; verdicts are about it
            else:
                owner.setdefault((row.point, row.warm), row.id)
    members: dict[str, list[RunRow]] = {}
    copies: dict[str, list[RunRow]] = {}
    lead_of: dict[str, str] = {}
    for row in rows:
        if row.id in leads:
            lead = row.id
        elif row.role in COPIES and row.twin in lead_of:
            lead = lead_of[row.twin]
        else:  # a control, or a replicate whose first run is gone, starts its own point
            lead = owner.setdefault((row.point, row.warm), row.id)
        lead_of[row.id] = lead
        (copies if row.role in COPIES and lead != row.id else members).setdefault(lead, []).append(row)
    by_id = {row.id: row for row in rows}
    return {
        lead: ReplicatedConfig(by_id[lead], tuple(members[lead]), tuple(copies.get(lead, ())))
        for lead in sorted(members, key=lambda lead: by_id[lead].n)
    }


# -- verdicts


@dataclass(frozen=True, slots=True)
class VerdictFacts:
    """A verdict with its evidence. Positive effects are improvements, for either goal."""

    run: str
    verdict: str
    why: str
    against: str | None
    """Champion that it was compared with."""
    effect: float | None
    low: float | None
    """95 % interval of the effect."""
    high: float | None
    p: float | None
    """None if there was no test."""
    bar: float | None
    """Largest p that would have won at this look; None if there was no test."""
    n: int
    """Number of pairs, or runs, behind the effect."""
    flags: tuple[str, ...]
    mean: float | None
    """Mean objective over all its runs."""
    sd: float | None
    runs: int
    at: float

    @property
    def interval(self) -> str:
        """`0.16 [0.11, 0.21]`"""
        if self.effect is None:
            return wording.NOTHING
        return wording.effect(self.effect, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Gain:
    """Improvement of the champion over the base."""

    effect: float
    low: float
    high: float
    p: float
    n: int
    paired: bool

    @property
    def shown(self) -> str:
        effect, p = wording.effect(self.effect, self.low, self.high), wording.number(self.p, 2)
        if self.paired:
            return t("{effect} ({n} pairs, p {p})", effect=effect, n=self.n, p=p)
        return t("{effect} ({n} runs, p {p})", effect=effect, n=self.n, p=p)


@dataclass(frozen=True, slots=True)
class UnderTest:
    """A challenger whose replicates are running."""

    run: str
    look: int
    """Interim looks so far."""
    runs: int


@dataclass(frozen=True, slots=True)
class Judged:
    """State and decisions of a study's judge."""

    by: str
    """test, mean, ratchet or deterministic"""
    base: str | None
    """First run of the base."""
    champion: str | None
    mean: float | None
    """Mean of the champion over all its runs."""
    sd: float | None
    runs: int
    gain: Gain | None
    """Champion against base; None if it is the base, or if too few runs can be compared."""
    sigma: float | None
    """Noise: standard deviation between runs that differ only in their seed."""
    noise_runs: int
    noise_points: int
    """Number of runs, and of configs, behind sigma."""
    floor: tuple[int, int]
    """Measured runs of the base, and the number needed before anything is judged."""
    counts: dict[str, int]
    """Number of challengers by verdict."""
    judgements: tuple[VerdictFacts, ...]
    """In order; including the base's own."""
    tests: tuple[UnderTest, ...]
    alpha: float
    spent: float
    """Alpha spent by tests that did not promote."""
    reserved: float
    """Alpha reserved by open tests."""
    alarms: tuple[str, ...]
    held_out: tuple[int, int] | None
    """Number of times the held-out metric was read, and its limit; None if the study has none."""
    held_out_said: str | None = None
    """Result of the last reading."""

    def of(self, run: str | None) -> VerdictFacts | None:
        """Return the verdict on a run; None if there is none."""
        return next((one for one in self.judgements if one.run == run), None)

    @property
    def challengers(self) -> list[VerdictFacts]:
        """All verdicts except the base's own."""
        return [one for one in self.judgements if one.run != self.base]

    @property
    def headline(self) -> str:
        """The main result in one sentence."""
        if self.champion is None:
            have, needed = self.floor
            key = "No champion yet: the noise of the base is being measured ({have} of {needed} runs)"
            return t(key, have=have, needed=needed)
        if self.champion == self.base:
            key = "Nothing has beaten the base yet ({n} {n|challenger|challengers} judged)"
            return t(key, n=len(self.challengers))
        return t("Champion {run} is {standing}", run=self.champion, standing=self.standing)

    @property
    def standing(self) -> str:
        """How the champion compares: `better than the base by 0.21 [0.18, 0.25] (12 pairs, p 1e-05)`."""
        own = self.of(self.champion)
        if self.champion == self.base:
            return t("the base: nothing has beaten it yet")
        if self.by == "ratchet":
            return t("the latest improvement, one run against one run, which may be luck")
        if self.by == "mean" and own is not None and own.effect is not None:
            key = "better than {against} by {effect} in the mean of {n} runs, without a test: it may be luck"
            return t(key, against=own.against, effect=wording.number(own.effect, 4), n=own.n)
        if self.by == "deterministic" and own is not None and own.effect is not None:
            key = "better than {against} by {effect}, and identical when repeated"
            return t(key, against=own.against, effect=wording.number(own.effect, 4))
        if self.gain is not None:
            return t("better than the base by {effect}", effect=self.gain.shown)
        if own is not None and own.effect is not None:
            p = "" if own.p is None else f", p {wording.number(own.p, 2)}"
            key = "better than {against} by {effect} ({n} {n|replicate|replicates}{p})"
            return t(key, against=own.against, effect=own.interval, n=own.n, p=p)
        return t("the champion")

    @property
    def sentences(self) -> list[str]:
        """Details after the headline."""
        lines = []
        own = self.of(self.champion)
        if own is not None and self.champion != self.base:
            why = own.why.replace("Better: ", "It was promoted for being ", 1)  # the judge's words, in English
            lines.append(why + (f" ({'; '.join(own.flags)})" if own.flags else ""))
        if self.sigma is not None and self.by != "deterministic":
            key = (
                "Noise: runs that differ only in their seed vary by {sigma} (standard deviation, from {n} runs of {m} "
                "{m|config|configs}). A smaller difference between single runs means nothing."
            )
            lines.append(t(key, sigma=wording.number(self.sigma, 3), n=self.noise_runs, m=self.noise_points))
        elif self.by == "test":
            lines.append(t("Noise: not measured yet."))
        if self.counts:
            counted = ", ".join(f"{n} {t(verdict)}" for verdict, n in self.counts.items())
            lines.append(t("Challengers: {counts}.", counts=counted))
        for test in self.tests:
            key = "Under test: {run}, {n} {n|run|runs} and {m} {m|look|looks} so far."
            lines.append(t(key, run=test.run, n=test.runs, m=test.look))
        if self.by == "test":
            key = "{n} reserved by open tests"
            held = f", {t(key, n=wording.number(self.reserved, 2))}" if self.reserved else ""
            key = "Probability of a false promotion: at most {alpha} for the whole study, {spent} spent{held}."
            alpha, spent = wording.number(self.alpha, 2), wording.number(self.spent, 2)
            lines.append(t(key, alpha=alpha, spent=spent, held=held))
        if self.held_out is not None:
            n, limit = self.held_out
            lines.append(t("The held-out metric was read {n} of {limit} times.", n=n, limit=limit))
        if self.held_out_said is not None:
            lines.append(self.held_out_said)
        return lines


def judged(study: StudyConfig, record: StudyView, found: Mapping[str, ReplicatedConfig]) -> Judged | None:
    """Return the state of a study's judge; None if it has no judge."""
    if study.judge is None or study.objective is None:
        return None
    state = record.judge_state() or {}
    verdicts = record.verdicts()
    every = found
    found = {run: point for run, point in every.items() if point.run.conditions == state.get("conditions", "")}
    first = next((point.run.id for point in found.values() if point.run.role == Role.BASE), None)
    bases = [run for run, evidence in verdicts.items() if "base" in evidence.get("flags", ()) and run in found]
    base = bases[0] if bases else first
    judgements = tuple(_judgement(run, evidence, every.get(run)) for run, evidence in verdicts.items())
    groups = [values for point in found.values() if len(values := point.values) > 1]
    noise = stats.pooled_spread(groups)
    champion, ground = found.get(state.get("champion") or ""), found.get(base or "")
    sigma = noise[0] if noise else None
    rule = study.judge_rule or "test"
    floor = {"test": study.judge.baseline_seeds, "mean": study.judge.replicates, "deterministic": 2, "ratchet": 1}[rule]
    return Judged(
        by=rule,
        base=base,
        champion=champion.run.id if champion else None,
        mean=champion.mean if champion else None,
        sd=champion.sd if champion else None,
        runs=len(champion.values) if champion else 0,
        gain=_gain(study.objective.goal, verdicts, ground, champion, sigma or 0.0),
        sigma=sigma,
        noise_runs=sum(map(len, groups)),
        noise_points=len(groups),
        floor=(len(ground.values) if ground else 0, floor),
        counts=dict(Counter(one.verdict for one in judgements if one.run != base)),
        judgements=judgements,
        tests=tuple(
            UnderTest(test["run"], test["look"], len(found[test["run"]].values))
            for test in state.get("tests", ())
            if test["run"] in found
        ),
        alpha=study.judge.alpha,
        spent=float(state.get("spent", 0.0)),
        reserved=math.fsum(test["alpha"] for test in state.get("tests", ())),
        alarms=tuple(wording.plain(alarm) for alarm in state.get("alarms", ())),
        held_out=(record.held_out_reads(), study.holdout.budget) if study.holdout else None,
        held_out_said=record.held_out_text() if study.holdout else None,
    )


def judged_now(study: StudyConfig, record: StudyView) -> Judged | None:
    """Like `judged`, for the runs in the ledger."""
    return judged(study, record, points(record.runs())) if study.judge else None


def _judgement(run: str, evidence: Mapping[str, Any], point: ReplicatedConfig | None) -> VerdictFacts:
    return VerdictFacts(
        run=run,
        verdict=evidence["verdict"],
        why=wording.plain(evidence.get("why", "")),
        against=evidence.get("champion"),
        effect=evidence.get("effect"),
        low=evidence.get("low"),
        high=evidence.get("high"),
        p=evidence.get("p"),
        bar=evidence.get("boundary"),
        n=evidence.get("n", 0),
        flags=tuple(flag for flag in evidence.get("flags", ()) if flag != "base"),
        mean=point.mean if point else None,
        sd=point.sd if point else None,
        runs=len(point.values) if point else 0,
        at=evidence.get("at", 0.0),
    )


def _gain(
    goal: str,
    verdicts: Mapping[str, Mapping[str, Any]],
    base: ReplicatedConfig | None,
    champion: ReplicatedConfig | None,
    sigma: float,
) -> Gain | None:
    """Compare the current champion with the base; the judge compared it with the champion of its time."""
    if champion is None or base is None or champion.run.id == base.run.id:
        return None
    evidence = verdicts.get(champion.run.id, {})
    seeded = base.run.seed is not None
    if evidence.get("champion") == base.run.id and evidence.get("p") is not None:
        return Gain(evidence["effect"], evidence["low"], evidence["high"], evidence["p"], evidence["n"], seeded)
    if champion.run.warm != base.run.warm:  # it was trained for longer than the base
        return None
    sign = 1.0 if goal == "max" else -1.0
    # First runs were selected for being good, so they are left out.
    excluded = {champion.run.seed, base.run.seed}
    ours, theirs = ({run.seed: sign * run.objective for run in point.runs if run.objective is not None}
                    for point in (champion, base))  # fmt: skip
    pairs = [ours[seed] - theirs[seed] for seed in ours if seed in theirs and seed not in excluded]
    if seeded and len(pairs) > 1:
        compared = stats.paired(pairs, stats.LEAST_SPREAD * math.sqrt(2.0) * sigma)
    else:
        mine = [sign * run.objective for run in champion.runs[1:] if run.objective is not None]
        other = [sign * value for value in base.values]
        if len(mine) < 2 or len(other) < 2:
            return None
        compared = stats.welch(mine, other, stats.LEAST_SPREAD * sigma)
    return Gain(compared.effect, *compared.interval(), compared.p(), compared.n, seeded and len(pairs) > 1)


# -- proposers


@dataclass(frozen=True, slots=True)
class MixFacts:
    """Record of each proposer, and its weight in the mix over time."""

    credit: dict[str, Credit]
    weights: tuple[tuple[int, dict[str, float]], ...]
    """(earlier proposals of the mix, share of each proposer); empty if the study has no mix."""


def mix_facts(record: StudyView) -> MixFacts | None:
    """Return the record of each proposer; None if there are no proposals."""
    weights: list[tuple[int, dict[str, float]]] = []
    made = 0
    for event in record.events_of("mix"):
        weights.append((made, event.get("weights", {})))
        made += sum(event.get("chosen", {}).values())
    if weights and made > weights[-1][0]:
        weights.append((made, weights[-1][1]))
    repeats = record.proposers_of(Role.REPRODUCTION)
    names = [name for name in record.proposals_by_proposer() if name not in repeats]
    return MixFacts(credit(record, names), tuple(weights)) if names else None


# -- watch rules and reproductions


@dataclass(frozen=True, slots=True)
class Watched:
    """A match of a watch rule."""

    run: str
    rule: str
    text: str
    stops: bool


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A run that was repeated exactly."""

    run: str
    again: str
    same: bool
    why: str


def watched(record: StudyView) -> tuple[Watched, ...]:
    """Return the matches of watch rules, in order."""
    return tuple(
        Watched(event["run"], wording.plain(event.get("rule", "")), wording.plain(event.get("text", "")),
                bool(event.get("stops")))
        for event in record.events_of("watched")
    )  # fmt: skip


def reproduced(record: StudyView) -> tuple[Reproduced, ...]:
    """Return the reproductions, in order."""
    return tuple(
        Reproduced(event["run"], event.get("again", ""), bool(event.get("same")), wording.plain(event.get("why", "")))
        for event in record.events_of("reproduced")
    )
