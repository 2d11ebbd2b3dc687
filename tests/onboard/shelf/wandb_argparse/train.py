import argparse
import os

import numpy as np
import torch
import torch.nn.functional as F
import wandb
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from torch import nn, optim


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--project", type=str, default="digits-sweep")
    parser.add_argument("--entity", type=str, default=None)
    parser.add_argument("--run_name", type=str, default=None)
    parser.add_argument("--tags", type=str, nargs="*", default=[])
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--bs", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--mixup_alpha", type=float, default=0.0)
    parser.add_argument("--label_smoothing", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=3407)
    return parser.parse_args()


def main(args):
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    run = wandb.init(
        project=args.project, entity=args.entity, name=args.run_name, tags=args.tags,
        config=vars(args), mode=os.environ.get("WANDB_MODE", "offline"),
    )
    wandb.define_metric("val/*", step_metric="epoch")
    cfg = wandb.config

    d = load_digits()
    X, Y = torch.tensor(d.data / 16.0).float(), torch.tensor(d.target)
    Xtr, Ytr, Xva, Yva = X[:1200], Y[:1200], X[1200:], Y[1200:]
    model = nn.Sequential(nn.Linear(64, cfg.hidden), nn.ReLU(), nn.Linear(cfg.hidden, 10))
    wandb.watch(model, log=None)
    opt = optim.Adam(model.parameters(), lr=cfg.lr)

    best_f1 = 0
    for epoch in range(cfg.epochs):
        for idx in torch.randperm(len(Xtr)).split(cfg.bs):
            x, y = Xtr[idx], F.one_hot(Ytr[idx], 10).float()
            if cfg.mixup_alpha > 0:
                lam = np.random.beta(cfg.mixup_alpha, cfg.mixup_alpha)
                p = torch.randperm(len(x))
                x, y = lam * x + (1 - lam) * x[p], lam * y + (1 - lam) * y[p]
            loss = F.cross_entropy(model(x), y, label_smoothing=cfg.label_smoothing)
            opt.zero_grad()
            loss.backward()
            opt.step()
            wandb.log({"train/loss": loss.item()})
        with torch.no_grad():
            out = model(Xva)
        f1 = f1_score(Yva, out.argmax(1), average="macro")
        best_f1 = max(best_f1, f1)
        wandb.log({"val/loss": F.cross_entropy(out, Yva).item(), "val/f1": f1, "epoch": epoch})
    run.summary["best_f1"] = best_f1
    wandb.finish()


if __name__ == "__main__":
    main(get_args())
