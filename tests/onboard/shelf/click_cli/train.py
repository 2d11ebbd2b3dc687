import json
from pathlib import Path

import click
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler


@click.command(context_settings={"show_default": True})
@click.option("--hidden", "-h", "hidden", type=int, multiple=True, default=(32,), help="Hidden layer size, repeatable.")
@click.option("--alpha", type=click.FloatRange(0, 10), default=1e-4, help="L2 penalty.")
@click.option("--lr", "learning_rate", type=float, default=1e-3, help="Initial learning rate.")
@click.option("--solver", type=click.Choice(["adam", "sgd"]), default="adam")
@click.option("--max-iter", type=click.IntRange(min=1), default=60)
@click.option("--early-stopping/--no-early-stopping", default=False)
@click.option("--folds", type=int, default=5, help="Number of CV folds.")
@click.option("--random-state", type=int, default=0, envvar="RANDOM_STATE")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default="metrics.json")
@click.option("--quiet", is_flag=True)
def main(hidden, alpha, learning_rate, solver, max_iter, early_stopping, folds, random_state, out, quiet):
    """Cross-validated MLP on the breast cancer dataset."""
    X, y = load_breast_cancer(return_X_y=True)
    cv = StratifiedKFold(folds, shuffle=True, random_state=2024)
    aucs, accs = [], []
    for i, (tr, te) in enumerate(cv.split(X, y)):
        clf = make_pipeline(
            StandardScaler(),
            MLPClassifier(
                hidden, alpha=alpha, learning_rate_init=learning_rate, solver=solver,
                max_iter=max_iter, early_stopping=early_stopping, random_state=random_state + i,
            ),
        )
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ConvergenceWarning
            clf.fit(X[tr], y[tr])
        prob = clf.predict_proba(X[te])[:, 1]
        aucs.append(roc_auc_score(y[te], prob))
        accs.append(((prob > 0.5) == y[te]).mean())
        if not quiet:
            click.echo(f"fold {i}: auc={aucs[-1]:.5f} acc={accs[-1]:.4f}")
    click.secho(f"mean auc: {np.mean(aucs):.5f} +/- {np.std(aucs):.5f}", fg="green", bold=True)
    out.write_text(json.dumps({"auc": np.mean(aucs), "auc_std": np.std(aucs), "accuracy": np.mean(accs)}, indent=2))


if __name__ == "__main__":
    main()
