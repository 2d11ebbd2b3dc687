import argparse
import os
import random
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter


class ConvNet(nn.Module):
    def __init__(self, width=16, dropout=0.25, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(2 * width * 4, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)  # 8x8 -> 4x4
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)  # 4x4 -> 2x2
        return self.fc(self.drop(x.flatten(1)))


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def get_loaders(args):
    digits = load_digits()
    x = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(digits.target, dtype=torch.long)
    # the split is always the same, independent of --seed
    x_tr, x_va, y_tr, y_va = train_test_split(x, y, test_size=0.25, random_state=0, stratify=y)
    train_loader = DataLoader(
        TensorDataset(x_tr, y_tr), batch_size=args.batch_size, shuffle=True, num_workers=args.workers
    )
    val_loader = DataLoader(TensorDataset(x_va, y_va), batch_size=256, num_workers=args.workers)
    return train_loader, val_loader


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    loss, correct, n = 0.0, 0, 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        out = model(x)
        loss += F.cross_entropy(out, y, reduction="sum").item()
        correct += (out.argmax(1) == y).sum().item()
        n += y.size(0)
    return loss / n, correct / n


def main():
    parser = argparse.ArgumentParser(description="Digits classification")
    parser.add_argument("--epochs", type=int, default=12, help="number of total epochs to run")
    parser.add_argument("--batch-size", "-b", type=int, default=64, metavar="N", help="mini-batch size (default: 64)")
    parser.add_argument("--lr", "--learning-rate", type=float, default=0.05, dest="lr", help="initial learning rate")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", "--weight-decay", type=float, default=5e-4, dest="weight_decay")
    parser.add_argument("--width", type=int, default=16, help="channels of the first conv layer")
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("-j", "--workers", type=int, default=0, help="number of data loading workers")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--logdir", type=str, default="runs", help="where tensorboard files go")
    parser.add_argument("--resume", type=str, default="", metavar="PATH", help="path to latest checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    set_seed(args.seed)
    device = torch.device(args.device)
    train_loader, val_loader = get_loaders(args)
    model = ConvNet(args.width, args.dropout).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay, nesterov=True
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    run_name = f"convnet_lr{args.lr}_bs{args.batch_size}_{time.strftime('%m%d-%H%M%S')}"
    writer = SummaryWriter(os.path.join(args.logdir, run_name))
    start_epoch, best_acc = 0, 0.0
    if args.resume:
        ckpt = torch.load(args.resume, map_location=device)
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        start_epoch, best_acc = ckpt["epoch"], ckpt["best_acc"]
        print(f"=> loaded checkpoint '{args.resume}' (epoch {start_epoch})")

    step = 0
    for epoch in range(start_epoch, args.epochs):
        model.train()
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            writer.add_scalar("train/loss", loss.item(), step)
            step += 1
        scheduler.step()

        val_loss, val_acc = validate(model, val_loader, device)
        writer.add_scalar("val/loss", val_loss, epoch)
        writer.add_scalar("val/acc", val_acc, epoch)
        writer.add_scalar("lr", scheduler.get_last_lr()[0], epoch)
        if val_acc > best_acc:
            best_acc = val_acc
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1, "best_acc": best_acc},
                os.path.join(writer.log_dir, "best.pt"),
            )
        print(f"epoch {epoch + 1:3d}/{args.epochs}  loss {loss.item():.4f}  val_loss {val_loss:.4f}  val_acc {val_acc:.4f}")

    writer.close()
    print("best val acc: %.4f" % best_acc)


if __name__ == "__main__":
    main()
