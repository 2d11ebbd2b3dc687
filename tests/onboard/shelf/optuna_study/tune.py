"""Hyperparameter search for an SVM with Optuna."""
import argparse
import logging
import sys

import optuna
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.svm import SVC

X, y = load_digits(return_X_y=True)
X, y = X[:600] / 16.0, y[:600]


def objective(trial: optuna.Trial) -> float:
    C = trial.suggest_float("C", 1e-3, 1e3, log=True)
    kernel = trial.suggest_categorical("kernel", ["rbf", "poly", "linear"])
    params = {"C": C, "kernel": kernel}
    if kernel != "linear":
        params["gamma"] = trial.suggest_float("gamma", 1e-5, 1e1, log=True)
    if kernel == "poly":
        params["degree"] = trial.suggest_int("degree", 2, 4)
    scores = cross_val_score(SVC(**params), X, y, cv=3)
    trial.set_user_attr("std", float(scores.std()))
    return scores.mean()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--n-trials", type=int, default=25)
    ap.add_argument("--timeout", type=float, default=None)
    ap.add_argument("--storage", default="sqlite:///svm.db")
    ap.add_argument("--study-name", default="svm-digits")
    ap.add_argument("--sampler-seed", type=int, default=10)
    args = ap.parse_args()

    optuna.logging.get_logger("optuna").addHandler(logging.StreamHandler(sys.stdout))
    study = optuna.create_study(
        direction="maximize", storage=args.storage, study_name=args.study_name, load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=args.sampler_seed),
    )
    study.optimize(objective, n_trials=args.n_trials, timeout=args.timeout)

    print("Number of finished trials: ", len(study.trials))
    print("Best trial:")
    trial = study.best_trial
    print("  Value: ", trial.value)
    print("  Params: ")
    for key, value in trial.params.items():
        print("    {}: {}".format(key, value))
