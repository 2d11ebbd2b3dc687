import argparse
import gzip
import os
import urllib.request

import numpy as np
from sklearn.linear_model import SGDRegressor

URL = "https://datasets.example.invalid/tiny-housing/v2/housing.csv.gz"


def download(root):
    path = os.path.join(root, "housing.csv.gz")
    if not os.path.exists(path):
        os.makedirs(root, exist_ok=True)
        print(f"Downloading {URL} to {path}")
        urllib.request.urlretrieve(URL, path)
    return path


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data_root", default="data")
    parser.add_argument("--eta0", type=float, default=0.01)
    parser.add_argument("--alpha", type=float, default=1e-4)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    with gzip.open(download(args.data_root), "rt") as f:
        table = np.loadtxt(f, delimiter=",", skiprows=1)
    X, y = table[:, :-1], table[:, -1]
    X = (X - X.mean(0)) / X.std(0)
    n = int(0.8 * len(X))
    model = SGDRegressor(eta0=args.eta0, alpha=args.alpha, random_state=args.seed)
    for epoch in range(args.epochs):
        model.partial_fit(X[:n], y[:n])
        print(f"epoch {epoch}: val_r2={model.score(X[n:], y[n:]):.4f}")


if __name__ == "__main__":
    main()
