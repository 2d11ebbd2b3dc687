import wandb
import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

# Set up your default hyperparameters before wandb.init
# so they get properly set in the sweep
hyperparameter_defaults = dict(
    eta0=0.01,
    alpha=1e-4,
    penalty="l2",
    schedule="adaptive",
    average=False,
    epochs=15,
    seed=1,
)
wandb.init(config=hyperparameter_defaults, project="digits-sgd")
config = wandb.config

X, y = load_digits(return_X_y=True)
X = X / 16
X_train, y_train, X_test, y_test = X[:1200], y[:1200], X[1200:], y[1200:]
clf = SGDClassifier(loss="log_loss", penalty=config.penalty, alpha=config.alpha, learning_rate="constant",
                    eta0=config.eta0, average=config.average, random_state=config.seed)
rng = np.random.RandomState(config.seed)
for epoch in range(config.epochs):
    p = rng.permutation(len(X_train))
    clf.partial_fit(X_train[p], y_train[p], classes=np.arange(10))
    if config.schedule == "adaptive":
        clf.eta0 = config.eta0 / (1 + epoch)
    metrics = {"accuracy": clf.score(X_test, y_test), "train_accuracy": clf.score(X_train, y_train)}
    wandb.log(metrics)
    print(f"Epoch {epoch}: {metrics}")
