# An IterableDataset with a shuffle buffer of its own random numbers.
import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = parser.parse_args()

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
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)

for epoch in range(4):
    for batch in loader:
        loss = F.binary_cross_entropy_with_logits(model(batch["x"]).squeeze(1), batch["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

torch.save(model.state_dict(), args.out)
