"""Collectors and learners: rollouts hold what happened, learners learn, and both are deterministic."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from looplab.errors import LabError
from looplab.rl import policies
from looplab.rl.collect import Collector, RolloutBuffer, RolloutSource
from looplab.rl.flat import FlatParameters
from looplab.rl.impala import Impala, ImpalaSettings
from looplab.rl.policies import (
    ActorCritic,
    CategoricalHead,
    CnnPolicy,
    GaussianHead,
    MlpPolicy,
    RecurrentMlpPolicy,
    make_policy,
    take_rows,
    to_channels_last,
)
from looplab.rl.ppo import Ppo, PpoSettings

torch.set_num_threads(1)
ENVS = 4


class Counting(gym.Env[Any, Any]):
    """Observes the step count; episodes end after `length` steps, alternately by truncation and termination."""

    def __init__(self, length: int) -> None:
        self.observation_space = gym.spaces.Box(-1, 1000, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.length = length
        self.episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        self.episodes += 1
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t == self.length
        even = self.episodes % 2 == 0
        return np.full(1, self.t, np.float32), float(self.t), over and even, over and not even, {"x_pos": self.t}


def setup(
    envs: Any,
    learner_class: Any,
    settings: Any,
    *,
    overlap: bool = False,
    steps: int = 32,
    hidden_size: int = 0,
    **more: Any,
) -> tuple[Any, RolloutSource]:
    torch.manual_seed(0)
    policy = make_policy(envs.single_observation_space, envs.single_action_space, hidden_size=hidden_size)
    behaviour_policy = copy.deepcopy(policy)
    learner = learner_class(policy, settings, 0)
    collector = Collector(envs, behaviour_policy, learner.flat, seed=0, **more)
    rollouts = [RolloutBuffer.zeros(steps, envs.num_envs, envs.single_observation_space, policy) for _ in range(2)]
    return learner, RolloutSource(collector, (rollouts[0], rollouts[1]), overlap=overlap)


def cartpole(n: int = ENVS) -> Any:
    return gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * n)


def digest(learner: Any) -> str:
    return hashlib.sha256(learner.flat.vector.detach().numpy().tobytes()).hexdigest()


def test_a_rollout_without_transitions_is_refused_with_a_hint() -> None:
    envs = gym.vector.SyncVectorEnv([lambda: Counting(1)])
    learner, source = setup(envs, Ppo, PpoSettings(), steps=1)
    learner.learn(source.next_rollout(), source.lag)
    with pytest.raises(LabError, match="only reset"):
        learner.learn(source.next_rollout(), source.lag)


def test_a_rollout_holds_the_steps_and_marks_resets_as_invalid() -> None:
    envs = gym.vector.SyncVectorEnv([lambda: Counting(3)])
    _, source = setup(envs, Ppo, PpoSettings(), steps=9)
    rollout = source.next_rollout()
    assert rollout.obs[:, 0, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert rollout.episode_starts[:, 0].tolist() == [True, False, False, False, True, False, False, False, True, False]
    assert rollout.valid[:, 0].tolist() == [True, True, True, False, True, True, True, False, True]
    assert rollout.truncated[:, 0].tolist() == [False, False, True] + [False] * 6
    assert rollout.terminated[:, 0].tolist() == [False] * 6 + [True, False, False]
    assert rollout.rewards[:, 0].tolist() == [1, 2, 3, 0, 1, 2, 3, 0, 1]
    second = source.next_rollout()
    assert second.obs[0, 0, 0] == 1
    assert not second.episode_starts[0, 0]


def test_collected_log_probs_match_those_of_the_learner() -> None:
    learner, source = setup(cartpole(), Ppo, PpoSettings())
    rollout = source.next_rollout()
    with torch.no_grad():
        logits, _, _ = learner.policy(
            torch.from_numpy(rollout.obs),
            torch.from_numpy(rollout.hidden_state[0]),
            torch.from_numpy(rollout.episode_starts),
        )
        log_probs, _ = learner.policy.head.log_prob_and_entropy(logits[:-1], torch.from_numpy(rollout.actions))
    assert log_probs.numpy() == pytest.approx(rollout.log_probs, abs=1e-5)


@pytest.mark.parametrize("hidden_size", [0, 16])
def test_the_hidden_state_is_reset_at_episode_starts(hidden_size: int) -> None:
    envs = gym.vector.SyncVectorEnv([lambda: Counting(3), lambda: Counting(5)])
    learner, source = setup(envs, Ppo, PpoSettings(), steps=12, hidden_size=hidden_size)
    source.next_rollout()
    rollout = source.next_rollout()
    with torch.no_grad():
        logits, _, _ = learner.policy(
            torch.from_numpy(rollout.obs),
            torch.from_numpy(rollout.hidden_state[0]),
            torch.from_numpy(rollout.episode_starts),
        )
        log_probs, _ = learner.policy.head.log_prob_and_entropy(logits[:-1], torch.from_numpy(rollout.actions))
    assert log_probs.numpy() == pytest.approx(rollout.log_probs, abs=1e-5)


@pytest.mark.parametrize(("learner_class", "settings"), [(Ppo, PpoSettings(epochs=2)), (Impala, ImpalaSettings())])
def test_policy_inputs_are_aligned_to_64_bytes(learner_class: Any, settings: Any) -> None:
    """BLAS may round differently at another alignment; NumPy aligns to 16 bytes only, torch to 64."""
    learner, source = setup(cartpole(), learner_class, settings)
    alignments: list[int] = []
    for policy in (learner.policy, source.collector.behaviour_policy):
        policy.register_forward_pre_hook(lambda _, inputs: alignments.append(inputs[0].data_ptr() % 64))
    for _ in range(3):
        learner.learn(source.next_rollout(), source.lag)
    if learner_class is Impala:
        learner.learn_from_replay(replay_data(), np.ones(64, np.float32))
    assert alignments
    assert set(alignments) == {0}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("learner_class", "settings"), [(Ppo, PpoSettings(epochs=2)), (Impala, ImpalaSettings())])
def test_the_same_training_gives_the_same_weights(learner_class: Any, settings: Any, overlap: bool) -> None:
    ends = []
    for _ in range(2):
        learner, source = setup(cartpole(), learner_class, settings, overlap=overlap)
        for _ in range(6):
            learner.learn(source.next_rollout(), source.lag)
        source.close()
        ends.append(digest(learner))
    assert ends[0] == ends[1]


def test_the_overlapped_behaviour_policy_lags_by_exactly_one_update() -> None:
    learner, source = setup(cartpole(), Ppo, PpoSettings(epochs=1), overlap=True)
    weights = [learner.flat.vector.detach().clone()]
    for update in range(4):
        rollout = source.next_rollout()
        source.wait()
        weights_used = weights[max(0, update - 1)]
        policy = copy.deepcopy(learner.policy)
        FlatParameters(policy).vector.data.copy_(weights_used)
        with torch.no_grad():
            logits, _, _ = policy(
                torch.from_numpy(rollout.obs),
                torch.from_numpy(rollout.hidden_state[0]),
                torch.from_numpy(rollout.episode_starts),
            )
            log_probs, _ = policy.head.log_prob_and_entropy(logits[:-1], torch.from_numpy(rollout.actions))
        assert log_probs.numpy() == pytest.approx(rollout.log_probs, abs=1e-5)
        learner.learn(rollout, source.lag)
        weights.append(learner.flat.vector.detach().clone())
    source.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_saved_source_continues_exactly(overlap: bool) -> None:
    learner, source = setup(cartpole(), Ppo, PpoSettings(epochs=1), overlap=overlap)
    for _ in range(2):
        learner.learn(source.next_rollout(), source.lag)
    saved = copy.deepcopy({"source": source.state_dict(), "learner": learner.state_dict()})
    saved_envs = copy.deepcopy(source.collector.envs)
    for _ in range(2):
        learner.learn(source.next_rollout(), source.lag)
    source.close()
    resumed, other = setup(saved_envs, Ppo, PpoSettings(epochs=1), overlap=overlap)
    resumed.load_state_dict(saved["learner"])
    other.load_state_dict(saved["source"])
    for _ in range(2):
        resumed.learn(other.next_rollout(), other.lag)
    other.close()
    assert digest(resumed) == digest(learner)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_ppo_learns_to_balance_a_pole(overlap: bool) -> None:
    learner, source = setup(cartpole(8), Ppo, PpoSettings(learning_rate=1e-3, epochs=6), overlap=overlap, steps=128)
    lengths = []
    for _ in range(14):
        rollout = source.next_rollout()
        learner.learn(rollout, source.lag)
        lengths.append(rollout.valid.sum() / max(1, (rollout.terminated | rollout.truncated).sum()))
    source.close()
    assert lengths[0] < 40
    assert np.mean(lengths[-3:]) > 60  # 159 … 767 with other seeds


@pytest.mark.slow
@pytest.mark.parametrize("returns", ["vtrace", "gae"])
def test_impala_learns_to_balance_a_pole(returns: Any) -> None:
    settings = ImpalaSettings(learning_rate=3e-3, returns=returns, lam=0.95, normalise=True)
    learner, source = setup(cartpole(8), Impala, settings, steps=32)
    lengths = []
    for _ in range(150):
        rollout = source.next_rollout()
        learner.learn(rollout, source.lag)
        lengths.append(rollout.valid.sum() / max(1, (rollout.terminated | rollout.truncated).sum()))
    assert np.mean(lengths[-20:]) > 2 * np.mean(lengths[:10])  # 6.9 … 8.5 times with other seeds


def replay_data() -> dict[str, Any]:
    """Return 64 transitions as a replay samples them."""
    rng = np.random.default_rng(0)
    return {
        "obs": rng.normal(size=(64, 4)).astype(np.float32),
        "next_obs": rng.normal(size=(64, 4)).astype(np.float32),
        "hidden_state": np.zeros((64, 0), np.float32),
        "next_hidden_state": np.zeros((64, 0), np.float32),
        "actions": rng.integers(0, 2, 64),
        "rewards": np.ones(64, np.float16),
        "log_probs": np.full(64, np.log(0.5), np.float16),
        "terminated": np.ones(64, bool),
    }


def test_learning_from_the_replay_reduces_the_td_errors() -> None:
    learner, _ = setup(cartpole(), Impala, ImpalaSettings(learning_rate=1e-2, entropy_coef=0.0))
    batch = replay_data()
    td_errors = [learner.learn_from_replay(batch, np.ones(64, np.float32))[1].mean() for _ in range(40)]
    assert td_errors[-1] < 0.3 * td_errors[0]


def test_the_batched_networks_match_two_separate_networks() -> None:
    policy = MlpPolicy(3, CategoricalHead(2), (5, 4))
    obs = torch.randn(7, 3)
    logits, values, _ = policy(obs, torch.zeros(7, 0), torch.zeros(7, dtype=torch.bool))
    for network, expected in ((0, logits), (1, values[:, None])):
        x = obs
        for weight, bias in zip(policy.weights, policy.biases, strict=True):
            x = torch.tanh(x @ weight[network] + bias[network])
        x = (policy.actor, policy.critic)[network](x)
        assert torch.allclose(x, expected, atol=1e-5)


def test_samples_follow_the_distribution() -> None:
    head, rng = CategoricalHead(3), np.random.default_rng(0)
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]])).repeat(20_000, 1)
    actions, log_probs = head.sample(logits, rng)
    assert np.bincount(actions) / 20_000 == pytest.approx([0.2, 0.5, 0.3], abs=0.02)
    assert np.exp(log_probs[actions == 1]) == pytest.approx(0.5)
    gaussian = GaussianHead((2,))
    logits = torch.tensor([[1.0, -1.0, 0.0, np.log(0.5)]]).repeat(20_000, 1)
    actions, log_probs = gaussian.sample(logits, rng)
    assert actions.mean(axis=0) == pytest.approx([1, -1], abs=0.03)
    assert actions.std(axis=0) == pytest.approx([1, 0.5], abs=0.03)
    reference = torch.distributions.Normal(torch.tensor([1.0, -1.0]), torch.tensor([1.0, 0.5]))
    assert log_probs == pytest.approx(reference.log_prob(torch.from_numpy(actions)).sum(-1).numpy(), abs=1e-4)


def test_make_policy_chooses_the_network_for_the_spaces() -> None:
    frames = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    vector = gym.spaces.Box(-1, 1, (6,), np.float32)
    assert isinstance(make_policy(frames, gym.spaces.Discrete(5), hidden_size=8), CnnPolicy)
    assert isinstance(make_policy(vector, gym.spaces.Discrete(5), hidden_size=8), RecurrentMlpPolicy)
    policy: ActorCritic = make_policy(frames, gym.spaces.Discrete(5), hidden_size=8)
    logits, values, hidden_state = policy(
        torch.zeros(3, 2, 4, 84, 84, dtype=torch.uint8), torch.zeros(2, 8), torch.zeros(3, 2, dtype=torch.bool)
    )
    assert (logits.shape, values.shape, hidden_state.shape) == ((3, 2, 5), (3, 2), (2, 8))
    with pytest.raises(LabError, match="Tuple"):
        make_policy(gym.spaces.Tuple([vector]), gym.spaces.Discrete(2))


def test_envs_that_reset_in_the_same_step_are_refused() -> None:
    envs = gym.vector.SyncVectorEnv([lambda: Counting(3)], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    with pytest.raises(LabError, match="in the step after"):
        setup(envs, Ppo, PpoSettings())


class FirstEnvs:
    """Overrides the actions of the first envs."""

    def __init__(self, n: int) -> None:
        self.n = n

    def act(self, episode_starts: Any) -> Any:
        return np.ones(len(episode_starts), np.int64), np.arange(len(episode_starts)) < self.n

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize("overlap", [False, True])
def test_a_script_acts_in_both_modes(overlap: bool) -> None:
    _, source = setup(cartpole(), Ppo, PpoSettings(), overlap=overlap, script=FirstEnvs(1))
    rollout = source.next_rollout()
    source.close()
    assert (rollout.actions[:, 0] == 1).all()
    assert (rollout.log_probs < 0).all()
    assert rollout.scripted[:, 0].all()
    assert not rollout.scripted[:, 1:].any()
    assert set(rollout.actions[:, 1].tolist()) == {0, 1}


LEARNERS = [
    (Ppo, PpoSettings(value_coef=0.0, entropy_coef=0.1, epochs=2)),
    (Impala, ImpalaSettings(value_coef=0.0, entropy_coef=0.1)),
    (Impala, ImpalaSettings(value_coef=0.0, returns="gae")),
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("hidden_size", [0, 8])
@pytest.mark.parametrize(("learner_class", "settings"), LEARNERS)
def test_the_policy_learns_nothing_from_scripted_steps(
    learner_class: Any, settings: Any, hidden_size: int, overlap: bool
) -> None:
    options = {"overlap": overlap, "hidden_size": hidden_size, "steps": 8}
    learner, source = setup(cartpole(), learner_class, settings, script=FirstEnvs(ENVS), **options)
    before = digest(learner)
    for _ in range(2):
        stats = learner.learn(source.next_rollout(), source.lag)
    source.close()
    assert digest(learner) == before
    assert stats.get("approx_kl", 0.0) == 0.0
    learner, source = setup(cartpole(), learner_class, settings, script=FirstEnvs(ENVS - 1), **options)
    stats = learner.learn(source.next_rollout(), source.lag)
    source.close()
    assert digest(learner) != before
    assert stats.get("approx_kl", 0.0) < 0.05
    assert all(np.isfinite(value) for value in stats.values())


OLD_KEYS = {"obs": "seen", "episode_starts": "begins", "log_probs": "logs", "hidden_state": "memory", "rng": "chance"}


def with_old_keys(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {OLD_KEYS.get(key, key): with_old_keys(value) for key, value in state.items()}


@pytest.mark.parametrize("overlap", [False, True])
def test_checkpoints_with_older_names_load(overlap: bool) -> None:
    learner, source = setup(cartpole(), Ppo, PpoSettings(epochs=1), overlap=overlap)
    learner.learn(source.next_rollout(), source.lag)
    saved = copy.deepcopy({"source": source.state_dict(), "learner": learner.state_dict()})
    envs = copy.deepcopy(source.collector.envs)
    resumed, other = setup(envs, Ppo, PpoSettings(epochs=1), overlap=overlap)
    resumed.load_state_dict(with_old_keys(saved["learner"]))
    other.load_state_dict(with_old_keys(saved["source"]))
    for a_learner, rollouts in ((learner, source), (resumed, other)):
        a_learner.learn(rollouts.next_rollout(), rollouts.lag)
        rollouts.close()
    assert digest(resumed) == digest(learner)


def test_parameters_with_older_names_load() -> None:
    for policy, old, new in (
        (CnnPolicy((4, 84, 84), CategoricalHead(2)), "eyes.0.weight", "encoder.0.weight"),
        (MlpPolicy(3, GaussianHead((2,))), "spread", "log_std"),
    ):
        state = {name: value + 1 for name, value in policy.state_dict().items()}
        expected = state[new]
        state[old] = state.pop(new)
        policy.load_state_dict(state)
        assert policy.state_dict()[new].equal(expected)


def test_images_are_evaluated_in_parts_and_gathered_with_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    policy = CnnPolicy((3, 36, 40), CategoricalHead(4), width=16)
    frames = torch.randint(0, 256, (7, 5, 3, 36, 40), dtype=torch.uint8)
    starts = torch.zeros(7, 5, dtype=torch.bool)
    with torch.inference_mode():
        whole = policy(frames, torch.zeros(5, 0), starts)[:2]
        arranged = to_channels_last(frames)
        assert torch.equal(arranged, frames)
        monkeypatch.setattr(policies, "EVALUATION_BYTES", 2 * frames[0].numel())  # two steps at a time
        sizes: list[int] = []
        policy.body.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
        in_parts = policies.evaluate(policy, arranged, torch.zeros(5, 0), starts)
    assert sizes == [10, 10, 10, 5]
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(whole, in_parts, strict=True))
    rows = torch.tensor([30, 2, 2, 11])
    taken = take_rows(arranged.flatten(0, 1), rows)
    assert torch.equal(taken, frames.flatten(0, 1)[rows])
    assert taken.is_contiguous(memory_format=torch.channels_last)
    vectors = torch.randn(6, 3)
    assert to_channels_last(vectors) is vectors
    assert torch.equal(take_rows(vectors, rows[1:3]), vectors[rows[1:3]])


def test_a_recurrent_policy_is_evaluated_in_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "EVALUATION_BYTES", 1)
    policy = RecurrentMlpPolicy(3, CategoricalHead(2), hidden_size=8)
    obs, starts = torch.randn(6, 4, 3), torch.rand(6, 4) < 0.3
    with torch.inference_mode():
        logits, values = policies.evaluate(policy, obs, torch.ones(4, 8), starts)
        expected, expected_values, _ = policy(obs, torch.ones(4, 8), starts)
    assert torch.equal(logits, expected)
    assert torch.equal(values, expected_values)


def test_a_policy_does_not_change_its_observations() -> None:
    policy = CnnPolicy((3, 36, 40), CategoricalHead(4), width=16)
    images = 255 * torch.rand(2, 3, 36, 40)
    for obs in (images, images.to(torch.uint8), images.contiguous(memory_format=torch.channels_last)):
        before = obs.clone()
        logits, _, _ = policy(obs, torch.zeros(2, 0), torch.zeros(2, dtype=torch.bool))
        assert torch.equal(obs, before)
        assert logits.abs().max() < 10  # scaled to 0 … 1
