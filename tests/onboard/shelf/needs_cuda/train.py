import argparse
import sys

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--gpu", type=int, default=0, help="GPU id to use")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--hidden", type=int, default=128)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

if not torch.cuda.is_available():
    print("ERROR: CUDA is not available. This training script requires a GPU (tested on A100 80GB).", file=sys.stderr)
    sys.exit(1)

torch.manual_seed(args.seed)
device = torch.device(f"cuda:{args.gpu}")
net = nn.Sequential(nn.Linear(16, args.hidden), nn.ReLU(), nn.Linear(args.hidden, 1)).to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
teacher = nn.Linear(16, 1).to(device)
for step in range(args.steps):
    x = torch.randn(256, 16, device=device)
    loss = ((net(x) - teacher(x).sin().detach()) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.5f}")
