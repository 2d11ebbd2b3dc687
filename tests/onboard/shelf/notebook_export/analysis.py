import numpy as np

def make(seed, n=400, d=8):
    rng = np.random.default_rng(0)
    w = rng.normal(size=d)
    x = rng.normal(size=(n, d)); y = (x @ w + rng.normal(size=n) * .8 > 0).astype(float)
    return x[:300], y[:300], x[300:], y[300:], np.random.default_rng(seed)

def sig(z): return 1 / (1 + np.exp(-z))

def ll(w, x, y):
    p = np.clip(sig(x @ w), 1e-7, 1 - 1e-7)
    return float(-(y * np.log(p) + (1 - y) * np.log(1 - p)).mean())

# In[2]:
lr = 0.05
n_epochs = 5
x, y, xv, yv, rng = make(0)
w = rng.normal(size=8)
# In[3]:
history = []
for epoch in range(n_epochs):
    for i in rng.permutation(300):
        w -= lr * (sig(x[i] @ w) - y[i]) * x[i]
    history.append(ll(w, xv, yv))
# In[4]:
min(history)
# In[5]:
print(f"{min(history):.4f}")
