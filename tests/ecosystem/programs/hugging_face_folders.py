"""Program that trains from a folder of Transformers, exports, and resumes LoRA of PEFT from trained parameters.

    mpiexec -n 2 python hugging_face_folders.py FOLDER PART

Rank 0 prints one line per result: RESULT [name, case, found].
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hpctrain
from hpctrain.errors import HpctrainError
from hpctrain.models.hugging_face import causal_lm

VOCABULARY, LENGTH, STEPS = 256, 16, 6
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT2 = {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 32}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **GPT2, **TOKENS)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES, **TOKENS)).bfloat16(),
}
PARALLEL = {
    "alone": None,
    "ddp": {"data": "ddp"},
    "zero1": {"data": "zero1"},
    "fsdp": {"data": "fsdp"},
    "tensor": {"tensor": 2},
    "pipe": {"pipe": 2},
}


def batch(step):
    return torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(step))


def report(job, name, case, found):
    if job.rank == 0:
        print("RESULT " + json.dumps([name, case, found]), flush=True)


def loading(job, folder):
    """Compare weights, and logits of ranks that have whole models, with from_pretrained."""
    for name in MODELS:
        plain = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
        stored = sum(each.numel() * (2 if name == "llama" else 4) for each in plain.parameters())
        expected = plain.state_dict()
        for case, settings in PARALLEL.items():
            torch.manual_seed(0)
            model = causal_lm(folder / name, vocab_size=VOCABULARY, context=LENGTH)
            names = list(model.state_dict())
            if settings is None:
                from hpctrain.parallel.meta_init import materialise

                materialise(model, torch.device("cpu"))
            else:
                job.wrap(model, settings, example=batch(0)[:2])
            loaded = job.load_pretrained(model, folder / name)
            found = {"names": names == list(expected), "share": loaded.bytes_read / stored}
            weights = model.state_dict() if settings is None else job.state_dict(model)
            whole = {each: tensor for each, tensor in weights.items() if tensor.shape == expected[each].shape}
            found["weights"] = all(torch.equal(tensor, expected[each]) for each, tensor in whole.items())
            if case not in ("tensor", "pipe"):
                with torch.no_grad():
                    found["logits"] = torch.equal(model.eval()(batch(0)), plain(batch(0)).logits)
            report(job, name, case, found)
    for case, options in {"vocabulary": {"vocab_size": 257}, "context": {"context": 4096}}.items():
        report(job, "refused", case, refusal(lambda options=options: causal_lm(folder / "llama", **options)))
    report(job, "refused", "options", refusal(lambda: causal_lm(folder / "llama", {"no_such_entry": 1})))
    other = {**json.loads((folder / "llama/config.json").read_text()), "architectures": ["LlamaForTokenClassification"]}
    if job.rank == 0:
        (folder / "other").mkdir()
        (folder / "other/config.json").write_text(json.dumps(other))
    job.comm.barrier()
    report(job, "refused", "architecture", refusal(lambda: causal_lm(folder / "other")))


def folders(job, folder):
    """Only write the folders of the models, as each part does."""


def refusal(call):
    try:
        call()
    except HpctrainError as error:
        return str(error)
    return "not refused"


def adapters(job, folder):
    """Train LoRA of PEFT with checkpoints of the adapters alone, interrupted and not."""

    def train(name, data, steps, **options):
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_dropout=0.0))
        model = job.wrap(model, data)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
        losses = []
        batches = [batch(step) for step in range(STEPS)]
        where = {"checkpoints": str(folder / f"{name}-{data}"), "split": False}
        with job.run(model, optimizer, batches, steps=steps, every=2, **where, **options) as run:
            for _, tokens in run:
                logits = model(input_ids=tokens).logits[:, :-1]
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
        return losses, run.state.path(run.step).stat().st_size, {k: v.clone() for k, v in job.state_dict(model).items()}

    for data in ("ddp", "zero2", "fsdp"):
        losses, whole, weights = train("whole", data, STEPS)
        first, _, _ = train("trained", data, 3, only="trained")
        second, small, resumed = train("trained", data, STEPS, only="trained")
        same = all(torch.equal(weights[name], resumed[name]) for name in weights)
        report(job, data, "lora", {"losses": first + second == losses, "weights": same, "bytes": [whole, small]})


if __name__ == "__main__":
    folder, part = Path(sys.argv[1]), sys.argv[2]
    with hpctrain.init(device="cpu") as job:
        if job.rank == 0:
            for name, make in MODELS.items():
                torch.manual_seed(5)
                make().save_pretrained(folder / name, max_shard_size="20KB" if name == "llama" else "1GB")
        job.comm.barrier()
        {"folders": folders, "loading": loading, "adapters": adapters}[part](job, folder)
