from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import numpy as np
import typer
from rich import print
from rich.progress import track
from rich.table import Table

from tinyrec.mf import MatrixFactorization, make_ratings

app = typer.Typer(help="Train and inspect tiny recommenders.", no_args_is_help=True)


class Init(str, Enum):
    normal = "normal"
    uniform = "uniform"


@app.command()
def train(
    n_factors: Annotated[int, typer.Option(min=1, help="Size of the embeddings")] = 8,
    lr: Annotated[float, typer.Option("--lr", "-l", help="SGD step size")] = 0.02,
    reg: Annotated[float, typer.Option(help="L2 regularization")] = 0.02,
    epochs: int = 20,
    init: Init = Init.normal,
    init_std: float = 0.1,
    use_bias: Annotated[bool, typer.Option("--bias/--no-bias")] = True,
    seed: Annotated[int, typer.Option(help="Random seed")] = 0,
    data_path: Annotated[Optional[Path], typer.Option(exists=True, help="CSV of user,item,rating")] = None,
    output: Annotated[Path, typer.Option("--output", "-o")] = Path("model.npz"),
    verbose: bool = False,
):
    """Fit a model with SGD."""
    rng = np.random.default_rng(seed)
    ratings = np.loadtxt(data_path, delimiter=",") if data_path else make_ratings()
    split = int(0.8 * len(ratings))
    train_set, valid_set = ratings[:split], ratings[split:]
    model = MatrixFactorization(n_factors, use_bias, init.value, init_std, rng)
    history = []
    for epoch in track(range(epochs), description="Training", disable=not verbose):
        rmse = model.fit_epoch(train_set, lr, reg)
        history.append((epoch + 1, rmse, model.rmse(valid_set)))
    table = Table("epoch", "train RMSE", "valid RMSE", title="History")
    for e, tr, va in history[:: max(1, len(history) // 5)] + history[-1:]:
        table.add_row(str(e), f"{tr:.4f}", f"{va:.4f}")
    print(table)
    model.save(output)
    print(f"[bold]Validation RMSE:[/bold] {history[-1][2]:.4f}  MAE: {model.mae(valid_set):.4f}")
    print(f"Saved to {output}")


@app.command()
def info(model: Path = Path("model.npz")):
    """Show the shapes of a saved model."""
    for name, value in np.load(model).items():
        print(name, value.shape)
