import argparse

import torch
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument('--lr', type=float, default=0.01)
parser.add_argument('--weight_decay', type=float, default=0)
parser.add_argument('--hidden', type=int, default=16)
parser.add_argument('--epochs', type=int, default=8)
parser.add_argument('--batch_size', type=int, default=100)
args = parser.parse_args()

data = load_digits()
X = torch.tensor(data.data / 16).float()
y = torch.tensor(data.target)
perm = torch.randperm(len(X))
X, y = X[perm], y[perm]
train_X, train_y, test_X, test_y = X[:1000], y[:1000], X[1000:], y[1000:]

model = torch.nn.Sequential(
    torch.nn.Linear(64, args.hidden),
    torch.nn.ReLU(),
    torch.nn.Linear(args.hidden, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
loss_fn = torch.nn.CrossEntropyLoss()

for epoch in range(args.epochs):
    for i in range(0, len(train_X), args.batch_size):
        loss = loss_fn(model(train_X[i:i + args.batch_size]), train_y[i:i + args.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        acc = (model(test_X).argmax(1) == test_y).float().mean()
    print('Epoch: %d, Loss: %.3f, Test Acc: %.2f%%' % (epoch, loss.item(), acc * 100))
