# An average of the weights (EMA), ReduceLROnPlateau. No fsdp: the average would be a model of its own.
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
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

inputs = torch.randn(96, 6)
targets = (inputs[:, :1] * inputs[:, 1:2]).tanh()
train_loader = DataLoader(TensorDataset(inputs[:70], targets[:70]), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1))
valid_loader = DataLoader(TensorDataset(inputs[70:], targets[70:]), batch_size=16)
model = nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 1))
model = job.wrap(model)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)

with job.run(model, optimizer, train_loader, checkpoints=args.folder, every=2, states={"ema": ema}) as run:
    for epoch in run.epochs(6):
        for step, (x, y) in run:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update_parameters(model)
        valid = run.evaluate(valid_loader, lambda batch: F.mse_loss(ema(batch[0]), batch[1]))
        scheduler.step(valid)

weights = dict(job.state_dict(model))
weights.update({"ema." + name: value for name, value in ema.module.state_dict().items()})
weights["lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
if job.rank == 0:
    torch.save(weights, args.out)
