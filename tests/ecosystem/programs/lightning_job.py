"""Program with Lightning's Trainer whose fits are runs in folders: they stop, save and resume.

    mpiexec -n 2 hpctrain run lightning_job.py FOLDER CASE ...

A case is NAME:FORM:WORKERS:SIGNALS. FORM is ddp, fsdp2, or plain (without the callback). SIGNALS
such as SIGUSR1@8,SIGTERM@13 are sent to the last rank in the batch of that number, each in one
attempt. The attempts follow each other in one process; SIGKILL ends it.
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from hpctrain.integrations.lightning import LightningCallback
from hpctrain.train.control import stop_request

SAMPLES, EPOCHS = 44, 3
warnings.filterwarnings("ignore")


class Net(LightningModule):
    """Two layers with dropout; FSDP2 or nothing shards them."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8)
        self.losses = []

    def configure_model(self):
        """Shard the model over the data ranks."""
        if self.form == "fsdp2":
            for layer in self.up, self.down:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def loss(self, batch):
        """Return the loss of a batch."""
        (values,) = batch
        return (self.down(self.drop(self.up(values).relu())) - values).square().mean()

    def training_step(self, batch, index):
        """Return the loss, with noise that comes from torch's generator."""
        loss = self.loss([batch[0] + 0.1 * torch.randn_like(batch[0])])
        self.losses.append(float(self.all_gather(loss.detach()).mean()))
        return loss

    def validation_step(self, batch, index):
        """Measure the loss."""
        self.log("validation/loss", self.loss(batch) + 1e-3 * torch.rand(()), sync_dist=True)

    def configure_optimizers(self):
        """Return AdamW, one schedule by steps and one by what a validation measures."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        schedulers = [
            {"scheduler": steps, "interval": "step"},
            {"scheduler": plateau, "monitor": "validation/loss", "interval": "epoch"},
        ]
        return [optimizer], schedulers


class Harm(Callback):
    """Signal to the last rank in one batch, counted over all attempts."""

    def __init__(self, signals):
        self.signals = signals

    def on_train_batch_start(self, trainer, module, batch, index):
        """Send the signal."""
        name, _, number = self.signals[0].partition("@") if self.signals else ("", "", "")
        if name and trainer.fit_loop.total_batch_idx + 1 == int(number):
            del self.signals[0]
            if trainer.global_rank == trainer.world_size - 1:
                os.kill(os.getpid(), getattr(signal, name))


def fit(folder, form, workers, signals, losses):
    """Train until the end or until a signal; return the exit code and the module."""
    ranks = int(os.environ["WORLD_SIZE"])
    seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(SAMPLES, 8))
    loader = DataLoader(data, batch_size=4 // ranks, shuffle=True, num_workers=workers)
    callbacks = [Harm(signals), EarlyStopping("validation/loss", patience=5)]
    callbacks.append(ModelCheckpoint(folder / "best", monitor="validation/loss"))
    if form != "plain":
        callbacks.append(LightningCallback(folder / "run", every=2, keep=2))
    strategy = DDPStrategy()
    if form == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        default_root_dir=folder,
        max_epochs=EPOCHS,
        val_check_interval=4,
        accumulate_grad_batches=2,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Net(form)
    net.losses = losses
    code = 0
    try:
        trainer.fit(net, loader, DataLoader(data, batch_size=11))
    except SystemExit as leaving:
        code = leaving.code
    return code, net


def main():
    """Train each case, and print its exit codes, the losses of all attempts and a sum of the weights."""
    found = {}
    for case in sys.argv[2:]:
        name, form, workers, signals = case.split(":")
        remaining, losses, codes = [one for one in signals.split(",") if one], [], []
        while not codes or codes[-1] == 75:
            stop_request.signal = None
            code, net = fit(Path(sys.argv[1]) / name, form, int(workers), remaining, losses)
            codes.append(code)
        whole = [getattr(value, "full_tensor", lambda: value)() for value in net.parameters()]
        weights = [float(value.detach().double().square().sum()).hex() for value in whole]
        found[name] = {"codes": codes, "losses": [loss.hex() for loss in losses], "weights": weights}
    if os.environ["RANK"] == "0":
        print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
