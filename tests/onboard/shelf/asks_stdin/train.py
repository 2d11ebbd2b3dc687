import os

import numpy as np
from sklearn.datasets import load_wine
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler


def ask(question, default, cast):
    answer = input(f"{question} [{default}]: ").strip()
    return cast(answer) if answer else default


print("Welcome to the kNN trainer!")
k = ask("How many neighbours", 5, int)
metric = ask("Metric (euclidean/manhattan/chebyshev)", "euclidean", str)
weights = ask("Weights (uniform/distance)", "uniform", str)
if os.path.exists("results.txt"):
    if input("results.txt exists. Overwrite? (y/n) ").lower() != "y":
        raise SystemExit("aborted")

X, y = load_wine(return_X_y=True)
X = StandardScaler().fit_transform(X)
rng = np.random.RandomState(0)
perm = rng.permutation(len(X))
X, y = X[perm], y[perm]
knn = KNeighborsClassifier(k, metric=metric, weights=weights).fit(X[:100], y[:100])
score = knn.score(X[100:], y[100:])
print(f"Accuracy on test set: {score:.4f}")
with open("results.txt", "w") as f:
    f.write(f"k={k} metric={metric} weights={weights} acc={score:.4f}\n")
