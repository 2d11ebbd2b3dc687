import os
import random
from typing import List

import fire
import torch
import torch.nn as nn

# a toy "instruction" corpus from a little grammar, so that nothing has to be downloaded
_rng = random.Random(0)
_THINGS = {"cat": "meows", "dog": "barks", "bird": "sings", "cow": "moos", "frog": "croaks", "bee": "buzzes"}
_PLACES = {"cat": "sofa", "dog": "garden", "bird": "tree", "cow": "field", "frog": "pond", "bee": "hive"}
CORPUS = []
for _ in range(60):
    a = _rng.choice(sorted(_THINGS))
    CORPUS += f"the {_rng.choice(['big', 'small', 'old'])} {a} {_THINGS[a]} in the {_PLACES[a]} .".split()


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r: int, alpha: int, dropout: float):
        super().__init__()
        self.base = base
        self.base.weight.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(r, base.in_features) * 0.02)
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale, self.drop = alpha / r, nn.Dropout(dropout)

    def forward(self, x):
        return self.base(x) + self.scale * (self.drop(x) @ self.A.T @ self.B.T)


def train(
    # model/data params
    base_model: str = "random-64",
    data_path: str = "builtin",
    output_dir: str = "./lora-out",
    # training hyperparams
    batch_size: int = 16,
    micro_batch_size: int = 4,
    num_epochs: int = 10,
    learning_rate: float = 3e-3,
    cutoff_len: int = 4,
    val_set_size: int = 80,
    # lora hyperparams
    lora_r: int = 8,
    lora_alpha: int = 16,
    lora_dropout: float = 0.05,
    lora_target_modules: List[str] = ["up", "down"],
    # llm hyperparams
    train_on_inputs: bool = True,
    seed: int = 42,
):
    print(
        f"Training LoRA model with params:\n"
        f"base_model: {base_model}\n"
        f"output_dir: {output_dir}\n"
        f"batch_size: {batch_size}\n"
        f"micro_batch_size: {micro_batch_size}\n"
        f"num_epochs: {num_epochs}\n"
        f"learning_rate: {learning_rate}\n"
        f"lora_r: {lora_r}\n"
        f"lora_alpha: {lora_alpha}\n"
        f"lora_target_modules: {lora_target_modules}\n"
    )
    gradient_accumulation_steps = batch_size // micro_batch_size
    dim = int(base_model.split("-")[1])
    vocab = sorted(set(CORPUS))
    ids = torch.tensor([vocab.index(w) for w in CORPUS])
    x = ids.unfold(0, cutoff_len + 1, 1)
    torch.manual_seed(0)  # the "pretrained" weights
    net = nn.ModuleDict({
        "emb": nn.Embedding(len(vocab), dim),
        "up": nn.Linear(cutoff_len * dim, 4 * dim),
        "down": nn.Linear(4 * dim, dim),
        "head": nn.Linear(dim, len(vocab)),
    })
    torch.manual_seed(seed)
    for name in lora_target_modules:
        net[name] = LoRALinear(net[name], lora_r, lora_alpha, lora_dropout)

    def loss_fn(b):
        h = net["emb"](b[:, :-1]).flatten(1)
        return nn.functional.cross_entropy(net["head"](net["down"](torch.relu(net["up"](h)))), b[:, -1])

    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(42))
    val, trn = x[perm[:val_set_size]], x[perm[val_set_size:]]
    params = [p for p in net.parameters() if p.requires_grad]
    print(f"trainable params: {sum(p.numel() for p in params)} || all params: {sum(p.numel() for p in net.parameters())}")
    opt = torch.optim.AdamW(params, lr=learning_rate)
    for epoch in range(num_epochs):
        net.train()
        tot = 0.0
        chunks = trn[torch.randperm(len(trn))].split(micro_batch_size)
        for i, b in enumerate(chunks):
            loss = loss_fn(b) / gradient_accumulation_steps
            loss.backward()
            tot += loss.item() * gradient_accumulation_steps
            if (i + 1) % gradient_accumulation_steps == 0 or i + 1 == len(chunks):
                opt.step()
                opt.zero_grad()
        net.eval()
        with torch.no_grad():
            eval_loss = loss_fn(val).item()
        print({"loss": round(tot / len(chunks), 4), "eval_loss": round(eval_loss, 4), "epoch": epoch + 1})
    os.makedirs(output_dir, exist_ok=True)
    torch.save({k: v for k, v in net.state_dict().items() if k.endswith((".A", ".B"))}, f"{output_dir}/adapter_model.bin")


if __name__ == "__main__":
    fire.Fire(train)
