# Classification: train and validation loaders, early stopping, best model.
import argparse
import copy
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import hpctrain

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--folder", required=True)
parser.add_argument("--strategy", default="ddp")
args = parser.parse_args()

job = hpctrain.init(parallel=args.strategy)
torch.manual_seed(0)
centers = torch.randn(3, 8)
labels = torch.randint(3, (203,))
inputs = centers[labels] + 1.5 * torch.randn(203, 8)
train_set, valid_set = random_split(TensorDataset(inputs, labels), [163, 40])
train_loader = DataLoader(train_set, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1))
valid_loader = DataLoader(valid_set, batch_size=16)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
model = job.wrap(model)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


def measure(batch):
    inputs, labels = batch
    logits = model(inputs)
    return {"loss": F.cross_entropy(logits, labels), "accuracy": logits.argmax(1).eq(labels).float().mean()}


best = {"loss": math.inf, "bad": 0, "weights": {}}
with job.run(model, optimizer, train_loader, checkpoints=args.folder, every=2, states={"best": best}, keep_best="best") as run:
    for epoch in run.epochs(8):
        for step, (x, y) in run:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        found = run.evaluate(valid_loader, measure)
        if found["loss"] < best["loss"]:
            best["loss"], best["bad"] = found["loss"], 0
            best["weights"] = copy.deepcopy(job.state_dict(model))
            run.save(best=found["loss"])
        else:
            best["bad"] += 1
            if best["bad"] == 2:
                run.stop("early stopping")

weights = {"last." + name: value for name, value in job.state_dict(model).items()}
weights.update({"best." + name: value for name, value in best["weights"].items()})
weights["best_loss"] = torch.tensor(best["loss"])
if job.rank == 0:
    torch.save(weights, args.out)
