"""NaN on one rank: all ranks make the same decision before the update, and no effect of the NaN remains."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.training_fixtures import PositionedLoader, Training, checkpoints_of, make_batches, metrics_of, receipt_of

from hpctrain.errors import NonFiniteError
from hpctrain.log import configure
from hpctrain.parallel.config import ParallelSettings
from hpctrain.train.resume import holding_nan
from hpctrain.train.updates import MOST_ROLLBACKS, MOST_SKIPS, Health

NAN = float("nan")


def _poison(job: Any, *steps: int) -> Any:
    """Return a function that gives the last rank a NaN in some of its steps."""

    def before(step: int, batch: torch.Tensor) -> torch.Tensor | None:
        poisoned = batch.clone()
        poisoned[0, 0] = NAN
        return poisoned if step in steps and job.rank == job.size - 1 else None

    return before


def _all_finite(path: Path) -> bool:
    found: list[bool] = []
    with h5py.File(path) as file:
        visit = lambda name, item: found.append(bool(np.isfinite(item[()]).all()))  # noqa: E731
        for group in ("model", "optimizer"):
            file[group].visititems(lambda name, item: visit(name, item) if isinstance(item, h5py.Dataset) else None)
    assert found
    return all(found)


@pytest.mark.ranks(1, 2, 3)
def test_abort_ends_the_run_before_the_update(job: Any, shared_tmp_path: Path) -> None:
    training = Training(job, shared_tmp_path, make_batches(9), every=2)
    weights: list[torch.Tensor] = []
    poison = _poison(job, 4)

    def before(step: int, batch: torch.Tensor) -> Any:
        weights[:] = [parameter.detach().clone() for parameter in training.model.parameters()]
        return poison(step, batch)

    with pytest.raises(NonFiniteError, match="in step 4: the averaged gradient of 0.weight is not finite") as found:
        training.go(before)
    assert str(found.value).endswith("; see on_nonfinite for alternatives")
    assert found.value.everywhere and found.value.exit_code == 1
    assert all(torch.equal(*pair) for pair in zip(training.model.parameters(), weights))
    job.comm.barrier()
    assert checkpoints_of(shared_tmp_path) == ["step_00000002.h5"]
    assert _all_finite(shared_tmp_path / "checkpoints/step_00000002.h5")
    assert [row["step"] for row in metrics_of(shared_tmp_path)] == [1, 2, 3]


@pytest.mark.ranks(1, 2, 3)
def test_a_repeated_pass_names_the_rank(job: Any, shared_tmp_path: Path) -> None:
    training = Training(job, shared_tmp_path, make_batches(9))
    drawn: list[torch.Tensor] = []
    check = training.run.health.before_update

    def checked(step: int) -> None:
        try:
            check(step)
        finally:
            after[:] = [torch.get_rng_state()]

    after: list[torch.Tensor] = []
    training.run.health.before_update = checked  # type: ignore[method-assign]

    def before(step: int, batch: torch.Tensor) -> torch.Tensor | None:
        seen = batch
        if step == 2 and job.rank == job.size - 1:
            seen = batch * NAN

        def replay() -> None:
            (training.model(seen) ** 2).mean().backward()

        training.run.health.replay = replay
        drawn.append(torch.get_rng_state())
        return seen

    said = f"in step 2: on rank {job.size - 1} the gradient of 0.weight is not finite"
    with pytest.raises(NonFiniteError, match=said):
        training.go(before)
    # The search for the rank restored the generator: one forward pass drew from it, not two.
    torch.set_rng_state(drawn[-1])
    training.model(torch.zeros(6, 4))
    assert torch.equal(torch.get_rng_state(), after[0])


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_parameter_with_the_nan_is_named(job: Any, shared_tmp_path: Path, clip: float | None) -> None:
    training = Training(job, shared_tmp_path, make_batches(9))
    with pytest.raises(NonFiniteError, match="gradient of 3.bias is not finite"):
        with training.run as run:
            for _, batch in run:
                (training.model(batch) ** 2).mean().backward()
                with torch.no_grad():
                    training.model[3].bias.grad.fill_(NAN)  # as a faulty kernel does on every rank
                if clip:
                    run.clip(clip)
                training.optimizer.step()


def test_a_parameter_that_is_not_finite_is_named(job: Any, tmp_path: Path) -> None:
    training = Training(job, tmp_path, make_batches(9))

    def break_weights(step: int, batch: torch.Tensor) -> None:
        if step == 3:
            with torch.no_grad():
                training.model[3].weight[0, 2] = NAN

    with pytest.raises(NonFiniteError, match="the parameter 3.weight is not finite"):
        training.go(break_weights)
    assert not checkpoints_of(tmp_path)


def test_an_overflow_of_the_norm_is_named(job: Any, tmp_path: Path) -> None:
    training = Training(job, tmp_path, make_batches(9))
    with pytest.raises(NonFiniteError, match="gradient norm is inf in step 1: .*overflows"):
        with training.run as run:
            for _ in run:
                for parameter in training.model.parameters():
                    parameter.grad = torch.full_like(parameter, 1e30)
                training.optimizer.step()


@pytest.mark.ranks(1, 2)
def test_skip_equals_a_run_without_that_update(job: Any, shared_tmp_path: Path) -> None:
    skipping = Training(job, shared_tmp_path / "skipping", make_batches(9), on_nonfinite="skip")
    skipping.go(_poison(job, 4, 5))

    plain = Training(job, shared_tmp_path / "plain", make_batches(9))
    with plain.run as run:
        for number, (_, batch) in enumerate(run, 1):
            buffers = [buffer.clone() for buffer in plain.model.buffers()]
            (plain.model(batch) ** 2).mean().backward()
            if number in (4, 5):  # which do not end a step then
                for buffer, before in zip(plain.model.buffers(), buffers):
                    buffer.copy_(before)
            else:
                plain.optimizer.step()
            plain.optimizer.zero_grad()
            plain.schedule.step()
    states = [training.model.state_dict() for training in (skipping, plain)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    job.comm.barrier()
    rows = metrics_of(shared_tmp_path / "skipping")
    assert [row["step"] for row in rows if row.get("skipped")] == [4, 5] and len(rows) == 9
    assert [row["loss"] is None for row in rows] == [row["step"] in (4, 5) for row in rows]


@pytest.mark.ranks(1, 2)
def test_too_many_skips_in_a_row_are_an_error(job: Any, shared_tmp_path: Path) -> None:
    configure(job.rank)
    batches = make_batches(3 * MOST_SKIPS)
    Training(job, shared_tmp_path / "a", batches, on_nonfinite="skip").go(_poison(job, *range(2, 30, 2)))
    job.comm.barrier()
    training = Training(job, shared_tmp_path / "b", batches, on_nonfinite="skip")
    with pytest.raises(NonFiniteError, match=f"{MOST_SKIPS} updates in a row were skipped"):
        training.go(_poison(job, *range(3, 99)))
    assert len(training.losses) == 2 + MOST_SKIPS


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("loader", [list, PositionedLoader])
def test_rollback_continues_after_the_bad_samples(job: Any, shared_tmp_path: Path, loader: Any) -> None:
    batches = make_batches(9)
    seen: list[tuple[int, int]] = []
    bad = batches[5]

    def before(step: int, batch: torch.Tensor) -> torch.Tensor | None:
        number = next(number for number, other in enumerate(batches, 1) if torch.equal(other, batch))
        seen.append((step, number))
        return batch * NAN if torch.equal(batch, bad) and job.rank == job.size - 1 else None

    options = {"every": 4, "steps": 8, "on_nonfinite": "rollback"}
    training = Training(job, shared_tmp_path, loader(batches), **options)
    with pytest.raises(StopAsAsked):
        training.go(_until(7, before))
    # Step 4 was saved; step 5 used sample 5, step 6 the bad one. Back at step 4, steps 5 and 6 use samples 7 and 8.
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (5, 7), (6, 8), (7, 9)]
    job.comm.barrier()
    rows = metrics_of(shared_tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    # The schedule was restored, too: its rate halves every three steps.
    assert [row["rate"] for row in rows] == [0.05, 0.05, 0.025, 0.025, 0.025, 0.0125]
    (attempt,) = receipt_of(shared_tmp_path)["attempts"]
    assert (attempt["steps"], attempt["repeated_steps"], attempt["saved_step"]) == (7, 1, 4)


@pytest.mark.few(1)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("loader", [list, PositionedLoader])
def test_a_resume_after_a_rollback_keeps_the_place_in_the_data(job: Any, shared_tmp_path: Path, loader: Any) -> None:
    batches = make_batches(12)
    bad = batches[2]

    def before(step: int, batch: torch.Tensor) -> torch.Tensor | None:
        return batch * NAN if torch.equal(batch, bad) else None

    options = {"every": 2, "on_nonfinite": "rollback"}
    whole = Training(job, shared_tmp_path / "whole", loader(batches), **options).go(before)
    with pytest.raises(StopAsAsked):
        Training(job, shared_tmp_path / "halves", loader(batches), **options).go(_until(7, before))
    job.comm.barrier()
    again = Training(job, shared_tmp_path / "halves", loader(batches), **options).go(before)
    assert whole.run.step == again.run.step == 11 and again.losses == whole.losses[-5:]


class StopAsAsked(Exception):
    """Exception that ends a run in the middle."""


@pytest.mark.ranks(1, 2)
def test_a_resume_tells_that_the_checkpoint_has_nan_in_a_moment(
    job: Any, shared_tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its parameters are finite, so the file is written; each start from it ends in the next step."""
    training = Training(job, shared_tmp_path, make_batches(9), every=2)

    def spoil(step: int, batch: torch.Tensor) -> None:
        if step == 4:
            update = lambda *_: training.optimizer.state[training.model[0].weight]["exp_avg"].fill_(NAN)  # noqa: E731
            training.optimizer.register_step_post_hook(update)
        if step == 5:
            raise StopAsAsked

    with pytest.raises(StopAsAsked):
        training.go(spoil)
    job.comm.barrier()
    name = checkpoints_of(shared_tmp_path)[-1]
    with caplog.at_level("WARNING", "hpctrain"), pytest.raises(NonFiniteError):
        Training(job, shared_tmp_path, make_batches(9), every=2).go()
    said = f"{name} has NaN in the optimizer's exp_avg: the next update spreads it; move it away" in caplog.text
    assert said == (job.rank == 0)
    job.comm.barrier()
    if job.rank == 0:
        (shared_tmp_path / "checkpoints" / name).unlink()
    job.comm.barrier()
    caplog.clear()
    with caplog.at_level("WARNING", "hpctrain"):
        again = Training(job, shared_tmp_path, make_batches(9), every=2).go()
    assert "NaN" not in caplog.text and again.run.step == 9


def test_states_of_other_classes_of_tensors_are_not_examined() -> None:
    class Opaque(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "sum" in str(function) or "isnan" in str(function):
                raise NotImplementedError(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {"small": torch.full((2,), NAN).as_subclass(Opaque), "step": 3, "fine": torch.ones(2)}
    assert holding_nan({"": optimizer}) == set()
    optimizer.state[weight]["bad"] = torch.tensor([1.0, NAN])
    assert holding_nan({"": optimizer}) == {"bad"}


def _until(last: int, before: Any) -> Any:
    def stopping(step: int, batch: torch.Tensor) -> Any:
        changed = before(step, batch)
        if step == last:
            raise StopAsAsked
        return changed

    return stopping


@pytest.mark.ranks(1, 2)
def test_rollbacks_without_a_checkpoint_or_too_often_are_an_error(job: Any, shared_tmp_path: Path) -> None:
    options = {"every": 4, "on_nonfinite": "rollback"}
    with pytest.raises(NonFiniteError, match="no checkpoint to roll back to"):
        Training(job, shared_tmp_path / "early", make_batches(9), **options).go(_poison(job, 2))
    training = Training(job, shared_tmp_path / "often", make_batches(30), **options)
    with pytest.raises(NonFiniteError, match=f"rolled back {MOST_ROLLBACKS} times already"):
        training.go(_poison(job, *range(6, 99)))
    job.comm.barrier()
    assert _all_finite(shared_tmp_path / "often/checkpoints/step_00000004.h5")


@pytest.mark.ranks(1, 2)
def test_a_checkpoint_refused_for_nan_does_not_count_as_saved(job: Any, shared_tmp_path: Path) -> None:
    training = Training(job, shared_tmp_path, make_batches(30), steps=30, every=10, keep=1, background=True)

    def spoil(step: int, batch: torch.Tensor) -> None:
        if step >= 19:  # from the checkpoint of step 20 on; training does not read this buffer
            training.model[1].running_mean.fill_(NAN)
        if step >= 20:  # the steps poll the writer process, whose error comes long before the next checkpoint
            time.sleep(0.1)

    with pytest.raises(NonFiniteError, match="the buffer 1.running_mean holds NaN"):
        with training.run as run:
            with pytest.raises(NonFiniteError, match="the buffer 1.running_mean holds NaN"):
                training.steps(run, spoil)
            run.save()
    job.comm.barrier()
    assert checkpoints_of(shared_tmp_path) == ["step_00000010.h5"]
    assert receipt_of(shared_tmp_path)["attempts"][-1]["saved_step"] == 10


@pytest.mark.ranks(2)
def test_one_rank_prints_the_warning(job: Any, shared_tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    configure(job.rank)
    Training(job, shared_tmp_path, make_batches(4), on_nonfinite="skip").go(_poison(job, 2))
    said = len(re.findall("skipping this update", capfd.readouterr().err))
    assert said == (job.rank == 0)


@pytest.mark.ranks(2, 3)
def test_an_asynchronous_worker_names_its_own_rank(job: Any) -> None:
    model = torch.nn.Linear(2, 1)
    job.wrap(model, ParallelSettings(data="easgd"), asynchronous={"mode": "asynchronous"})
    strategy = job.strategy(model)
    health = Health(model, strategy, job.comm, "abort")
    health.replay = lambda: model(torch.full((1, 2), NAN)).sum().backward()
    assert health.find() == f"on rank {job.rank} the gradient of weight is not finite"
    strategy.conclude()
    strategy.detach()
