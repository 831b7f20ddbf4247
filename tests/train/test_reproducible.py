"""Reproducible runs: the bits of one plain process, for every strategy and number of ranks, also over resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.reproducible import PROGRAM, plain
from support.train_runs import Legs, losses
from support.training_fixtures import contents

from hpctrain.errors import SettingsError

STEPS = 12
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
WORDS = [
    "parallel.reproducible=true",
    "train.microbatch=2",
    "model.options.dropout=0.3",
    "optimizer.schedule=constant",
    "train.evaluate_every=6",
]
TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.limit(180)
@pytest.mark.parametrize("ranks", (2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 3, 5, 8))))
def test_every_bit_is_that_of_a_plain_loop_over_the_microbatches(launch: Any, tmp_path: Path, ranks: int) -> None:
    torch.set_num_threads(1)
    env = {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    done = launch(ranks, PROGRAM, tmp_path, *STRATEGIES, timeout=150, env=env)
    assert done.returncode == 0, done
    lines = [line for line in done.stdout.splitlines() if line.split(" ")[0] in STRATEGIES]
    assert lines == [plain(name) for name in STRATEGIES], done


def tensors_of(folder: Path, steps: int = STEPS) -> dict[str, bytes]:
    """Return weights and moments of the checkpoint of a step."""
    every = contents(folder / f"checkpoints/step_{steps:08d}.h5")
    found = {name: each for name, each in every.items() if name.split("/")[0] in ("model", "optimizer")}
    assert len(found) > 20
    return found


def numbers(rows: list[dict[str, Any]]) -> list[Any]:
    """Return what a run has computed."""
    names = ("loss", "grad_norm", "validation_loss", "fingerprint")
    return [[row.get(name) for name in names] for row in rows]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    "name, more",
    {
        "ddp": ("ddp", []),
        "zero1": ("zero1", []),
        "zero2": ("zero2", []),
        "fsdp": ("fsdp", []),
        "gathered on demand": ("fsdp_alone", []),
        "recomputed": ("fsdp", ["parallel.recompute=true"]),
        "offloaded": ("zero1", ["offload.optimizer=true"]),
    }.values(),
)
def test_a_run_has_the_numbers_of_one_rank(leg: Legs, project: Path, name: str, more: list[str]) -> None:
    folder = f"same_{name}_{len(more) and more[0].split('.')[1].partition('=')[0]}"
    words = [*WORDS, f"train.steps={STEPS}"]
    rows = leg(name, folder, *words, *more)
    expected = leg("ddp", "one", *words, ranks=1)
    if leg.comm.rank == 0:
        assert numbers(rows) == numbers(expected)
        assert tensors_of(project / folder) == tensors_of(project / "one")


@pytest.mark.ranks(2, 3, 4)
def test_mixed_precision_has_the_numbers_of_one_rank(leg: Legs, project: Path) -> None:
    words = [*WORDS, "parallel.mixed_precision=bfloat16", f"train.steps={STEPS}"]
    for name in ("zero1", "fsdp"):
        rows = leg(name, f"mixed_{name}", *words)
        expected = leg("zero2", "mixed_one", *words, ranks=1)
        if leg.comm.rank == 0:
            assert numbers(rows) == numbers(expected)
            assert tensors_of(project / f"mixed_{name}") == tensors_of(project / "mixed_one")


@pytest.mark.ranks(2, 3, 4)
def test_resumes_on_other_ranks_and_strategies_keep_every_bit(leg: Legs, project: Path) -> None:
    straight = leg("ddp", "straight_on", *WORDS, "train.steps=50", ranks=1)
    size = leg.comm.size
    legs = [
        ("ddp", size, 11),
        ("fsdp", max(size - 1, 1), 23),
        ("zero1", 1, 30),
        ("fsdp_alone", 2, 41),
        ("zero2", size, 50),
    ]
    for name, ranks, steps in legs:
        rows = leg(name, "passed_on", *WORDS, f"train.steps={steps}", ranks=ranks)
    if leg.comm.rank == 0:
        assert losses(rows) == losses(straight) and len(rows) == 50
        assert tensors_of(project / "passed_on", 50) == tensors_of(project / "straight_on", 50)


@pytest.mark.ranks
def test_more_ranks_than_microbatches_are_refused(leg: Legs) -> None:
    with pytest.raises(SettingsError, match=r"in microbatches of 12 has 1 .* start at most 1"):
        leg("ddp", "refused", "parallel.reproducible=true", "train.microbatch=12", "train.steps=1")
