# Contrastive learning (CLIP): both towers in one model, a learnt temperature, comm.all_gather.
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


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(10, 8)
        self.text = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.scale.exp()


images = torch.randn(62, 10)
texts = images[:, :6] + 0.3 * torch.randn(62, 6)
loader = DataLoader(TensorDataset(images, texts), batch_size=12, shuffle=True)
model = job.wrap(Clip())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with job.run(model, optimizer, loader, checkpoints=args.folder, every=2) as run:
    for epoch in run.epochs(4):
        for step, (x, t) in run:
            a, b, scale = model(x, t)
            weight = run.sample_weight
            ranks = job.comm.all_gather(torch.full((len(a),), job.rank), weight=weight)
            all_a, all_b = (job.comm.all_gather(each, weight=weight) for each in (a, b))
            targets = int((ranks < job.rank).sum()) + torch.arange(len(a))
            targets = targets.clamp(max=len(all_a) - 1)
            loss = (F.cross_entropy(scale * a @ all_b.t(), targets) + F.cross_entropy(scale * b @ all_a.t(), targets)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

weights = job.state_dict(model)
if job.rank == 0:
    torch.save(weights, args.out)
