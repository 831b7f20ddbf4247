# An average of the weights (EMA), ReduceLROnPlateau. No fsdp: the average would be a model of its own.
import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

inputs = torch.randn(96, 6)
targets = (inputs[:, :1] * inputs[:, 1:2]).tanh()
train_loader = DataLoader(TensorDataset(inputs[:70], targets[:70]), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1))
valid_loader = DataLoader(TensorDataset(inputs[70:], targets[70:]), batch_size=16)
model = nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 1))
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)

for epoch in range(6):
    for x, y in train_loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
    with torch.no_grad():
        valid = sum(float(F.mse_loss(ema(x), y)) * len(x) for x, y in valid_loader) / 26
    scheduler.step(valid)

weights = dict(model.state_dict())
weights.update({"ema." + name: value for name, value in ema.module.state_dict().items()})
weights["lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
torch.save(weights, args.out)
