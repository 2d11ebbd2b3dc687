"""Actor-critic networks: MLPs for vectors, CNNs for images, feed-forward or recurrent.

All share one contract: `forward` takes observations [n, ...] or [steps, n, ...], the hidden state before the first of
them and the steps at which episodes start. It returns the head's logits, the values and the hidden state after the
last step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, cast

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from looplab.errors import LabError
from looplab.rl import fused
from looplab.rl.flat import FlatParameters
from looplab.rl.renamed import rename_parameters

MIN_LOG_STD, MAX_LOG_STD = -20.0, 2.0
HALF_LOG_2PI = 0.9189385332046727
GAUSSIAN_ENTROPY = 1.4189385332046727
"""Entropy of a standard normal distribution, in nats."""


class ActionHead(Protocol):
    """The distribution over actions that a policy's outputs parameterise."""

    @property
    def size(self) -> int:
        """Number of policy outputs."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one action."""
        ...

    @property
    def dtype(self) -> Any:
        """NumPy dtype of an action."""
        ...

    def sample(self, logits: Tensor, rng: np.random.Generator) -> tuple[Any, Any]:
        """Draw actions.

        Args:
            logits: Policy outputs, [n, size].
            rng: Source of randomness.

        Returns:
            Actions [n, *shape] and their log-probabilities [n], both as NumPy arrays.
        """
        ...

    def log_prob_and_entropy(self, logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each action and the entropy of its distribution."""
        ...

    def mode(self, logits: Tensor) -> Any:
        """Return the most likely actions as a NumPy array."""
        ...


@dataclass(frozen=True)
class CategoricalHead:
    """A softmax over discrete actions."""

    size: int
    shape: tuple[int, ...] = ()
    dtype: Any = np.int64

    def sample(self, logits: Tensor, rng: np.random.Generator) -> tuple[Any, Any]:
        shifted = logits.double().cpu().numpy()
        shifted = shifted - shifted.max(axis=-1, keepdims=True)
        weights = np.exp(shifted)
        total = weights.sum(axis=-1, keepdims=True)
        cumulative = np.cumsum(weights, axis=-1)
        draws = rng.random((len(shifted), 1)) * total
        actions = np.minimum((cumulative <= draws).sum(axis=-1), self.size - 1)
        log_probs = np.take_along_axis(shifted, actions[:, None], axis=-1) - np.log(total)
        return actions, log_probs[:, 0].astype(np.float32)

    def log_prob_and_entropy(self, logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = torch.log_softmax(logits, dim=-1)
        chosen = log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        return chosen, -(log_probs.exp() * log_probs).sum(-1)

    def mode(self, logits: Tensor) -> Any:
        return logits.argmax(-1).cpu().numpy()


@dataclass(frozen=True)
class GaussianHead:
    """An independent Gaussian per action dimension; the policy outputs means and log standard deviations.

    Actions are not squashed: the caller clips them to the bounds after their log-probability is taken.
    """

    shape: tuple[int, ...]
    dtype: Any = np.float32

    @property
    def size(self) -> int:
        return 2 * int(np.prod(self.shape))

    def _mean_and_log_std(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = logits.chunk(2, dim=-1)
        return mean, log_std.clamp(MIN_LOG_STD, MAX_LOG_STD)

    def sample(self, logits: Tensor, rng: np.random.Generator) -> tuple[Any, Any]:
        mean, log_std = self._mean_and_log_std(logits)
        noise = rng.standard_normal(tuple(mean.shape), dtype=np.float32)
        flat = mean.cpu().numpy() + np.exp(log_std.cpu().numpy()) * noise
        log_probs = self.log_prob_and_entropy(logits, torch.from_numpy(flat).to(logits.device))[0]
        return flat.reshape(len(flat), *self.shape), log_probs.cpu().numpy()

    def log_prob_and_entropy(self, logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self._mean_and_log_std(logits)
        z = (actions.reshape(mean.shape) - mean) * torch.exp(-log_std)
        log_probs = -0.5 * z.square() - log_std - HALF_LOG_2PI
        return log_probs.sum(-1), (log_std + GAUSSIAN_ENTROPY).sum(-1)

    def mode(self, logits: Tensor) -> Any:
        mean = self._mean_and_log_std(logits)[0]
        return mean.cpu().numpy().reshape(len(mean), *self.shape)


def make_head(action_space: gym.Space[Any]) -> ActionHead:
    """Return the head for an action space; LabError if there is none."""
    if isinstance(action_space, gym.spaces.Discrete):
        return CategoricalHead(int(action_space.n))
    if isinstance(action_space, gym.spaces.Box):
        return GaussianHead(action_space.shape)
    raise LabError(f"no policy for {type(action_space).__name__} actions", hint="use a Discrete or Box action space")


class ActorCritic(nn.Module):
    """Base class of all policies."""

    hidden_size: int = 0
    """Size of the recurrent hidden state; 0 for a feed-forward policy."""

    def __init__(self, head: ActionHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, obs: Tensor, hidden_state: Tensor, episode_starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate the policy on one step or on a sequence of steps.

        Args:
            obs: Observations, [n, ...] or [steps, n, ...].
            hidden_state: Hidden state before the first step, [n, hidden_size].
            episode_starts: Whether each observation is the first of its episode, [n] or [steps, n].

        Returns:
            Logits for the head, values, and the hidden state after the last step.
        """
        raise NotImplementedError

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load parameters, also those of checkpoints that use older names."""
        return super().load_state_dict(rename_parameters(state_dict), strict, assign)


class MlpPolicy(ActorCritic):
    """Separate actor and critic MLPs of equal shape, computed as one batched matrix product.

    Small networks are bound by the number of operations, which this halves. Learners and collectors evaluate and train
    these networks in C where that is possible; see `fuse`.
    """

    fused: bool = True
    """Set to False before a learner is created from this policy, to use only torch."""

    def __init__(self, inputs: int, head: ActionHead, hidden: Sequence[int] = (64, 64)) -> None:
        super().__init__(head)
        sizes = [inputs, *hidden]
        self.weights = nn.ParameterList([_orthogonal(2, a, b, gain=2**0.5) for a, b in pairwise(sizes)])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(2, 1, b)) for b in hidden])
        outputs = head.size // 2 if isinstance(head, GaussianHead) else head.size
        self.actor = nn.Linear(sizes[-1], outputs)
        self.critic = nn.Linear(sizes[-1], 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)
        nn.init.orthogonal_(self.critic.weight, 1.0)
        nn.init.zeros_(self.actor.bias)
        nn.init.zeros_(self.critic.bias)
        self.log_std = nn.Parameter(torch.zeros(outputs)) if isinstance(head, GaussianHead) else None

    def forward(self, obs: Tensor, hidden_state: Tensor, episode_starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = obs.reshape(-1, self.weights[0].shape[1]).float()
        x = flat.expand(2, *flat.shape)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = torch.tanh(torch.baddbmm(bias, x, weight))
        logits = self.to_logits(self.actor(x[0]))
        shape = episode_starts.shape
        return logits.view(*shape, -1), self.critic(x[1]).view(shape), hidden_state

    def to_logits(self, outputs: Tensor) -> Tensor:
        """Return the head's logits for the outputs of the actor."""
        if self.log_std is None:
            return outputs
        return torch.cat([outputs, self.log_std.expand_as(outputs)], dim=-1)


class FusedPolicy:
    """An `MlpPolicy` evaluated and trained in C (`fused`); not to be used by two threads at once."""

    def __init__(self, policy: MlpPolicy, flat: FlatParameters, mlp: fused.FusedMlp) -> None:
        self.policy, self.mlp = policy, mlp

    @property
    def usable(self) -> bool:
        """Whether nothing has been attached to the policy since, such as a hook or torch.compile."""
        policy = self.policy
        return not (policy._forward_hooks or policy._forward_pre_hooks or policy._compiled_call_impl)

    def flatten(self, obs: Any) -> Any:
        """Return observations as float32 rows."""
        return np.ascontiguousarray(obs.reshape(-1, self.mlp.inputs), np.float32)

    def logits(self, obs: Any) -> tuple[Tensor, Any]:
        """Return the head's logits and the values (a NumPy array) of observations, one row each."""
        outputs, values = self.mlp.forward(self.flatten(obs))
        return self.policy.to_logits(torch.from_numpy(outputs)), values


def fuse(policy: ActorCritic, flat: FlatParameters) -> FusedPolicy | None:
    """Return the policy in C, on the same parameters; None if that is not possible or not wanted."""
    if type(policy) is not MlpPolicy or not policy.fused or type(policy.head) not in (CategoricalHead, GaussianHead):
        return None
    layout = fused.MlpLayout(
        inputs=policy.weights[0].shape[1],
        weights=[[weight[net] for weight in policy.weights] for net in range(2)],
        biases=[[bias[net] for bias in policy.biases] for net in range(2)],
        heads=[(layer.weight, layer.bias) for layer in (policy.actor, policy.critic)],
        transposed=False,
        log_std=policy.log_std,
    )
    if fused.load() is None or not fused.supports(flat, layout):
        return None
    return FusedPolicy(policy, flat, fused.FusedMlp(flat, layout))


def _orthogonal(copies: int, rows: int, columns: int, gain: float) -> nn.Parameter:
    weights = torch.empty(copies, rows, columns)
    for weight in weights:
        nn.init.orthogonal_(weight, gain)
    return nn.Parameter(weights)


class CnnPolicy(ActorCritic):
    """A small CNN over stacked frames [channels, height, width], with a GRU on top if `hidden_size` is not 0."""

    def __init__(self, shape: Sequence[int], head: ActionHead, *, width: int = 256, hidden_size: int = 0) -> None:
        super().__init__(head)
        self.hidden_size = hidden_size
        self.encoder = nn.Sequential(
            nn.Conv2d(shape[0], 16, 8, stride=4), nn.ReLU(),
            nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2), nn.ReLU(),
            nn.Flatten(),
        )  # fmt: skip
        with torch.no_grad():
            features = self.encoder(torch.zeros(1, *shape)).shape[1]
        self.body = nn.Linear(features, width)
        self.cell = nn.GRUCell(width, hidden_size) if hidden_size else None
        self.actor = nn.Linear(hidden_size or width, head.size)
        self.critic = nn.Linear(hidden_size or width, 1)
        for layer in (*self.encoder, self.body):
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.orthogonal_(layer.weight, 2**0.5)
                nn.init.zeros_(cast(Tensor, layer.bias))
        nn.init.orthogonal_(self.actor.weight, 0.01)
        nn.init.orthogonal_(self.critic.weight, 1.0)

    def forward(self, obs: Tensor, hidden_state: Tensor, episode_starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = episode_starts.shape
        flat = obs.reshape(-1, *obs.shape[len(shape) :])
        # Convolutions on CPUs are a quarter faster with channels last in memory; bytes are cheaper to rearrange.
        flat = flat.contiguous(memory_format=torch.channels_last)
        images = flat * (1 / 255) if flat.dtype == torch.float32 else flat.float().mul_(1 / 255)
        x = torch.relu(self.body(self.encoder(images)))
        if self.cell is not None:
            x, hidden_state = unroll_gru(self.cell, x.view(*shape, -1), hidden_state, episode_starts)
            x = x.reshape(-1, self.hidden_size)
        return self.actor(x).view(*shape, -1), self.critic(x).view(shape), hidden_state


class RecurrentMlpPolicy(ActorCritic):
    """One linear layer and a GRU, for partially observed vectors."""

    def __init__(self, inputs: int, head: ActionHead, *, width: int = 64, hidden_size: int = 64) -> None:
        super().__init__(head)
        self.hidden_size = hidden_size
        self.inputs = inputs
        self.body = nn.Linear(inputs, width)
        self.cell = nn.GRUCell(width, hidden_size)
        self.actor = nn.Linear(hidden_size, head.size)
        self.critic = nn.Linear(hidden_size, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def forward(self, obs: Tensor, hidden_state: Tensor, episode_starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = episode_starts.shape
        x = torch.tanh(self.body(obs.reshape(-1, self.inputs).float())).view(*shape, -1)
        x, hidden_state = unroll_gru(self.cell, x, hidden_state, episode_starts)
        return self.actor(x), self.critic(x).squeeze(-1), hidden_state


def unroll_gru(cell: nn.GRUCell, x: Tensor, hidden_state: Tensor, episode_starts: Tensor) -> tuple[Tensor, Tensor]:
    """Run a GRU cell over one step or a sequence and return its outputs and the last hidden state.

    The hidden state is zeroed before each step that starts an episode.
    """
    keep = (~episode_starts).to(x.dtype).unsqueeze(-1)
    if episode_starts.dim() == 1:
        hidden_state = cell(x, hidden_state * keep)
        return hidden_state, hidden_state
    outputs = []
    for t in range(len(x)):
        hidden_state = cell(x[t], hidden_state * keep[t])
        outputs.append(hidden_state)
    return torch.stack(outputs), hidden_state


def make_policy(
    obs_space: gym.Space[Any], action_space: gym.Space[Any], *, hidden_size: int = 0, width: int | None = None
) -> ActorCritic:
    """Return the policy for these spaces: a CNN for uint8 observations [channels, height, width], else an MLP.

    Args:
        obs_space: Space of one observation; a Box.
        action_space: Space of one action; Discrete or Box.
        hidden_size: Size of the GRU's hidden state; 0 for a feed-forward policy.
        width: Units of the hidden layers; None for 256 (CNN) or 64 (MLP).

    Raises:
        LabError: No policy supports one of the spaces.
    """
    head = make_head(action_space)
    if not isinstance(obs_space, gym.spaces.Box):
        raise LabError(f"no policy for {type(obs_space).__name__} observations", hint="flatten them to a Box")
    if obs_space.dtype == np.uint8 and len(obs_space.shape) == 3:
        return CnnPolicy(obs_space.shape, head, width=width or 256, hidden_size=hidden_size)
    inputs = int(np.prod(obs_space.shape))
    if hidden_size:
        return RecurrentMlpPolicy(inputs, head, width=width or 64, hidden_size=hidden_size)
    return MlpPolicy(inputs, head, (width or 64, width or 64))


EVALUATION_BYTES = 2**21
"""Observations that are evaluated at once without a gradient: what they are computed into should fit into a cache."""


def evaluate(policy: ActorCritic, obs: Tensor, hidden_state: Tensor, episode_starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits and values of a sequence [steps, n, ...], of a feed-forward policy in parts; see `forward`."""
    step_bytes = obs[0].numel() * obs.element_size()
    steps = len(obs) if policy.hidden_size else max(1, EVALUATION_BYTES // step_bytes)
    if steps >= len(obs):
        logits, values, _ = policy(obs, hidden_state, episode_starts)
        return logits, values
    parts = [
        policy(obs[first : first + steps], hidden_state, episode_starts[first : first + steps])
        for first in range(0, len(obs), steps)
    ]
    return torch.cat([logits for logits, _, _ in parts]), torch.cat([values for _, values, _ in parts])


def to_channels_last(obs: Tensor) -> Tensor:
    """Return images [..., channels, height, width] with channels last in memory; anything else as it is."""
    if obs.dtype != torch.uint8 or obs.dim() < 4:
        return obs
    return obs.movedim(-3, -1).contiguous().movedim(-1, -3)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows of a tensor; images keep their channels last in memory."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.movedim(1, 3)[rows].movedim(3, 1)
    return x[rows]


def mean_or_zero(x: Tensor) -> Tensor:
    """Return the mean of a tensor; 0 if it is empty, as in a minibatch of scripted steps."""
    return x.mean() if x.numel() else x.sum()
