"""Gaussian mixture by EM with restarts; all settings come from settings.toml."""
import pathlib
import sys
import tomllib

import numpy as np
from sklearn.datasets import load_iris
from sklearn.mixture import GaussianMixture

path = pathlib.Path(sys.argv[1] if len(sys.argv) == 2 else pathlib.Path(__file__).with_name("settings.toml"))
settings = tomllib.loads(path.read_text())
em, run = settings["em"], settings["run"]

X = load_iris().data
X = (X - X.mean(0)) / X.std(0)
order = np.random.default_rng(0).permutation(len(X))
train, held_out = X[order[:100]], X[order[100:]]

print(f"[{settings['title']}] components={em['components']} covariance={em['covariance']}")
best = None
for restart in range(run["restarts"]):
    gm = GaussianMixture(
        em["components"],
        covariance_type=em["covariance"],
        reg_covar=em["reg_covar"],
        max_iter=em["max_iter"],
        tol=em["tol"],
        init_params=em["init"],
        random_state=run["seed"] + restart,
    ).fit(train)
    ll = gm.score(held_out)
    print(f"restart {restart}: train_ll={gm.lower_bound_:.4f} heldout_ll={ll:.4f} iterations={gm.n_iter_}")
    # select by the training bound, report held-out
    if best is None or gm.lower_bound_ > best[0]:
        best = (gm.lower_bound_, ll, gm)

print(f"held-out log-likelihood: {best[1]:.5f}")
print(f"bic: {best[2].bic(train):.2f}")
pathlib.Path(run["result_file"]).write_text(f"heldout_ll = {best[1]}\nbic = {best[2].bic(train)}\n")
