"""A small action-chunking transformer (ACT): a conditional VAE from three images and a state to a chunk of actions.

During training, an encoder of the true actions provides the latent, which a KL term regularizes towards the standard
normal distribution. At inference the latent is 0. All actions of a chunk are predicted at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS = 16
"""Tokens per image: a 4 × 4 grid."""


@dataclass(frozen=True)
class PolicyConfig:
    """The `policy` section of the config."""

    chunk_size: int = 10
    """Actions per chunk."""
    dim_model: int = 64
    """Width of the tokens."""
    n_heads: int = 4
    """Attention heads."""
    dim_feedforward: int = 128
    """Hidden width of the feed-forward blocks."""
    latent_dim: int = 8
    """Dimensions of the latent."""
    kl_weight: float = 10.0
    """Weight of the KL term."""
    optimizer_lr: float = 1e-4
    """Learning rate."""
    optimizer_weight_decay: float = 1e-4
    """Weight decay of AdamW."""
    device: str = "cpu"
    """Torch device."""
    type: str = "act"
    """Type of the policy; only `act` exists."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "PolicyConfig":
        """Parse and validate the section. Raises ValueError with the invalid key."""
        for key, value in config.items():
            if key not in cls.__dataclass_fields__:
                raise ValueError(f"unknown key policy.{key}; known keys: {', '.join(cls.__dataclass_fields__)}")
            default = getattr(cls, key)
            if isinstance(default, str):
                if not isinstance(value, str):
                    raise ValueError(f"policy.{key} must be a string, not {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int if isinstance(default, int) else int | float):
                kind = "an integer" if isinstance(default, int) else "a number"
                raise ValueError(f"policy.{key} must be {kind}, not {value!r}")
            elif value < 0 or (isinstance(default, int) and value < 1):
                raise ValueError(f"policy.{key} is too small: {value!r}")
        parsed = cls(**config)
        if parsed.type != "act":
            raise ValueError(f"policy.type must be act, not {parsed.type!r}")
        if parsed.dim_model % parsed.n_heads:
            raise ValueError(
                f"policy.dim_model {parsed.dim_model} is not a multiple of policy.n_heads {parsed.n_heads}"
            )
        return parsed


class ActPolicy(nn.Module):
    """States and actions are standardized, images are uint8."""

    def __init__(self, config: PolicyConfig, cameras: int, state_dim: int, action_dim: int) -> None:
        super().__init__()
        width = config.dim_model
        layer = (width, config.n_heads, config.dim_feedforward, 0.0)  # 0.0: no dropout
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
            if isinstance(module, nn.Conv2d):  # preserves the scale of the activations
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        self.state_in = nn.Linear(state_dim, width)
        self.latent_in = nn.Linear(config.latent_dim, width)
        self.places = nn.Parameter(0.02 * torch.randn(cameras * TOKENS + 2, width))  # position embeddings
        self.encoder = nn.TransformerEncoderLayer(*layer, batch_first=True)
        self.queries = nn.Parameter(0.02 * torch.randn(config.chunk_size, width))
        self.decoder = nn.TransformerDecoderLayer(*layer, batch_first=True)
        self.action_out = nn.Linear(width, action_dim)
        # Posterior q(latent | state, actions), used in training only.
        self.cls = nn.Parameter(0.02 * torch.randn(1, width))
        self.action_in = nn.Linear(action_dim, width)
        self.times = nn.Parameter(0.02 * torch.randn(config.chunk_size + 2, width))  # position embeddings
        self.posterior = nn.TransformerEncoderLayer(*layer, batch_first=True)
        self.latent_out = nn.Linear(width, 2 * config.latent_dim)
        self.latent_dim = config.latent_dim

    def embed(self, images: Tensor) -> Tensor:
        """Embed uint8 images; return batch × cameras × tokens × width."""
        batch, cameras = images.shape[:2]
        pixels = (images.flatten(0, 1).float() - 128.0) / 64.0
        grid: Tensor = self.backbone(pixels)
        return grid.flatten(2).transpose(1, 2).reshape(batch, cameras, TOKENS, -1)

    def encode(self, states: Tensor, actions: Tensor, pad: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance of the latent, given the true actions."""
        batch = len(states)
        tokens = torch.cat(
            [self.cls.expand(batch, 1, -1), self.state_in(states)[:, None], self.action_in(actions)], dim=1
        )
        mask = torch.cat([pad.new_zeros(batch, 2), pad], dim=1)
        hidden = self.posterior(tokens + self.times, src_key_padding_mask=mask)
        mean, log_var = self.latent_out(hidden[:, 0]).chunk(2, dim=-1)
        return mean, log_var

    def act(self, embeds: Tensor, states: Tensor, latent: Tensor | None = None) -> Tensor:
        """Predict the next actions: batch × chunk × action_dim. Default latent: 0."""
        if latent is None:
            latent = states.new_zeros(len(states), self.latent_dim)
        tokens = torch.cat(
            [self.latent_in(latent)[:, None], self.state_in(states)[:, None], embeds.flatten(1, 2)], dim=1
        )
        memory = self.encoder(tokens + self.places)
        chunk: Tensor = self.action_out(self.decoder(self.queries.expand(len(states), -1, -1), memory))
        return chunk


def masked_l1_loss(predicted: Tensor, actions: Tensor, pad: Tensor) -> Tensor:
    """Return the mean absolute error of the actions that are not padding."""
    mask = (~pad)[..., None].float()
    return (functional.l1_loss(predicted, actions, reduction="none") * mask).sum() / (mask.sum() * actions.shape[-1])


def kl_divergence(mean: Tensor, log_var: Tensor) -> Tensor:
    """Return the KL divergence of the latents from the standard normal distribution, averaged over the batch."""
    return (-0.5 * (1.0 + log_var - mean.square() - log_var.exp())).sum(-1).mean()
