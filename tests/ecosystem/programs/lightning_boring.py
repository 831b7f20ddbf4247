"""Program for torchrun with Lightning's own BoringModel under DDP.

mpiexec -n 2 hpctrain run lightning_boring.py FOLDER
"""

import json
import os
import sys

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy


class LossesOfBoringModel(BoringModel):
    """BoringModel that keeps its losses."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        """Return the loss of the ranks' batches."""
        step = super().training_step(batch, batch_idx)
        self.losses.append(float(self.all_gather(step["loss"].detach()).mean()))
        return step


def main():
    """Train, validate and test, and print the losses."""
    seed_everything(1, verbose=False)
    model = LossesOfBoringModel()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=DDPStrategy(process_group_backend=os.environ.get("BORING_BACKEND")) if ranks > 1 else "auto",
        default_root_dir=sys.argv[1],
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    trainer.validate(model, verbose=False)
    trainer.test(model, verbose=False)
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    if trainer.is_global_zero:
        print("LOSSES", json.dumps([float(value).hex() for value in [*model.losses, *weights]]), flush=True)


if __name__ == "__main__":
    main()
