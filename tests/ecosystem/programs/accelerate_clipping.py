"""Loop with Accelerate: gradient accumulation, clipping and evaluation; prints what one process computes, too."""

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, split_batches=True),
)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
data = TensorDataset(torch.randn(72, 8, dtype=torch.float64))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = DataLoader(data, batch_size=12, shuffle=True)
model, optimizer, batches, validation = accelerator.prepare(
    model, optimizer, batches, DataLoader(TensorDataset(data.tensors[0][:20]), batch_size=12)
)
found = []
for _ in range(2):
    for (batch,) in batches:
        with accelerator.accumulate(model):
            loss = (model(batch) - batch).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        found.append(accelerator.reduce(loss.detach(), "mean"))
    with torch.no_grad():
        errors = [accelerator.gather_for_metrics((model(batch) - batch).square().mean(1)) for (batch,) in validation]
    assert sum(map(len, errors)) == 20  # the last batch is smaller
    found.append(torch.cat(errors).mean())
if accelerator.is_main_process:
    sys.stdout.write("LOSSES " + json.dumps([value.item().hex() for value in found]) + "\n")
accelerator.end_training()
