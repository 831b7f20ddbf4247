# Evaluation only: loads weights of plain PyTorch, measures.
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


def make():
    return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 4))


path = args.out + ".weights"
trained = make()
trained(torch.randn(64, 6))  # running statistics
if job.rank == 0:
    torch.save(trained.state_dict(), path)
job.comm.barrier()

model = make()
model.load_state_dict(torch.load(path))
model = job.wrap(model)
inputs, labels = torch.randn(53, 6), torch.randint(4, (53,))
loader = DataLoader(TensorDataset(inputs, labels), batch_size=10)


def measure(batch):
    x, y = batch
    logits = model(x)
    loss = F.cross_entropy(logits, y, reduction="sum")
    return {"loss": (loss, len(y)), "accuracy": (logits.argmax(1).eq(y).sum(), len(y))}


found = job.evaluate(loader, measure)

weights = {name: torch.tensor(value) for name, value in found.items()}
weights.update(job.state_dict(model))
if job.rank == 0:
    torch.save(weights, args.out)
