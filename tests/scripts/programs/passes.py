# A number of steps, several passes over the data, an evaluation every 5 steps, the best is kept.
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
inputs = torch.randn(130, 5)
targets = inputs.prod(1, keepdim=True)
train_loader = DataLoader(TensorDataset(inputs[:90], targets[:90]), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(4))
valid_loader = DataLoader(TensorDataset(inputs[90:], targets[90:]), batch_size=16)
model = nn.Sequential(nn.Linear(5, 30), nn.ReLU(), nn.Linear(30, 1))
model = job.wrap(model)
optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3)
history = []

options = {"every": 2, "steps": 20, "states": {"history": history}, "keep_best": "best"}
with job.run(model, optimizer, train_loader, checkpoints=args.folder, **options) as run:
    for step, (x, y) in run:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            found = run.evaluate(valid_loader, lambda batch: F.mse_loss(model(batch[0]), batch[1]))
            history.append(found)
            run.save(best=found)

weights = dict(job.state_dict(model))
weights["history"] = torch.tensor(history)
if job.rank == 0:
    torch.save(weights, args.out)
