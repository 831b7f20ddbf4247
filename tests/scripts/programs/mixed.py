# Tensors of all sizes and kinds, from 4.5 MB to none; checkpoints in the background.
import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hpctrain

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--folder", required=True)
parser.add_argument("--strategy", default="ddp")
args = parser.parse_args()

job = hpctrain.init(parallel=args.strategy)
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4409, 256)  # 4.5 MB
        self.up = nn.Linear(256, 1031)  # 1.1 MB
        self.norms = nn.ModuleList(nn.LayerNorm(1031) for _ in range(3))
        self.small = nn.ModuleList(nn.Linear(7 + i, 8 + i) for i in range(6))
        self.inner = nn.Linear(1031, 300, bias=False)  # 1.2 MB
        self.pick = nn.Linear(300, 7)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(13, 5)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("thirds", torch.arange(5, dtype=torch.bfloat16) / 3)
        self.register_buffer("none", torch.zeros(0, 3))

    def forward(self, words):
        x = torch.tanh(self.up(self.embed(words).mean(1)))
        for norm in self.norms:
            x = norm(x) + 0.1 * x
        x = torch.tanh(self.pick(torch.tanh(self.inner(x)))) * self.scale
        for linear in self.small:
            x = F.silu(linear(x))
        return self.head(x)


words = torch.randint(4409, (90, 6), generator=torch.Generator().manual_seed(5))
loader = DataLoader(
    TensorDataset(words, words.sum(1) % 5), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(9)
)
model = job.wrap(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, eps=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)

with job.run(model, optimizer, loader, checkpoints=args.folder, every=3, background=True) as run:
    for epoch in run.epochs(2):
        for step, (words, labels) in run:
            loss = F.cross_entropy(model(words), labels)
            loss.backward()
            run.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()

weights = job.state_dict(model)
if job.rank == 0:
    torch.save(weights, args.out)
