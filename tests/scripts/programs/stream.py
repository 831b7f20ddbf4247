# An IterableDataset with a shuffle buffer of its own random numbers.
import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import hpctrain

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--folder", required=True)
parser.add_argument("--strategy", default="ddp")
args = parser.parse_args()

job = hpctrain.init(parallel=args.strategy)
torch.manual_seed(0)


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        chance = torch.Generator().manual_seed(5)
        for _ in range(self.count):
            x = torch.randn(5, generator=chance)
            yield {"x": x, "y": (x.abs().sum() > 4).float()}


loader = DataLoader(Stream(70), batch_size=9)
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
model = job.wrap(model)
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)

with job.run(model, optimizer, loader, checkpoints=args.folder, every=2) as run:
    for epoch in run.epochs(4):
        for step, batch in run:
            loss = F.binary_cross_entropy_with_logits(model(batch["x"]).squeeze(1), batch["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

weights = job.state_dict(model)
if job.rank == 0:
    torch.save(weights, args.out)
