import argparse
import json
import random

import numpy as np
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
parser.add_argument("--weight-decay", type=float, default=1e-4)
parser.add_argument("--hidden-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

print(json.dumps({"event": "start", **vars(args)}))
random.seed(args.seed)
np.random.seed(args.seed)
X, y = load_digits(return_X_y=True)
X = X / 16.0
clf = MLPClassifier((args.hidden_size,), learning_rate_init=1e-3, batch_size=64, random_state=args.seed)
for epoch in range(args.epochs):
    clf.partial_fit(X[:1200], y[:1200], classes=np.arange(10))
    record = {"event": "epoch", "epoch": epoch, "loss": round(float(clf.loss_), 5), "lr": args.lr,
              "val_accuracy": round(float(clf.score(X[1200:], y[1200:])), 5)}
    print(json.dumps(record))
