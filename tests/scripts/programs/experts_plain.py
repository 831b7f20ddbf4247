# Experts that only some samples use: a rank may use other ones than the rest.
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


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        chosen = x[:, 0].gt(0).long() + 2 * x[:, 1].gt(1.2).long()
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero()[:, 0]
            if len(mine):
                found = found.index_put((mine,), torch.tanh(expert(x[mine])))
        return self.head(found)


model = Routed()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)

for epoch in range(3):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

torch.save(model.state_dict(), args.out)
