"""Runs that start from another run's model: only the weights are used; a mismatch is refused before any write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.training_fixtures import Training, make_batches, make_net, metrics_of, seed_everything

from hpctrain.errors import CheckpointError, UsageError
from hpctrain.train.resume import carried

LAST = "checkpoints/step_00000004.h5"


@pytest.fixture
def other(job: Any, shared_tmp_path: Path) -> Path:
    """Return the last checkpoint of a run of four steps."""
    Training(job, shared_tmp_path / "other", make_batches(4)).go()
    job.comm.barrier()
    return shared_tmp_path / "other" / LAST


def stored(path: Path, group: str = "model") -> dict[str, Any]:
    with h5py.File(path) as file:
        return {name: data[()] for name, data in file[group].items() if isinstance(data, h5py.Dataset)}


def provenance(path: Path) -> dict[str, Any]:
    with h5py.File(path) as file:
        return dict(file["provenance"].attrs)


class Wide(Training):
    """Training of a net whose last layer has two outputs."""

    def __init__(self, job: Any, folder: Path, loader: Any, **options: Any) -> None:
        seed_everything(11)
        self.model = make_net()
        self.model[3] = torch.nn.Linear(8, 2)
        job.wrap(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.job, self.losses = job, list[float]()
        self.run = job.run(self.model, self.optimizer, loader, checkpoints=str(folder), **options)


@pytest.mark.ranks(1, 2, 3)
def test_only_the_weights_are_used(job: Any, shared_tmp_path: Path, other: Path, caplog: Any) -> None:
    one = Training(job, shared_tmp_path / "new", make_batches(6, seed=9), every=2, start_from=other)
    seen: dict[str, Any] = {}

    def look(step: int, batch: torch.Tensor) -> None:
        if step == 1:
            seen.update({name: value.numpy().copy() for name, value in one.model.state_dict().items()})
            assert not one.optimizer.state and one.run.step == 0 and one.run.state.tokens == 0

    with caplog.at_level("INFO", "hpctrain"):
        one.go(look)
    job.comm.barrier()
    expected = stored(other)
    assert seen.keys() == expected.keys() and all(np.array_equal(seen[name], expected[name]) for name in seen)
    assert [row["step"] for row in metrics_of(shared_tmp_path / "new")] == [1, 2, 3, 4, 5, 6]
    assert f"starting from the model of {other}, written after step 4" in caplog.text or job.rank
    kept = provenance(shared_tmp_path / "new" / LAST)
    assert (kept["start_from"], kept["start_step"]) == (bytes(other.resolve()), 4) and "start_skip.json" not in kept

    # Equal to a program that fills its model by itself with plain torch.
    plain = Training(job, shared_tmp_path / "plain", make_batches(6, seed=9))
    plain.model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in expected.items()})
    assert plain.go().losses == one.losses


@pytest.mark.ranks(1, 2)
def test_a_resumed_run_no_longer_needs_the_file(job: Any, shared_tmp_path: Path, other: Path, caplog: Any) -> None:
    folder = shared_tmp_path / "new"
    whole = Training(job, shared_tmp_path / "whole", make_batches(6), start_from=other, every=2).go()
    Training(job, folder, make_batches(6), start_from=other, every=2, steps=2).go()
    job.comm.barrier()
    if job.rank == 0:
        other.unlink()
    job.comm.barrier()
    caplog.clear()
    again = Training(job, folder, make_batches(6), start_from=other, every=2).go()
    assert again.losses == whole.losses[2:] and "starting from" not in caplog.text
    job.comm.barrier()
    assert provenance(folder / "checkpoints/step_00000006.h5")["start_from"] == bytes(other.resolve())


@pytest.mark.ranks(1, 2)
def test_a_run_that_did_not_start_there_has_no_such_provenance(job: Any, shared_tmp_path: Path, other: Path) -> None:
    folder = shared_tmp_path / "new"
    Training(job, folder, make_batches(6), steps=2).go()
    job.comm.barrier()
    Training(job, folder, make_batches(6), start_from=other, start_skip=["x"]).go()
    job.comm.barrier()
    assert not [name for name in provenance(folder / "checkpoints/step_00000006.h5") if name.startswith("start")]


@pytest.mark.ranks(1, 2, 3)
def test_skipped_tensors_need_not_match(job: Any, shared_tmp_path: Path, other: Path, caplog: Any) -> None:
    folder = shared_tmp_path / "new"
    with pytest.raises(CheckpointError, match="cannot start from .*start_skip.* 2 differences") as found:
        Wide(job, folder, make_batches(2), start_from=other).go()
    said = str(found.value)
    assert found.value.everywhere and "3.weight" in said and "float32 1x8" in said and "float32 2x8" in said
    assert not folder.exists()
    job.comm.barrier()

    one = Wide(job, folder, make_batches(2), start_from=other, start_skip=["3.*"])
    built = one.model[3].weight.detach().clone()
    with caplog.at_level("INFO", "hpctrain"), one.run:
        assert torch.equal(one.model[3].weight, built)
        assert np.array_equal(one.model[0].weight.detach().numpy(), stored(other)["0.weight"])
        one.run.state.step = 4
        one.run.save()
    assert "not loaded from it: 3.weight, 3.bias" in caplog.text or job.rank
    job.comm.barrier()
    assert json.loads(provenance(folder / LAST)["start_skip.json"]) == ["3.*"]


@pytest.mark.ranks(1, 2)
def test_the_newest_valid_checkpoint_of_a_folder_is_used(
    job: Any, shared_tmp_path: Path, other: Path, caplog: Any
) -> None:
    if job.rank == 0:
        later = other.with_name("step_00000009.h5")
        later.write_bytes(other.read_bytes()[:-1])
    job.comm.barrier()
    for number, folder in enumerate((other.parent, other.parent.parent)):
        caplog.clear()
        with caplog.at_level("INFO", "hpctrain"):
            Training(job, shared_tmp_path / f"new_{number}", make_batches(2), start_from=folder).go()
        job.comm.barrier()
        assert f"{folder} is a folder: using its newest valid checkpoint, {other}" in caplog.text or job.rank
        found = provenance(shared_tmp_path / f"new_{number}/checkpoints/step_00000002.h5")
        assert (found["start_from"], found["start_step"]) == (bytes(other.resolve()), 4)


@pytest.mark.ranks(1, 2)
def test_missing_and_foreign_files_are_an_error(job: Any, shared_tmp_path: Path, other: Path) -> None:
    folder = shared_tmp_path / "new"
    wrong = {
        shared_tmp_path / "nowhere.h5": "cannot start from .*nowhere.h5.*No such file",
        shared_tmp_path: "cannot start from .* is a folder that holds no checkpoint",
        Path(__file__): "not an HDF5 file",
    }
    for path, said in wrong.items():
        with pytest.raises(CheckpointError, match=said) as found:
            Training(job, folder, make_batches(2), start_from=path).go()
        assert found.value.everywhere and found.value.exit_code == 2 and not folder.exists()
    with pytest.raises(UsageError, match="nothing in .* is called 'head.*', which is to be skipped") as refused:
        Training(job, folder, make_batches(2), start_from=other, start_skip=["head.*"]).go()
    assert refused.value.everywhere and not folder.exists()


@pytest.mark.ranks(1, 2)
def test_a_damaged_file_is_an_error(job: Any, shared_tmp_path: Path, other: Path) -> None:
    if job.rank == 0:
        with h5py.File(other, "r") as file:
            offset = file["model/0.weight"].id.get_offset()
        data = bytearray(other.read_bytes())
        data[offset] ^= 1
        other.write_bytes(data)
    job.comm.barrier()
    with pytest.raises(CheckpointError, match="cannot start from .*0.weight is damaged") as found:
        Training(job, shared_tmp_path / "new", make_batches(2), start_from=other).go()
    assert found.value.everywhere and not (shared_tmp_path / "new").exists()


def test_provenance_is_kept_over_a_resume() -> None:
    before = {"start_from": "a", "start_step": 4, "host": "x"}
    now = {"host": "y", "start_from": "b", "start_skip": ["c"]}
    assert carried(before, now) == {"host": "y", "start_from": "a", "start_step": 4}
    assert carried({"host": "x"}, now) == {"host": "y"}
