# Classification: train and validation loaders, early stopping, best model.
import argparse
import copy
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)
centers = torch.randn(3, 8)
labels = torch.randint(3, (203,))
inputs = centers[labels] + 1.5 * torch.randn(203, 8)
train_set, valid_set = random_split(TensorDataset(inputs, labels), [163, 40])
train_loader = DataLoader(train_set, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1))
valid_loader = DataLoader(valid_set, batch_size=16)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


def measure(batch):
    inputs, labels = batch
    logits = model(inputs)
    return {"loss": F.cross_entropy(logits, labels), "accuracy": logits.argmax(1).eq(labels).float().mean()}


def validate():
    model.eval()
    sums = {"loss": 0.0, "accuracy": 0.0}
    with torch.no_grad():
        for batch in valid_loader:
            for name, value in measure(batch).items():
                sums[name] += float(value) * len(batch[0])
    model.train()
    return {name: value / len(valid_set) for name, value in sums.items()}


best = {"loss": math.inf, "bad": 0, "weights": {}}
for epoch in range(8):
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    found = validate()
    if found["loss"] < best["loss"]:
        best["loss"], best["bad"] = found["loss"], 0
        best["weights"] = copy.deepcopy(model.state_dict())
    else:
        best["bad"] += 1
        if best["bad"] == 2:
            break

weights = {"last." + name: value for name, value in model.state_dict().items()}
weights.update({"best." + name: value for name, value in best["weights"].items()})
weights["best_loss"] = torch.tensor(best["loss"])
torch.save(weights, args.out)
