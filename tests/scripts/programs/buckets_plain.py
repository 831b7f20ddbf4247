# A batch sampler of one's own: samples of like length, batches in random order.
import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)


class Buckets:
    def __init__(self, lengths, size):
        self.lengths, self.size = lengths, size

    def __iter__(self):
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i])
        batches = [order[i : i + self.size] for i in range(0, len(order), self.size)]
        for i in torch.randperm(len(batches)):
            yield batches[i]

    def __len__(self):
        return -(-len(self.lengths) // self.size)


inputs = torch.randn(80, 4)
labels = (inputs.sum(1) > 0).long()
loader = DataLoader(TensorDataset(inputs, labels), batch_sampler=Buckets(inputs[:, 0].tolist(), 11))
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for epoch in range(3):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

torch.save(model.state_dict(), args.out)
