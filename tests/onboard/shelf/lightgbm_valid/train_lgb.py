# coding: utf-8
import argparse

import lightgbm as lgb
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

p = argparse.ArgumentParser()
p.add_argument("--num_leaves", type=int, default=31)
p.add_argument("--learning_rate", type=float, default=0.05)
p.add_argument("--feature_fraction", type=float, default=0.9)
p.add_argument("--bagging_fraction", type=float, default=0.8)
p.add_argument("--bagging_freq", type=int, default=5)
p.add_argument("--min_data_in_leaf", type=int, default=20)
p.add_argument("--num_boost_round", type=int, default=200)
p.add_argument("--early_stopping_rounds", type=int, default=20)
p.add_argument("--period", type=int, default=10, help="print the metrics every N rounds")
p.add_argument("--num_threads", type=int, default=1)
p.add_argument("--seed", type=int, default=0)
p.add_argument("--model_file", default="model.txt")
a = p.parse_args()

print("Loading data...")
X, y = load_breast_cancer(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.3, random_state=0)
lgb_train = lgb.Dataset(X_train, y_train)
lgb_eval = lgb.Dataset(X_test, y_test, reference=lgb_train)

params = {
    "objective": "binary",
    "metric": ["binary_logloss", "auc"],
    "verbose": 0,
    **{k: getattr(a, k) for k in ("num_leaves", "learning_rate", "feature_fraction", "bagging_fraction",
                                  "bagging_freq", "min_data_in_leaf", "num_threads", "seed")},
}
print("Starting training...")
gbm = lgb.train(
    params, lgb_train, num_boost_round=a.num_boost_round, valid_sets=[lgb_train, lgb_eval],
    valid_names=["train", "valid"],
    callbacks=[lgb.early_stopping(a.early_stopping_rounds, first_metric_only=True), lgb.log_evaluation(a.period)],
)
print("Saving model...")
gbm.save_model(a.model_file)
