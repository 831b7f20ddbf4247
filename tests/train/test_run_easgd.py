"""Whole runs of workers with replicas of their own: resumes, and other uses of the saved centre."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.train_runs import Legs, losses, signalling
from support.training_fixtures import contents, metrics_of

from hpctrain.errors import UsageError

pytestmark = pytest.mark.ranks(2, 3)
EASGD = ("parallel.data=easgd", "train.clip=0.5", "optimizer.schedule=constant")


def test_a_stopped_run_resumes_bit_for_bit(leg: Legs, project: Path) -> None:
    """Workers, their moments and the phase of the exchange are restored, at an exchange or between two."""
    words = [*EASGD, "asynchronous.period=2", "model.options.dropout=0.2"]
    straight = leg("ddp", "straight", *words, "train.steps=9")
    again = leg("ddp", "straight_again", *words, "train.steps=9")
    leg("ddp", "stopped", *words, "train.steps=5")
    rows = leg("ddp", "stopped", *words, "train.steps=9")
    assert losses(rows) == losses(straight) == losses(again)
    files = [contents(project / folder / "checkpoints/step_00000009.h5") for folder in ("straight", "stopped")]
    parts = [
        {name: each for name, each in one.items() if name.split("/")[0] in ("model", "optimizer", "workers", "rng")}
        for one in files
    ]
    assert parts[0] == parts[1] and sum(name.endswith("/parameters") for name in parts[0]) == leg.comm.size
    assert rows[-1]["centre_distance"] > 0 and 0 < rows[-1]["validation_loss"] < 6
    assert 0 < rows[-1]["communication"] < 1 and "staleness" not in rows[-1]


APART = {
    "asynchronous": ["asynchronous.mode=asynchronous"],
    "round-robin": ["asynchronous.mode=round-robin"],
    "server": ["parallel.data=server"],
    "locked": ["parallel.data=server", "asynchronous.lock=true", "asynchronous.max_staleness=4"],
    "served": ["parallel.data=server", "asynchronous.ranks=1"],
    "hogwild": ["parallel.data=hogwild"],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", APART)
def test_asynchronous_workers_save_and_stop_after_the_same_step(leg: Legs, project: Path, mode: str) -> None:
    """One rank is signalled: all save after the same step, and resume from there."""
    words = [*EASGD, *APART[mode], "train.steps=12", "train.evaluate_every=4", "checkpoint.every=5"]
    if leg.comm.rank == (0 if mode == "served" else leg.comm.size - 1):
        leg.on_wrap = signalling(6)
    with pytest.raises(SystemExit, match="75"):
        leg("ddp", mode, *words)
    leg.on_wrap = lambda model: None
    rows = metrics_of(project / mode)
    assert 6 <= rows[-1]["step"] < 12
    rows = leg("ddp", mode, *words)
    assert len(losses(rows)) == 12 and rows[11]["loss"] < rows[0]["loss"]
    evaluated = [row for row in rows if "validation_loss" in row]
    assert [row["step"] for row in evaluated] == [4, 8, 12]
    for row in evaluated:
        assert 0 <= row["staleness"] <= row["staleness_most"] and 0 < row["communication"] < 1
    histograms = [row["staleness_histogram"] for row in rows if "staleness" in row]
    workers = leg.comm.size - (mode == "served")
    assert sum(histograms[0]) == 4 * workers and sum(map(sum, histograms)) == 12 * workers
    with h5py.File(project / mode / "checkpoints/step_00000012.h5") as file:
        served = "parallel.data=server" in APART[mode]
        added = [sum(column) for column in zip_longest(*histograms, fillvalue=0)]
        assert file["train/staleness_histogram"][...].tolist() == added
        assert "optimizer" in file if served else len(file["workers"]) == leg.comm.size
    start = [f"train.start_from={mode}/checkpoints/step_00000012.h5", "optimizer.learning_rate=0", "train.steps=1"]
    loaded = leg("ddp", f"{mode}_loaded", *start, "parallel.data=ddp")
    assert loaded[-1]["validation_loss"] == pytest.approx(rows[-1]["validation_loss"], rel=1e-6)


@pytest.mark.parametrize("mode", ["asynchronous", "server", "hogwild"])
def test_background_checkpoints_are_refused(leg: Legs, mode: str) -> None:
    with pytest.raises(UsageError, match="checkpoint.background: not possible with asynchronous workers"):
        leg("ddp", "refused", *EASGD, *APART[mode], "checkpoint.background=true", "train.steps=2")


def test_other_runs_load_the_centre(leg: Legs, project: Path) -> None:
    """The file's model is not a replica: under ddp it evaluates to the loss of the run, and it starts fewer workers."""
    size = leg.comm.size
    rows = leg("ddp", "source", *EASGD, "train.steps=6")
    path = project / "source/checkpoints/step_00000006.h5"
    with h5py.File(path) as file:
        workers = [file[f"workers/{rank}/parameters"][...] for rank in range(size)]
        first = next(iter(file["model"].values()))[...].reshape(-1)
    assert all(not np.array_equal(one[: first.size], first) for one in workers)
    assert len({one.tobytes() for one in workers}) == size
    start = [f"train.start_from={path}", "optimizer.learning_rate=0", "train.steps=1"]
    loaded = leg("ddp", "loaded", *start, "parallel.data=ddp")
    assert loaded[-1]["validation_loss"] == pytest.approx(rows[-1]["validation_loss"], rel=1e-6)
    fewer = leg("ddp", "source", *EASGD, "train.steps=7", ranks=size - 1)
    if leg.comm.rank < size - 1:
        assert len(fewer) == 7
