# Sharpness-aware minimisation by hand: two passes per update, the second at shifted weights.
import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(70, 6)
labels = (inputs.sum(1) > 1).long()
loader = DataLoader(TensorDataset(inputs, labels), batch_size=12, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(3):
    for x, y in loader:
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

torch.save(model.state_dict(), args.out)
