# Gradient accumulation by hand: three batches for an update, the rest of the epoch as well.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(84, 6)
targets = torch.sin(inputs).sum(1, keepdim=True)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()

for epoch in range(4):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y) / 3
        loss.backward()
        if (i + 1) % 3 == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()

torch.save(model.state_dict(), args.out)
