# Padded sequences of uneven lengths: a loss over a count, in two parts (run.backward).
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


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8, padding_idx=0)
        self.rnn = nn.GRU(8, 16, batch_first=True)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


lengths = torch.randint(1, 11, (75,))
words = torch.randint(1, 12, (75, 10))
tags = words % 3
past = torch.arange(10) >= lengths.view(-1, 1)
words, tags = words.masked_fill(past, 0), tags.masked_fill(past, -100)
loader = DataLoader(TensorDataset(words, tags), batch_size=10, shuffle=True)
model = job.wrap(Tagger())
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)


def total_and_count(batch):
    x, y = batch
    total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
    return total, (y != -100).sum()


with job.run(model, optimizer, loader, checkpoints=args.folder, every=2) as run:
    for epoch in run.epochs(4):
        for step, batch in run:
            optimizer.zero_grad()
            loss = run.backward(batch, total_and_count, accumulate=2)
            optimizer.step()
            run.log(loss=loss)

weights = job.state_dict(model)
if job.rank == 0:
    torch.save(weights, args.out)
