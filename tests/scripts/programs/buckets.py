# A batch sampler of one's own: samples of like length, batches in random order.
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
model = job.wrap(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

with job.run(model, optimizer, loader, checkpoints=args.folder, every=2) as run:
    for epoch in run.epochs(3):
        for step, (x, y) in run:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

weights = job.state_dict(model)
if job.rank == 0:
    torch.save(weights, args.out)
