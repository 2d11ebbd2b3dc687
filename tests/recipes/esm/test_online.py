"""Steering: without a memory it is greedy, token for token; scores, gates and ties as written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from looplab.errors import LabError
from looplab.recipes.esm.esm import online
from looplab.recipes.esm.esm.backends.base import Injection, SamplingParams
from looplab.recipes.esm.esm.backends.toy import LAYERS, ToyBackend, _mind_directions, make_problem
from looplab.recipes.esm.esm.config import EsmSettings, OnlineSettings
from looplab.recipes.esm.esm.memory import Memory, MemoryEntry
from looplab.recipes.esm.esm.online import Controller, GeneratedAnswer, SteeringCandidate, SteeringDecision

SAMPLING = SamplingParams(64)
QUESTIONS = [make_problem(number).question for number in range(0, 600, 15)]


def solve(
    controller: Controller | None, texts: Sequence[str] = QUESTIONS, backend: ToyBackend | None = None
) -> list[GeneratedAnswer]:
    return online.solve(backend or ToyBackend(), texts, [0] * len(texts), SAMPLING, "\n\n", 4, controller)


def careful(quality: float = 1.0, null: bool = False) -> Memory:
    """One entry of each kind at control point 1, layer 3: from a fast mind to a slow one."""
    mind = _mind_directions()[3]
    entries = [MemoryEntry("wrong", 3, 1, quality, 2 * mind)]
    keys = [-mind]
    if null:
        entries.append(MemoryEntry("right", 3, 1, quality, None))
        keys.append(mind)
    return Memory(np.stack(keys).astype(np.float32), entries)


def controller(toy: Callable[..., EsmSettings], memory: Memory, variant: str = "esm", **changes: Any) -> Controller:
    settings = toy({f"online.{name}": value for name, value in changes.items()})
    return online.make_controller(settings, memory, variant, LAYERS)


def test_without_memory_it_equals_greedy_token_for_token(toy: Callable[..., EsmSettings]) -> None:
    plain, steered = solve(None), solve(controller(toy, careful(), "no_memory"))
    assert [one.tokens for one in plain] == [one.tokens for one in steered]
    assert [one.finish_reason for one in plain] == [one.finish_reason for one in steered]
    assert {step["mem_reason"] for one in steered for step in one.steps if step["m"] > 1} == {"empty_memory"}


def test_a_memory_fixes_what_a_fast_mind_gets_wrong(toy: Callable[..., EsmSettings]) -> None:
    right = [make_problem(number).gold for number in range(0, 600, 15)]
    plain = [one.text.endswith(f"#### {gold}") for one, gold in zip(solve(None), right, strict=True)]
    backend = ToyBackend()
    answers = solve(controller(toy, careful(null=True)), backend=backend)
    steered = [one.text.endswith(f"#### {gold}") for one, gold in zip(answers, right, strict=True)]
    assert sum(plain) < len(plain)
    assert all(steered)
    chosen = [step["chosen"] for one in answers for step in one.steps]
    assert chosen.count("wrong") == plain.count(False)
    assert backend.injections_applied() >= chosen.count("wrong")


def test_the_first_segment_is_never_steered(toy: Callable[..., EsmSettings]) -> None:
    for variant in ("esm", "no_probing", "mean_vector", "random_direction"):
        firsts = [one.steps[0] for one in solve(controller(toy, careful(), variant))]
        assert {(step["m"], step["mem_m"], step["chosen"], step["spent_probe"]) for step in firsts} == {(1, 0, None, 0)}


def test_the_factor_is_k_scale_times_the_score_of_the_formula(toy: Callable[..., EsmSettings]) -> None:
    answers = solve(controller(toy, careful(0.5), k_scale=3.0, beta=2.0, rho=0.25))
    steps = [step for one in answers for step in one.steps if step["chosen"]]
    assert steps
    for step in steps:
        one = step["candidates"][0]
        assert one["ahat"] == pytest.approx(0.5 * one["sim"])
        assert step["chosen_score"] == pytest.approx(2.0 * one["ahat"] + 0.25 * one["conf_gain"])
        assert step["chosen_scale"] == pytest.approx(3.0 * step["chosen_score"])


def test_probes_are_counted_outside_the_budget(toy: Callable[..., EsmSettings]) -> None:
    for one in solve(controller(toy, careful(null=True), probe_tokens=3)):
        assert one.probe_tokens_used == sum(step["spent_probe"] for step in one.steps)
        assert one.tokens_used == sum(step["spent_commit"] for step in one.steps)
        for step in one.steps:
            assert step["spent_total"] == step["spent_probe"] + step["spent_commit"]
            assert step["spent_probe"] <= 3 * (1 + len(step["candidates"]))
            assert step["did_probe"] == bool(step["candidates"])


def test_no_probing_spends_nothing(toy: Callable[..., EsmSettings]) -> None:
    answers = solve(controller(toy, careful(), "no_probing"))
    assert sum(one.probe_tokens_used for one in answers) == 0
    assert any(step["chosen"] for one in answers for step in one.steps)


def test_a_zero_scale_does_not_change_the_text(toy: Callable[..., EsmSettings]) -> None:
    plain, steered = solve(None), solve(controller(toy, careful(), k_scale=0.0))
    assert [one.tokens for one in plain] == [one.tokens for one in steered]


def test_batches_and_their_order_change_no_decision(toy: Callable[..., EsmSettings]) -> None:
    """Rounding moves scores by 1e-6 at most, and no score of these questions is within 1 of null."""
    together = solve(controller(toy, careful(null=True)))
    backwards = solve(controller(toy, careful(null=True)), QUESTIONS[::-1])[::-1]
    alone = [solve(controller(toy, careful(null=True)), [text])[0] for text in QUESTIONS]
    for one, other, third in zip(together, backwards, alone, strict=True):
        assert one.tokens == other.tokens == third.tokens
        assert (
            [s["chosen"] for s in one.steps] == [s["chosen"] for s in other.steps] == [s["chosen"] for s in third.steps]
        )


def decide(scores: Sequence[float], null_ahat: float, **changes: Any) -> SteeringDecision:
    choice = SteeringDecision(online._new_step(2, 10, ""))
    choice.step["null_ahat"] = null_ahat
    vector = np.ones(4, np.float32)
    offer = [
        SteeringCandidate(MemoryEntry(f"e{i}", 0, 1, 1.0, vector), 1.0, score, score) for i, score in enumerate(scores)
    ]
    online._decide(choice, offer, OnlineSettings(**changes))
    return choice


def test_the_best_score_is_chosen_and_the_first_of_equal_ones() -> None:
    assert decide([0.2, 0.9, 0.9], 0.1).step["chosen"] == "e1"


def test_a_tie_with_null_is_null() -> None:
    assert decide([0.5], 0.5).injection is None
    assert decide([0.5], 0.25, beta=2.0).injection is None
    assert decide([0.5 + 1e-9], 0.5).injection is not None


def test_a_score_below_tau_null_is_null() -> None:
    assert decide([0.5], 0.0, tau_null=0.6).injection is None
    assert decide([0.6], 0.0, tau_null=0.6).injection is not None


def test_random_directions_are_as_long_and_do_not_help(toy: Callable[..., EsmSettings]) -> None:
    injected: list[Injection] = []
    inner = controller(toy, careful(), "random_direction")

    def spy(session: Any, rows: Sequence[int], remaining: Sequence[int], m: int) -> list[SteeringDecision]:
        choices = inner(session, rows, remaining, m)
        injected.extend(choice.injection for choice in choices if choice.injection)
        return choices

    plain, steered = solve(None), solve(spy)
    assert injected
    assert {round(float(np.linalg.norm(one.vector)), 4) for one in injected} == {2.0}
    assert [one.text for one in plain] == [one.text for one in steered]


def test_the_window_of_control_points_is_kept(toy: Callable[..., EsmSettings]) -> None:
    answers = solve(controller(toy, careful(), min_tool_m=2))
    assert not any(step["chosen"] for one in answers for step in one.steps)


def test_a_layer_that_was_not_mined_is_an_error(toy: Callable[..., EsmSettings]) -> None:
    with pytest.raises(LabError, match=r"contains \[1\], but the memory only has entries at \[3\]"):
        controller(toy, careful(), layers=[1, 3])


def test_a_budget_of_one_token_is_one_token(toy: Callable[..., EsmSettings]) -> None:
    answers = online.solve(
        ToyBackend(), QUESTIONS, [0] * len(QUESTIONS), SamplingParams(1), "\n\n", 4, controller(toy, careful())
    )
    assert {one.tokens_used for one in answers} == {1}
    assert {one.finish_reason for one in answers} == {"length"}


def test_ranked_probes_choose_between_candidates_but_not_against_null(toy: Callable[..., EsmSettings]) -> None:
    """A vector that lowers the confidence a little is still used if the state is closer to its key than to null's."""
    step = {"null_ahat": 0.990}
    for rule, chosen in (("score", None), ("rank", "e1")):
        choice = SteeringDecision(online._new_step(2, 10, ""))
        choice.step.update(step)
        offer = [
            SteeringCandidate(MemoryEntry(name, 0, 1, 1.0, np.ones(4, np.float32)), ahat, ahat, ahat + 0.1 * gain, gain)
            for name, ahat, gain in (("e0", 0.994, -0.2), ("e1", 0.993, -0.05))
        ]
        online._decide(choice, offer, OnlineSettings(probe_rule=rule))  # type: ignore[arg-type]
        assert choice.step["chosen"] == chosen
    assert choice.step["chosen_scale"] == pytest.approx(0.993)


def test_ranked_probes_inject_what_would_be_committed(toy: Callable[..., EsmSettings]) -> None:
    scales: list[tuple[float, bool]] = []

    class Recording(ToyBackend):
        def start_session(self, prompts: Any, seeds: Any) -> Any:
            session = super().start_session(prompts, seeds)
            generate = session.generate

            def recorded(rows: Any, limits: Any, injections: Any, *given: Any, commit: bool = True) -> Any:
                scales.extend((one.scale, commit) for one in injections if one is not None)
                return generate(rows, limits, injections, *given, commit=commit)

            session.generate = recorded  # type: ignore[method-assign]
            return session

    solve(controller(toy, careful(0.5), k_scale=3.0, probe_rule="rank"), backend=Recording())
    probed, committed = ({scale for scale, commit in scales if commit is kind} for kind in (False, True))
    assert committed
    assert committed <= probed
    scales.clear()
    solve(controller(toy, careful(0.5), k_scale=3.0), backend=Recording())
    assert {scale for scale, commit in scales if not commit} == {online.PROBE_SCALE}
