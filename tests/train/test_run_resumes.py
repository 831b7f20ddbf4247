"""Runs in a user's own program: they resume bit for bit after any end, and refuse wrong use with a reason."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training_fixtures import (
    PositionedLoader,
    Training,
    checkpoints_of,
    contents,
    make_batches,
    make_net,
    metrics_of,
    receipt_of,
    seed_everything,
)
from torch.utils.data import DataLoader, TensorDataset

from hpctrain.errors import CheckpointError, LockError, UsageError
from hpctrain.train.exchange import LOGGED

STEPS = 9


class Stop(Exception):
    """Exception that ends a run in the middle."""


def _shuffling() -> Any:
    data = torch.utils.data.TensorDataset(torch.cat(make_batches(10)))
    batches = torch.utils.data.DataLoader(data, batch_size=6, shuffle=True, collate_fn=lambda rows: rows)

    class Stacked:
        def __iter__(self) -> Any:
            return (torch.stack([row[0] for row in rows]) for rows in batches)

    return Stacked()


LOADERS = {
    "list": lambda: make_batches(10),
    "positioned": lambda: PositionedLoader(make_batches(10)),
    "shuffling": _shuffling,
}


@pytest.mark.few(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", LOADERS)
def test_resumes_bit_for_bit(job: Any, shared_tmp_path: Path, kind: str) -> None:
    straight, halting = shared_tmp_path / "straight", shared_tmp_path / "halting"
    whole = Training(job, straight, LOADERS[kind](), steps=STEPS, every=4).go()

    def stop(step: int, batch: torch.Tensor) -> None:
        if step == 7:
            raise Stop

    first = Training(job, halting, LOADERS[kind](), steps=STEPS, every=4)
    with pytest.raises(Stop):
        first.go(stop)
    job.comm.barrier()
    again = Training(job, halting, LOADERS[kind](), steps=STEPS, every=4).go()

    assert first.losses[:4] + again.losses == whole.losses and len(whole.losses) == STEPS
    name = f"checkpoints/step_{STEPS:08d}.h5"
    one, two = contents(straight / name), contents(halting / name)
    assert one == two and {"model/0.weight", "optimizer/0.weight/exp_avg", "rng/0/torch", "train/loss"} <= set(one)
    rows = [[(row["step"], row["loss"], row["rate"]) for row in metrics_of(path)] for path in (straight, halting)]
    assert rows[0] == rows[1] and [row[0] for row in rows[0]] == list(range(1, STEPS + 1))
    if job.rank == 0:
        attempts = receipt_of(halting)["attempts"]
        assert [attempt["status"] for attempt in attempts] == ["failed", "finished"]
        assert [attempt["first_step"] for attempt in attempts] == [1, 5]
        assert not (halting / "lock.json").exists()


@pytest.mark.ranks(1, 2)
def test_a_signal_saves_once_and_exits_for_a_restart(job: Any, shared_tmp_path: Path) -> None:
    straight = Training(job, shared_tmp_path / "straight", make_batches(9), every=100).go()
    folder = shared_tmp_path / "signalled"

    def twice_in_step_3(step: int, batch: torch.Tensor) -> None:
        if step == 3 and job.rank == job.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)

    first = Training(job, folder, make_batches(9), every=100)
    with pytest.raises(SystemExit) as ended:
        first.go(twice_in_step_3)
    assert ended.value.code == 75
    job.comm.barrier()
    assert checkpoints_of(folder) == ["step_00000003.h5"]
    job.comm.barrier()
    first.run.stop_request.signal = None  # the next attempt is another process
    again = Training(job, folder, make_batches(9), every=100).go()
    assert first.losses + again.losses == straight.losses
    if job.rank == 0:
        assert [one["status"] for one in receipt_of(folder)["attempts"]] == ["stopped", "finished"]
        assert "sig" in receipt_of(folder)["attempts"][0]["reason"].lower()


@pytest.mark.ranks(1, 2)
def test_a_signal_before_the_first_step_or_during_a_save_is_handled(job: Any, shared_tmp_path: Path) -> None:
    training = Training(job, shared_tmp_path, make_batches(9), every=2)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SystemExit):
        training.go()
    job.comm.barrier()
    assert len(training.losses) == 1 and checkpoints_of(shared_tmp_path) == ["step_00000001.h5"]
    training.run.stop_request.signal = None
    job.comm.barrier()

    again = Training(job, shared_tmp_path, make_batches(9), every=2, keep=9)
    save_request = again.run.state.save_request

    def interrupted() -> Any:
        if again.run.step == 4:
            os.kill(os.getpid(), signal.SIGUSR1)
        return save_request()

    again.run.state.save_request = interrupted  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        again.go()
    job.comm.barrier()
    steps = ["step_00000001.h5", "step_00000002.h5", "step_00000004.h5", "step_00000005.h5"]
    assert checkpoints_of(shared_tmp_path) == steps


@pytest.mark.few(2)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("when", ["after the update", "before the update"])
@pytest.mark.parametrize("loader", [list, PositionedLoader])
def test_leaving_the_loop_counts_a_step_with_an_update(job: Any, shared_tmp_path: Path, loader: Any, when: str) -> None:
    straight = Training(job, shared_tmp_path / "straight", loader(make_batches(8))).go()
    folder = shared_tmp_path / "left"
    first = Training(job, folder, loader(make_batches(8)))
    with first.run as run:
        for step, batch in run:
            if step == 6:
                break
            (first.model(batch) ** 2).mean().backward()
            first.optimizer.step()
            first.optimizer.zero_grad()
            first.schedule.step()
            if step == 5 and when == "after the update":
                break
    assert run.step == 5
    job.comm.barrier()
    assert Training(job, folder, loader(make_batches(8))).go().losses == straight.losses[5:]


def test_a_finished_run_is_reported_and_not_changed(job: Any, tmp_path: Path) -> None:
    Training(job, tmp_path, make_batches(9), steps=3).go()
    before = contents(tmp_path / "checkpoints/step_00000003.h5")
    again = Training(job, tmp_path, make_batches(9), steps=3).go()
    assert again.run.finished and not again.losses
    assert contents(tmp_path / "checkpoints/step_00000003.h5") == before and len(metrics_of(tmp_path)) == 3


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "way, said",
    [
        ("steps", "all 3 steps are done"),
        ("epochs", "all 2 epochs are done, after step 8"),
        ("a pass", "all batches are done, after step 4"),
    ],
)
def test_a_script_is_told_that_its_run_is_finished(
    job: Any, shared_tmp_path: Path, way: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    def messages() -> list[str]:
        torch.manual_seed(0)
        model = job.wrap(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"steps": 3} if way == "steps" else {}
        samples = torch.utils.data.TensorDataset(torch.randn(16, 3))
        loader = torch.utils.data.DataLoader(samples, batch_size=4)
        caplog.clear()
        with caplog.at_level("INFO", "hpctrain"):
            with job.run(model, optimizer, loader, checkpoints=str(shared_tmp_path), **options) as run:
                for _ in run.epochs(2) if way == "epochs" else range(1):
                    for _, (x,) in run:
                        model(x).pow(2).mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
        job.comm.barrier()
        return [text for text in caplog.messages if text.startswith("the run is finished")]

    assert not messages()
    assert messages() == [f"the run is finished: {said}"] * (job.rank == 0)


@pytest.mark.ranks(1, 2)
def test_resume_may_be_never_or_must(job: Any, shared_tmp_path: Path) -> None:
    empty = shared_tmp_path / "empty"
    with pytest.raises(CheckpointError, match="no checkpoint to resume from, and resume is 'must'") as found:
        Training(job, empty, make_batches(2), resume="must").go()
    assert found.value.everywhere and not empty.exists()
    Training(job, empty, make_batches(2), resume="never").go()
    job.comm.barrier()
    with pytest.raises(CheckpointError, match="holds checkpoints, and resume is 'never'"):
        Training(job, empty, make_batches(4), resume="never").go()
    assert len(Training(job, empty, make_batches(4), resume="must").go().losses) == 2


@pytest.mark.ranks(1, 2)
def test_a_damaged_newest_checkpoint_is_passed_over(
    job: Any, shared_tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from hpctrain.log import configure

    Training(job, shared_tmp_path, make_batches(6), every=4).go()
    newest = shared_tmp_path / "checkpoints/step_00000006.h5"
    if job.rank == 0:
        with newest.open("r+b") as file:
            file.truncate(newest.stat().st_size - 100)
    job.comm.barrier()
    with pytest.raises(CheckpointError, match="step_00000006.h5"):
        Training(job, shared_tmp_path, make_batches(6), strict=True).go()
    configure(job.rank)
    again = Training(job, shared_tmp_path, make_batches(6)).go()
    assert len(again.losses) == 2
    said = capfd.readouterr().err
    assert ("step_00000006.h5 is not used" in said) == (job.rank == 0)
    assert [row["step"] for row in metrics_of(shared_tmp_path)] == list(range(1, 7))


@pytest.mark.ranks(1, 2)
def test_a_second_run_in_the_folder_is_refused(job: Any, shared_tmp_path: Path) -> None:
    with Training(job, shared_tmp_path, make_batches(2)).run as run:
        with pytest.raises(LockError, match="works in") as found:
            Training(job, shared_tmp_path, make_batches(2)).go()
        assert found.value.everywhere
        for _ in run:
            pass


def test_a_folder_that_cannot_be_made_is_an_error(job: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot make the run's folder"):
        Training(job, tmp_path / "file", make_batches(2)).go()


@pytest.mark.ranks(1, 2, 3)
def test_logged_values_are_averaged(job: Any, shared_tmp_path: Path) -> None:
    values = {f"v{number:02d}": float(number + job.rank) for number in range(LOGGED)}
    with Training(job, shared_tmp_path, make_batches(2)).run as run:
        for step, _ in run:
            run.log(**values, tokens=7, same={"exact": 0.1})
    job.comm.barrier()
    for row in metrics_of(shared_tmp_path):
        for number in range(LOGGED):
            assert row[f"v{number:02d}"] == pytest.approx(number + (job.size - 1) / 2, rel=1e-15)
        assert (row["exact"], row["tokens"]) == (0.1, 7 * row["step"])
        assert row["step_seconds"] >= row["communication_seconds"] >= 0


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("epochs", [False, True])
def test_records_tell_the_last_step_and_the_times_of_each(job: Any, shared_tmp_path: Path, epochs: bool) -> None:
    loader = DataLoader(TensorDataset(torch.eye(12)[:, :4]), batch_size=4)
    model = job.wrap(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = {} if epochs else {"steps": 6}
    with job.run(model, optimizer, loader, checkpoints=shared_tmp_path, **steps) as run:
        for _ in run.epochs(2) if epochs else [0]:
            for _, (batch,) in run:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    job.comm.barrier()
    (attempt,) = json.loads((shared_tmp_path / "run.json").read_text())["attempts"]
    assert attempt["target_step"] == 6 and "job_ends" not in attempt
    rows = metrics_of(shared_tmp_path)
    assert all(0 < row["optimizer_seconds"] <= row["step_seconds"] for row in rows)
    assert all(row["data_seconds"] > 0 for row in rows[:-1])  # batches are fetched ahead


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_complex_tensor_is_refused_before_the_first_step(job: Any, shared_tmp_path: Path, kind: str) -> None:
    training = Training(job, shared_tmp_path, make_batches(2))
    value = torch.zeros(3, dtype=torch.complex64)
    if kind == "buffer":
        training.model.register_buffer("phases", value)
    else:
        training.model.register_parameter("phases", torch.nn.Parameter(value, requires_grad=False))
    with pytest.raises(CheckpointError, match="phases has the dtype complex64: a checkpoint .*float32") as found:
        training.go()
    assert found.value.everywhere and found.value.exit_code == 2 and "\n" not in str(found.value)
    assert not training.losses and not list(shared_tmp_path.iterdir())


def test_a_model_must_be_wrapped_and_a_run_entered(job: Any, tmp_path: Path) -> None:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"call job.wrap\(model\) first"):
        job.run(model, optimizer, [], checkpoints=str(tmp_path))
    run = job.run(job.wrap(model), optimizer, [1], checkpoints=str(tmp_path))
    with pytest.raises(UsageError, match="enter the run"):
        next(iter(run))


@pytest.mark.ranks(2, 4)
def test_records_that_cannot_be_opened_stop_all_ranks(job: Any, shared_tmp_path: Path) -> None:
    if job.rank == 0:
        (shared_tmp_path / "run.json").mkdir()
    job.comm.barrier()
    with pytest.raises(Exception, match="run.json") as found:
        Training(job, shared_tmp_path, make_batches(2)).go()
    assert found.value.everywhere  # type: ignore[attr-defined]
    job.comm.barrier()
    assert not (shared_tmp_path / "lock.json").exists()


def test_a_run_does_not_change_generators_of_the_program(job: Any, tmp_path: Path) -> None:
    seed_everything(1)
    expected = torch.rand(3)
    training = Training(job, tmp_path, make_batches(2))
    seed_everything(1)
    training.go()
    assert torch.equal(torch.rand(3), expected)
