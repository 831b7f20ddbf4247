"""Whole runs under sharding strategies: the loss curve of a plain loop, and one file format for all of them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import pytest
from support.train_runs import ONE_OF_EACH, SPLIT, Legs, losses, poisoning, signalling
from support.training_fixtures import checkpoints_of, contents

from hpctrain.errors import NonFiniteError
from hpctrain.parallel.fsdp.strategy import ShardedDataParallel

STEPS = 50
CLOSE = 1e-5


@pytest.mark.ranks(2, 4)
def test_the_loss_curve_of_hybrid_sharding_equals_that_of_a_plain_loop(leg: Legs) -> None:
    steps = STEPS if leg.comm.size == 2 else 20  # errors with more ranks show early
    plain, rows = leg.plain(steps), leg("hybrid", "plain_hybrid", f"train.steps={steps}")
    assert losses(rows) == pytest.approx(plain, rel=CLOSE) and plain[-1] < plain[0] - (0.5 if steps == STEPS else 0.2)
    assert all(row["grad_norm"] > 0 for row in rows) and 0 < rows[-1]["validation_loss"] < 6


@pytest.mark.ranks(2, 3, 4)
def test_a_run_may_resume_under_another_strategy_bit_for_bit(leg: Legs, project: Path) -> None:
    """Without clipping, as norms of shards differ in the last digits, and with dropout from each rank's generator."""
    words = ["train.clip=0", "model.options.dropout=0.3", "optimizer.schedule=constant"]
    straight = leg("ddp", "straight", *words, f"train.steps={STEPS}")
    names = ["zero1", "fsdp", "ddp", "zero2", "fsdp_alone"]
    for number, name in enumerate(names, 1):
        more = ["checkpoint.background=true", "checkpoint.every=3"] if name == "fsdp" else []
        rows = leg(name, "passed", *words, *more, f"train.steps={number * STEPS // len(names)}")
    assert losses(rows) == pytest.approx(losses(straight), rel=CLOSE)
    if leg.comm.size < 4 and leg.comm.nodes == 1:  # messages of more ranks are summed in another order
        one, two = (_tensors(project / folder) for folder in ("straight", "passed"))
        assert len(one) > 20 and one == two and losses(rows) == losses(straight)


def _tensors(folder: Path) -> dict[str, bytes]:
    """Return the parts of a run's last checkpoint that must be equal."""
    every = contents(folder / f"checkpoints/step_{STEPS:08d}.h5")
    return {name: each for name, each in every.items() if name.split("/")[0] in ("model", "optimizer", "rng")}


@pytest.mark.ranks(2, 3, 4)
def test_a_run_may_resume_on_another_number_of_ranks(leg: Legs) -> None:
    """The run is stopped by a signal, so that the learning rate follows the schedule of all steps."""
    size = leg.comm.size
    for name, ranks in [("fsdp", size), ("zero1", 1), ("fsdp_alone", size), ("ddp", size - 1), ("zero2", size)]:
        leg.on_wrap = signalling(8)
        with pytest.raises(SystemExit) if leg.comm.rank < ranks else nullcontext():
            leg(name, "sizes", f"train.steps={STEPS}", ranks=ranks)
    leg.on_wrap = lambda model: None
    rows = leg("fsdp", "sizes", f"train.steps={STEPS}")
    assert losses(rows) == pytest.approx(leg.plain(STEPS), rel=CLOSE)


@pytest.mark.few(2)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("accumulate", ["local", "reduced"])
@pytest.mark.parametrize("name", SPLIT)
def test_four_passes_per_step_accumulate(
    leg: Legs, monkeypatch: pytest.MonkeyPatch, name: str, accumulate: str
) -> None:
    no_sync, kept = ShardedDataParallel.no_sync, []

    def counting(self: Any) -> Any:
        kept.append(1)
        return no_sync(self)

    monkeypatch.setattr(ShardedDataParallel, "no_sync", counting)
    words = ["train.batch=48", "train.accumulate=4", f"parallel.accumulate={accumulate}", "train.steps=6"]
    rows = leg(name, f"four_{name}_{accumulate}", *words)
    assert losses(rows) == pytest.approx(leg.plain(6, batch=48), rel=CLOSE)
    assert len(kept) == (6 * 3 if accumulate == "local" else 0)


@pytest.mark.ranks(2, 3, 4)
def test_an_evaluation_may_have_fewer_samples_than_ranks(leg: Legs) -> None:
    words = ["data.validation_samples=1", "train.evaluate_every=2", "optimizer.schedule=constant"]
    expected = leg("ddp", "few_ddp", *words, "train.steps=6")
    for name in SPLIT:
        for steps in (5, 6):  # a resumed run has its first evaluation after one step
            rows = leg(name, f"few_{name}", *words, f"train.steps={steps}")
        assert losses(rows) == pytest.approx(losses(expected), rel=CLOSE)
        assert [row["step"] for row in rows if "validation_loss" in row] == [2, 4, 5, 6]
        values = [[each[step - 1]["validation_loss"] for step in (2, 4, 6)] for each in (rows, expected)]
        assert values[0] == pytest.approx(values[1], rel=CLOSE)


# NaN ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def poison(leg: Legs) -> Any:
    """Return a function that gives the last rank a NaN in the embedding's gradient, in some of its passes."""

    def set_passes(*passes: int) -> None:
        if leg.comm.rank == leg.comm.size - 1:
            leg.on_wrap = poisoning(passes)

    return set_passes


@pytest.mark.few(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_abort_names_rank_and_parameter(leg: Legs, project: Path, poison: Any, name: str) -> None:
    poison(4, 5)  # in step 4, and in the repeated pass that locates the NaN
    said = f"in step 4: on rank {leg.comm.size - 1} the gradient of embedding.weight is not finite"
    with pytest.raises(NonFiniteError, match=said) as found:
        leg(name, f"abort_{name}", "train.steps=9", "checkpoint.every=2")
    assert found.value.everywhere
    assert checkpoints_of(project / f"abort_{name}") == ["step_00000002.h5"]


@pytest.mark.few(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_nan_is_handled_as_under_ddp(leg: Legs, poison: Any, policy: str) -> None:
    words = ["train.steps=9", "checkpoint.every=2", f"train.on_nonfinite={policy}"]
    rows = {}
    for name in ("ddp", *ONE_OF_EACH):
        poison(4, 5)
        rows[name] = leg(name, f"{policy}_{name}", *words)
    expected = [(row["loss"], row.get("skipped", False)) for row in rows["ddp"]]
    assert [skipped for _, skipped in expected].count(True) == (policy == "skip") and len(expected) == 9
    for name in ONE_OF_EACH:
        found = [(row["loss"], row.get("skipped", False)) for row in rows[name]]
        assert found == [(pytest.approx(loss, rel=CLOSE), skipped) for loss, skipped in expected], name


# Starts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_run_starts_from_the_model_of_another_strategy(leg: Legs, project: Path) -> None:
    leg("ddp", "other", "train.steps=4")
    start = ["train.start_from=other/checkpoints/step_00000004.h5", "train.steps=3", "train.seed=5"]
    expected = losses(leg("ddp", "new_ddp", *start))
    for name in SPLIT:
        found = losses(leg(name, f"new_{name}", *start))
        assert found[0] == expected[0] and found == pytest.approx(expected, rel=CLOSE)
    with h5py.File(project / "new_fsdp/checkpoints/step_00000003.h5") as file:
        assert file["provenance"].attrs["start_step"] == 4
