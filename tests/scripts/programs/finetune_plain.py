# Fine-tuning: frozen layers, a group of small rate, a group of large rate.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.LayerNorm(24), nn.ReLU())
torch.manual_seed(7)
head = nn.Linear(24, 5)
model = nn.Sequential(backbone, head)
for parameter in backbone[0].parameters():
    parameter.requires_grad = False
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

for epoch in range(3):
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

torch.save(model.state_dict(), args.out)
