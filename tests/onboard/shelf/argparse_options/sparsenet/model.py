import numpy as np


class SparseRegressor:
    """One hidden layer, L1 on the first weights, plain numpy."""

    def __init__(self, dim, hidden, residual=False, rng=None):
        rng = rng or np.random.default_rng()
        self.p = {
            "w1": rng.normal(0, 1 / np.sqrt(dim), (dim, hidden)),
            "b1": np.zeros(hidden),
            "w2": rng.normal(0, 1 / np.sqrt(hidden), hidden),
            "b2": np.zeros(1),
        }
        self.residual = residual
        if residual:
            self.p["skip"] = np.zeros(dim)

    def forward(self, x):
        h = np.tanh(x @ self.p["w1"] + self.p["b1"])
        out = h @ self.p["w2"] + self.p["b2"]
        if self.residual:
            out = out + x @ self.p["skip"]
        return out, h

    def grads(self, x, y, l1):
        out, h = self.forward(x)
        d = 2 * (out - y) / len(x)
        dh = np.outer(d, self.p["w2"]) * (1 - h**2)
        g = {"w1": x.T @ dh + l1 * np.sign(self.p["w1"]), "b1": dh.sum(0), "w2": h.T @ d, "b2": np.array([d.sum()])}
        if self.residual:
            g["skip"] = x.T @ d
        return g, float(np.mean((out - y) ** 2))
