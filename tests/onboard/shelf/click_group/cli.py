import numpy as np

def make(seed, n=400, d=8):
    rng = np.random.default_rng(0)
    w = rng.normal(size=d)
    x = rng.normal(size=(n, d)); y = (x @ w + rng.normal(size=n) * .8 > 0).astype(float)
    return x[:300], y[:300], x[300:], y[300:], np.random.default_rng(seed)

def sig(z): return 1 / (1 + np.exp(-z))

def ll(w, x, y):
    p = np.clip(sig(x @ w), 1e-7, 1 - 1e-7)
    return float(-(y * np.log(p) + (1 - y) * np.log(1 - p)).mean())

import click, json, pathlib

@click.group()
@click.option("--seed", default=1, type=int)
@click.option("--verbose/--quiet", default=True)
@click.pass_context
def cli(ctx, seed, verbose):
    ctx.obj = dict(seed=seed, verbose=verbose)

@cli.command()
@click.option("-l", "--learning-rate", default=0.05, show_default=True, type=click.FloatRange(1e-4, 0.5))
@click.option("--n-iter", default=200)
@click.option("--out", default="result.json")
@click.pass_obj
def fit(obj, learning_rate, n_iter, out):
    """Fit the model."""
    x, y, xv, yv, rng = make(obj["seed"])
    w = rng.normal(size=8)
    for i in range(n_iter):
        w -= learning_rate * x.T @ (sig(x @ w) - y) / 300
    pathlib.Path(out).write_text(json.dumps({"dev": {"nll": ll(w, xv, yv), "acc": float(((xv @ w > 0) == yv).mean())}, "n": 100}))

@cli.command()
@click.argument("path")
def evaluate(path):
    print(path)

if __name__ == "__main__":
    cli()
