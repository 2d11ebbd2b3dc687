import logging
import os

import hydra
import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import StandardScaler

log = logging.getLogger(__name__)


class Linear:
    def __init__(self, dim, rng, **_):
        self.params = [np.zeros((dim, 1)), np.zeros(1)]

    def forward(self, x):
        return x @ self.params[0] + self.params[1]

    def backward(self, x, d):
        return [x.T @ d, d.sum(0)]


class MLP:
    def __init__(self, dim, rng, hidden=32, init_scale=1.0, **_):
        s = init_scale
        self.params = [rng.normal(0, s / dim**0.5, (dim, hidden)), np.zeros(hidden),
                       rng.normal(0, s / hidden**0.5, (hidden, 1)), np.zeros(1)]

    def forward(self, x):
        self.h = np.maximum(x @ self.params[0] + self.params[1], 0)
        return self.h @ self.params[2] + self.params[3]

    def backward(self, x, d):
        dh = (d @ self.params[2].T) * (self.h > 0)
        return [x.T @ dh, dh.sum(0), self.h.T @ d, d.sum(0)]


MODELS = {"linear": Linear, "mlp": MLP}


def make_step(cfg, params):
    m = [np.zeros_like(p) for p in params]
    v = [np.zeros_like(p) for p in params]

    def step(grads, t):
        for i, (p, g) in enumerate(zip(params, grads)):
            g = g + cfg.weight_decay * p
            if cfg.name == "sgd":
                m[i] = cfg.momentum * m[i] + g
                p -= cfg.lr * m[i]
            else:
                b1, b2 = cfg.betas
                m[i], v[i] = b1 * m[i] + (1 - b1) * g, b2 * v[i] + (1 - b2) * g * g
                p -= cfg.lr * (m[i] / (1 - b1**t)) / (np.sqrt(v[i] / (1 - b2**t)) + 1e-8)

    return step


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    log.info("Working directory: %s", os.getcwd())
    log.info("\n%s", OmegaConf.to_yaml(cfg))
    rng = np.random.default_rng(cfg.seed)
    X, y = load_diabetes(return_X_y=True)
    X, y = StandardScaler().fit_transform(X), ((y - y.mean()) / y.std())[:, None]
    order = np.random.default_rng(0).permutation(len(X))
    tr, va = order[: cfg.data.n_train], order[cfg.data.n_train :]
    model = MODELS[cfg.model.name](X.shape[1], rng, **{k: v for k, v in cfg.model.items() if k != "name"})
    step, t = make_step(cfg.optim, model.params), 0
    val = float("inf")
    for epoch in range(1, cfg.trainer.max_epochs + 1):
        idx = rng.permutation(tr)
        for i in range(0, len(idx), cfg.data.batch_size):
            b = idx[i : i + cfg.data.batch_size]
            t += 1
            d = 2 * (model.forward(X[b]) - y[b]) / len(b)
            step(model.backward(X[b], d), t)
        val = float(np.mean((model.forward(X[va]) - y[va]) ** 2))
        if epoch % cfg.trainer.log_every == 0:
            log.info("epoch=%d train/mse=%.4f val/mse=%.4f", epoch, np.mean((model.forward(X[tr]) - y[tr]) ** 2), val)
    out = HydraConfig.get().runtime.output_dir
    np.savez(os.path.join(out, "weights.npz"), *model.params)
    log.info("Finished. val/mse: %.5f (outputs in %s)", val, out)
    return val


if __name__ == "__main__":
    main()
