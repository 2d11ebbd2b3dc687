"""PPO of the drone recipe: advantages, Muon, the update."""

from __future__ import annotations

import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from looplab.recipes.drone import ppo
from looplab.recipes.drone.ppo import (
    DronePolicy,
    DroneRollout,
    Muon,
    NonFiniteUpdate,
    compute_advantages,
    make_optimizer,
    orthogonalize,
    update,
)
from looplab.recipes.drone.settings import TrainConfig

STEPS, AGENTS = 8, 16
TRAIN = TrainConfig(batch_size=128, minibatch_size=128, max_minibatch_size=128, bptt_horizon=STEPS, update_epochs=2)


def rollout(policy: DronePolicy) -> tuple[DroneRollout, torch.Tensor]:
    """Random observations; the reward is highest for actions of 0.5."""
    rng = torch.Generator().manual_seed(3)
    obs = torch.randn(STEPS, AGENTS, 24, generator=rng)
    with torch.no_grad():
        mean, values = policy(obs)
        actions = mean + policy.log_std.exp() * torch.randn(mean.shape, generator=rng)
        log_probs = policy.log_prob(mean, actions)
    rewards = -(actions - 0.5).square().sum(-1)
    return DroneRollout(obs, actions, log_probs, values, rewards, torch.ones(STEPS, AGENTS)), torch.zeros(AGENTS)


def make(train: TrainConfig = TRAIN) -> tuple[DronePolicy, torch.optim.Optimizer, torch.Generator]:
    torch.manual_seed(0)
    policy = DronePolicy(24, 4)
    return policy, make_optimizer(policy, train), torch.Generator().manual_seed(0)


def test_advantages_match_a_hand_computed_example() -> None:
    # gamma 0.5, lambda 0.5; the episode of the first drone ends after its second step, that of the second continues.
    rewards = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    values = torch.tensor([[0.5, 0.5], [1.0, 1.0], [1.5, 1.5]])
    done = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    nothing = torch.zeros(3, 2, 1)
    found = compute_advantages(
        DroneRollout(nothing, nothing, rewards, values, rewards, done), torch.tensor([2.0, 2.0]), 0.5, 0.5
    )
    # last: 3 + 0.5 * 2 - 1.5 = 2.5
    # second: ended 2 - 1 = 1; flying 2 + 0.5 * 1.5 - 1 + 0.25 * 2.5 = 2.375
    # first: 1 + 0.5 * 1 - 0.5 = 1, + 0.25 * 1 = 1.25, or + 0.25 * 2.375 = 1.59375
    assert torch.allclose(found, torch.tensor([[1.25, 1.59375], [1.0, 2.375], [2.5, 2.5]]))


def test_log_prob_and_entropy_match_a_normal_distribution() -> None:
    policy = DronePolicy(24, 4)
    mean, actions = torch.randn(5, 4), torch.randn(5, 4)
    normal = torch.distributions.Normal(mean, policy.log_std.exp())
    assert torch.allclose(policy.log_prob(mean, actions), normal.log_prob(actions).sum(-1), atol=1e-5)
    assert torch.allclose(policy.entropy(), normal.entropy()[0].sum(), atol=1e-5)


@pytest.mark.parametrize("shape", [(64, 64), (64, 24), (4, 64), (1, 64)])
def test_orthogonalize_brings_singular_values_near_one_and_keeps_their_directions(
    shape: tuple[int, int],
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalize(matrix)
    assert found.shape == matrix.shape
    sizes = torch.linalg.svdvals(found)
    large = s > 0.03 * torch.linalg.vector_norm(s)  # five iterations do not lift the very smallest all the way
    assert sizes.max() < 1.3
    assert (torch.diag(u.T @ found @ v.T)[large] > 0.6).all()


def test_muon_orthogonalizes_steps_of_matrices_and_is_adamw_otherwise() -> None:
    matrix, vector = torch.nn.Parameter(torch.randn(32, 32)), torch.nn.Parameter(torch.randn(8))
    twin = torch.nn.Parameter(vector.detach().clone())
    muon = Muon([matrix, vector], lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    adamw = torch.optim.AdamW([twin], lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for _ in range(5):
        before = matrix.detach().clone()
        matrix.grad, vector.grad = torch.randn(32, 32), torch.randn(8)
        twin.grad = vector.grad.clone()
        muon.step()
        adamw.step()
        step = (matrix.detach() - before * (1 - 0.01 * 0.1)) / (0.01 * 0.2 * 32**0.5)
        sizes = torch.linalg.svdvals(step)
        assert sizes.max() < 1.3
        assert sizes.median() > 0.6
    assert torch.allclose(vector, twin, atol=1e-6)


@pytest.mark.parametrize("name", ["muon", "adam", "adamw"])
def test_every_optimizer_learns_the_better_action(name: str) -> None:
    train = replace(TRAIN, optimizer=name, learning_rate=0.01, ent_coef=0.0)
    policy, optimizer, rng = make(train)
    means = []
    for _ in range(30):
        collected, next_values = rollout(policy)
        losses = update(policy, optimizer, collected, next_values, train, rng)
        means.append(float(collected.rewards.mean()))
    assert means[-1] > means[0] + 0.5
    assert set(losses) == {
        "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance",
    }  # fmt: skip


def test_gradient_accumulation_does_not_change_the_weights() -> None:
    weights = []
    for chunk in (128, 32):
        train = replace(TRAIN, max_minibatch_size=chunk, optimizer="adam")
        policy, optimizer, rng = make(train)
        update(policy, optimizer, *rollout(policy), train, rng)
        weights.append(torch.cat([p.detach().flatten() for p in policy.parameters()]))
    # Adam's first step is the sign of the gradient: where that is next to 0, rounding may turn it around.
    assert (weights[0] - weights[1]).abs().lt(1e-5).float().mean() > 0.999


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_precision_is_close_to_full_precision(precision: str) -> None:
    found = []
    for wanted in ("float32", precision):
        train = replace(TRAIN, precision=wanted, update_epochs=1)
        policy, optimizer, rng = make(train)
        found.append(update(policy, optimizer, *rollout(policy), train, rng))
    assert found[1]["value_loss"] == pytest.approx(found[0]["value_loss"], rel=0.05)
    assert found[1]["value_loss"] != found[0]["value_loss"]


def test_a_gradient_that_is_not_finite_is_never_applied() -> None:
    policy, optimizer, rng = make()
    collected, next_values = rollout(policy)
    collected.rewards[0, 0] = float("nan")
    before = [p.detach().clone() for p in policy.parameters()]
    with pytest.raises(NonFiniteUpdate, match="not finite"):
        update(policy, optimizer, collected, next_values, TRAIN, rng)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def fused_update() -> Any:
    """The module, which is imported as in a lab."""
    sys.path.insert(0, str(Path(ppo.__file__).parent))
    try:
        import fused_update as module
    finally:
        del sys.path[0]
    return module


def test_fused_update_has_the_hash_of_ppo_py() -> None:
    """A change of ppo.py may need one in fused_update.py, and then this hash."""
    assert sha256(Path(ppo.__file__).read_bytes()).hexdigest() == fused_update().PPO_SHA256


@pytest.mark.parametrize("name", ["muon", "adam", "adamw"])
@pytest.mark.parametrize("minibatch", [128, 32])
def test_the_update_in_c_agrees_with_torch(name: str, minibatch: int) -> None:
    module = fused_update()
    train = replace(
        TRAIN, optimizer=name, minibatch_size=minibatch, max_minibatch_size=minibatch, max_grad_norm=0.5, clip_coef=0.05
    )
    if module.why_not(train) is not None:
        pytest.skip("no C compiler")
    weights, losses, states = [], [], []
    for compiled in (True, False):
        policy, _, rng = make(train)
        optimizer = (module.ppo if compiled else ppo).make_optimizer(policy, train)
        fused = module.FusedUpdate(policy, optimizer) if compiled else None
        for _ in range(2):
            collected, next_values = rollout(policy)
            collected.log_probs.add_(torch.randn(STEPS, AGENTS, generator=torch.Generator().manual_seed(4)) * 0.1)
            collected.values.add_(torch.randn(STEPS, AGENTS, generator=torch.Generator().manual_seed(5)))
            if fused is not None:
                losses.append(fused.update(collected, next_values, train, rng))
            else:
                losses.append(update(policy, optimizer, collected, next_values, train, rng))
        weights.append(torch.cat([p.detach().flatten() for p in policy.parameters()]))
        states.append(optimizer.state_dict())
    # The first steps of Adam are about the sign of the gradient: where that is next to 0, rounding may turn it around.
    assert (weights[0] - weights[1]).abs().lt(2e-5).float().mean() > 0.99
    assert 0.1 < losses[0]["clip_fraction"] < 0.9
    for one, other in ((losses[0], losses[2]), (losses[1], losses[3])):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    assert states[0]["state"].keys() == states[1]["state"].keys()
    assert all(one.keys() == states[1]["state"][key].keys() for key, one in states[0]["state"].items())


def test_the_update_in_c_never_applies_a_gradient_that_is_not_finite() -> None:
    module = fused_update()
    if module.why_not(TRAIN) is not None:
        pytest.skip("no C compiler")
    policy, optimizer, rng = make()
    fused = module.FusedUpdate(policy, optimizer)
    collected, next_values = rollout(policy)
    collected.rewards[0, 0] = float("nan")
    before = [p.detach().clone() for p in policy.parameters()]
    with pytest.raises(module.ppo.NonFiniteUpdate, match="not finite"):
        fused.update(collected, next_values, TRAIN, rng)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
