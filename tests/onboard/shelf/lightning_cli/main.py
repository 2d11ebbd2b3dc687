import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 64, num_workers: int = 0, val_fraction: float = 0.2):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        d = load_digits()
        ds = TensorDataset(torch.tensor(d.data / 16, dtype=torch.float32), torch.tensor(d.target))
        n_val = int(len(ds) * self.hparams.val_fraction)
        self.train, self.val = random_split(ds, [len(ds) - n_val, n_val], torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, num_workers=self.hparams.num_workers)

    def val_dataloader(self):
        return DataLoader(self.val, 256, num_workers=self.hparams.num_workers)


class LitClassifier(L.LightningModule):
    """MLP classifier.

    Args:
        hidden_dim: width of the hidden layer
        lr: learning rate of Adam
        label_smoothing: smoothing of the targets in the training loss
    """

    def __init__(self, hidden_dim: int = 64, lr: float = 1e-3, dropout: float = 0.1, label_smoothing: float = 0.0):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(64, hidden_dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden_dim, 10)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y, label_smoothing=self.hparams.label_smoothing)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        self.log("val_loss", nn.functional.cross_entropy(out, y), prog_bar=True)
        self.log("val_acc", (out.argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def cli_main():
    LightningCLI(LitClassifier, DigitsDataModule, seed_everything_default=1234)


if __name__ == "__main__":
    cli_main()
