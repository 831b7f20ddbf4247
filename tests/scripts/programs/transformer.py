# A small transformer: warmup stepped per iteration, clipping.
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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.place = nn.Parameter(torch.randn(12, 16) * 0.1)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 20)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.encoder(self.embed(x) + self.place, mask=mask, is_causal=True))


tokens = (torch.arange(13) * torch.randint(1, 5, (100, 1)) + torch.randint(20, (100, 1))) % 20
loader = DataLoader(TensorDataset(tokens), batch_size=16, shuffle=True)
model = job.wrap(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 8))

with job.run(model, optimizer, loader, checkpoints=args.folder, every=2) as run:
    for epoch in run.epochs(3):
        for step, (x,) in run:
            logits = model(x[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, 20), x[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            run.clip(0.5)
            optimizer.step()
            scheduler.step()

weights = job.state_dict(model)
if job.rank == 0:
    torch.save(weights, args.out)
