"""The judge: evaluate all measurements so far, issue verdicts, and request the runs that are missing.

Method. The base runs with `baseline_seeds` seeds; their spread is the noise. A challenger's first run, the trial, must
beat the champion by `screen` × the noise, else it is decided after one run. A challenger that passes is replicated on
the champion's other seeds, in pairs. The trial is excluded from the test because it was selected for being good. A test
takes interim looks after 3, 5, 8, 13 and 28 pairs. It is won when the one-sided p is at most the boundary of that look,
and ends early when it is hopeless.

Why false promotions are bounded. Each test receives a fraction of the remaining alpha, fixed before its replicates are
seen; the boundaries of its looks add up to that alpha. A lost test spends its alpha and a promotion spends nothing, so
the boundaries of all lost tests add up to less than `alpha`, however many challengers there are.

Why these defaults (400 simulated studies per setting, each with 24 challengers and 120 runs, half of them better by one
standard deviation, as in `benchmarks/judge.py`). A screen of half a standard deviation passes two thirds of such
challengers and a third of those that are no better; 0.3 finds as many and takes 3 runs more. An alpha share of 0.15
finds an improvement in 82 % of the studies, 0.3 in 85 %, but leaves less for the tenth test. At most 28 replicates
instead of 24 find it in 87 %, and 32 find no more. Looks that grow by 1.4 instead of 1.6 decide 6 runs sooner and find
82 %.

Why a winner is confirmed. The champion was measured once and is compared for the rest of the study; if the data, the
evaluation or the machine changes meanwhile, every later run looks better or worse than it. So a look that is won is
taken again with the champion's runs on those seeds repeated, and promotes if p is still at most 0.05. Where a repeat
measures exactly the same, one is enough. If each run adds 0.02 standard deviations to all later ones, this lowers the
studies with a false promotion from 65 % to 3 %; of the true improvements of one standard deviation it costs 4 %.

Why equal repeats raise an alarm. Repeats that are equal to the last digit have no spread to test against: either the
seed does not reach the trainer, or the metric is too coarse. Such a challenger is not promoted until its repeats
differ. The exception is a metric at its limit (0, 1, 100) in a study whose other runs vary. For a trainer that is
declared deterministic, each winner is repeated once with the same seed and must measure exactly the same.

The judge is pure: no clock, no files, no randomness. The same state and candidates give the same judgement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

from looplab.errors import LabError
from looplab.judge import stats
from looplab.judge.base import (
    Candidate,
    Evidence,
    HeldOut,
    Judgement,
    JudgeSettings,
    JudgeState,
    OpenTest,
    ReadHeldOut,
    RunRequest,
    Verdict,
)

RATCHET = ("single run, no statistics",)
DETERMINISTIC = ("deterministic, no statistics",)
BEST_MEAN = ("best mean, no proof",)
TIE_BREAK = "decided by the tie-break"
EQUAL = "equal to the last digit"
NEARLY_EQUAL = "equal up to rounding"
ROUNDING = 1e-6
"""Relative difference up to which repeats count as one computation rounded differently: a few ulps of float32."""
LIMITS = (0.0, 1.0, 100.0)
"""Values at which accuracies and success rates saturate: equal repeats are plausible there."""
COSTLY = 1.25
"""Cost ratio to the rival from which on a verdict carries a flag, in either direction."""
COLLAPSE = 6.0
"""Distance below a config's median, in standard deviations of the noise, at which a run has collapsed."""
CONFIRM_P = 0.05
"""Largest p with which a winner may be confirmed."""
MAX_PRIOR = 8
"""Maximum degrees of freedom that other tests' differences contribute to the spread of a test's differences."""
DRIFT_P = 0.01
"""Threshold for an alarm: two-sided p of the champion's old values against its new ones."""
SEED_PRIOR, SEED_WEIGHT = 0.5, 4.0
"""Prior of the slope between the values of two configs over common seeds, and its weight in pairs."""

Key = tuple[str, str | None]


@dataclass(slots=True)
class _Side:
    """A candidate with its values by number: seed minus the base's seed, or run index without seeds."""

    candidate: Candidate
    trial_number: int
    values: dict[int, float | None]
    """Signed so that more is better; None: crashed, or measured by a different evaluator."""
    foreign: list[str]
    """Runs that were measured by a different evaluator or on different data."""
    orders: dict[int, int] = field(default_factory=dict)
    """When the values were measured: the numbers of their runs in the study."""
    repeats: list[tuple[int, int, float | None]] = field(default_factory=list)
    """Confirmations: number of the run in the study, number of the value, value."""
    former: dict[int, float | None] = field(default_factory=dict)
    """First values of the numbers that were confirmed."""

    @property
    def run(self) -> str:
        return self.candidate.run

    @property
    def trial(self) -> float | None:
        return self.values[self.trial_number]

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values.values() if value is not None]

    @property
    def replicates(self) -> list[float]:
        return [v for number, v in self.values.items() if v is not None and number != self.trial_number]

    @property
    def crashes(self) -> int:
        """Number of crashed runs, without the trial."""
        return sum(value is None for number, value in self.values.items() if number != self.trial_number)

    @property
    def is_constant(self) -> bool:
        """Whether it has several runs and all measured exactly the same."""
        return len(self.finite) > 1 and len(set(self.finite)) == 1

    @property
    def equality(self) -> str:
        """Wording for repeats that hardly vary."""
        return EQUAL if self.is_constant else NEARLY_EQUAL

    @property
    def hardly_varies(self) -> bool:
        """Whether it has several runs that differ by no more than float32 rounding.

        A trainer that ignores its seed repeats the same training. Kernels with a nondeterministic order of summation
        then change the last digits, which is not noise that a test can use.
        """
        largest = max(map(abs, self.finite), default=0.0)
        return len(self.finite) > 1 and max(self.finite) - min(self.finite) <= ROUNDING * largest

    @property
    def cost(self) -> float:
        return stats.mean([score.cost for score in self.candidate.scores])


class Judge:
    """Judge of a study. Call `evaluate` after each finished run, or after each round."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings

    def evaluate(
        self, state: JudgeState, candidates: Sequence[Candidate], held_out: ReadHeldOut | None = None
    ) -> Judgement:
        """Issue all verdicts that the measurements support and request the missing runs.

        Args:
            state: State of the previous judgement; empty at the start.
            candidates: Every candidate of the study in the order of their proposals; the first is the base.
            held_out: Reads the held-out metric before a promotion; None: the study has none.

        Raises:
            LabError: The champion of `state` is not among the candidates.
        """
        session = _Session(self.settings, state, candidates, held_out)
        session.evaluate()
        return session.judgement()

    def close(self, state: JudgeState, candidates: Sequence[Candidate]) -> Judgement:
        """End the study: every candidate with a finished run and no verdict becomes `inconclusive`."""
        session = _Session(self.settings, state, candidates, None)
        for side in session.pending():
            session.record_verdict(side, Verdict.INCONCLUSIVE, "The study ended before this could be decided.")
        for test in list(session.tests.values()):
            session.close_test(test)
        return session.judgement()


class _Session:
    """One evaluation: a mutable copy of the state, and the results so far."""

    def __init__(
        self, settings: JudgeSettings, state: JudgeState, candidates: Sequence[Candidate], held_out: ReadHeldOut | None
    ) -> None:
        self.settings = settings
        self.before = state
        self.held_out = held_out
        self.sign = 1.0 if settings.goal == "max" else -1.0
        self.plan = stats.looks(settings.replicates, settings.max_replicates, settings.growth)
        self.champion = state.champion
        self.tests = {test.run: test for test in state.tests}
        self.opened: list[OpenTest] = []
        self.spent = state.spent
        self.decided = dict(state.verdicts)
        self.verdicts: list[Evidence] = []
        self.alarms: list[str] = []
        self.requests: dict[tuple[Key, int], RunRequest] = {}

        self.sides: dict[Key, _Side] = {}
        self.by_run: dict[str, _Side] = {}
        self.repeats: list[Candidate] = []
        """Candidates that differ from an earlier one only in their seed."""
        self.first_seed: int | None = None
        if candidates and candidates[0].scores:  # nothing can be judged before the base has finished
            if settings.by != "deterministic":  # all repeats of a deterministic study have the same seed
                self.first_seed = candidates[0].scores[0].seed
            self._merge_candidates([candidate for candidate in candidates if candidate.scores])
            if self.champion is not None and self.champion not in self.by_run:
                raise LabError(
                    f"the champion {self.champion} of the judge's state is not among the candidates",
                    hint="pass every candidate of the study, each identified by its first run",
                )
        self.noise = stats.pooled_spread(side.finite for side in self.sides.values())
        varies = any(len(side.finite) > 1 and not side.hardly_varies for side in self.sides.values())
        self.sigma = self.noise[0] if self.noise and varies else 0.0  # exactly 0, despite rounding of the mean

    def _merge_candidates(self, candidates: Sequence[Candidate]) -> None:
        """Fill `sides`, `by_run` and `repeats`: one side for all candidates that differ only in their seed."""
        merged: dict[Key, Candidate] = {}
        for candidate in candidates:
            key = candidate.point, candidate.warm
            earlier = merged.get(key)
            if earlier is None:
                merged[key] = candidate
            else:
                self.repeats.append(candidate)
                merged[key] = replace(earlier, scores=earlier.scores + candidate.scores)
        references = [candidate for candidate in merged.values() if candidate.run == self.champion]
        references += [candidate for candidate in merged.values() if candidate.scores[0].finite]
        reference = references[0].scores[0].fingerprint if references else ""
        for key, candidate in merged.items():
            self.sides[key] = self.by_run[candidate.run] = self._build_side(candidate, reference)

    def _build_side(self, candidate: Candidate, reference: str) -> _Side:
        side = _Side(candidate, 0, {}, [])
        names: dict[int, str] = {}
        for index, score in enumerate(candidate.scores):
            if self.first_seed is None:
                number = index
            elif score.seed is None:
                number = -1 - index - 10**9  # in a study with seeds it counts towards the noise, never in a pair
            else:
                number = score.seed - self.first_seed
            side.trial_number = number if index == 0 else side.trial_number
            value = self.sign * score.value if score.value is not None and score.finite else None
            if reference and score.fingerprint != reference and value is not None:
                side.foreign.append(score.run)
                value = None
            if score.again and self.first_seed is not None:
                side.repeats.append((score.order, number, value))
                continue
            # The same seed twice: a measurement wins over a crash, then the smaller name, whatever the order.
            if number in side.values:
                known = side.values[number]
                if value is None or (known is not None and names[number] <= score.run):
                    continue
            side.values[number], side.orders[number], names[number] = value, score.order, score.run
        for order, number, value in sorted(side.repeats, key=lambda repeat: repeat[0]):  # the newest one counts
            side.former.setdefault(number, side.values.get(number))
            side.values[number], side.orders[number] = value, order
        return side

    # --- results

    def judgement(self) -> Judgement:
        new_alarms = tuple(dict.fromkeys(alarm for alarm in self.alarms if alarm not in self.before.alarms))
        state = JudgeState(
            champion=self.champion,
            tests=tuple(self.tests.values()),
            opened=self.before.opened + len(self.opened),
            spent=self.spent,
            verdicts=tuple(self.decided.items()),
            alarms=self.before.alarms + new_alarms,
        )
        sigma = self.sigma if self.noise else None
        return Judgement(
            state=state,
            verdicts=tuple(self.verdicts),
            opened=tuple(self.opened),
            requests=tuple(self.requests.values()),
            champion=self.champion,
            alarms=new_alarms,
            sigma=sigma,
        )

    def record_verdict(self, side: _Side, verdict: Verdict, why: str, **rest: Any) -> None:
        self._record_candidate_verdict(side.candidate, verdict, why, **rest)

    def _record_candidate_verdict(self, candidate: Candidate, verdict: Verdict, why: str, **rest: Any) -> None:
        self.decided[candidate.run] = verdict.value
        sigma = self.sigma if self.noise else None
        champion = None if self.champion == candidate.run else self.champion
        rest = {"champion": champion, "sigma": sigma, **rest}
        self.verdicts.append(Evidence(candidate.run, candidate.point, verdict, why, **rest))

    def request(self, candidate: Candidate, number: int, why: str, *, again: bool = False) -> None:
        key = candidate.point, candidate.warm
        seed = None if self.first_seed is None else self.first_seed + number
        request = RunRequest(*key, seed=seed, number=number, why=why, control=candidate.control, again=again)
        self.requests.setdefault((key, number), request)

    def request_unpaired(self, side: _Side, n: int, why: str) -> None:
        for number in range(len(side.values), len(side.values) + n):
            self.request(side.candidate, number, why)

    def request_other_seeds(self, side: _Side, n: int, why: str) -> None:
        """Request runs with the first n seeds, after that of the base, that the candidate has not run with."""
        unused = (number for number in count(1) if number not in side.values)
        for number in islice(unused, n):
            self.request(side.candidate, number, why)

    def close_test(self, test: OpenTest) -> None:
        """Close a test that was not won and spend its whole alpha.

        A test that stops early spends it too: it could still have been won, and the tests that stop are those that
        would have been lost. Refunding the looks not taken let chance win in 9 % of simulated studies with 150
        challengers without any effect.
        """
        self.spent += test.alpha
        del self.tests[test.run]

    def pending(self) -> list[_Side]:
        """Return the candidates whose trial has finished and that have no verdict yet."""
        return [side for run, side in self.by_run.items() if run not in self.decided and not side.candidate.control]

    # --- the steps of an evaluation

    def evaluate(self) -> None:
        if not self.sides:
            return
        ready = self._find_base()
        champion = self.by_run[self.champion] if self.champion else None
        self._tripwires(champion)
        if champion is None or not ready:
            return
        rules = {"ratchet": self._ratchet, "deterministic": self._confirm, "mean": self._compare_means}
        if self.settings.by in rules:
            for side in self.pending():
                rules[self.settings.by](side)
            return
        # A promotion changes what the others are compared with, and a replayed challenger may already have its
        # replicates: repeat until nothing changes.
        settled = False
        while not settled:
            state = (self.champion, len(self.decided), len(self.opened))
            self.requests.clear()
            for test in sorted(self.tests.values(), key=lambda test: (-test.look, test.number)):
                if test.run in self.tests and test.run in self.by_run:
                    self._continue_test(self.tests[test.run])
            for side in self.pending():
                if side.run not in self.tests:
                    self._screen(side)
            settled = state == (self.champion, len(self.decided), len(self.opened))

    def _find_base(self) -> bool:
        """Make the first working candidate the base; return whether its noise floor is known."""
        if self.champion is not None and self.champion in self.decided:
            return True
        for side in self.pending():
            if side.trial is None:
                continue
            self.champion = side.run
            if self.settings.by == "ratchet":
                self.record_verdict(side, Verdict.KEEP, f"The base, from a single run: {self._fmt_mean(side.finite)}.",
                          n=1, flags=("base", *RATCHET))  # fmt: skip
                return True
            baseline_seeds = {"deterministic": 2, "mean": self.settings.replicates}.get(
                self.settings.by, self.settings.baseline_seeds
            )
            missing = baseline_seeds - len(side.finite)
            if missing > 0 and side.crashes < baseline_seeds:
                self._request_baseline(side, missing)
                return False
            if len(side.finite) > 1:
                self._keep_base(side)
                return True
            self.champion = None
            self.record_verdict(side, Verdict.CRASH, f"It crashed with {side.crashes} of {len(side.values)} seeds.")
        return False

    def _keep_base(self, side: _Side) -> None:
        n, flags = len(side.finite), ("base",)  # type: tuple[int, tuple[str, ...]]
        if self.settings.by == "deterministic":
            why = f"The base: {self._fmt_mean(side.finite)}, and exactly the same when repeated."
            flags += DETERMINISTIC
            if not side.is_constant:
                why = (
                    f"The base: {self._fmt_mean(side.finite)}, but not the same when repeated: it is not deterministic."
                )
                self._alarm_varies(side)
        else:
            what = "runs" if self.first_seed is None else "seeds"
            why = f"The base: {self._fmt_mean(side.finite)} over {n} {what}, noise {_fmt(self.sigma, 2)}."
            if side.hardly_varies:
                flags += (f"repeats {side.equality}",)
                self._alarm_constant(side)
        self.record_verdict(side, Verdict.KEEP, why, n=n, flags=flags)

    def _alarm_constant(self, side: _Side) -> None:
        self.alarms.append(
            f"Every repeat of {side.run} measured {'exactly ' if side.is_constant else ''}"
            f"{self.sign * side.finite[0]!r}, {side.equality}: either no seed "
            "reaches the trainer or the metric is too coarse. Nothing is promoted on such numbers. Pass the seed on "
            "(`{seed}` in launch.command or launch.env), or declare `deterministic: true`."
        )

    def _alarm_varies(self, side: _Side) -> None:
        self.alarms.append(
            f"The study declares `deterministic: true`, but repeats of {side.run} differ. Nothing is promoted on such "
            "numbers: fix the trainer's seed, or remove `deterministic`."
        )

    def _request_baseline(self, side: _Side, missing: int) -> None:
        if self.first_seed is None:
            self.request_unpaired(side, missing, "the noise floor: the base again")
        else:
            self.request_other_seeds(side, missing, "the noise floor: the base with another seed")

    def _tripwires(self, champion: _Side | None) -> None:
        for candidate in self.repeats:
            if candidate.run not in self.decided and not candidate.control:
                first = self.sides[candidate.point, candidate.warm].run
                why = f"It differs from {first} only in its seed: not a change. It counts as another run of {first}."
                self._record_candidate_verdict(candidate, Verdict.DISCARD, why, flags=("no change",))
        for side in self.by_run.values():
            if side.foreign and (side is champion or side.run in self.decided or side.candidate.control):
                for run in side.foreign:
                    self.alarms.append(
                        f"{run} was measured by a different evaluator or on different data; it is excluded."
                    )
        for side in self.pending():
            if side is champion:
                continue
            if side.foreign:
                self.alarms.append(f"{side.run}: the evaluator or the data changed; its numbers are void.")
                why = (
                    f"{min(side.foreign)} was measured by a different evaluator or on different data than the champion."
                )
                self._conclude(side, Verdict.VOID, why, flags=("evaluator or data changed",))
            elif side.trial is None:
                why = "It crashed, or its metric is missing or not finite: it cannot win."
                self._conclude(side, Verdict.CRASH, why)
            elif champion is not None and side.candidate.point == champion.candidate.point:
                start = f"the checkpoint of {side.candidate.warm}" if side.candidate.warm else "scratch"
                why = f"It is the champion's config, trained from {start}: more or less training, but the same config."
                self._conclude(side, Verdict.DISCARD, why, flags=("no change",))
            elif side.crashes >= self.settings.crashes:
                why = f"It crashed with {side.crashes} of {len(side.values)} seeds."
                self._conclude(side, Verdict.CRASH, why, n=len(side.replicates))

    def _conclude(self, side: _Side, verdict: Verdict, why: str, **rest: Any) -> None:
        """Record a verdict and close the test of the challenger, if it has one."""
        test = self.tests.get(side.run)
        if test is not None:
            self.close_test(test)
            rest = {"alpha": test.alpha, "look": test.look, **rest}
        self.record_verdict(side, verdict, why, **rest)

    # --- one run each, any improvement wins

    def _ratchet(self, side: _Side) -> None:
        champion = self.by_run[self.champion or ""]
        assert side.trial is not None  # the tripwires have excluded it
        assert champion.trial is not None
        effect = side.trial - champion.trial
        tie_break = self._tie_break(side, champion) if effect == 0 else None
        better = effect > 0 or (tie_break or 0.0) > 0
        summary = _fmt_effect(effect, self.sigma) + self._fmt_tie_break(tie_break)
        why = f"One run against one run: {summary} than {champion.run}. No replicates, so this may be luck."
        flags = RATCHET if tie_break is None else (*RATCHET, TIE_BREAK)
        self.record_verdict(side, Verdict.KEEP if better else Verdict.DISCARD, why, effect=effect, n=1, flags=flags)
        if better:
            self.champion = side.run

    def _tie_break(self, side: _Side, champion: _Side) -> float | None:
        """Return the improvement of its first finite run on the metric that breaks exact ties; None: unknown."""
        if self.settings.then is None:
            return None
        ours, theirs = (
            next((score.tie for score in one.candidate.scores if score.finite), None) for one in (side, champion)
        )
        if ours is None or theirs is None or not (math.isfinite(ours) and math.isfinite(theirs)):
            return None
        return ours - theirs if self.settings.then == "max" else theirs - ours

    def _fmt_tie_break(self, tie_break: float | None) -> str:
        if tie_break is None:
            return ""
        return f" on the objective, and {_fmt_effect(tie_break)} on {self.settings.then_metric or 'the tie-break'},"

    # --- a trainer without noise: a winner must measure exactly the same when repeated

    def _confirm(self, side: _Side) -> None:
        champion = self.by_run[self.champion or ""]
        assert side.trial is not None  # the tripwires have excluded it
        effect = side.trial - champion.finite[0]
        smallest = self._smallest_effect(champion)
        tie_break = self._tie_break(side, champion) if effect == 0 else None
        wins_tie = (tie_break or 0.0) > 0
        summary = f"{_fmt_effect(effect, self.sigma)}{self._fmt_tie_break(tie_break)} than {champion.run}"
        numbers: dict[str, Any] = {"effect": effect, "n": len(side.finite), "flags": DETERMINISTIC}
        if tie_break is not None:
            numbers["flags"] = (*DETERMINISTIC, TIE_BREAK)
        if effect <= 0 and not wins_tie:
            self.record_verdict(side, Verdict.DISCARD, f"One run, {summary}.", **numbers)
        elif effect < smallest and not wins_tie:
            why = f"Too little: {summary}; less than {_fmt(smallest)} is not worth a promotion."
            self.record_verdict(side, Verdict.DISCARD, why, **numbers)
        elif not champion.is_constant:
            why = f"One run, {summary}, whose repeats differ although the study is declared deterministic."
            self.record_verdict(side, Verdict.INCONCLUSIVE, why, **numbers)
        elif len(side.values) < 2:
            self.request_unpaired(side, 1, f"{side.run} again: it must measure exactly the same")
        elif not side.is_constant:
            self._alarm_varies(side)
            why = f"{side.run} is {summary}, but measured a different value when repeated: it is not deterministic."
            self.record_verdict(side, Verdict.INCONCLUSIVE, why, **numbers)
        elif self._passes_held_out(champion, side, numbers, summary):
            self.record_verdict(
                side, Verdict.KEEP, f"Better: {summary}, and exactly the same when repeated.", **numbers
            )
            self.champion = side.run

    # --- the best mean of a few runs, for those who want a good config and no proof

    def _compare_means(self, side: _Side) -> None:
        champion = self.by_run[self.champion or ""]
        k = self.settings.replicates
        effect = self._trial_effect(side, champion)
        n = 1
        if effect > 0:
            missing = k - len(side.replicates)
            if missing > 0:
                if self.first_seed is None:
                    self.request_unpaired(side, missing, f"{k} repeats of {side.run}, for its mean")
                else:
                    self.request_other_seeds(side, missing, f"repeat of {side.run}, for the mean of {k}")
                return
            effect, n = stats.mean(side.replicates) - stats.mean(champion.replicates or champion.finite), k
        summary = f"{_fmt_effect(effect, self.sigma)} than {champion.run}"
        smallest = self._smallest_effect(champion)
        better = effect > 0 and effect >= smallest
        why = f"The mean of {n} repeats is {summary}. No test: this may be luck." if n > 1 else f"One run, {summary}."
        self.record_verdict(side, Verdict.KEEP if better else Verdict.DISCARD, why, effect=effect, n=n, flags=BEST_MEAN)
        if better:
            self.champion = side.run

    # --- the screen: is the trial worth replicates?

    def _screen(self, side: _Side) -> None:
        champion = self.by_run[self.champion or ""]
        effect = self._trial_effect(side, champion)
        rival = champion
        if effect > self.settings.screen * self.sigma and self._needs_control(side):
            # Its warm start adds the parent's training: the champion's config gets the same start before they compare.
            control = self._control(side)
            if not control.finite:
                self._request_control(side, control)
                return
            rival = control
            effect = self._trial_effect(side, rival)
        if effect > self.settings.screen * self.sigma:
            if effect > self.settings.implausible * self.sigma > 0:
                self.alarms.append(
                    f"{side.run} is better by {effect / self.sigma:.0f} times the noise: implausible, so it is repeated"
                    " before it counts. Check its evaluation for a leak."
                )
            left = self.settings.alpha - self.spent - math.fsum(test.alpha for test in self.tests.values())
            number = self.before.opened + len(self.opened) + 1
            test = OpenTest(side.run, number, self.settings.alpha_share * max(left, 0.0))
            self.opened.append(test)
            self.tests[side.run] = test
            self._continue_test(test)
            return
        error = self.sigma * math.sqrt(1.0 + 1.0 / max(1, len(rival.finite)))
        single = stats.Comparison(effect, error, self.noise[1] if self.noise else 1, 1)
        low, high = single.interval()
        if effect > 0:
            verdict = Verdict.INCONCLUSIVE
            shown = _fmt_effect(effect, self.sigma)
            why = f"One run, {shown} than the champion: inside the noise ({_fmt(self.sigma, 2)})."
        else:
            verdict = Verdict.DISCARD
            tie_break = self._tie_break(side, rival) if effect == 0 else None
            why = f"One run, {_fmt_effect(effect, self.sigma)}{self._fmt_tie_break(tie_break)} than the champion."
            if (tie_break or 0.0) > 0:
                why += " A test decides on the objective alone."
        self.record_verdict(
            side, verdict, why, effect=effect, low=low, high=high, n=1, **self._cost_and_flags(side, rival)
        )

    def _trial_effect(self, side: _Side, rival: _Side) -> float:
        """Return how much the trial exceeds the value expected of the rival with the trial's seed."""
        assert side.trial is not None  # the tripwires have excluded it
        # The trial of a promoted champion was selected for being good, so only its replicates are unbiased.
        base = next((run for run, verdict in self.decided.items() if verdict == Verdict.KEEP), None)
        known = rival.finite if rival.run == base or rival.candidate.control else rival.replicates
        expected = stats.mean(known or rival.finite)
        same_seed = rival.values.get(side.trial_number) if self.first_seed is not None else None
        if same_seed is not None:
            expected += self._shared_seed_effect(rival) * (same_seed - expected)
        return side.trial - expected

    def _shared_seed_effect(self, rival: _Side) -> float:
        """Estimate how much of a seed's luck configs share: the slope of their values on the rival's, seed by seed."""
        variance = self.sigma**2
        covariance_sum, variance_sum = SEED_PRIOR * SEED_WEIGHT * variance, SEED_WEIGHT * variance
        for side in self.sides.values():
            common = [
                (value, other)
                for number, value in side.values.items()
                if value is not None
                and number not in (side.trial_number, rival.trial_number)
                and (other := rival.values.get(number)) is not None
            ]
            if side is not rival and len(common) > 1:
                here = stats.mean([value for value, _ in common])
                there = stats.mean([other for _, other in common])
                covariance_sum += math.fsum((value - here) * (other - there) for value, other in common)
                variance_sum += math.fsum((other - there) ** 2 for _, other in common)
        return min(1.0, max(0.0, covariance_sum / variance_sum)) if variance_sum > 0 else SEED_PRIOR

    # --- warm starts

    def _needs_control(self, side: _Side) -> bool:
        return (
            side.candidate.warm is not None and side.candidate.warm != self.by_run[self.champion or ""].candidate.warm
        )

    def _control(self, side: _Side) -> _Side:
        """Return the champion's config with the challenger's warm start, with the runs it has so far."""
        champion = self.by_run[self.champion or ""].candidate
        control = self.sides.get((champion.point, side.candidate.warm))
        return control or _Side(
            Candidate(champion.point, "", (), side.candidate.warm, control=True), side.trial_number, {}, []
        )

    def _request_control(self, side: _Side, control: _Side) -> None:
        if len(control.values) > self.settings.crashes:
            why = f"The champion's config crashes when it starts from {side.candidate.warm}: nothing to compare with."
            self.record_verdict(side, Verdict.INCONCLUSIVE, why, flags=("no control",))
            return
        number = max(0, side.trial_number)
        while number in control.values:
            number += 1
        self.request(
            control.candidate, number, f"the champion's config from the start of {side.run}, to compare at equal cost"
        )

    def _cost_and_flags(self, side: _Side, rival: _Side) -> dict[str, Any]:
        """Return the cost ratio of the two and the flags of their comparison."""
        flags = []
        champion = self.by_run[self.champion or ""].candidate
        if rival.run != champion.run:
            flags.append(f"warm start, against the champion's config from {side.candidate.warm}")
        elif champion.warm != side.candidate.warm:
            flags.append("warm start" if side.candidate.warm else "the champion had a warm start")
        cost = None
        if side.cost > 0 and rival.candidate.scores and rival.cost > 0:
            cost = side.cost / rival.cost
            if not 1 / COSTLY <= cost <= COSTLY:
                flags.append(f"{_fmt(cost, 2)} × the cost")
        trial_effect = None if side.trial is None or not rival.finite else side.trial - stats.mean(rival.finite)
        if trial_effect is not None and trial_effect > self.settings.implausible * self.sigma > 0:
            flags.append("implausible jump")
        return {"cost": cost, "flags": tuple(flags)}

    # --- the test: replicates against the champion's, look by look

    def _continue_test(self, test: OpenTest) -> None:
        side = self.by_run[test.run]
        rival = self._control(side) if self._needs_control(side) else self.by_run[self.champion or ""]
        boundaries = stats.boundaries(test.alpha, self.plan, self.settings.spending)
        while test.run in self.tests:
            if rival.crashes > self.settings.crashes + len(rival.finite):
                self._conclude(
                    side, Verdict.INCONCLUSIVE, f"{rival.run} crashes with most seeds: nothing to compare with."
                )
                return
            comparison = self._compare(side, rival, self.plan[test.look], confirming=test.confirming)
            if comparison is None:
                return
            test = replace(test, look=test.look + 1)
            self.tests[test.run] = test
            self._take_look(test, side, rival, comparison, boundaries)
            test = self.tests.get(test.run, test)

    def _compare(self, side: _Side, rival: _Side, n: int, *, confirming: bool) -> stats.Comparison | None:
        """Compare the two by n replicates; if runs are missing, request them and return None.

        Args:
            confirming: Whether the rival's runs from before the challenger no longer count.
        """
        least = stats.LEAST_SPREAD * self.sigma * self.plan[0] / n
        against = rival.run or "its control"
        why = f"replicate {{}} of {n} for the test of {side.run} against {against}"
        paired = f"{against} with the seed of replicate {{}} of {n} of {side.run}, for their test"
        stale = self._stale(side, rival) if confirming else set()
        if self.first_seed is None:
            ours = side.replicates
            theirs = [
                value
                for number, value in rival.values.items()
                if value is not None and number != rival.trial_number and number not in stale
            ]
            self.request_unpaired(side, max(0, n - len(ours)), why.format(f"up to {n}"))
            again = f"{against} again, for the test of {side.run} against it"
            self.request_unpaired(rival, max(0, n - len(theirs)), again)
            if len(ours) < n or len(theirs) < n:
                return None
            return stats.welch(ours, theirs, least)
        differences: list[float] = []
        number = planned = 0
        while planned < n:
            number += 1
            ours_, theirs_ = side.values.get(number, math.nan), rival.values.get(number, math.nan)
            if number in (side.trial_number, rival.trial_number) or ours_ is None or theirs_ is None:
                continue  # a trial, or a seed with which one of them crashed
            planned += 1
            if math.isnan(ours_):
                self.request(side.candidate, number, why.format(planned))
            if math.isnan(theirs_):
                self.request(rival.candidate, number, paired.format(planned))
            elif number in stale:
                theirs_ = math.nan
                if self._confirmations(side, rival) or not any(map(math.isnan, differences)):
                    # One comes first: if it measures exactly the same, nothing has changed, and no other is needed.
                    again = f"{rival.run} again, as it must lose again before {side.run} replaces it"
                    self.request(rival.candidate, number, again, again=True)
            differences.append(ours_ - theirs_)
        if any(map(math.isnan, differences)):
            return None
        return stats.paired(differences, math.sqrt(2.0) * least, self._known_spread(side, rival))

    def _known_spread(self, side: _Side, rival: _Side) -> tuple[float, float] | None:
        """Return the spread of the differences between the rival and other challengers, and its degrees of freedom."""
        others = [
            [
                value - theirs
                for number, value in other.values.items()
                if value is not None
                and number not in (other.trial_number, rival.trial_number)
                and (theirs := rival.values.get(number)) is not None
            ]
            for other in self.sides.values()
            if other is not side and other is not rival
        ]
        pooled = stats.pooled_spread(others)
        return (pooled[0], min(pooled[1], MAX_PRIOR)) if pooled else None

    def _confirmations(self, side: _Side, rival: _Side) -> list[int]:
        """Return the numbers of the rival's values that were confirmed since the challenger was proposed."""
        born = side.orders[side.trial_number]
        return [number for order, number, _ in rival.repeats if order >= born]

    def _stale(self, side: _Side, rival: _Side) -> set[int]:
        """Return the numbers of the rival's values from before the challenger was proposed.

        None is stale if the rival measures exactly the same again, and other seeds measure other values: the training
        is reproducible, and nothing has changed.
        """
        confirmed = self._confirmations(side, rival)
        distinct = len(set(rival.finite)) == len(rival.finite)
        if confirmed and distinct and all(rival.values[number] == rival.former[number] for number in confirmed):
            return set()
        born = side.orders[side.trial_number]
        return {
            number
            for number, order in rival.orders.items()
            if order < born or (order == born and number not in confirmed)
        }

    def _watch_drift(self, side: _Side, rival: _Side) -> None:
        """Raise an alarm if the rival's results differ from those before the challenger was proposed."""
        if self.first_seed is not None:
            pairs = [(rival.values[number], rival.former[number]) for number in self._confirmations(side, rival)]
            changes = [new - old for new, old in pairs if new is not None and old is not None]
            change = stats.paired(changes) if len(changes) > 1 else None
        else:
            stale = self._stale(side, rival)
            groups: tuple[list[float], list[float]] = ([], [])
            for number, value in rival.values.items():
                if value is not None and number != rival.trial_number:
                    groups[number in stale].append(value)
            change = stats.welch(*groups) if min(map(len, groups)) > 1 else None
        if change is not None and change.effect and 2 * min(change.p(), 1 - change.p()) < DRIFT_P:
            shown = _fmt_effect(change.effect, self.sigma)
            self.alarms.append(
                f"{rival.run} no longer measures what it did: {shown} in {change.n} repeats "
                f"(p {_fmt_p(2 * min(change.p(), 1 - change.p()))}). The data, the evaluation or the machine changed "
                "while the study ran; runs from before and after cannot be compared."
            )

    def _take_look(
        self, test: OpenTest, side: _Side, rival: _Side, comparison: stats.Comparison, boundaries: tuple[float, ...]
    ) -> None:
        """Take one look: the test is won, hopeless, at its end, or continues."""
        p, effect = comparison.p(), comparison.effect
        boundary = CONFIRM_P if test.confirming else boundaries[test.look - 1]
        low, high = comparison.interval()
        smallest = self._smallest_effect(rival)
        numbers = {
            "effect": effect, "low": low, "high": high, "p": p, "boundary": boundary, "n": comparison.n,
            "alpha": test.alpha, "look": test.look, **self._cost_and_flags(side, rival),
        }  # fmt: skip
        if side.crashes:
            numbers["flags"] += (f"crashed with {side.crashes} of its seeds",)
        again = ", which was run again," if test.confirming else ""
        summary = (
            f"{_fmt_effect(effect, self.sigma)} than {rival.run}{again} over {comparison.n} replicates"
            f" (p {_fmt_p(p)}, needed {_fmt_p(boundary)})"
        )
        last = test.look == len(self.plan)
        if test.confirming:
            self._watch_drift(side, rival)
        if p <= boundary and effect > 0 and effect >= smallest:
            if not self._is_suspicious(side):
                if self.settings.confirm and not test.confirming and rival.run == self.champion:
                    # The same look again, without measurements from before the challenger was proposed.
                    self.tests[test.run] = replace(test, look=test.look - 1, confirming=True)
                    return
                self._promote(test, side, numbers, summary)
                return
            self._alarm_constant(side)
            if self.sigma == 0.0 or last:
                numbers["p"] = None  # meaningless without any spread
                numbers["flags"] += (f"repeats {side.equality}",)
                why = (
                    f"Not proven: {_fmt_effect(effect, self.sigma)} than {rival.run}, "
                    f"but its {comparison.n} repeats are {side.equality}."
                )
                self._conclude(side, Verdict.INCONCLUSIVE, why, **numbers)
            return
        # A few differences say little about their spread: shrink it towards the noise of the study.
        shrunk_spread = math.sqrt(
            (comparison.error**2 * comparison.n * (comparison.n - 1) + 8 * self.sigma**2) / (comparison.n + 3)
        )
        power = stats.predictive_power(effect, shrunk_spread, comparison.n, self.plan[-1], boundaries[-1])
        if p <= boundary and last:
            why = f"Too little: {summary}; less than {_fmt(smallest)} is not worth a promotion."
            self._conclude(side, Verdict.DISCARD, why, **numbers)
        elif high <= smallest:
            why = f"Too little: {summary}; the effect is unlikely to exceed {_fmt(max(high, 0.0))}."
            self._conclude(side, Verdict.DISCARD, why, **numbers)
        elif last:
            self._conclude(side, Verdict.INCONCLUSIVE, f"Not proven: {summary}, and that was the last look.", **numbers)
        elif power < self.settings.futility:
            self._conclude(
                side, Verdict.DISCARD, f"Hopeless: {summary}; more runs are unlikely to change this.", **numbers
            )

    def _smallest_effect(self, rival: _Side) -> float:
        """Return the smallest improvement over the rival that is worth a promotion."""
        return max(self.settings.min_effect, self.settings.min_relative * abs(stats.mean(rival.finite)))

    def _is_suspicious(self, side: _Side) -> bool:
        """Return whether its repeats are equal where they should differ."""
        return side.hardly_varies and (self.sigma == 0.0 or self.sign * side.finite[0] not in LIMITS)

    def _promote(self, test: OpenTest, side: _Side, numbers: dict[str, Any], summary: str) -> None:
        old = self.by_run[self.champion or ""]
        if not self._passes_held_out(old, side, numbers, summary):
            return
        del self.tests[test.run]  # its alpha is refunded: a promotion costs nothing
        why = f"Better: {summary}. {self._collapse_risk(side)}"
        self.record_verdict(side, Verdict.KEEP, why, **{"champion": old.run, **numbers})
        self.champion = side.run
        # Whoever has beaten the old champion has yet to beat the new one.
        self.tests = {run: replace(other, confirming=False) for run, other in self.tests.items()}

    def _collapse_risk(self, side: _Side) -> str:
        """Say how many of its runs collapsed, and which rate of collapse they cannot exclude.

        A run collapses if it crashes, or measures far below the others.
        """
        values = sorted(side.replicates)
        middle = values[len(values) // 2]
        collapsed = side.crashes + sum(value < middle - COLLAPSE * self.sigma for value in values)
        n = len(values) + side.crashes
        return f"{collapsed} of {n} runs collapsed; the true rate may be up to {stats.largest_rate(collapsed, n):.0%}."

    def _passes_held_out(self, old: _Side, side: _Side, numbers: dict[str, Any], summary: str) -> bool:
        """Return whether the challenger is no worse on the held-out metric; if it is worse, record its verdict."""
        if self.held_out is None:
            return True
        reading = self.held_out(old.candidate, side.candidate)
        worse = None if reading is None else self._compare_held_out(reading)
        if worse is None:
            numbers["flags"] += ("held-out metric not read",)
        elif worse.p() < self.settings.held_out_p:
            self.alarms.append(f"{side.run} is better on the objective and worse on the held-out metric.")
            why = f"Better on the objective, {summary}, but worse on the held-out metric."
            numbers["flags"] += ("held-out metric worse",)
            self._conclude(side, Verdict.INCONCLUSIVE, why, **numbers)
            return False
        else:
            numbers["flags"] += ("held-out metric read",)
        return True

    def _compare_held_out(self, reading: HeldOut) -> stats.Comparison | None:
        """Compare the held-out values: a positive effect means that the challenger is worse. None: too few values."""
        if self.settings.by == "deterministic":
            theirs_, ours_ = (next(iter(values.values()), None) for values in (reading.champion, reading.challenger))
            if theirs_ is None or ours_ is None:
                return None
            return stats.Comparison(self.sign * (theirs_ - ours_), 0.0, 1.0, 1)
        common = sorted(set(reading.champion) & set(reading.challenger)) if self.first_seed is not None else []
        if len(common) > 1:
            return stats.paired([self.sign * (reading.champion[n] - reading.challenger[n]) for n in common])
        theirs = [self.sign * value for value in reading.champion.values()]
        ours = [self.sign * value for value in reading.challenger.values()]
        return stats.welch(theirs, ours) if len(ours) > 1 and len(theirs) > 1 else None

    def _fmt_mean(self, values: Sequence[float]) -> str:
        return _fmt(self.sign * stats.mean(values), 4)


def _fmt(value: float, digits: int = 3) -> str:
    """Return a number with the few digits that it can be trusted with, and without an exponent if it is large."""
    return f"{value:.0f}" if 10**digits <= abs(value) < 1e9 else f"{value:.{digits}g}"


def _fmt_p(p: float) -> str:
    """Return a p-value or a bar with two digits, one if it is tiny."""
    return _fmt(p, 2 if p >= 1e-4 else 1)


def _fmt_effect(effect: float, noise: float = 0.0) -> str:
    """Return an effect in words, with digits down to a tenth of the noise's first."""
    if 0 < noise < math.inf:
        effect = round(effect, 1 - math.floor(math.log10(noise)))
    return f"{_fmt(effect)} better" if effect > 0 else f"{_fmt(-effect)} worse" if effect < 0 else "no better"
