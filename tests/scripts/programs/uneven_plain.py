# 17 samples, batches of 5: the last has 2, fewer than ranks.
import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)
inputs, targets = torch.randn(17, 3), torch.randn(17, 2)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=5, shuffle=True)
model = nn.Sequential(nn.Linear(3, 10), nn.Sigmoid(), nn.Linear(10, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)

losses = []
for epoch in range(5):
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

torch.save(model.state_dict(), args.out)
