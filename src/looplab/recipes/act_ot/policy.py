"""A small action-chunking policy: from three pictures and a state to the next actions, by a conditional autoencoder.

While it trains, an encoder sees the true actions and hands a latent to the policy, which is pulled towards the normal
distribution; when it acts, the latent is 0. All actions of a chunk come out at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS = 16
"""Tokens of a picture: a grid of 4 × 4."""


@dataclass(frozen=True)
class PolicyConfig:
    """What the config says in `policy`."""

    chunk_size: int = 10
    """Actions at once."""
    dim_model: int = 64
    """Width of all layers."""
    n_heads: int = 4
    """Heads of the attention."""
    dim_feedforward: int = 128
    """Width inside a transformer layer."""
    latent_dim: int = 8
    """Numbers in the latent."""
    kl_weight: float = 10.0
    """Weight of the latent's distance from the normal distribution."""
    optimizer_lr: float = 1e-4
    """Length of a step."""
    optimizer_weight_decay: float = 1e-4
    """Pull of the weights towards 0."""
    device: str = "cpu"
    """Where it trains."""
    type: str = "act"
    """The kind of policy; there is one."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "PolicyConfig":
        """Checked; a ValueError says which key is wrong."""
        for key, value in config.items():
            if key not in cls.__dataclass_fields__:
                raise ValueError(f"unknown key policy.{key}; there are: {', '.join(cls.__dataclass_fields__)}")
            default = getattr(cls, key)
            if isinstance(default, str):
                if not isinstance(value, str):
                    raise ValueError(f"policy.{key} is text, not {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int if isinstance(default, int) else int | float):
                kind = "a whole number" if isinstance(default, int) else "a number"
                raise ValueError(f"policy.{key} is {kind}, not {value!r}")
            elif value < 0 or (isinstance(default, int) and value < 1):
                raise ValueError(f"policy.{key} is too small: {value!r}")
        made = cls(**config)
        if made.type != "act":
            raise ValueError(f"policy.type must be act, not {made.type!r}")
        if made.dim_model % made.n_heads:
            raise ValueError(f"policy.dim_model {made.dim_model} is no multiple of policy.n_heads {made.n_heads}")
        return made


class Policy(nn.Module):
    """States and actions go in and out in standard deviations; pictures as bytes."""

    def __init__(self, config: PolicyConfig, cameras: int, state_dim: int, action_dim: int) -> None:
        super().__init__()
        width = config.dim_model
        layer = (width, config.n_heads, config.dim_feedforward, 0.0)  # the last: no dropout
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
        )
        for module in self.backbone:
            if isinstance(module, nn.Conv2d):  # keeps the scale of the pictures from layer to layer
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        self.state_in = nn.Linear(state_dim, width)
        self.latent_in = nn.Linear(config.latent_dim, width)
        self.places = nn.Parameter(0.02 * torch.randn(cameras * TOKENS + 2, width))
        self.encoder = nn.TransformerEncoderLayer(*layer, batch_first=True)
        self.queries = nn.Parameter(0.02 * torch.randn(config.chunk_size, width))
        self.decoder = nn.TransformerDecoderLayer(*layer, batch_first=True)
        self.action_out = nn.Linear(width, action_dim)
        # The encoder of the true actions, used only while training.
        self.cls = nn.Parameter(0.02 * torch.randn(1, width))
        self.action_in = nn.Linear(action_dim, width)
        self.times = nn.Parameter(0.02 * torch.randn(config.chunk_size + 2, width))
        self.posterior = nn.TransformerEncoderLayer(*layer, batch_first=True)
        self.latent_out = nn.Linear(width, 2 * config.latent_dim)
        self.latent_dim = config.latent_dim

    def embed(self, images: Tensor) -> Tensor:
        """batch × cameras × tokens × width, of pictures in bytes."""
        batch, cameras = images.shape[:2]
        pixels = (images.flatten(0, 1).float() - 128.0) / 64.0
        grid: Tensor = self.backbone(pixels)
        return grid.flatten(2).transpose(1, 2).reshape(batch, cameras, TOKENS, -1)

    def encode(self, states: Tensor, actions: Tensor, pad: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the latent that the true actions stand for."""
        batch = len(states)
        tokens = torch.cat(
            [self.cls.expand(batch, 1, -1), self.state_in(states)[:, None], self.action_in(actions)], dim=1
        )
        mask = torch.cat([pad.new_zeros(batch, 2), pad], dim=1)
        seen = self.posterior(tokens + self.times, src_key_padding_mask=mask)
        mean, log_variance = self.latent_out(seen[:, 0]).chunk(2, dim=-1)
        return mean, log_variance

    def act(self, embeds: Tensor, states: Tensor, latent: Tensor | None = None) -> Tensor:
        """The next actions: batch × chunk × dimensions. Without a latent it is 0."""
        if latent is None:
            latent = states.new_zeros(len(states), self.latent_dim)
        tokens = torch.cat(
            [self.latent_in(latent)[:, None], self.state_in(states)[:, None], embeds.flatten(1, 2)], dim=1
        )
        memory = self.encoder(tokens + self.places)
        chunk: Tensor = self.action_out(self.decoder(self.queries.expand(len(states), -1, -1), memory))
        return chunk


def l1_error(predicted: Tensor, actions: Tensor, pad: Tensor) -> Tensor:
    """The mean absolute error of the actions that lie inside their episode."""
    inside = (~pad)[..., None].float()
    return (functional.l1_loss(predicted, actions, reduction="none") * inside).sum() / (
        inside.sum() * actions.shape[-1]
    )


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """The Kullback-Leibler divergence of the latents from the normal distribution, mean over the batch."""
    return (-0.5 * (1.0 + log_variance - mean.square() - log_variance.exp())).sum(-1).mean()
