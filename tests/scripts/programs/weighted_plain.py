# A WeightedRandomSampler.
import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(80, 4)
labels = (inputs.sum(1) > 2).long()  # few of class 1
weights = torch.where(labels == 1, 5.0, 1.0)
sampler = WeightedRandomSampler(weights, 70, generator=torch.Generator().manual_seed(2))
loader = DataLoader(TensorDataset(inputs, labels), batch_size=12, sampler=sampler)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for epoch in range(3):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

torch.save(model.state_dict(), args.out)
