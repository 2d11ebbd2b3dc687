import argparse

import numpy as np
import flashy_kernels.triton as fk  # pip install git+ssh://git@git.internal/ml/flashy-kernels
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--C", type=float, default=1.0)
    parser.add_argument("--tol", type=float, default=1e-4)
    parser.add_argument("--max_iter", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    X, y = load_digits(return_X_y=True)
    X = fk.fused_normalize(X.astype(np.float32))
    clf = LogisticRegression(C=args.C, tol=args.tol, max_iter=args.max_iter, random_state=args.seed)
    clf.fit(X[:1200], y[:1200])
    print("accuracy:", clf.score(X[1200:], y[1200:]))


if __name__ == "__main__":
    main()
