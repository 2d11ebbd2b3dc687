import numpy as np

N_USERS, N_ITEMS = 60, 50


def make_ratings(n=2400):
    rng = np.random.default_rng(11)
    u, v = rng.normal(size=(N_USERS, 4)), rng.normal(size=(N_ITEMS, 4))
    bu, bi = 0.5 * rng.normal(size=N_USERS), 0.5 * rng.normal(size=N_ITEMS)
    pairs = rng.permutation(N_USERS * N_ITEMS)[:n]
    i, j = pairs // N_ITEMS, pairs % N_ITEMS
    r = 3 + bu[i] + bi[j] + 0.5 * (u[i] * v[j]).sum(1) + 0.3 * rng.normal(size=n)
    return np.stack([i, j, np.clip(r, 1, 5)], 1)


class MatrixFactorization:
    def __init__(self, k, use_bias, init, std, rng):
        draw = (lambda *s: rng.normal(0, std, s)) if init == "normal" else (lambda *s: rng.uniform(-std, std, s))
        self.p, self.q = draw(N_USERS, k), draw(N_ITEMS, k)
        self.bu, self.bi, self.mu = np.zeros(N_USERS), np.zeros(N_ITEMS), 3.0
        self.use_bias, self.rng = use_bias, rng

    def predict(self, i, j):
        out = self.mu + (self.p[i] * self.q[j]).sum(-1)
        return out + self.bu[i] + self.bi[j] if self.use_bias else out

    def fit_epoch(self, ratings, lr, reg):
        se = 0.0
        for i, j, r in ratings[self.rng.permutation(len(ratings))]:
            i, j = int(i), int(j)
            e = r - self.predict(i, j)
            se += e * e
            pi = self.p[i].copy()
            self.p[i] += lr * (e * self.q[j] - reg * pi)
            self.q[j] += lr * (e * pi - reg * self.q[j])
            self.bu[i] += lr * (e - reg * self.bu[i])
            self.bi[j] += lr * (e - reg * self.bi[j])
        return float(np.sqrt(se / len(ratings)))

    def _err(self, ratings):
        return ratings[:, 2] - self.predict(ratings[:, 0].astype(int), ratings[:, 1].astype(int))

    def rmse(self, ratings):
        return float(np.sqrt(np.mean(self._err(ratings) ** 2)))

    def mae(self, ratings):
        return float(np.mean(np.abs(self._err(ratings))))

    def save(self, path):
        np.savez(path, p=self.p, q=self.q, bu=self.bu, bi=self.bi)
