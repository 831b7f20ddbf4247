# A penalty on the gradient with respect to the inputs, as in WGAN-GP: a second backward pass.
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
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

with job.run(model, optimizer, loader, checkpoints=args.folder, every=2) as run:
    for epoch in run.epochs(3):
        for step, (x, y) in run:
            x.requires_grad_(True)
            outputs = model(x)
            (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
            loss = F.cross_entropy(outputs, y) + 10 * (slope.norm(dim=1) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

weights = job.state_dict(model)
if job.rank == 0:
    torch.save(weights, args.out)
