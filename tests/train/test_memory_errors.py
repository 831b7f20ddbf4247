"""Memory errors in training: every changed bit is found, named and repaired, and the run ends with the right bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.memory_errors import BATCH, PROGRAMS, SAMPLES, Flip, dataset, evaluating, make_model, random_flips, train
from torch.utils.data import DataLoader

from hpctrain.checkpoint.format.reader import Reader
from hpctrain.errors import CorruptionError, UsageError
from hpctrain.parallel.config import ParallelSettings

STEPS = 24
EVERYWHERE = pytest.mark.ranks(2, 3)


def numbers(rows: list[dict[str, Any]]) -> list[Any]:
    """Return what does not depend on time."""
    return [{name: each for name, each in row.items() if not name.endswith(("seconds", "unix_time"))} for row in rows]


@EVERYWHERE
@pytest.mark.few(4)
@pytest.mark.parametrize("every", (1, 5))
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_run_with_changed_bits_ends_like_an_undisturbed_one(
    job: Any, shared_tmp_path: Path, name: str, every: int
) -> None:
    plain = train(job, shared_tmp_path / "plain", PROGRAMS[name], [], STEPS)
    planned = random_flips(6, range(3, STEPS), job.size)
    found = train(job, shared_tmp_path / "found", PROGRAMS[name], planned, STEPS, fingerprint_every=every)
    assert len(found.done) >= 4 and found.count >= 1  # a program without a place makes no change there
    assert found.bits == plain.bits
    assert numbers(found.rows) == numbers(plain.rows)
    assert [row["step"] for row in found.rows] == list(range(1, STEPS + 1))
    if every == 1:
        named = [(one["rank"], one["tensor"]) for one in found.errors]
        if name == "adversarial":  # between two updates, a changed moment also makes its parameter wrong
            named = [each for each in named if each in {each[1:] for each in found.done}]
        assert named == [each[1:] for each in found.done]


@EVERYWHERE
@pytest.mark.parametrize("every", (1, 4))
def test_a_bit_that_makes_everything_nan_is_found_before_the_update(
    job: Any, shared_tmp_path: Path, every: int
) -> None:
    """The highest bit of the exponent: without the comparison, the gradients of all ranks are NaN."""
    plain = train(job, shared_tmp_path / "plain", PROGRAMS["in_epochs"], [], STEPS)
    flips = [Flip(6, "begin", 1, 0.0, 0.3, 30), Flip(13, "end", 0, 0.15, 0.0, 30)]
    found = train(job, shared_tmp_path / "found", PROGRAMS["in_epochs"], flips, STEPS, fingerprint_every=every)
    assert found.bits == plain.bits and numbers(found.rows) == numbers(plain.rows)
    assert [(one["rank"], one["tensor"]) for one in found.errors[:1]] == [(1, "parameter 0.weight")]


@pytest.mark.ranks(3)
def test_two_wrong_ranks_of_three_are_repaired_element_by_element(job: Any, shared_tmp_path: Path) -> None:
    plain = train(job, shared_tmp_path / "plain", PROGRAMS["in_epochs"], [], 8)
    flips = [Flip(5, "begin", 0, 0.0, 0.3, 20), Flip(5, "forward", 2, 0.0, 0.6, 25)]
    found = train(job, shared_tmp_path / "found", PROGRAMS["in_epochs"], flips, 8, fingerprint_every=1)
    assert found.bits == plain.bits and numbers(found.rows) == numbers(plain.rows)
    assert [(one["rank"], one["tensor"]) for one in found.errors] == [(0, found.done[0][2]), (2, found.done[0][2])]
    flips = [Flip(5, "begin", rank, 0.0, 0.3, 20 + rank) for rank in (0, 2)]
    with pytest.raises(CorruptionError, match="no value has a majority, so it cannot be repaired"):
        train(job, shared_tmp_path / "both", PROGRAMS["in_epochs"], flips, 8, fingerprint_every=1)


@EVERYWHERE
@pytest.mark.parametrize("every", (1, 3))
def test_errors_between_steps_reach_no_evaluation_and_no_checkpoint(
    job: Any, shared_tmp_path: Path, every: int
) -> None:
    """In the code after a pass, nothing can be repeated, but the right values are those of the last comparison."""
    plain = train(job, shared_tmp_path / "plain", evaluating, [], STEPS)
    flips = [
        *(Flip(4, "after", 0, 0.0, 0.3, 21), Flip(8, "evaluated", 1, 0.4, 0.3, 22), Flip(12, "after", 1, 0.7, 0.5, 29)),
        *(Flip(14, "end", 0, 0.2, 0.3, 24), Flip(16, "evaluated", 0, 0.9, 0.3, 27), Flip(18, "begin", 1, 0.0, 0.3, 20)),
        *(Flip(STEPS, "after", 1, 0.0, 0.4, 23), Flip(STEPS, "evaluated", 0, 0.1, 0.0, 19)),
    ]
    found = train(job, shared_tmp_path / "found", evaluating, flips, STEPS, fingerprint_every=every)
    assert len(found.done) == 8 and found.count >= 8
    assert found.bits == plain.bits and numbers(found.rows) == numbers(plain.rows)
    if job.rank == 0:
        files = [sorted((shared_tmp_path / name / "checkpoints").glob("*.h5")) for name in ("plain", "found")]
        assert [path.name for path in files[0]] == [path.name for path in files[1]] and len(files[0]) == 6
        assert [Reader(path).fingerprint for path in files[0]] == [Reader(path).fingerprint for path in files[1]]


@EVERYWHERE
@pytest.mark.parametrize("every", (1, 4))
def test_an_error_in_the_first_step_is_repaired(job: Any, shared_tmp_path: Path, every: int) -> None:
    plain = train(job, shared_tmp_path / "plain", PROGRAMS["in_epochs"], [], 8)
    flips = [Flip(1, "begin", 0, 0.0, 0.3, 20)] if every == 1 else [Flip(1, "end", 0, 0.0, 0.3, 20)]
    found = train(job, shared_tmp_path / "found", PROGRAMS["in_epochs"], flips, 8, fingerprint_every=every)
    assert found.bits == plain.bits and numbers(found.rows) == numbers(plain.rows) and found.count == 1


@EVERYWHERE
def test_an_error_before_the_optimizer_has_states_is_repaired(job: Any, shared_tmp_path: Path) -> None:
    plain = train(job, shared_tmp_path / "plain", PROGRAMS["in_epochs"], [], 8)
    flips = [Flip(2, "begin", 0, 0.0, 0.3, 20)]
    for every in (1, 4):
        found = train(job, shared_tmp_path / f"{every}", PROGRAMS["in_epochs"], flips, 8, fingerprint_every=every)
        assert found.bits == plain.bits and numbers(found.rows) == numbers(plain.rows) and found.count >= 1


@EVERYWHERE
def test_a_reproducible_run_is_repaired(job: Any, shared_tmp_path: Path) -> None:
    def program(job: Any, folder: Path, flips: Any, steps: int, **options: Any) -> Any:
        model = make_model()
        job.wrap(model, ParallelSettings(reproducible=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        flips.tensors = lambda: {f"parameter {name}": each for name, each in model.named_parameters()}
        loader = DataLoader(dataset(), batch_size=BATCH, shuffle=True)
        with job.run(model, optimizer, loader, checkpoints=folder, steps=steps, microbatch=4, **options) as run:
            for step, batch in run:
                flips(step, "begin")
                loss = run.backward(batch, lambda part: torch.nn.functional.cross_entropy(model(part[0]), part[1]))
                flips(step, "backward")
                optimizer.step()
                optimizer.zero_grad()
                flips(step, "end")
                run.log(loss=loss)
        return {"": model}, {"": optimizer}, []

    plain = train(job, shared_tmp_path / "plain", program, [], 12)
    flips = [Flip(4, "begin", 1, 0.0, 0.3, 22), Flip(7, "end", 0, 0.5, 0.0, 3)]
    found = train(job, shared_tmp_path / "found", program, flips, 12, fingerprint_every=1)
    assert found.bits == plain.bits and numbers(found.rows) == numbers(plain.rows) and found.count == 2


@EVERYWHERE
@pytest.mark.long
@pytest.mark.limit(300)
def test_two_hundred_changed_bits(job: Any, shared_tmp_path: Path) -> None:
    steps = 1000
    plain = train(job, shared_tmp_path / "plain", PROGRAMS["in_epochs"], [], steps, every=500)
    planned = random_flips(200, range(3, steps, 2), job.size)
    options = {"fingerprint_every": 1, "every": 500}
    found = train(job, shared_tmp_path / "found", PROGRAMS["in_epochs"], planned, steps, **options)
    assert len(found.done) == found.count == 200
    assert found.bits == plain.bits and numbers(found.rows) == numbers(plain.rows)


@EVERYWHERE
@pytest.mark.long
@pytest.mark.limit(300)
def test_no_false_alarm(job: Any, shared_tmp_path: Path) -> None:
    options = {"fingerprint_every": 1, "on_corruption": "stop", "every": 1000}
    assert train(job, shared_tmp_path, PROGRAMS["in_epochs"], [], 2000, **options).count == 0


# Log, records and refusals ---------------------------------------------------------------------------------


@EVERYWHERE
def test_the_log_names_rank_host_and_tensor(job: Any, shared_tmp_path: Path, caplog: Any) -> None:
    flip = Flip(6, "begin", job.size - 1, 0.0, 0.3, 22)
    train(job, shared_tmp_path, PROGRAMS["in_epochs"], [flip], 8, fingerprint_every=1)
    repair = "it has got the tensor of the other ranks" if job.size > 2 else "the steps since the last comparison are"
    pattern = f"memory error in step 6: parameter 0.weight of rank {job.size - 1} on [^ ]+ was wrong; {repair}"
    assert bool(re.search(pattern, caplog.text)) is (job.rank == 0)


@EVERYWHERE
@pytest.mark.parametrize("every", (1, 5))
def test_stop_ends_the_run_and_keeps_the_checkpoint(job: Any, shared_tmp_path: Path, every: int) -> None:
    flip = Flip(12, "backward", 0, 0.0, 0.3, 22)
    options: dict[str, Any] = {"fingerprint_every": every, "on_corruption": "stop", "every": 10}
    with pytest.raises(CorruptionError, match='parameter 0.weight .*; the run ends, because .* = "stop"') as found:
        train(job, shared_tmp_path, PROGRAMS["in_epochs"], [flip], STEPS, **options)
    assert found.value.everywhere and found.value.exit_code == 1
    job.comm.barrier()
    assert [path.name for path in sorted((shared_tmp_path / "checkpoints").glob("*.h5"))] == ["step_00000010.h5"]


@EVERYWHERE
@pytest.mark.parametrize("every", (1, 5))
def test_ranks_that_make_different_updates_are_no_memory_error(job: Any, shared_tmp_path: Path, every: int) -> None:
    model = make_model()
    job.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset(), batch_size=BATCH)
    seen = []
    with pytest.raises(CorruptionError, match="ranks make different updates"):
        with job.run(model, optimizer, loader, checkpoints=shared_tmp_path, steps=20, fingerprint_every=every) as run:
            for step, (inputs, targets) in run:
                seen.append(step)
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                if step > 6:
                    with torch.no_grad():
                        model[0].weight.add_(job.rank * 1e-3)
    assert max(seen) <= 10


@EVERYWHERE
def test_a_loop_left_in_the_step_of_an_error_cannot_repeat_it(job: Any, shared_tmp_path: Path) -> None:
    model = make_model()
    job.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset(), batch_size=BATCH)
    with pytest.raises(CorruptionError, match="left its loop by break: .*; parameter 0.weight .*; start"):
        with job.run(model, optimizer, loader, checkpoints=shared_tmp_path, steps=20, fingerprint_every=1) as run:
            for step, (inputs, targets) in run:
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                if step == 5 and job.rank == 1:
                    model[0].weight.detach().numpy()[0, 0] += 1
                optimizer.step()
                if step == 5:
                    break


@pytest.mark.ranks(1, 2, 3)
def test_what_cannot_be_compared_or_repeated_is_refused(job: Any, shared_tmp_path: Path) -> None:
    model = make_model()
    job.wrap(model, ParallelSettings(data="fsdp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset(), batch_size=BATCH)
    options: dict[str, Any] = {"checkpoints": shared_tmp_path, "steps": 2}
    if job.size > 1:
        with pytest.raises(UsageError, match='fingerprint_every = 1 with .*; allowed is parallel.data = "ddp"'):
            job.run(model, optimizer, loader, fingerprint_every=1, **options)
    with pytest.raises(UsageError, match="fingerprint_every = -1: must be at least 0"):
        job.run(model, optimizer, loader, fingerprint_every=-1, **options)
    with pytest.raises(UsageError, match="on_corruption = 'mend': allowed are repair, stop"):
        job.run(model, optimizer, loader, on_corruption="mend", **options)
    plain = make_model()
    job.wrap(plain, ParallelSettings())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    batches = iter([dataset()[:BATCH]] * (SAMPLES // BATCH))
    with pytest.raises(UsageError, match='can be read only once .*; pass a DataLoader or a list, or on_corruption="st'):
        job.run(plain, optimizer, batches, fingerprint_every=1, **options)
