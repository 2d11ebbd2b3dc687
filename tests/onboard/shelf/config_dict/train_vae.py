# VAE on 8x8 digits. Change CONFIG below and run again.
import random

import matplotlib
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CONFIG = {
    "seed": 17,
    "latent_dim": 6,
    "hidden_dim": 64,
    "beta": 1.0,           # weight of the KL
    "lr": 2e-3,
    "batch_size": 64,
    "epochs": 15,
    "device": "cpu",
    "plot_path": "elbo.png",
    "checkpoint": "vae.pt",
}


class VAE(nn.Module):
    def __init__(self, hidden, latent):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, hidden), nn.ReLU())
        self.mu, self.logvar = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


def terms(model, x):
    logits, mu, logvar = model(x)
    rec = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum() / len(x)
    return rec, kl


def train(config):
    random.seed(config["seed"])
    np.random.seed(config["seed"])
    torch.manual_seed(config["seed"])
    X = torch.tensor(load_digits().data / 16.0, dtype=torch.float32, device=config["device"])
    train_x, test_x = X[:1400], X[1400:]
    model = VAE(config["hidden_dim"], config["latent_dim"]).to(config["device"])
    opt = torch.optim.Adam(model.parameters(), lr=config["lr"])
    curve = []
    for epoch in range(1, config["epochs"] + 1):
        for idx in torch.randperm(len(train_x)).split(config["batch_size"]):
            rec, kl = terms(model, train_x[idx])
            opt.zero_grad()
            (rec + config["beta"] * kl).backward()
            opt.step()
        with torch.no_grad():
            rec, kl = terms(model, test_x)
        curve.append(-(rec + kl).item())
        print(f"====> Epoch: {epoch} Test ELBO: {curve[-1]:.3f} (rec {rec:.3f}, kl {kl:.3f})")
    torch.save(model.state_dict(), config["checkpoint"])
    plt.plot(curve)
    plt.ylabel("ELBO")
    plt.savefig(config["plot_path"])


if __name__ == "__main__":
    train(CONFIG)
