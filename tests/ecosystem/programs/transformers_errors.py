"""Wrong uses of the callback for the Trainer of Transformers, each with the error that it raises; then a right one.

hpctrain run transformers_errors.py FOLDER
"""

import json
import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hpctrain.errors import HpctrainError
from hpctrain.integrations.transformers import TransformersCallback

FOLDER = sys.argv[1]


def trainer(*callbacks, **arguments):
    """Return a Trainer of a tiny model."""
    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    given = {"output_dir": os.path.join(FOLDER, "output"), "max_steps": 2, "use_cpu": True, "report_to": []}
    tokens = torch.arange(16)
    data = [{"input_ids": tokens, "labels": tokens}] * 8
    chosen = TrainingArguments(**{**given, **arguments})
    return Trainer(model, chosen, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))


def callback(name="a", **options):
    """Return a callback."""
    return TransformersCallback(os.path.join(FOLDER, name), **options)


def added_later():
    """Train with a callback that is not attached."""
    one = trainer()
    one.add_callback(callback())
    one.train()


WRONG = {
    "two": lambda: trainer(callback(), callback("b")),
    "every": lambda: trainer(callback(every=3)),
    "unknown": lambda: trainer(callback(evry=3)).train(),
    "best": lambda: trainer(callback(), load_best_model_at_end=True, eval_strategy="steps", eval_steps=1, save_steps=1),
    "path": lambda: trainer(callback()).train(resume_from_checkpoint="elsewhere"),
    "added": added_later,
    "must": lambda: trainer(callback(resume="must")).train(),
}


def main():
    """Print the errors, and the files of a right training."""
    found = {}
    for name, call in WRONG.items():
        try:
            call()
            found[name] = "no error"
        except (HpctrainError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    written = os.path.exists(os.path.join(FOLDER, "a"))
    one = trainer()
    callback("c", keep=1).attach(one)
    steps = one.train().global_step
    files = sorted(os.listdir(os.path.join(FOLDER, "c")))
    print("FACTS", json.dumps({"errors": found, "written": written, "steps": steps, "files": files}), flush=True)


if __name__ == "__main__":
    main()
