"""Usage: python train.py --config configs/base.yaml [--name NAME]"""
import argparse
import csv
import os
import shutil

import numpy as np
import torch
import torch.nn as nn
import yaml
from tqdm import tqdm


class AttrDict(dict):
    __getattr__ = dict.__getitem__


def load_config(path):
    with open(path) as f:
        cfg = yaml.safe_load(f)
    if "_base_" in cfg:  # inheritance, one level
        base = load_config(os.path.join(os.path.dirname(path), cfg.pop("_base_")))
        cfg = merge(base, cfg)
    return wrap(cfg)


def merge(a, b):
    out = dict(a)
    for k, v in b.items():
        out[k] = merge(a[k], v) if isinstance(v, dict) and isinstance(a.get(k), dict) else v
    return out


def wrap(d):
    return AttrDict({k: wrap(v) if isinstance(v, dict) else v for k, v in d.items()})


def sine_waves(n, length, seed):
    rng = np.random.RandomState(seed)
    t = np.arange(length + 1) / 8.0
    f, ph = rng.uniform(0.5, 2, (n, 1)), rng.uniform(0, 6.28, (n, 1))
    s = np.sin(f * t + ph) + 0.05 * rng.randn(n, length + 1)
    s = torch.tensor(s, dtype=torch.float32).unsqueeze(-1)
    return s[:, :-1], s[:, 1:]


class Forecaster(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        rnn = {"gru": nn.GRU, "lstm": nn.LSTM}[cfg.cell]
        self.rnn = rnn(1, cfg.hidden_size, cfg.num_layers, batch_first=True, dropout=cfg.dropout if cfg.num_layers > 1 else 0)
        self.head = nn.Linear(cfg.hidden_size, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--config", "-c", required=True, help="path to the yaml config")
    ap.add_argument("--name", default=None)
    opt = ap.parse_args()
    cfg = load_config(opt.config)
    exp_dir = os.path.join(cfg.experiment.root, opt.name or cfg.experiment.name)
    os.makedirs(exp_dir, exist_ok=True)
    shutil.copy(opt.config, os.path.join(exp_dir, "config.yaml"))

    torch.manual_seed(cfg.experiment.seed)
    x, y = sine_waves(cfg.data.n_train, cfg.data.seq_len, 0)
    xv, yv = sine_waves(cfg.data.n_val, cfg.data.seq_len, 1)
    model = Forecaster(cfg.model)
    opt_cls = getattr(torch.optim, cfg.train.optimizer.type)
    optim = opt_cls(model.parameters(), lr=cfg.train.optimizer.lr, weight_decay=cfg.train.optimizer.weight_decay)
    sched = torch.optim.lr_scheduler.StepLR(optim, cfg.train.scheduler.step_size, cfg.train.scheduler.gamma)

    with open(os.path.join(exp_dir, "metrics.csv"), "w") as f:
        w = csv.writer(f)
        w.writerow(["epoch", "train_mse", "val_mse", "val_mae"])
        pbar = tqdm(range(cfg.train.epochs))
        for epoch in pbar:
            model.train()
            tot = 0
            for idx in torch.randperm(len(x)).split(cfg.train.batch_size):
                loss = nn.functional.mse_loss(model(x[idx]), y[idx])
                optim.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), cfg.train.grad_clip)
                optim.step()
                tot += loss.item() * len(idx)
            sched.step()
            model.eval()
            with torch.no_grad():
                out = model(xv)
                mse, mae = nn.functional.mse_loss(out, yv).item(), (out - yv).abs().mean().item()
            w.writerow([epoch, tot / len(x), mse, mae])
            f.flush()
            pbar.set_postfix(train=f"{tot / len(x):.4f}", val=f"{mse:.4f}")
    torch.save(model.state_dict(), os.path.join(exp_dir, "last.pth"))


if __name__ == "__main__":
    main()
