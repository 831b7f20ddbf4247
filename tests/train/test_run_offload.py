"""Whole runs with offload: the loss curve of a run without, and checkpoints that either kind of run can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.train_runs import Legs, losses, poisoning
from support.training_fixtures import contents

WORDS = ["model.options.dropout=0.3", "optimizer.schedule=constant"]
ON = ["offload.optimizer=true", "offload.device_fraction=0"]


def tensors(folder: Path, step: int) -> dict[str, bytes]:
    """Return the parts of a checkpoint that must be equal."""
    every = contents(folder / f"checkpoints/step_{step:08d}.h5")
    return {name: each for name, each in every.items() if name.split("/")[0] in ("model", "optimizer", "rng")}


def check_passed(leg: Legs, project: Path, straight: str, ways: list[tuple[str, list[str]]]) -> None:
    """Assert that a run that resumes with other settings every 6 steps equals an uninterrupted run."""
    whole = leg(straight, "straight", *WORDS, f"train.steps={6 * len(ways)}")
    rows: list[dict[str, Any]] = []
    for number, (name, words) in enumerate(ways, 1):
        rows = leg(name, "passed", *WORDS, *words, f"train.steps={6 * number}")
    assert losses(rows) == losses(whole) and rows[-1]["grad_norm"] == whole[-1]["grad_norm"]
    one, two = (tensors(project / folder, 6 * len(ways)) for folder in ("straight", "passed"))
    assert len(one) > 20 and one == two


def test_a_run_may_switch_offload_on_and_off(leg: Legs, project: Path) -> None:
    everything = [*ON, "offload.parameters=true", "offload.activations=true", "parallel.recompute=true"]
    ways = [("ddp", ON), ("fsdp", everything), ("zero2", ON), ("ddp", [])]
    check_passed(leg, project, "ddp", [*ways, ("ddp", [*ON, "offload.device_fraction=0.5"])])


@pytest.mark.ranks(2)
def test_a_run_of_several_ranks_may_switch_offload_on_and_off(leg: Legs, project: Path) -> None:
    ways = [("fsdp", ON), ("fsdp", [*ON, "offload.parameters=true"]), ("fsdp", []), ("fsdp", ON)]
    check_passed(leg, project, "fsdp", ways)


def test_a_run_with_delayed_updates_resumes_bit_for_bit(leg: Legs) -> None:
    words = [*WORDS, *ON, "offload.delayed=true", "checkpoint.every=4"]
    whole = losses(leg("ddp", "delayed", *words, "train.steps=12"))
    assert whole != losses(leg("ddp", "at_once", *WORDS, *ON, "train.steps=12"))
    for steps in (4, 8, 12):
        rows = leg("ddp", "delayed_in_legs", *words, f"train.steps={steps}")
    assert losses(rows) == whole


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_nan_is_handled_as_without_offload(leg: Legs, policy: str) -> None:
    rows = []
    for name, words in {"plain": [], "offloaded": ON}.items():
        leg.on_wrap = poisoning((4, 5))  # in step 4, and in the repeated pass that locates the NaN
        words = [*words, "train.steps=8", "checkpoint.every=2", f"train.on_nonfinite={policy}"]
        rows.append([(row["loss"], row.get("skipped")) for row in leg("ddp", f"{policy}_{name}", *words)])
    assert rows[0] == rows[1] and [skipped for _, skipped in rows[0]].count(True) == (policy == "skip")
