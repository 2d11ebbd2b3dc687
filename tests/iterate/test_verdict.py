"""Verdicts on versions: pairs of episodes, alpha that is spent over versions."""

from __future__ import annotations

import random

import pytest

from looplab.iterate.gates import Measured
from looplab.iterate.settings import VersionJudging
from looplab.iterate.verdict import VersionRuling, interval, judge
from looplab.judge.base import Verdict


def measured(values: list[float]) -> Measured:
    return Measured(sum(values) / len(values), tuple(values))


def drawn(seed: int, n: int = 32) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(0.5, 0.2) for _ in range(n)]


def test_the_first_version_is_the_champion() -> None:
    assert judge(measured(drawn(1)), None, None, VersionJudging(), "max", 0.0).verdict == Verdict.KEEP


def test_a_small_gain_on_every_episode_is_proved_by_pairs() -> None:
    champion = drawn(1)
    noise = random.Random(2)
    ruling = judge(
        measured([v + 0.02 + noise.gauss(0, 0.01) for v in champion]),
        measured(champion),
        "v1",
        VersionJudging(),
        "max",
        0.0,
    )
    assert ruling.verdict == Verdict.KEEP
    assert ruling.n == 32
    assert ruling.low is not None
    assert ruling.low > 0


def test_where_less_is_better_a_gain_is_a_loss() -> None:
    champion = drawn(1)
    noise = random.Random(2)
    better = [v + 0.1 + noise.gauss(0, 0.05) for v in champion]
    assert judge(measured(better), measured(champion), "v1", VersionJudging(), "min", 0.0).verdict == Verdict.DISCARD
    assert judge(measured(champion), measured(better), "v1", VersionJudging(), "min", 0.0).verdict == Verdict.KEEP


def test_a_gain_inside_the_noise_is_inconclusive_and_a_copy_is_discarded() -> None:
    champion = measured(drawn(1))
    shaky = [v + 0.03 + (0.2 if n % 2 else -0.2) for n, v in enumerate(champion.values)]
    assert judge(measured(shaky), champion, "v1", VersionJudging(), "max", 0.0).verdict == Verdict.INCONCLUSIVE
    assert judge(champion, champion, "v1", VersionJudging(), "max", 0.0).verdict == Verdict.DISCARD


def test_a_proved_gain_that_is_too_small_to_matter_is_not_promoted() -> None:
    champion = drawn(1)
    noise = random.Random(2)
    settings = VersionJudging.model_validate({"min_effect": 0.05})
    ruling = judge(
        measured([v + 0.02 + noise.gauss(0, 0.01) for v in champion]), measured(champion), "v1", settings, "max", 0.0
    )
    assert ruling.verdict == Verdict.DISCARD


@pytest.mark.parametrize("values", [[0.9] * 3, [0.9] * 31])
def test_other_episodes_or_too_few_prove_nothing(values: list[float]) -> None:
    ruling = judge(measured(values), measured(drawn(1)), "v1", VersionJudging(), "max", 0.0)
    assert ruling.verdict == Verdict.INCONCLUSIVE
    assert ruling.p is None


def test_versions_that_are_no_better_are_promoted_less_often_than_alpha() -> None:
    """400 lines of 10 versions, all exactly equal to the champion."""
    settings, lines, wrong = VersionJudging(), 400, 0
    for line in range(lines):
        champion, spent = measured(drawn(line * 100, 16)), 0.0
        for version in range(1, 11):
            ruling: VersionRuling = judge(
                measured(drawn(line * 100 + version, 16)), champion, "v1", settings, "max", spent
            )
            if ruling.verdict == Verdict.KEEP:
                wrong += 1
                break
            spent += ruling.alpha or 0.0
        assert spent < settings.alpha
    assert wrong <= 0.05 * lines + 9  # two standard deviations


def test_an_interval_is_given_only_where_the_metric_is_the_mean_of_the_values() -> None:
    low, high = interval(measured([0.4, 0.5, 0.6])) or (0.0, 0.0)
    assert low < 0.5 < high
    assert interval(Measured(0.4, (0.4, 0.5, 0.6))) is None
    assert interval(Measured(0.4, ())) is None
