"""Autoencoder on the digits, config with simple-parsing."""
from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from simple_parsing import ArgumentParser, choice, list_field
from sklearn.datasets import load_digits
from torch import Tensor, nn


@dataclass
class ModelConfig:
    """Shape of the autoencoder."""

    hidden: list[int] = list_field(48)  # sizes of the encoder's hidden layers
    latent_dim: int = 8  # size of the code
    activation: str = choice("relu", "elu", "tanh", default="elu")
    denoise_std: float = 0.1  # noise added to the inputs while training


@dataclass
class OptimConfig:
    """Optimizer settings."""

    lr: float = 2e-3
    weight_decay: float = 1e-5
    batch_size: int = 64
    epochs: int = 30


@dataclass
class RunConfig:
    """Where and how to run."""

    seed: int = 0
    output_dir: Path = Path("results")
    eval_interval: int = 5
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


def mlp(sizes: list[int], act: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class AutoEncoder(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        act = {"relu": nn.ReLU, "elu": nn.ELU, "tanh": nn.Tanh}[cfg.activation]
        sizes = [64, *cfg.hidden, cfg.latent_dim]
        self.encoder, self.decoder = mlp(sizes, act), mlp(sizes[::-1], act)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def main(cfg: RunConfig) -> None:
    torch.manual_seed(cfg.seed)
    X = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    train, test = X[:1400], X[1400:]
    model = AutoEncoder(cfg.model)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.optim.lr, weight_decay=cfg.optim.weight_decay)
    cfg.output_dir.mkdir(parents=True, exist_ok=True)
    with open(cfg.output_dir / "log.csv", "w", newline="") as f:
        log = csv.DictWriter(f, ["epoch", "train_mse", "test_mse"])
        log.writeheader()
        for epoch in range(1, cfg.optim.epochs + 1):
            total = 0.0
            for idx in torch.randperm(len(train)).split(cfg.optim.batch_size):
                x = train[idx]
                loss = nn.functional.mse_loss(model(x + cfg.model.denoise_std * torch.randn_like(x)), x)
                opt.zero_grad()
                loss.backward()
                opt.step()
                total += loss.item() * len(idx)
            if epoch % cfg.eval_interval == 0 or epoch == cfg.optim.epochs:
                with torch.no_grad():
                    test_mse = nn.functional.mse_loss(model(test), test).item()
                row = {"epoch": epoch, "train_mse": round(total / len(train), 6), "test_mse": round(test_mse, 6)}
                log.writerow(row)
                print(row)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_arguments(RunConfig, dest="config")
    args = parser.parse_args()
    print(asdict(args.config))
    main(args.config)
