"""Program with a plain loop of Accelerate and a run folder: stopped, it exits with 75; started again, it resumes.

    mpiexec -n 2 hpctrain run accelerate_job.py FOLDER

Dropout, accumulation, shuffled samples, and epochs of an odd number of steps: a resumed run has to find all of it
again. STOP_AT is the step in which the last rank gets SIGTERM, TOUCH the file that rank 0 writes in step 1. FSDP=1
shards the model by FSDP2. With --parts, one process trains once as a whole and once in three parts.
"""

import hashlib
import json
import os
import signal

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from parts import main
from torch import nn

from hpctrain.integrations.accelerate import AccelerateRun


def interrupt(run, step, folder, stop_at):
    """Send a signal to this process, or write a file."""
    if step == stop_at and run.job.rank == run.job.size - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if step == 1 and run.job.rank == 0 and os.environ.get("TOUCH"):
        open(os.path.join(folder, os.environ["TOUCH"]), "w").close()


def train(folder, stop_at):
    """Train; return the losses, the epochs whose end was reached, and a digest of the weights."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if os.environ.get("FSDP") else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    data = torch.utils.data.TensorDataset(torch.randn(36, 8, generator=torch.Generator().manual_seed(3)))
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    torch.manual_seed(5 + accelerator.process_index)  # of dropout
    losses, ended = {}, []
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    with AccelerateRun(folder, accelerator, model, optimizer, loader, **options) as run:
        for epoch in run.epochs(2):
            for (batch,) in run.batches():
                with accelerator.accumulate(model):
                    loss = (model(batch) - batch).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    losses[run.step + 1] = loss.item()
                    interrupt(run, run.step + 1, folder, stop_at)
                run.end_step(loss=loss)
            ended.append(epoch)
    whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in whole)).hexdigest()
    return {"losses": losses, "ended": ended, "weights": digest, "rate": scheduler.get_last_lr()}


if __name__ == "__main__":
    main(train, stops=(3, 5))  # in the middle of an epoch, and at its end
