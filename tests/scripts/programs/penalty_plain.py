# A penalty on the gradient with respect to the inputs, as in WGAN-GP: a second backward pass.
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
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(3):
    for x, y in loader:
        x.requires_grad_(True)
        outputs = model(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        loss = F.cross_entropy(outputs, y) + 10 * (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

torch.save(model.state_dict(), args.out)
