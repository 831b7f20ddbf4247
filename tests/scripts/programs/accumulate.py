# Gradient accumulation by hand: three batches for an update, the rest of the epoch as well.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpctrain

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--folder", required=True)
parser.add_argument("--strategy", default="ddp")
args = parser.parse_args()

job = hpctrain.init(parallel=args.strategy)
torch.manual_seed(0)
inputs = torch.randn(84, 6)
targets = torch.sin(inputs).sum(1, keepdim=True)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
model = job.wrap(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()

with job.run(model, optimizer, loader, checkpoints=args.folder, every=2) as run:
    for epoch in run.epochs(4):
        for step, (x, y) in run:
            loss = criterion(model(x), y) / 3
            loss.backward()
            if (run.batch + 1) % 3 == 0 or run.last:
                optimizer.step()
                optimizer.zero_grad()

weights = job.state_dict(model)
if job.rank == 0:
    torch.save(weights, args.out)
