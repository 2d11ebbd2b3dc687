#!/usr/bin/env python
"""MLP baselines for the two-spirals / moons problem."""
import argparse
import logging
import sys

import numpy as np
import torch
from torch import nn

logging.basicConfig(
    format="%(asctime)s - %(levelname)s - %(name)s -   %(message)s",
    datefmt="%m/%d/%Y %H:%M:%S",
    level=logging.INFO,
    stream=sys.stdout,
)
logger = logging.getLogger(__name__)

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU}


def str2bool(v):
    if isinstance(v, bool):
        return v
    if v.lower() in ("yes", "true", "t", "y", "1"):
        return True
    elif v.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError("Boolean value expected.")


def parse_args():
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    data = p.add_argument_group("data")
    data.add_argument("--dataset", choices=["spirals", "moons"], default="spirals")
    data.add_argument("--n_points", type=int, default=2000)
    data.add_argument("--noise", type=float, default=0.15, help="std of the noise added to the points")
    data.add_argument("--test-frac", type=float, default=0.3)

    model = p.add_argument_group("model")
    model.add_argument("--hidden_sizes", type=int, nargs="+", default=[64, 64], help="one int per hidden layer")
    model.add_argument("--activation", choices=sorted(ACTIVATIONS), default="relu")
    model.add_argument("--layer-norm", action="store_true", help="LayerNorm after every hidden layer")
    model.add_argument("--no_bias", action="store_true")

    optim = p.add_argument_group("optimization")
    optim.add_argument("--optimizer", choices=("sgd", "adam", "adamw"), default="adam")
    optim.add_argument("--learning_rate", type=float, default=3e-3)
    optim.add_argument("--weight-decay", type=float, default=0.0)
    optim.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.999), metavar=("B1", "B2"))
    optim.add_argument("--train-batch-size", type=int, default=128)
    optim.add_argument("--num_epochs", type=int, default=40)
    optim.add_argument("--clip_grad", type=float, default=None, help="max grad norm, off if not given")
    optim.add_argument("--milestones", type=int, nargs="*", default=[25, 35])
    optim.add_argument("--cosine", action=argparse.BooleanOptionalAction, default=False)

    misc = p.add_argument_group("misc")
    misc.add_argument("--seed", type=int, default=1234)
    misc.add_argument("--save-model", type=str2bool, nargs="?", const=True, default=False)
    misc.add_argument("--cpu", action="store_true", help="do not use the GPU even if there is one")
    misc.add_argument("--eval_every", type=int, default=5)
    misc.add_argument("-v", "--verbose", action="count", default=0)
    return p.parse_args()


def make_data(args):
    rng = np.random.RandomState(0)
    n = args.n_points // 2
    if args.dataset == "spirals":
        t = np.sqrt(rng.rand(n)) * 2.5 * np.pi
        a = np.stack([t * np.cos(t), t * np.sin(t)], 1) / 4
        X = np.concatenate([a, -a])
    else:
        t = rng.rand(n) * np.pi
        X = np.concatenate([np.stack([np.cos(t), np.sin(t)], 1), np.stack([1 - np.cos(t), 0.5 - np.sin(t)], 1)])
    y = np.repeat([0, 1], n)
    X = X + args.noise * rng.randn(*X.shape)
    perm = rng.permutation(len(X))
    X, y = X[perm].astype("float32"), y[perm]
    k = int(len(X) * (1 - args.test_frac))
    to = torch.from_numpy
    return to(X[:k]), to(y[:k]), to(X[k:]), to(y[k:])


def build_mlp(args):
    layers, d = [], 2
    for h in args.hidden_sizes:
        layers.append(nn.Linear(d, h, bias=not args.no_bias))
        if args.layer_norm:
            layers.append(nn.LayerNorm(h))
        layers.append(ACTIVATIONS[args.activation]())
        d = h
    layers.append(nn.Linear(d, 2))
    return nn.Sequential(*layers)


def build_optimizer(args, params):
    if args.optimizer == "sgd":
        return torch.optim.SGD(params, lr=args.learning_rate, momentum=0.9, weight_decay=args.weight_decay)
    cls = torch.optim.Adam if args.optimizer == "adam" else torch.optim.AdamW
    return cls(params, lr=args.learning_rate, betas=tuple(args.betas), weight_decay=args.weight_decay)


def main():
    args = parse_args()
    if args.verbose:
        logger.setLevel(logging.DEBUG)
    logger.info("Training/evaluation parameters %s", args)
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"

    Xtr, ytr, Xte, yte = (t.to(device) for t in make_data(args))
    net = build_mlp(args).to(device)
    opt = build_optimizer(args, net.parameters())
    if args.cosine:
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.num_epochs)
    else:
        sched = torch.optim.lr_scheduler.MultiStepLR(opt, args.milestones, gamma=0.1)
    criterion = nn.CrossEntropyLoss()

    best = 1.0
    for epoch in range(1, args.num_epochs + 1):
        net.train()
        total = 0.0
        for idx in torch.randperm(len(Xtr)).split(args.train_batch_size):
            loss = criterion(net(Xtr[idx]), ytr[idx])
            opt.zero_grad()
            loss.backward()
            if args.clip_grad is not None:
                nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad)
            opt.step()
            total += loss.item() * len(idx)
        sched.step()
        if epoch % args.eval_every == 0 or epoch == args.num_epochs:
            net.eval()
            with torch.no_grad():
                err = (net(Xte).argmax(1) != yte).float().mean().item()
            best = min(best, err)
            logger.info("[epoch %d] train_loss = %.4f, test_err = %.4f (best %.4f)", epoch, total / len(Xtr), err, best)
    if args.save_model:
        torch.save(net.state_dict(), "mlp_%s.pth" % args.dataset)
    logger.info("***** Final test error: %.2f%% *****", 100 * err)


if __name__ == "__main__":
    main()
