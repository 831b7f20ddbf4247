# 17 samples, batches of 5: the last has 2, fewer than ranks.
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
inputs, targets = torch.randn(17, 3), torch.randn(17, 2)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=5, shuffle=True)
model = nn.Sequential(nn.Linear(3, 10), nn.Sigmoid(), nn.Linear(10, 2))
model = job.wrap(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)

losses = []
with job.run(model, optimizer, loader, checkpoints=args.folder, every=2) as run:
    for epoch in run.epochs(5):
        for step, (x, y) in run:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

weights = job.state_dict(model)
if job.rank == 0:
    torch.save(weights, args.out)
