"""How the runs of a probe are judged, and which setting is recommended."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.config.lab import LabConfig, StudyConfig, WatchRule
from looplab.errors import LabError
from looplab.loop.probing import (
    MAX_CV,
    NEAR,
    ProbeReading,
    Result,
    Setting,
    advise,
    judge_rows,
    judge_setting,
    probe_study,
)
from looplab.loop.submitting import jobs_study


def setting(workers: int = 1, envs: int = 1, *, base: bool = False) -> Setting:
    return Setting({"workers": workers, "envs": envs}, (), f"{workers}x{envs}", is_base=base)


def reading(mean: float, cv: float = 0.01, trouble: str = "") -> ProbeReading:
    return ProbeReading("0001-aaaa", mean, cv, 20, trouble)


def measured(mean: float, workers: int = 1, envs: int = 1, *, base: bool = False, trouble: str = "") -> Result:
    return judge_setting(setting(workers, envs, base=base), [reading(mean, trouble=trouble)], 1)


def study(**changes: object) -> StudyConfig:
    given = {
        "study": "toy",
        "launch": {"command": ["train"], "timeout": "1h"},
        "base": ["a.json", "b.json"],
        "objective": {"metric": "reward", "goal": "max"},
        "probe": {"sweep": {"workers": [1, 2]}},
    }
    return StudyConfig.model_validate({**given, **changes})


def test_the_first_half_of_the_rows_is_warming_up() -> None:
    assert judge_rows([1, 2, 3, 100, 100, 100], "sps") == (100, 0, "")


def test_too_few_rows_tell_nothing() -> None:
    mean, cv, trouble = judge_rows([100, 100], "sps")
    assert mean == 100
    assert cv is None
    assert "too short to measure: 2 rows" in trouble
    assert judge_rows([], "sps") == (None, None, "sps was not measured")


def test_what_is_not_finite_is_no_throughput() -> None:
    assert judge_rows([100, 100, math.nan, math.inf], "sps") == (None, None, "no sps in its rows")
    assert judge_rows([0, 0, 0, 0], "sps")[2] == "a sps of 0"


def test_of_several_runs_the_median_counts() -> None:
    result = judge_setting(setting(), [reading(100), reading(101, cv=0.5), reading(102)], 3)
    assert result.stable
    assert result.mean == 101
    assert result.cv == pytest.approx(0.01)


def test_runs_that_differ_from_each_other_are_not_stable_however_even_each_is() -> None:
    result = judge_setting(setting(), [reading(100), reading(200)], 2)
    assert not result.stable
    assert result.trouble == "varies by 47%"


def test_one_run_of_several_that_went_wrong_is_enough() -> None:
    result = judge_setting(setting(), [reading(100), reading(100, trouble="stalled"), reading(100)], 3)
    assert result.status == "stalled (1 of 3 runs)"


def test_a_setting_with_runs_to_go_is_not_stable_yet() -> None:
    assert judge_setting(setting(), [reading(100)], 2).status == "1 run to go"


def test_of_what_is_equally_fast_the_cheapest_is_recommended() -> None:
    results = [measured(1000, 8, 8), measured(980, 2, 8), measured(975, 4, 4), measured(960, 1, 1)]
    advice = advise(results, "sps")
    assert advice is not None
    assert advice.result is results[1]  # as many in all as 4 x 4, but fewer of what the sweep names first
    assert "the cheapest within 3% of the fastest, workers=8, envs=8 (1,000)" in advice.reason


def test_the_speed_is_compared_with_the_base() -> None:
    advice = advise([measured(1000, base=True), measured(2500, 4)], "sps")
    assert advice is not None
    assert advice.reason == "2,500 sps, ± 1%: the fastest of 2 stable settings; 2.50 times the base"


def test_a_gain_that_is_no_larger_than_the_noise_is_said_to_be_so() -> None:
    noisy = judge_setting(setting(4), [reading(1080, cv=0.15)], 1)
    advice = advise([measured(1000, base=True), noisy], "sps")
    assert advice is not None
    assert advice.reason.endswith("1.08 times the base, which is within their variation")


def test_there_is_no_advice_where_nothing_is_stable() -> None:
    assert advise([measured(1000, trouble="stalled")], "sps") is None


@given(
    st.lists(
        st.tuples(st.floats(1, 1e6), st.floats(0, 0.5), st.integers(0, 64), st.sampled_from(["", "stalled"])),
        max_size=12,
    )
)
def test_what_is_recommended_is_stable_and_nearly_the_fastest(
    found: list[tuple[float, float, int, str]],
) -> None:
    results = [judge_setting(setting(w), [reading(mean, cv, trouble)], 1) for mean, cv, w, trouble in found]
    sound = [mean for mean, cv, _, trouble in found if cv <= MAX_CV and not trouble]
    advice = advise(results, "sps")
    assert (advice is None) == (not sound)
    if advice is not None and advice.result.mean is not None:
        assert advice.result.stable
        assert advice.result.mean >= (1 - NEAR) * max(sound)


def test_a_probe_is_measured_by_its_throughput_alone() -> None:
    real = study(
        judge={"baseline_seeds": 3},
        holdout={"metric": "held"},
        budget={"runs": 2},
        track={"wandb": {"mode": "online"}},
        require={"gpu": True, "wandb": "online"},
        watch=[{"when": "step > 3", "requeue": ["x@mul=2"]}],
        modes={"quick": ["steps@set=1"]},
        probe={"sweep": {"workers": [1, 2]}, "edits": ["steps@mul=2"], "timeout": 7, "stall": 3},
    )
    made = probe_study(real, "toy.probe", "quick")
    assert made.objective is not None
    assert (made.objective.metric, made.objective.goal) == ("sps", "max")
    assert (made.judge, made.holdout, made.budget.runs, made.proposers) == (None, None, None, [])
    assert made.base == ["a.json"]
    assert made.launch.timeout == 7
    assert made.modes == {"probe": ["steps@set=1", "steps@mul=2"]}
    assert [rule.kind for rule in made.watch] == ["stall", "nan"]
    assert made.watch[1].nan == ["sps"]
    assert made.track.wandb is not None
    assert made.track.wandb.mode == "offline"
    assert made.require.gpu
    assert made.require.wandb is None


def test_what_the_study_says_of_its_knobs_holds_in_a_probe() -> None:
    real = study(
        knobs={"vec.*": {"type": "int", "high": 8}}, probe={"sweep": {"vec.workers": [1], "threads": [1]}},
        watch=[WatchRule(nan=["loss"], requeue=["x@mul=2"])],
    )  # fmt: skip
    made = probe_study(real, "toy.probe", None)
    assert made.knobs == {"vec.*": {"type": "int", "high": 8}, "threads": {}}
    assert made.watch[1].nan == ["loss"]
    assert not made.watch[1].requeue


@pytest.mark.parametrize(
    ("sweep", "said"),
    [({"a": []}, "no values to try"), ({"a": list(range(40)), "b": list(range(40))}, "1600 combinations")],
)
def test_a_sweep_of_nothing_or_of_everything_is_refused(sweep: dict[str, list[int]], said: str) -> None:
    with pytest.raises(LabError, match=said):
        probe_study(study(probe={"sweep": sweep}), "toy.probe", None)


def test_a_mode_that_is_not_there_is_named() -> None:
    with pytest.raises(LabError, match="no mode 'quick'"):
        probe_study(study(), "toy.probe", "quick")


# -- studies made of other studies


def test_every_field_of_a_study_is_inherited_by_name_or_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = study()
    lab = LabConfig(tmp_path, {real.name: real})
    probe, jobs = probe_study(real, "toy.probe", None), jobs_study(lab, real)
    assert (probe.name, probe.judge, probe.seed) == ("toy.probe", None, real.seed)
    assert (jobs.name, jobs.base, jobs.objective) == ("toy.jobs", [], real.objective)
    monkeypatch.setitem(StudyConfig.model_fields, "brand_new", StudyConfig.model_fields["seed"])
    for make in (lambda: probe_study(real, "toy.probe", None), lambda: jobs_study(lab, real)):
        with pytest.raises(TypeError, match=r"inherited or changed\? brand_new$"):
            make()
