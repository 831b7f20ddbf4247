"""Program with the Trainer of Transformers and a run folder: stopped, it exits with 75; started again, it resumes.

    mpiexec -n 2 hpctrain run transformers_job.py FOLDER

Dropout, accumulation, evaluation, and epochs of an odd number of steps: a resumed run has to find all of it again.
STOP_AT is the step in which the last rank gets SIGTERM, TOUCH the file that rank 0 writes in step 1. With --parts, one
process trains once as a whole and once in two parts.
"""

import hashlib
import json
import os
import signal

import torch
from parts import main
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from hpctrain.integrations.transformers import TransformersCallback


class RandomTokens(torch.utils.data.Dataset):
    """Samples of 16 tokens."""

    def __init__(self, count=40):
        self.tokens = torch.randint(0, 32, (count, 16), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Interruption(TrainerCallback):
    """Signal to the last rank, or a file, in a step."""

    def __init__(self, folder, stop_at):
        self.folder, self.stop_at = folder, stop_at

    def on_step_begin(self, args, state, control, **_):
        """Interrupt the training."""
        step = state.global_step + 1
        if step == self.stop_at and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if step == 1 and args.process_index == 0 and os.environ.get("TOUCH"):
            open(os.path.join(self.folder, os.environ["TOUCH"]), "w").close()


def train(folder, stop_at):
    """Train; return the losses, the evaluations and a digest of the weights."""
    set_seed(1)
    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 16, "vocab_size": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    given = {"eval_steps": 2, "eval_strategy": "steps", "logging_steps": 1, "save_steps": 100}
    arguments = TrainingArguments(
        output_dir=os.path.join(folder, "trainer"),
        per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")),
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        save_total_limit=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{**given, **json.loads(os.environ.get("ARGUMENTS", "{}"))},
    )
    data = {"train_dataset": RandomTokens(), "eval_dataset": RandomTokens(6)}
    job = TransformersCallback(folder, **json.loads(os.environ.get("OPTIONS", "{}")))
    trainer = Trainer(model=model, args=arguments, **data, callbacks=[Interruption(folder, stop_at), job])
    trainer.train()
    named = ("loss", "eval_loss", "learning_rate", "grad_norm")
    history = [{name: value for name, value in one.items() if name in named} for one in trainer.state.log_history]
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return {"history": [one for one in history if one], "weights": hashlib.sha256(weights).hexdigest()}


if __name__ == "__main__":
    main(train, stops=(3,))
