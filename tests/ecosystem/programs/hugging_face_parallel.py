"""Program that trains tiny Hugging Face models under our strategies, and the same models in a plain loop.

    mpiexec -n 2 python hugging_face_parallel.py FOLDER CASE...

Rank 0 prints one line per case: the losses and norms of the gradients of both, and the largest
difference of the final weights.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hpctrain
from hpctrain import ParallelSettings
from hpctrain.errors import HpctrainError

VOCABULARY, LENGTH, BATCH, STEPS = 67, 12, 8, 4
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": 32}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, **TOKENS)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, **TOKENS, tie_word_embeddings=True)),
    "llama-one-kv": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **{**HEADS, "num_key_value_heads": 1}, **TOKENS)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, **TOKENS, head_dim=16)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, **NO_DROPOUT, **TOKENS)),
    "gpt2-untied": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, **NO_DROPOUT, **TOKENS, tie_word_embeddings=False)),
    "bert": lambda: BertForMaskedLM(
        BertConfig(**SIZES, num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, **TOKENS, num_local_experts=4)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, **HEADS, **TOKENS)),
}
# Names and settings of a case: MODEL/key=value,...
VALUES = {"tensor": int, "pipe": int, "data": str, "schedule": str, "plan": str, "partition": str, "recompute": bool}


def made(name):
    """Return a model with the same values on all ranks."""
    torch.manual_seed(1)
    model = MODELS[name.removesuffix("-masks")]().double()
    if name.endswith("-masks"):  # the mask of a padded batch is always a tensor, as a pipeline needs it
        model.set_attn_implementation("eager")
    return model


class Tokens(torch.utils.data.Dataset):
    """Samples of random tokens, with padding in some of them."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(3, VOCABULARY, (BATCH * STEPS, LENGTH), generator=generator)
        self.mask = torch.arange(LENGTH) < torch.randint(
            LENGTH // 2, LENGTH + 1, (BATCH * STEPS, 1), generator=generator
        )

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        labels = self.tokens[index].masked_fill(~self.mask[index], -100)
        return {"input_ids": self.tokens[index], "attention_mask": self.mask[index].long(), "labels": labels}


def loader():
    """Return batches in the same order for all programs."""
    return torch.utils.data.DataLoader(Tokens(), BATCH)


def compute_with(model):
    """Return the loss of a batch as a sum and a count, so that ranks and microbatches may have different counts."""

    def compute(batch):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        targets = batch["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        return loss, (targets != -100).sum()

    return compute


def plain(name):
    """Return the model that one process trains, with losses and norms of gradients."""
    model, losses, norms = made(name), [], []
    optimizer, compute = torch.optim.AdamW(model.parameters(), lr=1e-3), compute_with(model)
    for batch in loader():
        loss, count = compute(batch)
        (loss / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach() / count))
    return model, losses, norms


def trained(job, name, settings, folder):
    """Return this rank's part of the model that the strategy trains, with losses and norms of gradients."""
    model, losses, norms = job.wrap(made(name), settings), [], []
    optimizer, compute = torch.optim.AdamW(model.parameters(), lr=1e-3), compute_with(model)
    with job.run(model, optimizer, loader(), checkpoints=str(folder), steps=STEPS) as run:
        for _, batch in run:
            losses.append(float(run.backward(batch, compute)))
            norms.append(float(run.clip(1.0)))
            optimizer.step()
            optimizer.zero_grad()
    return model, losses, norms


def difference(folder, name, whole):
    """Return the largest difference of the weights that one process loads from the last checkpoint."""
    alone = made(name)
    hpctrain.checkpoint.load(
        max((folder / "checkpoints").glob("*.h5"), key=lambda path: path.stat().st_mtime), model=alone
    )
    expected = whole.state_dict()
    return max(float((tensor - expected[key]).abs().max()) for key, tensor in alone.state_dict().items())


def settings_of(words):
    """Return the settings of a case."""
    values = dict(word.split("=", 1) for word in words.split(",") if word)
    plan = values.pop("plan", "")
    typed = {name: VALUES[name](value) for name, value in values.items()}
    return ParallelSettings(**typed, tensor_plan=tuple(each.replace(":", "=") for each in plan.split("+") if plan))


def main():
    """Train all cases; print what rank 0 has found."""
    torch.set_num_threads(1)
    job = hpctrain.init()
    for number, case in enumerate(sys.argv[2:]):
        name, _, words = case.partition("/")
        found = {"case": case}
        folder = Path(sys.argv[1]) / str(number)
        try:
            model, found["losses"], found["norms"] = trained(job, name, settings_of(words), folder)
        except HpctrainError as error:
            found["error"] = f"{type(error).__name__}: {error}"
        else:
            whole, found["plain_losses"], found["plain_norms"] = plain(name)
            if job.comm.rank == 0:
                found["difference"] = difference(folder, name, whole)
        if job.comm.rank == 0:
            print("CASE " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
