# even smaller, for debugging on a macbook
out_dir = 'out-tiny'
eval_interval = 20
max_iters = 40
n_embd = 16
dropout = 0.0
