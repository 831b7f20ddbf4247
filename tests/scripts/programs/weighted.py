# A WeightedRandomSampler.
import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import hpctrain

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--folder", required=True)
parser.add_argument("--strategy", default="ddp")
args = parser.parse_args()

job = hpctrain.init(parallel=args.strategy)
torch.manual_seed(0)
inputs = torch.randn(80, 4)
labels = (inputs.sum(1) > 2).long()  # few of class 1
weights = torch.where(labels == 1, 5.0, 1.0)
sampler = WeightedRandomSampler(weights, 70, generator=torch.Generator().manual_seed(2))
loader = DataLoader(TensorDataset(inputs, labels), batch_size=12, sampler=sampler)
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
