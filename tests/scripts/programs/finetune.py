# Fine-tuning: frozen layers, a group of small rate, a group of large rate.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpctrain

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--folder", required=True)
parser.add_argument("--strategy", default="ddp")
args = parser.parse_args()

job = hpctrain.init(parallel=args.strategy)
torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.LayerNorm(24), nn.ReLU())
torch.manual_seed(7)
head = nn.Linear(24, 5)
model = nn.Sequential(backbone, head)
for parameter in backbone[0].parameters():
    parameter.requires_grad = False
model = job.wrap(model)
groups = [
    {"params": [p for p in backbone.parameters() if p.requires_grad], "lr": 1e-4},
    {"params": head.parameters()},
]
optimizer = torch.optim.AdamW(groups, lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-3, 1e-2], total_steps=18)
inputs = torch.randn(90, 8)
labels = inputs[:, :5].argmax(1)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=16, shuffle=True)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

with job.run(model, optimizer, loader, checkpoints=args.folder, every=2) as run:
    for epoch in run.epochs(3):
        for step, (x, y) in run:
            loss = criterion(model(x), y)
            loss.backward()
            run.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

weights = job.state_dict(model)
if job.rank == 0:
    torch.save(weights, args.out)
