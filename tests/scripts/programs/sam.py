# Sharpness-aware minimisation by hand: two passes per update, the second at shifted weights.
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
inputs = torch.randn(70, 6)
labels = (inputs.sum(1) > 1).long()
loader = DataLoader(TensorDataset(inputs, labels), batch_size=12, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
model = job.wrap(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with job.run(model, optimizer, loader, checkpoints=args.folder, every=2) as run:
    for epoch in run.epochs(3):
        for step, (x, y) in run:
            F.cross_entropy(model(x), y).backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            shifts = []
            with torch.no_grad():
                for p in model.parameters():
                    shifts.append(p.grad * (0.05 / (norm + 1e-12)))
                    p.add_(shifts[-1])
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p, shift in zip(model.parameters(), shifts):
                    p.sub_(shift)
            optimizer.step()
            optimizer.zero_grad()

weights = job.state_dict(model)
if job.rank == 0:
    torch.save(weights, args.out)
