"""The act_ot recipe: transport loss, pairing, demonstrations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("ot")

from looplab.config.lab import load_lab  # noqa: E402
from looplab.recipes.act_ot import demos, ot_loss, pairs  # noqa: E402

LABEL_ONLY = {"name": "action", "term": "action_lbl", "weight_label": 0.5, "dim_slice": [0, 2]}


def loss_config(features: list[dict[str, Any]] | None = None, **changes: Any) -> ot_loss.LossConfig:
    config = {"reg": 0.1, "tau_src": 0.05, "tau_tgt": 0.05, "heuristic": True, "features": features or [LABEL_ONLY]}
    return ot_loss.LossConfig.read({**config, **changes}, ("camera",), ("camera", "action"))


# --- the plan


@settings(max_examples=40, deadline=None)
@given(
    costs=st.lists(st.floats(0.0, 20.0), min_size=1, max_size=8),
    reg=st.floats(0.05, 2.0),
    tau=st.floats(0.05, 3.0),
)
def test_a_plan_between_pairs_has_the_mass_of_the_closed_form(costs: list[float], reg: float, tau: float) -> None:
    cost = np.full((len(costs), len(costs)), 1.0)
    np.fill_diagonal(cost, costs)
    plan, numerical_errors = ot_loss.transport_plan(cost, loss_config(reg=reg, tau_src=tau, tau_tgt=tau))
    assert not numerical_errors
    assert np.array_equal(plan, np.diag(np.diag(plan)))
    assert plan.sum() == pytest.approx(np.mean(np.exp(-np.array(costs) / (reg + 2 * tau))), rel=1e-2)


def test_if_the_kernel_underflows_reg_has_an_effect_and_tau_has_none() -> None:
    cost = np.diag([1.0, 80.0])  # exp(-80 / 0.1) underflows in float64
    masses = [ot_loss.transport_plan(cost, loss_config(tau_src=tau, tau_tgt=tau)) for tau in (0.05, 5.0)]
    assert all(numerical_errors for _, numerical_errors in masses)
    expected = np.mean([math.exp(-10.0), 0.0])
    assert [plan.sum() for plan, _ in masses] == pytest.approx([expected, expected])
    plan, numerical_errors = ot_loss.transport_plan(cost, loss_config(reg=0.5, tau_src=5.0, tau_tgt=5.0))
    assert not numerical_errors
    assert plan.sum() > 1000 * expected


def test_without_the_heuristic_mass_may_leave_the_pairs() -> None:
    cost = np.array([[5.0, 0.0], [0.0, 5.0]])
    plan, _ = ot_loss.transport_plan(cost, loss_config(heuristic=False, reg=0.5, tau_src=1.0, tau_tgt=1.0))
    assert np.trace(plan) < 0.01 < plan.sum()


# --- the loss


def test_the_loss_is_plan_times_cost_and_its_gradient_ignores_the_plan() -> None:
    torch.manual_seed(0)
    camera = {"name": "camera", "use_learned_embed": True, "weight_embed": 0.3, "term_weight": 2.0}
    config = loss_config([camera, LABEL_ONLY], heuristic=False, reg=1.0, tau_src=1.0, tau_tgt=1.0)
    source, target = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    labels = [torch.randn(3, 5, 3, requires_grad=True) for _ in range(2)]
    found = ot_loss.transport_loss(
        config, ({"camera": source}, {"camera": target}), ({"action": labels[0]}, {"action": labels[1]})
    )
    embed = 0.3 * torch.cdist(source.detach().double(), target.double()) ** 2
    flat = [label.detach().double()[..., :2].flatten(1) for label in labels]
    label = 0.5 * torch.cdist(flat[0], flat[1]) ** 2
    plan, _ = ot_loss.transport_plan((2.0 * embed + label).numpy(), config)
    assert found.loss is not None
    assert found.loss.item() == pytest.approx((plan * (2.0 * embed + label).numpy()).sum())
    assert found.pi_sum == pytest.approx(plan.sum())
    assert found.costs == pytest.approx({"camera": embed.mean().item(), "action_lbl": label.mean().item()})
    torch.autograd.backward(found.loss)
    pulled = 2 * 2.0 * 0.3 * torch.from_numpy(plan)[..., None] * (source.detach()[:, None] - target[None])
    assert torch.allclose(source.grad.double(), pulled.sum(1), rtol=1e-4)
    assert labels[0].grad is None


def test_there_is_no_loss_if_the_plan_is_not_finite() -> None:
    label = torch.tensor([[[math.nan, 1.0]]])
    found = ot_loss.transport_loss(loss_config(), ({}, {}), ({"action": label}, {"action": label}))
    assert found.loss is None


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([{"name": "camera", "use_learned_embed": True, "weight_embed": 0.0}], "features.0 .camera. compares nothing"),
        ([LABEL_ONLY, {"name": "action", "weight_embed": 0.1}], "features.1 .action. compares nothing"),
        ([{"name": "action", "use_learned_embed": True, "weight_embed": 0.1}], "no learned embedding of action"),
        ([{"name": "sound", "weight_label": 0.1}], "sound has no label"),
        ([{**LABEL_ONLY, "weight_lable": 0.1}], "unknown key ot.loss_config.features.0.weight_lable"),
        ([{**LABEL_ONLY, "dim_slice": [8, 0]}], "dim_slice must be two integers"),
        ([{**LABEL_ONLY, "weight_label": -1}], "weight_label must be a number ≥ 0"),
        ([LABEL_ONLY, LABEL_ONLY], "same term"),
    ],
)
def test_invalid_features_are_reported(features: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss_config(features)


# --- the pairs


def test_time_warping_finds_the_cheapest_path_of_a_small_matrix() -> None:
    cost = np.abs(np.subtract.outer([0.0, 1.0, 2.0], [0.0, 0.0, 1.0, 2.0, 2.0]))
    assert pairs.dynamic_time_warping(cost) == (0.0, [(0, 0), (0, 1), (1, 2), (2, 3), (2, 4)])
    distance, path = pairs.dynamic_time_warping(np.array([[1.0, 9.0], [9.0, 2.0], [9.0, 3.0]]))
    assert path == [(0, 0), (1, 1), (2, 1)]
    assert distance == pytest.approx(2.0)


def test_the_nearest_source_episode_comes_first_with_its_frames() -> None:
    ramp = np.linspace(0.0, 1.0, 5)[:, None]
    (found,) = pairs.pair_episodes([ramp + 3.0, np.repeat(ramp, 2, axis=0)], [ramp])
    assert [pair.source for pair in found] == [1, 0]
    assert found[0].distance == pytest.approx(0.0)
    assert [list(frames) for frames in found[0].alignment] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_sharpness_and_cutoff_prefer_near_episodes() -> None:
    distances = np.array([0.1, 0.5, 2.0])

    def ratio(sampling: pairs.PairSamplingConfig) -> np.ndarray:
        probs = pairs.episode_probs(distances, sampling)
        assert probs.sum() == pytest.approx(1.0)
        return probs / probs[0]

    assert ratio(pairs.PairSamplingConfig(sharpness=0.0)) == pytest.approx([1, 1, 1])
    assert ratio(pairs.PairSamplingConfig(sharpness=2.0)) == pytest.approx(np.exp(-2.0 * (distances - 0.1)))
    expected = 1 / (1 + np.exp(10.0 * (distances - 0.4)))
    assert ratio(pairs.PairSamplingConfig(sharpness=10.0, cutoff=0.4)) == pytest.approx(expected / expected[0])
    for sampling in (pairs.PairSamplingConfig(sharpness=1e6), pairs.PairSamplingConfig(sharpness=1e6, cutoff=0.01)):
        assert ratio(sampling) == pytest.approx([1, 0, 0])


def sampler(sampling: pairs.PairSamplingConfig) -> tuple[pairs.PairSampler, np.ndarray]:
    """Three source episodes of 4, 7 and 5 frames, two target episodes of 5 and 6."""
    rng = np.random.default_rng(0)
    source = [rng.normal(size=(n, 2)) for n in (4, 7, 5)]
    target = [rng.normal(size=(n, 2)) for n in (5, 6)]
    starts = np.array([0, 4, 11, 16])
    return pairs.PairSampler(pairs.pair_episodes(source, target), starts, np.array([0, 5, 11]), sampling), starts


@settings(max_examples=40, deadline=None)
@given(window=st.integers(0, 40), sharpness=st.floats(0, 50), seed=st.integers(0, 1000), no_window=st.booleans())
def test_the_window_stays_within_the_episode(window: int, sharpness: float, seed: int, no_window: bool) -> None:
    some, starts = sampler(pairs.PairSamplingConfig(window, 1, sharpness, None, no_window))
    source, target = some.sample(30, np.random.default_rng(seed))
    episodes = np.searchsorted(starts, source, side="right") - 1
    for first, end in ((0, 5), (5, 11)):  # topk is 1: all frames come from one episode
        assert len(set(episodes[(target >= first) & (target < end)])) <= 1
    assert source.min() >= 0
    assert source.max() < 16


def test_topk_keeps_the_nearest_episodes() -> None:
    ramp = np.linspace(0.0, 1.0, 4)[:, None]
    found = pairs.pair_episodes([ramp + 9.0, ramp, ramp + 1.0], [ramp])
    drawn = {}
    for topk in (1, 2, None):
        some = pairs.PairSampler(
            found, np.array([0, 4, 8, 12]), np.array([0, 4]), pairs.PairSamplingConfig(topk_src_episodes=topk)
        )
        drawn[topk] = set((some.sample(200, np.random.default_rng(0))[0] // 4).tolist())
    assert drawn == {1: {1}, 2: {1, 2}, None: {0, 1, 2}}


def test_without_a_window_aligned_frames_are_sampled() -> None:
    same = [np.arange(6.0)[:, None]]
    exact = pairs.PairSampler(
        pairs.pair_episodes(same, same), np.array([0, 6]), np.array([0, 6]), pairs.PairSamplingConfig()
    )
    source, target = exact.sample(50, np.random.default_rng(0))
    assert np.array_equal(source, target)


@pytest.mark.parametrize(
    ("ot", "message"),
    [
        ({"window_size": 20.5}, "ot.window_size must be an integer ≥ 0, not 20.5"),
        ({"topk_src_episodes": 0}, "ot.topk_src_episodes must be an integer ≥ 1"),
        ({"sharpness": -1}, "ot.sharpness must be a number ≥ 0"),
        ({"cutoff": "near"}, "ot.cutoff must be a number ≥ 0"),
    ],
)
def test_invalid_sampling_keys_are_reported(ot: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pairs.PairSamplingConfig.read(ot)


# --- the demonstrations


def test_demonstrations_are_deterministic_and_differ_between_the_domains(tmp_path: Path) -> None:
    made = demos.load_demos(tmp_path / "a", 3, 2, 2)
    again = demos.load_demos(tmp_path / "b", 3, 2, 2)
    kept = demos.load_demos(tmp_path / "a", 3, 2, 2)
    for one, two, three in zip(made, again, kept, strict=True):
        for name, value in vars(one).items():
            assert np.array_equal(value, getattr(two, name))
            assert np.array_equal(value, getattr(three, name))
    assert [some.episodes for some in made] == [3, 2, 2]
    source, target, held_out = made
    assert abs(source.images.mean() - target.images.mean()) > 10
    assert not np.array_equal(target.states[:5], held_out.states[:5])
    assert [path.suffix for path in (tmp_path / "a").iterdir()] == [".npz"]


def test_a_chunk_ends_with_its_episode() -> None:
    made = demos.make_demos(demos.SOURCE, 2, 5)
    last = int(made.starts[1]) - 1
    actions, pad = made.chunks(np.array([0, last]), 4)
    assert np.array_equal(actions[0], made.actions[:4])
    assert np.array_equal(actions[1], np.repeat(made.actions[last : last + 1], 4, axis=0))
    assert pad.tolist() == [[False] * 4, [False, True, True, True]]
    second = made.select_episodes(1, 2)
    assert second.episodes == 1
    assert np.array_equal(second.states, made.states[last + 1 :])


# --- the lab file


def test_the_metrics_have_unambiguous_aliases_and_every_one_is_in_a_group() -> None:
    measure = load_lab(Path(demos.__file__).parent).study(None).measure
    assert len(measure.aliases) == 14
    assert sorted(name for names in measure.groups.values() for name in names) == sorted(measure.aliases)
    others = [other for names in measure.aliases.values() for other in names]
    assert len(others) == len(set(others))
    assert set(others).isdisjoint(measure.aliases)
