"""
Single node:  python train_ddp.py
Multi GPU:    torchrun --nproc_per_node=4 train_ddp.py
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def is_main_process():
    return not dist.is_initialized() or dist.get_rank() == 0


def setup(args):
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    args.rank = int(os.environ.get("RANK", 0))
    if args.local_rank == -1:
        args.local_rank = int(os.environ.get("LOCAL_RANK", 0))
    args.distributed = args.world_size > 1
    if args.distributed:
        dist.init_process_group(args.dist_backend, init_method=args.dist_url, rank=args.rank, world_size=args.world_size)
        dist.barrier()


def reduce_mean(t):
    if dist.is_initialized():
        dist.all_reduce(t)
        t /= dist.get_world_size()
    return t


def regression_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 6, generator=g) * 2 - 1
    y = torch.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.1 * torch.randn(n, 1, generator=g)
    return TensorDataset(x, y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int, default=-1, help="set by torch.distributed.launch")
    parser.add_argument("--dist-url", default="env://", help="url used to set up distributed training")
    parser.add_argument("--dist-backend", default="gloo", choices=["nccl", "gloo"])
    parser.add_argument("--world-size", default=1, type=int, help="number of nodes")
    parser.add_argument("--epochs", default=15, type=int)
    parser.add_argument("--batch-size", default=64, type=int, help="per process")
    parser.add_argument("--lr", default=3e-3, type=float)
    parser.add_argument("--warmup-epochs", default=2, type=int)
    parser.add_argument("--ema-decay", default=0.0, type=float, help="decay of the averaged model, 0 = off")
    parser.add_argument("--width", default=64, type=int)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--print-freq", default=10, type=int)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--sync-bn", action="store_true")
    parser.add_argument("--output-dir", default="./output")
    args = parser.parse_args()
    setup(args)
    torch.manual_seed(args.seed + args.rank)

    train, val = regression_data(1200, 1), regression_data(600, 2)
    sampler = DistributedSampler(train) if args.distributed else None
    loader = DataLoader(train, args.batch_size, shuffle=sampler is None, sampler=sampler)
    val_x, val_y = val.tensors
    model = nn.Sequential(nn.Linear(6, args.width), nn.SiLU(), nn.Linear(args.width, args.width), nn.SiLU(), nn.Linear(args.width, 1))
    if args.distributed:
        model = DDP(model)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(args.ema_decay)) if args.ema_decay else None
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr * args.world_size)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda e: min(1.0, (e + 1) / max(1, args.warmup_epochs)))

    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        model.train()
        for i, (x, y) in enumerate(loader):
            with torch.autocast("cpu", torch.bfloat16, enabled=args.amp):
                loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            if ema is not None:
                ema.update_parameters(model)
            if i % args.print_freq == 0 and is_main_process():
                print(f"Epoch: [{epoch}]  [{i:>4d}/{len(loader)}]  lr: {opt.param_groups[0]['lr']:.6f}  loss: {loss.item():.4f}")
        sched.step()
        with torch.no_grad():
            mse = reduce_mean(nn.functional.mse_loss((ema or model)(val_x), val_y)).item()
        if is_main_process():
            print(f"Test: Epoch [{epoch}] MSE {mse:.5f} RMSE {mse ** 0.5:.5f}")
    if is_main_process():
        os.makedirs(args.output_dir, exist_ok=True)
        torch.save({"model": model.state_dict(), "args": vars(args)}, os.path.join(args.output_dir, "checkpoint.pth"))
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
