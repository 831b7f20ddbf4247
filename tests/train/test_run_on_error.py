"""Failed checkpoints: with a message, the run stops or continues on all ranks, as configured."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.disks import PLENTY, shared_disk
from support.faults import file_size_limit
from support.training_fixtures import Training, checkpoints_of, contents, make_batches, metrics_of, receipt_of

from hpctrain.errors import CheckpointError, NonFiniteError

STEPS = 8


def training(job: Any, folder: Path, **options: Any) -> Training:
    return Training(job, folder, make_batches(STEPS), **{"every": 2, "keep": 9, **options})


class Blocked:
    """Callback that makes a run's checkpoints unwritable in steps ``first`` to ``last``, on rank 0, even for root."""

    def __init__(self, job: Any, run: Any, first: int, last: int = 99) -> None:
        self.job, self.first, self.last = job, first, last
        self.place, self.away = run.state.folder, run.folder / "away"

    def __call__(self, step: int, batch: torch.Tensor) -> None:
        if self.job.rank == 0 and step == self.first:
            self.place.rename(self.away)
            self.place.write_text("in the way")
        if self.job.rank == 0 and step == self.last + 1:
            self.restore()

    def restore(self) -> None:
        self.place.unlink()
        self.away.rename(self.place)


@pytest.mark.ranks(1, 2, 3)
def test_with_continue_the_run_continues_and_retries(job: Any, shared_tmp_path: Path, caplog: Any) -> None:
    whole = training(job, shared_tmp_path / "whole").go()
    one = training(job, shared_tmp_path / "blocked", on_error="continue")
    with caplog.at_level("WARNING", "hpctrain"):
        one.go(Blocked(job, one.run, 3, 6))
    job.comm.barrier()
    assert one.losses == whole.losses and len(metrics_of(one.run.folder)) == STEPS
    assert checkpoints_of(one.run.folder) == ["step_00000002.h5", "step_00000008.h5"]
    last = "checkpoints/step_00000008.h5"
    assert contents(one.run.folder / last) == contents(whole.run.folder / last)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if job.rank:
        assert not said
        return
    first, second, again = said
    assert "no checkpoint of step 4: cannot write" in first and "the next is tried after step 6" in first
    assert "no checkpoint of step 6 (2 failures in a row)" in second and "step 8" in second
    assert "step 8 is saved, after 2 failures" in again
    receipt = receipt_of(one.run.folder)
    (attempt,) = receipt["attempts"]
    assert receipt["status"] == "finished" and attempt["failed_saves"] == 2
    assert attempt["last_failed_save"]["step"] == 6 and "cannot write" in attempt["last_failed_save"]["reason"]


@pytest.mark.ranks(1, 2, 3)
def test_with_stop_the_run_stops(job: Any, shared_tmp_path: Path) -> None:
    one = training(job, shared_tmp_path)
    with pytest.raises(CheckpointError, match="cannot write .*step_00000004.h5") as found:
        one.go(Blocked(job, one.run, 3))
    assert found.value.everywhere and len(one.losses) == 4
    job.comm.barrier()
    if job.rank == 0:
        (attempt,) = receipt_of(shared_tmp_path)["attempts"]
        assert attempt["status"] == "failed" and attempt["reason"].startswith("CheckpointError: cannot write")
        assert not (shared_tmp_path / "lock.json").exists()
    one.optimizer.step()  # the hooks of the run, which refuse an update outside of its loop, are gone


@pytest.mark.few(2)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("ends_by, before", [("steps", 2), ("loader", 3), ("break", 2), ("signal", 1)])
def test_a_failed_last_save_is_always_an_error(job: Any, shared_tmp_path: Path, ends_by: str, before: int) -> None:
    """Earlier failures are counted; a failure of the last save is the run's error."""
    one = training(job, shared_tmp_path, on_error="continue", steps=STEPS if ends_by == "steps" else None)
    block = Blocked(job, one.run, 3)

    def end_in_6(step: int, batch: torch.Tensor) -> None:
        block(step, batch)
        if step == 6 and ends_by == "signal":
            one.run.stop_request.signal = 10

    with pytest.raises(CheckpointError, match="cannot write") as found:
        if ends_by == "break":
            _leave_in_6(one, block)
        else:
            one.go(end_in_6)
    assert found.value.everywhere and found.value.exit_code not in (0, 75)
    job.comm.barrier()
    if job.rank == 0:
        (attempt,) = receipt_of(shared_tmp_path)["attempts"]
        assert attempt["status"] == "failed" and attempt["failed_saves"] == before
        block.restore()
    job.comm.barrier()
    assert checkpoints_of(shared_tmp_path) == ["step_00000002.h5"]


def _leave_in_6(one: Training, block: Blocked) -> None:
    with one.run as run:
        for step, batch in run:
            block(step, batch)
            (one.model(batch) ** 2).mean().backward()
            one.optimizer.step()
            one.optimizer.zero_grad()
            run.log(loss=0.0)
            if step == 6:
                break


@pytest.mark.ranks(1, 2)
def test_a_failed_save_by_the_program_raises(job: Any, shared_tmp_path: Path) -> None:
    one = training(job, shared_tmp_path, on_error="continue", every=100)
    block = Blocked(job, one.run, 3, 5)

    def save_in_5(step: int, batch: torch.Tensor) -> None:
        block(step, batch)
        if step == 5:
            assert one.run.save().name == "step_00000005.h5"

    with pytest.raises(CheckpointError, match="cannot write"):
        one.go(save_in_5)
    assert len(one.losses) == 5


@pytest.mark.ranks(1, 2)
def test_a_save_inside_a_step_happens_at_its_end(job: Any, shared_tmp_path: Path) -> None:
    one = training(job, shared_tmp_path / "asked", every=100, keep=9)

    def save_in_5(step: int, batch: torch.Tensor) -> None:
        if step == 5:
            one.run.save()
            assert checkpoints_of(shared_tmp_path / "asked") == []

    one.go(save_in_5)
    training(job, shared_tmp_path / "due", every=5, keep=9).go()
    name = "checkpoints/step_00000005.h5"
    assert contents(shared_tmp_path / "asked" / name) == contents(shared_tmp_path / "due" / name)


@pytest.mark.ranks(1, 2)
def test_a_nan_in_a_checkpoint_is_always_an_error(job: Any, shared_tmp_path: Path) -> None:
    one = training(job, shared_tmp_path, on_error="continue")

    def spoil(step: int, batch: torch.Tensor) -> None:
        if step == 4:
            # After the check of the gradients, as an optimizer of the user may do.
            one.optimizer.register_step_post_hook(lambda *_: one.model[0].bias.data.fill_(float("nan")))

    with pytest.raises(NonFiniteError, match="must not reach a checkpoint") as found:
        one.go(spoil)
    assert found.value.everywhere and len(one.losses) == 4
    job.comm.barrier()
    assert checkpoints_of(shared_tmp_path) == ["step_00000002.h5"]


def test_an_error_of_one_rank_is_always_raised(job: Any, tmp_path: Path) -> None:
    one = training(job, tmp_path, on_error="continue")

    def fail(*arguments: Any, **more: Any) -> None:
        raise CheckpointError("only here")

    one.run.state.save_request = fail  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="only here"):
        one.go()
    assert len(one.losses) == 2


# Real disks -----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3)
def test_a_run_continues_after_a_full_disk(job: Any, shared_tmp_path: Path, caplog: Any) -> None:
    whole = training(job, shared_tmp_path / "whole").go()
    job.comm.barrier()
    size = (whole.run.state.folder / "step_00000004.h5").stat().st_size
    with shared_disk(shared_tmp_path / "disk", job.comm) as disk:
        one = training(job, disk.folder / "run", on_error="continue")

        def fill(step: int, batch: torch.Tensor) -> None:
            if job.rank == 0 and step in (3, 7):
                disk.leave(size // 2 if step == 3 else PLENTY)

        with caplog.at_level("WARNING", "hpctrain"):
            one.go(fill)
        job.comm.barrier()
        assert one.losses == whole.losses and len(metrics_of(one.run.folder)) == STEPS
        assert checkpoints_of(one.run.folder) == ["step_00000002.h5", "step_00000008.h5"]
        again = training(job, disk.folder / "run").go()
        assert again.run.step == STEPS and not again.losses
        if job.rank == 0:
            assert receipt_of(one.run.folder)["attempts"][0]["failed_saves"] == 2
            assert "no space left on device" in caplog.text and "bytes are needed" in caplog.text
            assert "the newest that exists is" in caplog.text and "step_00000002.h5" in caplog.text
        job.comm.barrier()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("on_error, done", [("stop", 4), ("continue", STEPS)])
def test_a_disk_without_a_free_byte_raises_the_checkpoint_error(
    job: Any, shared_tmp_path: Path, caplog: Any, on_error: str, done: int
) -> None:
    """The receipt cannot be written either: all ranks still raise the checkpoint's error."""
    with shared_disk(shared_tmp_path / "disk", job.comm) as disk:
        one = training(job, disk.folder / "run", on_error=on_error)

        def fill(step: int, batch: torch.Tensor) -> None:
            if job.rank == 0 and step == 3:
                disk.leave(0)

        with caplog.at_level("WARNING", "hpctrain"), pytest.raises(CheckpointError, match="no space left") as found:
            one.go(fill)
        assert len(one.losses) == done and found.value.everywhere
        job.comm.barrier()
        assert checkpoints_of(one.run.folder) == ["step_00000002.h5"]
        if job.rank == 0:
            assert caplog.text.count("; continuing without it; this is said once") == 1, caplog.text
            assert {path.name for path in one.run.folder.iterdir()} == {"checkpoints", "metrics.jsonl", "run.json"}
        job.comm.barrier()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_disk_that_becomes_read_only_is_handled(job: Any, shared_tmp_path: Path, on_error: str) -> None:
    with shared_disk(shared_tmp_path / "disk", job.comm) as disk:
        # The metrics are open for writing, and a mount with such files stays writable: they are stored elsewhere.
        if job.rank == 0:
            (shared_tmp_path / "run").mkdir()
            (disk.folder / "checkpoints").mkdir()
            (shared_tmp_path / "run/checkpoints").symlink_to(disk.folder / "checkpoints")
        job.comm.barrier()
        one = training(job, shared_tmp_path / "run", on_error=on_error)

        def close(step: int, batch: torch.Tensor) -> None:
            if job.rank == 0 and step in (3, 7):
                disk.writable(step == 7)

        if on_error == "stop":
            with pytest.raises(CheckpointError, match="read-only file system") as found:
                one.go(close)
            assert found.value.everywhere and len(one.losses) == 4
        else:
            assert len(one.go(close).losses) == STEPS
        job.comm.barrier()
        left = ["step_00000002.h5"] + ["step_00000008.h5"] * (on_error == "continue")
        assert checkpoints_of(disk.folder) == left
        job.comm.barrier()


@pytest.mark.ranks(1, 2)
def test_a_limit_on_file_sizes_is_handled(job: Any, shared_tmp_path: Path, caplog: Any) -> None:
    """A limit on the size of files on one rank: to a process it looks like a quota, and needs no root."""
    one = training(job, shared_tmp_path, on_error="continue")
    with ExitStack() as limits:

        def limit(step: int, batch: torch.Tensor) -> None:
            if job.rank == 0 and step == 3:
                limits.enter_context(file_size_limit(8192))
            if step == 7:
                limits.close()

        one.go(limit)
    job.comm.barrier()
    assert checkpoints_of(shared_tmp_path) == ["step_00000002.h5", "step_00000008.h5"]
    assert len(one.losses) == STEPS and (job.rank or "file too large" in caplog.text)
