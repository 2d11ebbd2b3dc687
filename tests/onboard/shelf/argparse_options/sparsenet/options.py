import argparse


def add_dataset_args(parser):
    group = parser.add_argument_group("Dataset")
    group.add_argument("--dim", type=int, default=40, help="number of input features")
    group.add_argument("--num-train", type=int, default=400)
    group.add_argument("--num-valid", type=int, default=400)
    group.add_argument("--data-seed", type=int, default=7, help="seed of the generated dataset")
    return group


def add_model_args(parser):
    group = parser.add_argument_group("Model")
    group.add_argument("--hidden-dim", type=int, default=32)
    group.add_argument("--sparsity-weight", type=float, default=1e-3, help="L1 penalty on the first layer")
    group.add_argument("--residual", action="store_true", help="add a linear skip connection")
    return group


def add_optimization_args(parser):
    group = parser.add_argument_group("Optimization")
    group.add_argument("--max-epoch", "--me", default=60, type=int, metavar="N")
    group.add_argument("--lr", default=0.01, type=float, metavar="LR")
    group.add_argument("--lr-decay", default=0.98, type=float)
    group.add_argument("--batch-size", "--max-sentences", type=int, default=32, metavar="N")
    return group


def add_checkpoint_args(parser):
    group = parser.add_argument_group("Checkpointing")
    group.add_argument("--save-dir", default="checkpoints", metavar="DIR")
    group.add_argument("--no-save", action="store_true", help="don't save models or checkpoints")
    group.add_argument("--save-interval", type=int, default=20, metavar="N")
    return group


def get_training_parser():
    parser = argparse.ArgumentParser("sparsenet training", allow_abbrev=False)
    parser.add_argument("--seed", default=1, type=int, metavar="N", help="pseudo random number generator seed")
    parser.add_argument("--log-interval", type=int, default=10, metavar="N")
    add_dataset_args(parser)
    add_model_args(parser)
    add_optimization_args(parser)
    add_checkpoint_args(parser)
    return parser
