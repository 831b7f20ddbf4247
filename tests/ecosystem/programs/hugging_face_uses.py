"""Program that does with models of Transformers what programs do besides training, under strategies of hpctrain.

mpiexec -n 2 python hugging_face_uses.py FOLDER USE
"""

import sys
from pathlib import Path

import h5py
import hugging_face_samples as models
import torch
from hugging_face import JOB, STRATEGIES, difference, report, train, wrap
from safetensors.torch import load_file

from hpctrain.errors import UsageError

TIED = ("gpt2", "llama-tied", "t5", "bert", "whisper")
FEW = ("ddp", "zero2", "fsdp", "fsdp-messages", "fsdp-recompute", "fsdp-offload")


def is_tied(model):
    """Return whether the head and the embedding are one parameter."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def resume(folder):
    """Stop under one strategy, and resume under two others; then exchange weights with Transformers."""
    for name in TIED:
        expected = models.train_plain(name, models.make(name), epochs=2)
        losses, norms = [], []
        for strategy, steps in (("fsdp-messages", 2), ("ddp", 4), ("fsdp-recompute", None)):
            model = models.make(name, seed=7 + len(losses))
            parts = wrap(model, strategy)
            found = train(name, model, parts, folder / name, epochs=2, steps=steps, every=1)
            losses, norms = losses + found[0], norms + found[1]
            assert is_tied(model), name
        report(name, "resume", difference((losses, norms, found[2]), expected))
        kept = folder / name / "transformers"
        if JOB.rank == 0:
            model.save_pretrained(kept, state_dict=dict(found[2]))
            again = type(model).from_pretrained(kept, dtype=torch.float64)
            assert is_tied(again), name
            assert all(torch.equal(value, found[2][key]) for key, value in again.state_dict().items()), name
            shared = models.make(name)
            shared.save_pretrained(kept / "plain")
            assert load_file(kept / "model.safetensors").keys() == load_file(kept / "plain/model.safetensors").keys()
        JOB.comm.barrier()


def generate(folder):
    """Generate tokens in evaluation mode after every step, each rank from its own prompts."""
    for name in ("gpt2", "llama", "mixtral", "t5", "whisper"):
        inputs = models.columns(name, torch.float64, 2 + JOB.rank)  # other numbers and lengths per rank
        del inputs["labels"]

        def tokens(model):
            model.eval()
            found = model.generate(**inputs, max_new_tokens=5 + JOB.rank, do_sample=False)
            model.train()
            return found.tolist()

        plain, ours = [], []

        def generate_ours(model):
            with JOB.unshard(model):
                ours.append(tokens(model))

        expected = models.train_plain(name, models.make(name), after_step=lambda model: plain.append(tokens(model)))
        for strategy in FEW:
            model = models.make(name)
            parts = wrap(model, strategy)
            ours.clear()
            found = train(name, model, parts, folder / name / strategy, after_step=generate_ours)
            report(name, strategy, difference(found, expected))
            assert ours == plain, (name, strategy)


def dropout(folder):
    """Train with dropout: recomputation and sharding draw the same masks."""
    for name in ("gpt2", "llama", "t5", "vit"):
        expected = None
        without = models.train_plain(name, models.make(name))
        for strategy in ("ddp", "recompute", "zero1", "fsdp-messages", "fsdp-recompute"):
            model = models.make(name, dropout=0.2)
            parts = wrap(model, strategy)
            found = train(name, model, parts, folder / name / strategy)
            expected = expected or found
            report(name, strategy, difference(found, expected))
        assert min(abs(a - b) for a, b in zip(expected[0], without[0])) > 1e-4, name


def checkpointing(folder):
    """Let the models recompute activations themselves, also next to recomputation by hpctrain."""
    for name in models.MODELS:
        expected = models.train_plain(name, models.make(name))
        for strategy in (*FEW, "recompute"):
            model = models.make(name)
            model.gradient_checkpointing_enable()
            parts = wrap(model, strategy)
            found = train(name, model, parts, folder / name / strategy)
            report(name, strategy, difference(found, expected))


def reentrant(folder):
    """Let the models recompute activations by torch's older implementation."""
    for name in ("gpt2", "llama", "t5"):
        expected = models.train_plain(name, models.make(name))
        for strategy in FEW:
            model = models.make(name)
            model.gradient_checkpointing_enable({"use_reentrant": True})
            parts = wrap(model, strategy)
            found = train(name, model, parts, folder / name / strategy)
            report(name, strategy, difference(found, expected))


def attention(folder):
    """Compute attention by the implementations of Transformers that run on CPUs."""
    for name in ("gpt2", "llama", "bert", "whisper"):
        for kind in ("eager", "sdpa"):
            expected = models.train_plain(name, models.make(name, attn_implementation=kind))
            for strategy in ("ddp", "fsdp-recompute"):
                model = models.make(name, attn_implementation=kind)
                parts = wrap(model, strategy)
                found = train(name, model, parts, folder / name / kind / strategy)
                report(name, f"{kind} {strategy}", difference(found, expected))


def experts(folder):
    """Compute Mixtral's experts one after the other, or by torch's grouped_mm in float32; some ranks leave some out."""
    for kind in ("eager", "grouped_mm"):
        expected = models.train_plain("mixtral", models.make("mixtral", torch.float32, experts=kind), torch.float32)
        for strategy in FEW:
            model = models.make("mixtral", torch.float32, experts=kind)
            parts = wrap(model, strategy)
            found = train("mixtral", model, parts, folder / kind / strategy, torch.float32)
            report("mixtral", f"{kind} {strategy}", difference(found, expected))


def bfloat16(folder):
    """Compute and communicate in bfloat16; weights and updates stay in float32."""
    for name in models.MODELS:
        expected = models.train_plain(name, models.make(name, torch.float32), torch.float32)
        for strategy in ("zero2", "fsdp-messages", "fsdp-recompute", "fsdp-offload"):
            parallel, offload, parts, messages = STRATEGIES[strategy]
            mixed = f"{strategy}-bfloat16"
            STRATEGIES[mixed] = ({**parallel, "mixed_precision": "bfloat16"}, offload, parts, messages)
            model = models.make(name, torch.float32)
            parts = wrap(model, mixed)
            found = train(name, model, parts, folder / name / strategy, torch.float32)
            assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
            report(name, mixed, difference(found, expected))


def lora(folder):
    """Train adapters of PEFT; the base stays as it was."""
    from peft import LoraConfig, PeftModel, get_peft_model

    targets = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj"], "llama-tied": ["q_proj", "down_proj"]}
    targets |= {"t5": ["q", "v"], "bert": ["query", "value"], "vit": "all-linear", "whisper": ["q_proj", "fc1"]}

    def adapted(name, seed=7):
        base = models.make(name)
        config = LoraConfig(
            r=4, lora_alpha=8, target_modules=targets[name], init_lora_weights=False, fan_in_fan_out=name == "gpt2"
        )
        torch.manual_seed(seed)
        return get_peft_model(base, config).to(torch.float64).train()

    for name in targets:
        expected = models.train_plain(name, adapted(name))
        for strategy in (*FEW, "zero1", "ddp-offload"):
            model = adapted(name, seed=7 + JOB.rank)
            parts = wrap(model, strategy)
            run = folder / name / strategy
            found = train(name, model, parts, run)
            report(name, strategy, difference(found, expected))
        before = adapted(name).state_dict()
        frozen = [key for key in before if "lora_" not in key]
        assert all(torch.equal(before[key], found[2][key]) for key in frozen), name
        if JOB.rank == 0:
            check_adapter_files(name, model, run, found[2], PeftModel)
        JOB.comm.barrier()


def check_adapter_files(name, model, run, weights, peft_model):
    """Check what checkpoints hold of adapters, and that PEFT writes and reads the trained ones."""
    newest = sorted((run / "checkpoints").glob("*.h5"))[-1]
    with h5py.File(newest) as file:
        stored, updated = set(), set()
        file["model"].visititems(lambda path, item: stored.add(path) if isinstance(item, h5py.Dataset) else None)
        file["optimizer"].visititems(lambda path, item: updated.add(path) if isinstance(item, h5py.Dataset) else None)
    assert any("lora_A" in path for path in stored) and any("lora_" not in path for path in stored)
    assert updated and all("lora_" in path for path in updated), updated
    model.save_pretrained(run / "peft", state_dict=dict(weights))
    kept = load_file(run / "peft/adapter_model.safetensors")
    assert kept and all("lora_" in key for key in kept), list(kept)
    again = peft_model.from_pretrained(models.make(name), run / "peft").to(torch.float64)
    assert all(torch.equal(value, weights[key]) for key, value in again.state_dict().items()), name


def refused(folder):
    """Call what needs whole parameters on a sharded model, and wrap a model without memory."""
    model = models.make("gpt2")
    wrap(model, "fsdp-messages")
    inputs = models.columns("gpt2", torch.float64, 2)

    def wrap_without_memory():
        with torch.device("meta"):
            other = models.MODELS["gpt2"]()
        wrap(other, "fsdp-messages")

    calls = {
        "save_pretrained": lambda: model.save_pretrained(folder / "whole"),
        "embedding alone": lambda: model.get_input_embeddings()(inputs["input_ids"]),
        "resize_token_embeddings": lambda: model.resize_token_embeddings(64),
        "initialisation": lambda: torch.nn.init.normal_(model.lm_head.weight),
        "meta device": wrap_without_memory,
    }
    for what, call in calls.items():
        try:
            call()
            report("gpt2", what, "no error")
        except UsageError as error:
            report("gpt2", what, str(error))
        JOB.comm.barrier()


if __name__ == "__main__":
    globals()[sys.argv[2]](Path(sys.argv[1]))
