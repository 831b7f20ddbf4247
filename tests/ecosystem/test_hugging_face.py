"""Models of Transformers train under hpctrain's strategies as in a plain loop of one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs import JobStarter

PROGRAMS = Path(__file__).resolve().parent / "programs"
MODELS = ("gpt2", "llama", "llama-tied", "bert", "t5", "mixtral", "vit", "whisper")
STRATEGIES = (
    "ddp",
    "zero1",
    "zero2",
    "fsdp",
    "offload",
    "ddp-offload",
    "recompute",
    "accumulate",
    "fsdp-messages",
    "fsdp-recompute",
    "fsdp-accumulate",
    "fsdp-offload",
)
USES = ("resume", "generate", "dropout", "checkpointing", "reentrant", "attention", "lora")
# Largest differences of losses, norms of gradients and weights in double precision.
EXACT = 1e-10
# These models compute norms or softmaxes in float32, whatever the dtype of their weights. Parts of a batch scale the
# gradients there by another divisor, which rounds them to other float32 numbers.
FLOAT32_INSIDE = ("llama", "llama-tied", "t5", "mixtral")
ROUNDED = 1e-6

pytestmark = [pytest.mark.ecosystem, pytest.mark.limit(600)]


def results(
    launch: JobStarter, program: str, *words: str | Path, timeout: float = 300
) -> Iterator[tuple[str, str, Any]]:
    """Run a program on two ranks, and yield what it reports: model, case and numbers."""
    job = launch(2, PROGRAMS / program, *words, timeout=timeout)
    assert job.returncode == 0, str(job)
    lines = [line for line in job.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, str(job)
    for line in lines:
        name, case, found = json.loads(line.removeprefix("RESULT "))
        yield name, case, found


def check(name: str, case: str, found: dict[str, float]) -> None:
    """Assert that differences are those of rounding."""
    allowed = ROUNDED if name in FLOAT32_INSIDE and "accumulate" in case else EXACT
    assert max(found.values()) < allowed, f"{name}, {case}: {found}"


def check_training(launch: JobStarter, folder: Path, models: tuple[str, ...], strategies: tuple[str, ...]) -> None:
    """Train models under strategies, and compare all steps with a plain loop."""
    cases = []
    for name, case, found in results(launch, "hugging_face.py", folder, ",".join(models), ",".join(strategies)):
        check(name, case, found)
        cases.append((name, case))
    assert cases == [(name, case) for name in models for case in strategies]


def test_models_train_as_in_one_process(launch: JobStarter, tmp_path: Path) -> None:
    check_training(launch, tmp_path, ("gpt2", "llama-tied"), ("ddp", "fsdp-offload"))


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_model_trains_under_every_strategy(launch: JobStarter, tmp_path: Path, model: str) -> None:
    check_training(launch, tmp_path, (model,), STRATEGIES)


@pytest.mark.long
@pytest.mark.parametrize("use", USES)
def test_program_does_as_in_one_process(launch: JobStarter, tmp_path: Path, use: str) -> None:
    for name, case, found in results(launch, "hugging_face_uses.py", tmp_path, use):
        check(name, case, found)


@pytest.mark.long
def test_experts_without_tokens_train_as_in_one_process(launch: JobStarter, tmp_path: Path) -> None:
    for name, case, found in results(launch, "hugging_face_uses.py", tmp_path, "experts"):
        assert max(found.values()) < ROUNDED, f"{name}, {case}: {found}"  # in float32


@pytest.mark.long
def test_bfloat16_rounds_and_updates_float32(launch: JobStarter, tmp_path: Path) -> None:
    for name, case, found in results(launch, "hugging_face_uses.py", tmp_path, "bfloat16"):
        # Three updates of at most 0.01 each, and the rounding of job.state_dict: 0.4 % of numbers up to 1.
        assert found["losses"] < 0.05 and found["weights"] < 0.07, f"{name}, {case}: {found}"


@pytest.mark.long
def test_calls_that_need_whole_parameters_raise(launch: JobStarter, tmp_path: Path) -> None:
    refused = {case: text for _, case, text in results(launch, "hugging_face_uses.py", tmp_path, "refused")}
    assert "job.unshard(model, write=True)" in refused["resize_token_embeddings"]
    assert "job.unshard(model, write=True)" in refused["initialisation"]
    assert "rank's shard of parameter" in refused["save_pretrained"]
    assert "call the model" in refused["embedding alone"]
    assert "meta device" in refused["meta device"]
