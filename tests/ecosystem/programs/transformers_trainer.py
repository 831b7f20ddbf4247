"""Program for torchrun with the Trainer of Transformers: a random tiny GPT-2, from its configuration only.

    mpiexec -n 2 hpctrain run transformers_trainer.py FOLDER

The batch of all ranks has eight samples, so that the losses do not depend on their number.
"""

import json
import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

BATCH, STEPS = 8, 5


class RandomTokens(torch.utils.data.Dataset):
    """Samples of 16 tokens."""

    def __init__(self):
        self.tokens = torch.randint(0, 32, (64, 16), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main():
    """Train, and print the losses."""
    set_seed(1)
    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 16, "vocab_size": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=STEPS,
        logging_steps=1,
        save_steps=STEPS,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=RandomTokens())
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        print("LOSSES", json.dumps([loss.hex() for loss in losses]), flush=True)


if __name__ == "__main__":
    main()
