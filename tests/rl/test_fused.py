"""PPO in C agrees with PPO in torch, which is the definition."""

from __future__ import annotations

import copy
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from looplab import trainkit
from looplab.rl import SupervisedVectorEnv, fused, native
from looplab.rl.collect import RolloutBuffer
from looplab.rl.flat import FlatParameters
from looplab.rl.metrics import MetricsWriter
from looplab.rl.native import detect_isa
from looplab.rl.policies import CategoricalHead, MlpPolicy, fuse, make_head, make_policy
from looplab.rl.ppo import Ppo, PpoSettings
from looplab.rl.runner import Runner, TrainingPlan

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(fused.load() is None, reason="no C compiler, or no fused multiply-add")
STEPS, ENVS = 24, 5
OBS = gym.spaces.Box(-np.inf, np.inf, (3, 2), np.float64)
ACTIONS = {"categorical": gym.spaces.Discrete(3), "gaussian": gym.spaces.Box(-1, 1, (2,), np.float32)}


def make_rollout(policy: MlpPolicy, scripted: bool) -> RolloutBuffer:
    """Random steps whose log-probabilities are a little off those of the policy."""
    rng = np.random.default_rng(0)
    rollout = RolloutBuffer.zeros(STEPS, ENVS, OBS, policy)
    rollout.obs[:] = rng.normal(size=rollout.obs.shape)
    with torch.no_grad():
        logits, _, _ = policy(
            torch.from_numpy(rollout.obs[:-1]), torch.zeros(ENVS, 0), torch.from_numpy(rollout.episode_starts[:-1])
        )
        for t in range(STEPS):
            rollout.actions[t], rollout.log_probs[t] = policy.head.sample(logits[t], rng)
    rollout.log_probs += rng.normal(0, 0.2, rollout.log_probs.shape).astype(np.float32)
    rollout.rewards[:] = rng.normal(size=rollout.rewards.shape)
    rollout.terminated[:] = rng.random(rollout.rewards.shape) < 0.1
    rollout.truncated[:] = rng.random(rollout.rewards.shape) < 0.1
    rollout.valid[:] = rng.random(rollout.rewards.shape) < 0.9
    rollout.scripted[:] = scripted & (rng.random(rollout.rewards.shape) < 0.3)
    return rollout


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize(
    ("settings", "lag", "scripted"),
    [
        (PpoSettings(epochs=1, minibatch=200, entropy_coef=0.01), 0, False),
        (PpoSettings(epochs=2, minibatch=16, clip=0.1, value_coef=1.3, max_grad_norm=0.1), 0, True),
        (PpoSettings(epochs=2, minibatch=50, normalise=False, entropy_coef=0.1), 1, True),
        (PpoSettings(epochs=9, minibatch=64, target_kl=0.001), 1, False),
    ],
)
def test_learning_in_c_agrees_with_torch(kind: str, settings: PpoSettings, lag: int, scripted: bool) -> None:
    torch.manual_seed(0)
    policy = make_policy(OBS, ACTIONS[kind])
    assert isinstance(policy, MlpPolicy)
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.1 * torch.randn_like(p)
        if policy.log_std is not None:
            policy.log_std[1] = 2.5  # beyond its limit: it has no gradient
    by_torch = copy.deepcopy(policy)
    by_torch.fused = False
    rollout = make_rollout(policy, scripted)
    learners = [Ppo(policy, settings, 0), Ppo(by_torch, settings, 0)]
    assert [learner._fused is not None for learner in learners] == [True, False]
    one, other = (learner.learn(rollout, lag, 0.5) for learner in learners)
    assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    # The first steps of Adam are about the sign of the gradient: where that is next to 0, rounding may turn it around.
    close = (learners[0].flat.vector - learners[1].flat.vector).abs() < 1e-5
    assert close.float().mean() > 0.995
    states = [learner.optimizer.state_dict()["state"][0] for learner in learners]
    assert states[0]["step"] == states[1]["step"]
    assert torch.allclose(states[0]["exp_avg"], states[1]["exp_avg"], atol=2e-3)
    # The state of one continues in the other.
    learners[1].load_state_dict(copy.deepcopy(learners[0].state_dict()))
    one, other = (learner.learn(rollout, lag) for learner in learners)
    assert one == pytest.approx(other, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("hidden", [(16,), (48, 80, 16), (256, 256)])
def test_networks_of_other_shapes_agree_with_torch(hidden: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    policy = MlpPolicy(7, CategoricalHead(5), hidden)
    fast = fuse(policy, FlatParameters(policy))
    assert fast is not None
    for count in (1, 5, 64, 131):
        obs = 3 * torch.randn(count, 7)
        logits, values = fast.logits(obs.numpy())
        expected, expected_values, _ = policy(obs, torch.zeros(count, 0), torch.zeros(count, dtype=torch.bool))
        assert torch.allclose(logits, expected, atol=1e-5)
        assert np.allclose(values, expected_values.detach().numpy(), atol=1e-5)


def test_what_the_library_does_not_support_is_left_to_torch() -> None:
    class Other(MlpPolicy):
        """May compute anything."""

    head = CategoricalHead(2)
    for policy in (Other(4, head), MlpPolicy(4, head, (20, 20)), MlpPolicy(4, CategoricalHead(100))):
        assert fuse(policy, FlatParameters(policy)) is None
    policy = MlpPolicy(4, head)
    fast = fuse(policy, FlatParameters(policy))
    assert fast is not None
    assert fast.usable
    policy.register_forward_hook(lambda *_: None)
    assert not fast.usable


def variants() -> list[str]:
    """Variants of the library that this machine can run."""
    usable = {"avx512": ["avx512", "avx2", "fma"], "avx2": ["avx2", "fma"], "neon": ["neon"]}
    return usable.get(detect_isa(), [])


def train_with(isa: str, monkeypatch: pytest.MonkeyPatch, kind: str, hidden: tuple[int, ...]) -> list[bytes]:
    """Return the bits of outputs, weights, optimizer state and metrics after some updates with one variant."""
    monkeypatch.setitem(native.ISA_FLAGS, "fma", ("-mfma",))  # 4 floats per vector, as on ARM
    monkeypatch.setattr(fused, "detect_isa", lambda: isa)
    assert fused.backend_name() == f"c-{isa}"
    torch.manual_seed(0)
    policy = MlpPolicy(6, make_head(ACTIONS[kind]), hidden)
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.1 * torch.randn_like(p)
    rollout = make_rollout(policy, scripted=True)
    learner = Ppo(policy, PpoSettings(epochs=3, minibatch=32, entropy_coef=0.01), 0)
    assert learner._fused is not None
    metrics = [learner.learn(rollout, lag) for lag in (0, 1)]
    logits, values = learner._fused.logits(rollout.obs)
    state = learner.optimizer.state_dict()["state"][0]
    tensors = (logits, learner.flat.vector, state["exp_avg"], state["exp_avg_sq"])
    return [*(tensor.detach().numpy().tobytes() for tensor in tensors), values.tobytes(), repr(metrics).encode()]


@pytest.mark.parametrize("hidden", [(64, 64), (48, 80, 16)])
@pytest.mark.parametrize("kind", ACTIONS)
def test_the_width_of_vectors_does_not_change_a_bit(
    kind: str, hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = {isa: train_with(isa, monkeypatch, kind, hidden) for isa in variants()}
    assert results
    first = next(iter(results.values()))
    assert [isa for isa, bits in results.items() if bits != first] == []


ARM_DRIVER = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
typedef struct { const void *obs, *actions, *log_probs, *advantages, *returns, *old_values, *choices, *scripted; } Columns;
int64_t looplab_scratch_size(const int64_t *shape);
void looplab_forward(const int64_t *, const float *, float *, const float *, int64_t, float *, float *);
void looplab_gradient(const int64_t *, const void *, const Columns *, const float *, int64_t, float *, float *,
                      const int64_t *, int64_t, double, double *);

static void *read_array(FILE *file, int64_t *bytes) { /* its length in bytes, then the array */
    if (fread(bytes, 8, 1, file) != 1) exit(2);
    void *data = aligned_alloc(64, (size_t)(*bytes + 128) / 64 * 64);
    if (fread(data, 1, (size_t)*bytes, file) != (size_t)*bytes) exit(3);
    return data;
}

int main(int count, char **names) {
    int64_t bytes, size, n, rows_bytes;
    FILE *in = count == 3 ? fopen(names[1], "rb") : NULL, *out = count == 3 ? fopen(names[2], "wb") : NULL;
    if (!in || !out) return 1;
    int64_t *shape = read_array(in, &bytes);
    float *params = read_array(in, &size);
    void *loss = read_array(in, &bytes), *obs = read_array(in, &bytes), *actions = read_array(in, &bytes);
    float *log_probs = read_array(in, &n), *advantages = read_array(in, &bytes), *returns = read_array(in, &bytes);
    int64_t *rows = read_array(in, &rows_bytes);
    size /= 4, n /= 4;
    float *scratch = aligned_alloc(64, (size_t)(looplab_scratch_size(shape) * 4 + 64) / 64 * 64);
    float *grad = calloc((size_t)size, 4), *outputs = calloc((size_t)(n * shape[2]), 4), *values = calloc((size_t)n, 4);
    double stats[6];
    Columns columns = {obs, shape[3] ? actions : NULL, log_probs, advantages, returns, NULL, shape[3] ? NULL : actions, NULL};
    looplab_forward(shape, params, scratch, obs, n, outputs, values);
    looplab_gradient(shape, loss, &columns, params, size, grad, scratch, rows, rows_bytes / 8, 0.5, stats);
    fwrite(outputs, 4, (size_t)(n * shape[2]), out);
    fwrite(values, 4, (size_t)n, out);
    fwrite(grad, 4, (size_t)size, out);
    return fclose(out);
}
"""
ARM_TOOLS = [shutil.which(name) for name in ("aarch64-linux-gnu-gcc", "qemu-aarch64")]


@pytest.mark.slow
@pytest.mark.skipif(None in ARM_TOOLS, reason="gcc-aarch64-linux-gnu or qemu-user is not installed")
@pytest.mark.parametrize("kind", ACTIONS)
def test_the_library_computes_the_same_on_arm(kind: str, tmp_path: Path) -> None:
    compiler, emulator = ARM_TOOLS
    (tmp_path / "driver.c").write_text(ARM_DRIVER)
    flags = [flag for flag in native.FLAGS if flag not in ("-fPIC", "-shared")]
    flags += ["-ffp-contract=fast", "-Wno-psabi", *native.ISA_FLAGS["neon"], "-static"]
    program = str(tmp_path / "program")
    argv = [str(compiler), *flags, str(fused.SOURCE), str(tmp_path / "driver.c"), "-o", program, "-lm"]
    subprocess.run(argv, check=True)
    torch.manual_seed(0)
    policy = MlpPolicy(6, make_head(ACTIONS[kind]), (64, 48))
    flat = FlatParameters(policy)
    fast = fuse(policy, flat)
    assert fast is not None
    rng = np.random.default_rng(0)
    n = 133
    actions = rng.normal(size=(n, 2)).astype(np.float32) if kind == "gaussian" else rng.integers(3, size=n)
    columns = fused.Columns(
        obs=rng.normal(size=(n, 6)).astype(np.float32), actions=actions,
        log_probs=rng.normal(-1.0, 0.2, n).astype(np.float32), advantages=rng.normal(size=n).astype(np.float32),
        returns=rng.normal(size=n).astype(np.float32),
    )  # fmt: skip
    loss = fused.Loss(
        clip=0.2, value_clip=0.0, value_coef=0.5, value_scale=1.0, entropy_coef=0.01, min_log_std=-20.0,
        max_log_std=2.0, normalise=1,
    )  # fmt: skip
    rows = rng.permutation(n)[:100]
    outputs, values = fast.mlp.forward(columns.obs)
    fast.mlp.gradient(loss, columns, rows, 0.5)
    arrays = [
        fast.mlp._shape.tobytes(), flat.vector.detach().numpy().tobytes(), bytes(loss), columns.obs.tobytes(),
        actions.tobytes(), columns.log_probs.tobytes(), columns.advantages.tobytes(), columns.returns.tobytes(),
        rows.tobytes(),
    ]  # fmt: skip
    (tmp_path / "in").write_bytes(b"".join(len(data).to_bytes(8, "little") + data for data in arrays))
    subprocess.run([str(emulator), program, str(tmp_path / "in"), str(tmp_path / "out")], check=True)
    found = np.fromfile(tmp_path / "out", np.float32)
    on_arm = np.split(found, np.cumsum([outputs.size, values.size]))
    assert on_arm[0].tobytes() == outputs.tobytes()
    assert on_arm[1].tobytes() == values.tobytes()
    gradient = flat.grad.numpy()
    # expf and logf are those of the C library, whose last bit may differ
    np.testing.assert_allclose(on_arm[2], gradient, rtol=1e-4, atol=1e-7 * float(np.abs(gradient).max()))


def test_not_a_number_is_not_lost() -> None:
    policy = MlpPolicy(4, CategoricalHead(2))
    fast = fuse(policy, FlatParameters(policy))
    assert fast is not None
    logits, values = fast.logits(np.array([[np.nan, 0, 0, 0], [1e30, 0, 0, 0]], np.float32))
    assert torch.isnan(logits[0]).all()
    assert np.isnan(values[0])
    assert torch.isfinite(logits[1]).all()


def test_a_run_that_resumes_with_another_backend_says_so(tmp_path: Path) -> None:
    notes: list[str] = []
    for steps, wanted in ((64, True), (128, False), (192, False)):
        envs = SupervisedVectorEnv([partial(gym.make, "CartPole-v1")] * 2)
        policy: Any = make_policy(envs.single_observation_space, envs.single_action_space)
        policy.fused = wanted
        metrics = MetricsWriter(trainkit.Logger(tmp_path / "metrics.jsonl"))
        runner = Runner(
            envs, Ppo(policy, PpoSettings(epochs=1), 0), TrainingPlan(steps, rollout=16), out_dir=tmp_path,
            metrics=metrics, seed=0, echo=notes.append,
        )  # fmt: skip
        runner.run()
        envs.close()
    changed = [note for note in notes if "rounding" in note]
    assert changed == [f"the checkpoint was computed by {fused.backend_name()}, now torch is used: rounding differs"]
