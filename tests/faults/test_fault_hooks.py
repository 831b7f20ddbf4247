"""Faults injected into a run of this process, or of all ranks of this session: none of these ends a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training_fixtures import Training, checkpoints_of, contents, make_batches, metrics_of

from hpctrain.checkpoint.format import writer
from hpctrain.checkpoint.format.reader import verify_file
from hpctrain.errors import CheckpointError, CheckpointFaultError, MismatchError, NonFiniteError, UsageError
from hpctrain.faults.actions import RECORD, flip_bit
from hpctrain.faults.spec import PLACES, VARIABLE

STEPS = 8


@pytest.fixture
def train(job: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that trains in a folder of this name, with a fault."""

    def run(name: str, fault: str = "", **options: Any) -> Training:
        monkeypatch.setenv(VARIABLE, fault)
        options = {"every": 3, "keep": 9, "steps": STEPS, **options}
        training = Training(job, shared_tmp_path / name, make_batches(STEPS), **options)
        try:
            training.go()
        finally:
            left = hooks(training)
            assert not left, "the run leaves hooks of faults behind"
        return training

    return run


def hooks(training: Training) -> list[str]:
    """Return what a run's objects have of an injector."""
    run = training.run
    owners: dict[str, Any] = {
        "streams": run.streams,
        "feed": run.feed,
        "state": run.state,
        "retention": run.state.retention,
        "comm": run.job.comm,
    }
    found = [
        f"{name}.{key}"
        for name, owner in owners.items()
        for key in vars(owner)
        if callable(getattr(type(owner), key, None))
    ]
    tables = ("_forward_pre_hooks", "_forward_hooks")
    kept = [hook for module in training.model.modules() for name in tables for hook in vars(module)[name].values()]
    found += [str(hook) for hook in kept if "faults" in str(getattr(hook, "_function", ""))]
    return found + ([] if writer.open_private.__module__ == writer.__name__ else ["open_private"])


def fired(folder: Path) -> list[dict[str, Any]]:
    """Return the record of the faults that have fired."""
    path = folder / RECORD
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def said(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if "injected" in record.getMessage()]


@pytest.mark.ranks(1, 2)
def test_a_run_without_faults_has_no_hooks(job: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(job, shared_tmp_path, make_batches(STEPS), every=3)
    assert hooks(training) == []
    monkeypatch.setenv(VARIABLE, "kill step=3")
    other = Training(job, shared_tmp_path / "other", make_batches(STEPS), every=3)
    assert bool(hooks(other)) == (job.rank == job.size - 1)
    other.run.feed.close()
    assert hooks(other) == []


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    "fault",
    [
        "pause step=4 seconds=0.3",
        "slow step=2 factor=2",
        "eio step=4 seconds=0.4",
        pytest.param("full step=4 seconds=0.4", marks=pytest.mark.slow),
    ],
)
def test_a_run_survives_a_fault_that_passes(
    job: Any, train: Any, shared_tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTRAIN_FILE_PATIENCE", "0.2")
    plain = train("plain")
    one = train("one", fault)
    assert one.losses == plain.losses and one.run.fingerprint == plain.run.fingerprint
    job.comm.barrier()
    (row,) = fired(shared_tmp_path / "one")
    assert row["fault"] == " ".join([fault.split()[0], *sorted(fault.split()[1:])]) and row["rank"] == job.size - 1
    assert checkpoints_of(shared_tmp_path / "one") == [f"step_{step:08}.h5" for step in (3, 6, 8)]


@pytest.mark.ranks(1, 3)
def test_a_slow_rank_takes_longer_in_each_step(train: Any, shared_tmp_path: Path) -> None:
    train("plain")
    train("one", "slow step=7 factor=100 rank=0")
    plain, slow = (
        min(row["step_seconds"] for row in metrics_of(shared_tmp_path / name)[6:]) for name in ("plain", "one")
    )
    assert slow > 10 * plain


@pytest.mark.ranks(1, 2, 3)
def test_a_nan_is_found_before_the_update(job: Any, train: Any, shared_tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level("WARNING", "hpctrain"):
        with pytest.raises(NonFiniteError, match="gradient norm is nan in step 5: the averaged gradient of "):
            train("one", "nan step=5")
    expected = [f"injected fault: nan on rank {job.size - 1} in step 5 at backward"]
    assert said(caplog) == (expected if job.rank == job.size - 1 else [])
    assert checkpoints_of(shared_tmp_path / "one") == ["step_00000003.h5"]
    # A later start does not meet the fault again.
    plain, again = train("plain"), train("one", "nan step=5")
    assert again.losses == plain.losses[3:] and again.run.fingerprint == plain.run.fingerprint


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_nan_is_met_once(train: Any, policy: str, shared_tmp_path: Path) -> None:
    one = train("one", "nan step=5", on_nonfinite=policy)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in one.model.parameters())
    rows = metrics_of(shared_tmp_path / "one")
    assert [row["step"] for row in rows if row.get("skipped")] == ([5] if policy == "skip" else [])


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("target", ["parameter", "moment"])
def test_a_flipped_bit_is_found_at_the_next_checkpoint(train: Any, shared_tmp_path: Path, target: str) -> None:
    with pytest.raises(MismatchError, match="parameter 3.weight of the model at the checkpoint of step 6: rank "):
        train("one", f"flip in={target} step=4 tensor=3.weight bit=21")
    assert checkpoints_of(shared_tmp_path / "one") == ["step_00000003.h5"]


def test_one_bit_of_a_parameter_is_flipped(train: Any, shared_tmp_path: Path) -> None:
    plain, one = train("plain"), train("one", "flip in=parameter step=8 tensor=0.bias bit=2")
    different = {
        name: (a, b)
        for (name, a), b in zip(plain.model.named_parameters(), one.model.parameters())
        if not torch.equal(a, b)
    }
    assert list(different) == ["0.bias"]
    a, b = (tensor.detach().view(torch.int32) for tensor in different["0.bias"])
    assert (a ^ b).tolist() == [4, *[0] * (len(a) - 1)]


@pytest.mark.parametrize(
    "dtype, bit", [(torch.float32, 22), (torch.bfloat16, 6), (torch.float16, 9), (torch.float64, 51), (torch.int64, 0)]
)
def test_the_default_bit_is_the_highest_of_the_mantissa(dtype: torch.dtype, bit: int) -> None:
    tensor = torch.ones(3, 2, dtype=dtype)
    before = tensor.clone()
    flip_bit(tensor, None)
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    assert (tensor.view(width) ^ before.view(width)).flatten().tolist() == [1 << bit, 0, 0, 0, 0, 0]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "fault",
    [
        "flip in=checkpoint step=6",
        pytest.param("flip in=checkpoint step=5 tensor=3.weight bit=9", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_not_resumed(train: Any, job: Any, shared_tmp_path: Path, fault: str) -> None:
    folder = shared_tmp_path / "one"
    plain, _ = train("plain"), train("one", f"{fault}; nan step=7 rank=0", on_nonfinite="skip", steps=7)
    job.comm.barrier()
    with pytest.raises(CheckpointError):
        verify_file(folder / "checkpoints" / "step_00000006.h5")
    verify_file(folder / "checkpoints" / "step_00000003.h5")
    job.comm.barrier()
    if job.rank == 0:
        (folder / "checkpoints" / "step_00000007.h5").unlink()
    job.comm.barrier()
    again = train("one", f"{fault}; nan step=7 rank=0")
    assert again.losses == plain.losses[3:] and len(fired(folder)) == 2


def test_a_checkpoint_in_the_background_is_damaged_when_it_is_complete(train: Any, shared_tmp_path: Path) -> None:
    train("one", "flip in=checkpoint step=4", background=True)
    (row,) = fired(shared_tmp_path / "one")
    for step in (3, 6, 8):
        path = shared_tmp_path / "one" / "checkpoints" / f"step_{step:08}.h5"
        if step == row["step"]:
            with pytest.raises(CheckpointError):
                verify_file(path)
        else:
            verify_file(path)
    assert row["step"] == 6


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind, reason", [("full", "no space left on device"), ("eio", "input/output error")])
def test_a_lasting_fault_of_the_disk_ends_the_run(
    train: Any, job: Any, shared_tmp_path: Path, kind: str, reason: str
) -> None:
    with pytest.raises(CheckpointFaultError, match=f"cannot write .*step_00000006.h5: {reason}") as found:
        train("one", f"{kind} step=4")
    job.comm.barrier()
    assert found.value.everywhere and found.value.exit_code == 1
    assert checkpoints_of(shared_tmp_path / "one") == ["step_00000003.h5"]


@pytest.mark.ranks(1, 3)
def test_a_run_may_continue_without_checkpoints(train: Any, shared_tmp_path: Path) -> None:
    plain, one = train("plain"), train("one", "full step=4 seconds=0.001", on_error="continue")
    assert one.losses == plain.losses
    assert checkpoints_of(shared_tmp_path / "one") == ["step_00000003.h5", "step_00000008.h5"]


@pytest.mark.parametrize(
    "place, background",
    [
        *((place, False) for place in PLACES),
        ("save", True),
        *(pytest.param(place, True, marks=pytest.mark.long) for place in PLACES if place != "save"),
    ],
)
def test_a_fault_fires_once_at_its_place(
    train: Any, shared_tmp_path: Path, place: str, background: bool, caplog: Any
) -> None:
    plain = train("plain")
    with caplog.at_level("WARNING", "hpctrain"):
        with pytest.raises(RuntimeError, match=f"injected fault: exception on rank 0 in step 6 at {place}"):
            train("one", f"exception step=6 at={place}", background=background)
    assert said(caplog) == [f"injected fault: exception on rank 0 in step 6 at {place}"]
    (row,) = fired(shared_tmp_path / "one")
    assert row["fault"] == f"exception at={place} step=6" and (row["rank"], row["at"]) == (0, place)
    again = train("one", f"exception step=6 at={place}", background=background)
    assert again.losses == plain.losses[-len(again.losses) :] and again.run.fingerprint == plain.run.fingerprint
    last = "checkpoints/step_00000008.h5"
    assert contents(shared_tmp_path / "one" / last) == contents(shared_tmp_path / "plain" / last)


def test_each_start_has_the_next_of_equal_faults(train: Any, shared_tmp_path: Path) -> None:
    fault = "; ".join(["exception step=5"] * 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="injected fault"):
            train("one", fault)
    assert len(fired(shared_tmp_path / "one")) == 2
    assert len(train("one", fault).losses) == STEPS - 3


def test_a_damaged_line_of_the_record_is_ignored(train: Any, shared_tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        train("one", "exception step=5")
    with (shared_tmp_path / "one" / RECORD).open("a") as file:
        file.write('{"fault": "exit st')
    assert len(train("one", "exception step=5").losses) == STEPS - 3


def test_a_fault_that_was_not_injected_is_reported(train: Any, caplog: Any) -> None:
    train("one", steps=5)
    with caplog.at_level("WARNING", "hpctrain"):
        train("one", "exception step=3")
    assert said(caplog) == ["fault not injected: exception on rank 0 in step 3 at forward; the run is after step 5"]


@pytest.mark.parametrize("place", ["optimizer", "save"])
def test_a_fault_of_the_last_step_that_was_not_injected_is_reported(train: Any, caplog: Any, place: str) -> None:
    train("one", steps=5)
    with caplog.at_level("WARNING", "hpctrain"):
        train("one", f"exception step=5 at={place}", steps=5)
    assert said(caplog) == [f"fault not injected: exception on rank 0 in step 5 at {place}; the run is after step 5"]


def test_several_faults_of_one_save_fire(train: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTRAIN_FILE_PATIENCE", "0.2")
    train("one", "full step=5 seconds=0.3; pause step=5 seconds=0.1 at=save; eio step=5 seconds=0.3")
    assert [(row["fault"][:4], row["step"]) for row in fired(shared_tmp_path / "one")] == [
        ("full", 6),
        ("paus", 6),
        ("eio ", 6),
    ]


def test_a_moment_that_does_not_exist_is_an_error(train: Any) -> None:
    with pytest.raises(UsageError, match="flip in=moment 0.bias: this rank has no such values in step 1"):
        train("one", "flip in=moment tensor=0.bias step=1 at=begin")


@pytest.mark.ranks(1, 2, 3)
def test_a_wrong_fault_is_refused_on_all_ranks_before_the_run(train: Any, job: Any, shared_tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=f"rank=9: the job has {job.size} ranks?; allowed are 0 to {job.size - 1}"
    ) as found:
        train("one", "kill rank=9 step=3")
    assert found.value.everywhere and not (shared_tmp_path / "one").exists()
