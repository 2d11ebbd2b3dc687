# Run with:  wandb sweep sweep.yaml && wandb agent <id>
import random

import numpy as np
import wandb
from sklearn.datasets import fetch_california_housing, load_diabetes  # noqa: F401  (california was too slow on my laptop)
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.metrics import mean_squared_error
from sklearn.model_selection import train_test_split


def train(config=None):
    # If called by wandb.agent, this config will be set by Sweep Controller
    with wandb.init(config=config):
        config = wandb.config
        random.seed(config.seed)
        np.random.seed(config.seed)

        X, y = load_diabetes(return_X_y=True)
        X_train, X_val, y_train, y_val = train_test_split(X, y, test_size=0.3, random_state=0)
        model = GradientBoostingRegressor(
            learning_rate=config.learning_rate,
            n_estimators=config.n_estimators,
            max_depth=config.max_depth,
            subsample=config.subsample,
            loss=config["loss"],
            random_state=config.seed,
        )
        model.fit(X_train, y_train)
        for i, pred in enumerate(model.staged_predict(X_val)):
            wandb.log({"val_rmse": mean_squared_error(y_val, pred) ** 0.5, "n_trees": i + 1})


train()
