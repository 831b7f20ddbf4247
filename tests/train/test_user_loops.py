"""Training loops of users: any number of ranks gives the numbers of one process with a plain DataLoader."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.training_fixtures import metrics_of
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hpctrain.errors import MismatchError, UsageError

SAMPLES = 22
STRATEGIES = ["ddp", "zero1", "fsdp"]


class Halt(Exception):
    """Exception that ends a run in the middle."""


class Numbered(IterableDataset[Any]):
    """Iterable dataset over the same samples."""

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*_data()))


class ByPython(Sampler[list[int]]):
    """Batch sampler that draws every batch from Python's generator, as users write them."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(4):
            yield random.sample(range(SAMPLES), 5)

    def __len__(self) -> int:
        return 4


class ByNumpy(Sampler[int]):
    """Sampler that draws its order from NumPy's generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.linspace(-1, 1, SAMPLES * 3).sin().reshape(SAMPLES, 3)
    return inputs, (inputs.sum(1, keepdim=True) * 2).cos()


def _dataset() -> Dataset[Any]:
    return TensorDataset(*_data())


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(_dataset(), batch_size=8),
    "shuffled": lambda: DataLoader(_dataset(), batch_size=8, shuffle=True),
    "a batch per rank at most": lambda: DataLoader(_dataset(), batch_size=3, shuffle=True),
    "full batches only": lambda: DataLoader(_dataset(), batch_size=8, shuffle=True, drop_last=True),
    "workers": lambda: DataLoader(_dataset(), batch_size=7, shuffle=True, num_workers=1),
    "workers that stay": lambda: DataLoader(
        _dataset(), batch_size=7, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "own generator": lambda: DataLoader(
        _dataset(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "with replacement": lambda: DataLoader(
        _dataset(), batch_size=8, sampler=RandomSampler(range(SAMPLES), replacement=True, num_samples=20)
    ),
    "a subset": lambda: DataLoader(_dataset(), batch_size=4, sampler=SubsetRandomSampler(range(3, 17))),
    "weighted": lambda: DataLoader(
        _dataset(), batch_size=5, sampler=WeightedRandomSampler([1.0 + i for i in range(SAMPLES)], 21)
    ),
    "batch sampler": lambda: DataLoader(
        _dataset(), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), 5, drop_last=False)
    ),
    "Python's generator": lambda: DataLoader(_dataset(), batch_sampler=ByPython()),
    "NumPy's generator": lambda: DataLoader(_dataset(), batch_size=6, sampler=ByNumpy()),
    "iterable": lambda: DataLoader(Numbered(), batch_size=8),
}
QUICK = ["in order", "a batch per rank at most", "workers that stay", "Python's generator", "iterable"]


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


class Program:
    """Model, optimizer, scheduler and loader of a program."""

    def __init__(self, loader: str, wrap: Any = lambda model: model) -> None:
        _seed()
        self.model = wrap(_net())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.7)
        self.loader = LOADERS[loader]()
        self.losses: list[float] = []

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def update(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.backward(x, y)
        self.step()
        return loss


class Plain(Program):
    """Program without hpctrain, in one process."""

    def go(self, epochs: int = 3) -> Plain:
        for _ in range(epochs):
            self.losses += [float(self.update(x, y)) for x, y in self.loader]
            self.scheduler.step()
        return self


class Own(Program):
    """Same program with the lines of hpctrain."""

    def __init__(self, job: Any, loader: str, strategy: str = "ddp") -> None:
        super().__init__(loader, lambda model: job.wrap(model, strategy))
        self.job, self.ends = job, list[int]()

    def run(self, folder: Path, **options: Any) -> Any:
        return self.job.run(self.model, self.optimizer, self.loader, checkpoints=str(folder), **options)

    def go(self, folder: Path, epochs: int = 3, halt: int = 0, **options: Any) -> Own:
        with self.run(folder, **options) as run:
            for epoch in run.epochs(epochs):
                for step, (x, y) in run:
                    if step == halt:
                        raise Halt
                    run.log(loss=self.update(x, y))
                self.scheduler.step()
                self.ends.append(epoch)
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.job.state_dict(self.model)
        return found


def _seed() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)


def _same(own: dict[str, torch.Tensor], model: nn.Module, tolerance: float = 1e-6) -> None:
    for name, expected in model.state_dict().items():
        assert torch.allclose(own[name], expected, rtol=0, atol=tolerance), name


@pytest.mark.few(6)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    "loader, strategy",
    [(loader, "ddp") for loader in LOADERS] + [(loader, one) for loader in QUICK for one in STRATEGIES[1:]],
)
def test_a_plain_loader_gives_the_numbers_of_one_process(
    job: Any, shared_tmp_path: Path, loader: str, strategy: str
) -> None:
    plain = Plain(loader).go()
    own = Own(job, loader, strategy).go(shared_tmp_path)
    _same(own.weights(), plain.model)
    job.comm.barrier()
    losses = [row["loss"] for row in metrics_of(shared_tmp_path)]
    assert losses == pytest.approx(plain.losses, abs=1e-6) and own.ends == [0, 1, 2]


@pytest.mark.few(2)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "loader, halt",
    [(loader, halt) for loader in QUICK for halt in (5, 2)]
    + [pytest.param(loader, 5, marks=pytest.mark.slow) for loader in LOADERS if loader not in QUICK],
)
def test_a_killed_loop_resumes_inside_an_epoch(job: Any, shared_tmp_path: Path, loader: str, halt: int) -> None:
    plain = Plain(loader).go()
    with pytest.raises(Halt):
        Own(job, loader).go(shared_tmp_path, halt=halt, every=1)
    job.comm.barrier()
    _seed_otherwise(job)
    again = Own(job, loader).go(shared_tmp_path, every=1)
    _same(again.weights(), plain.model)
    job.comm.barrier()
    rows = metrics_of(shared_tmp_path)
    assert [row["step"] for row in rows] == list(range(1, len(plain.losses) + 1))
    assert [row["loss"] for row in rows] == pytest.approx(plain.losses, abs=1e-6)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("halt", [0, 5])
def test_persistent_workers_end_with_the_run(job: Any, shared_tmp_path: Path, halt: int) -> None:
    before, own = set(active_children()), Own(job, "workers that stay")
    with pytest.raises(Halt) if halt else nullcontext():
        own.go(shared_tmp_path, halt=halt)
    assert set(active_children()) <= before


def _seed_otherwise(job: Any) -> None:
    torch.manual_seed(99 + job.rank)
    random.seed(1)


@pytest.mark.ranks(1, 2)
def test_the_end_of_an_epoch_runs_once_over_resumes(job: Any, shared_tmp_path: Path) -> None:
    """The run is killed after the loop of the second epoch, before and after its scheduler has stepped."""
    plain = Plain("shuffled").go()
    for place, moment in enumerate(("before", "after")):
        folder = shared_tmp_path / moment
        own = Own(job, "shuffled")
        with pytest.raises(Halt):
            with own.run(folder, every=1) as run:
                for epoch in run.epochs(3):
                    for _, (x, y) in run:
                        own.update(x, y)
                    if epoch == 1 and place == 0:
                        raise Halt
                    own.scheduler.step()
                    if epoch == 1:
                        raise Halt
        job.comm.barrier()
        again = Own(job, "shuffled").go(folder)
        _same(again.weights(), plain.model)
        assert again.scheduler.last_epoch == 3 and again.ends == [1, 2]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_by_hand_equals_accumulation_by_backward(job: Any, shared_tmp_path: Path, strategy: str) -> None:
    def weigh(x: torch.Tensor) -> torch.Tensor:
        return (x[:, 0] > -0.5).float().unsqueeze(1)  # as a padding mask

    plain = Plain("shuffled")
    for number, (x, y) in enumerate(plain.loader, 1):
        loss = (weigh(x) * (plain.model(x) - y) ** 2).sum() / weigh(x).sum()
        loss.backward()
        plain.losses.append(float(loss.detach()))
        if number % 2 == 0 or number == len(plain.loader):
            plain.step()

    own = Own(job, "shuffled", strategy)
    losses = []
    with own.run(shared_tmp_path) as run:
        for number, (_, batch) in enumerate(run, 1):

            def compute(part: Any) -> tuple[torch.Tensor, torch.Tensor]:
                x, y = part
                return (weigh(x) * (own.model(x) - y) ** 2).sum(), weigh(x).sum()

            losses.append(float(run.backward(batch, compute, accumulate=3)))
            if number % 2 == 0 or number == len(own.loader):
                own.step()
    _same(own.weights(), plain.model)
    assert losses == pytest.approx(plain.losses, abs=1e-6) and run.step == 2


@pytest.mark.few(1)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("loader", ["shuffled", "iterable"])
@pytest.mark.parametrize("index", ["of the run", "of enumerate"])
def test_accumulation_by_an_index_continues_over_a_resume(
    job: Any, shared_tmp_path: Path, loader: str, index: str, caplog: pytest.LogCaptureFixture
) -> None:
    def due(number: int, is_last: bool) -> bool:
        return (number + 1) % 2 == 0 or is_last

    plain = Plain(loader)
    for _ in range(3):
        for number, (x, y) in enumerate(plain.loader):
            plain.backward(x, y)
            if due(number, number == 2):
                plain.step()

    def train(halt: int) -> Own:
        own, seen = Own(job, loader), 0
        with own.run(shared_tmp_path, every=1) as run:
            for _ in run.epochs(3):
                for number, (_, (x, y)) in enumerate(run):
                    seen += 1
                    if seen == halt:
                        raise Halt
                    own.backward(x, y)
                    if due(run.batch, run.last) if index == "of the run" else due(number, number == 2):
                        own.step()
        return own

    with pytest.raises(Halt):
        train(6)  # after the first update of the second epoch
    job.comm.barrier()
    caplog.clear()
    with caplog.at_level("WARNING", "hpctrain"):
        own = train(0)
    warned = any("use run.batch and run.last to decide" in one.getMessage() for one in caplog.records)
    assert warned == (index == "of enumerate" and job.rank == 0)
    if index == "of the run":
        _same(own.weights(), plain.model)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backward_with_means_gives_the_numbers_of_one_process(
    job: Any, shared_tmp_path: Path, accumulate: int, strategy: str
) -> None:
    plain = Plain("in order").go(1)
    own = Own(job, "in order", strategy)
    with own.run(shared_tmp_path) as run:
        for step, batch in run:
            loss = run.backward(
                batch, lambda part: nn.functional.mse_loss(own.model(part[0]), part[1]), accumulate=accumulate
            )
            own.step()
            run.log(loss=loss)
            assert float(loss) == pytest.approx(plain.losses[step - 1], abs=1e-6)
    _same(own.weights(), plain.model)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("by", ["means", "sums"])
def test_backward_drives_pipelines(job: Any, shared_tmp_path: Path, accumulate: int, by: str) -> None:
    x = torch.linspace(-2, 2, 96).cos().reshape(24, 4)
    y = torch.arange(24) % 3
    if by == "sums":
        y[::5] = -100  # ignored, more in some microbatches than in others
    data = TensorDataset(x, y)

    def net() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    losses = []
    for inputs, targets in DataLoader(data, batch_size=8):
        loss = nn.functional.cross_entropy(plain(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        expected = float(nn.functional.cross_entropy(plain(x), y))

    model = job.wrap(net(), {"pipe": 2, "microbatches": 2})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def compute(part: Any) -> Any:
        outputs, targets = model(part[0]), part[1]
        if by == "means":
            return nn.functional.cross_entropy(outputs, targets)
        return nn.functional.cross_entropy(outputs, targets, reduction="sum"), (targets >= 0).sum()

    found = []
    with job.run(model, optimizer, DataLoader(data, batch_size=8), checkpoints=str(shared_tmp_path)) as run:
        for _, batch in run:
            found.append(float(run.backward(batch, compute, accumulate=accumulate)))
            optimizer.step()
            optimizer.zero_grad()
        measured = run.evaluate(DataLoader(data, batch_size=8), compute)
    assert found == pytest.approx(losses, abs=1e-6)
    assert measured == pytest.approx(expected, abs=1e-6)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loader", ["shuffled", "a batch per rank at most"])
def test_batch_norm_over_uneven_shares_gives_the_numbers_of_one_process(
    job: Any, shared_tmp_path: Path, strategy: str, loader: str
) -> None:
    def net() -> nn.Sequential:
        _seed()
        return nn.Sequential(nn.Linear(3, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))

    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    kept = DataLoader(_dataset(), batch_size=8 if loader == "shuffled" else 3, shuffle=True, drop_last=True)
    for x, y in kept:
        nn.functional.mse_loss(plain(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = job.wrap(net(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with job.run(model, optimizer, kept, checkpoints=str(shared_tmp_path)) as run:
        for _, (x, y) in run:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    _same(job.state_dict(model), plain, 2e-6)


@pytest.mark.ranks(1, 2, 3)
def test_two_models_may_step_at_different_rates(job: Any, shared_tmp_path: Path) -> None:
    def program(wrap: Any, loop: Any) -> tuple[nn.Module, nn.Module]:
        _seed()
        g, d = wrap(_net()), wrap(nn.Linear(1, 1))
        og = torch.optim.SGD(g.parameters(), lr=0.1, momentum=0.9)
        od = torch.optim.AdamW(d.parameters(), lr=0.05)
        for number, (x, y), clip in loop(g, d, og, od):
            (d(g(x).detach()) - d(y)).pow(2).mean().backward()
            clip("discriminator", d)
            od.step()
            od.zero_grad()
            if number % 2:
                d(g(x)).pow(2).mean().backward()
                clip("generator", g)
                og.step()
                og.zero_grad()
                od.zero_grad()
        return g, d

    def plainly(*_: Any) -> Iterator[Any]:
        loader = LOADERS["shuffled"]()
        for _ in range(2):
            for number, batch in enumerate(loader):
                yield number, batch, lambda key, model: nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    def ours(g: Any, d: Any, og: Any, od: Any) -> Iterator[Any]:
        models, optimizers = {"generator": g, "discriminator": d}, {"generator": og, "discriminator": od}
        with job.run(models, optimizers, LOADERS["shuffled"](), checkpoints=str(shared_tmp_path), every=1) as run:
            for _ in run.epochs(2):
                for number, (_, batch) in enumerate(run):
                    yield number, batch, lambda key, model: run.clip(0.05, model=key)

    expected = program(lambda model: model, plainly)
    found = program(job.wrap, ours)
    for own, plain in zip(found, expected):
        _same(job.state_dict(own), plain)


@pytest.mark.ranks(1, 2, 3)
def test_evaluation_is_exact_and_has_no_side_effects(job: Any, shared_tmp_path: Path) -> None:
    own, (x, y) = Own(job, "shuffled"), _data()
    model = job.wrap(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)), "fsdp")
    loader = DataLoader(_dataset(), batch_size=5, shuffle=True)
    for _ in range(2):
        torch.manual_seed(8)
        for _ in loader:
            pass
    expected_state = torch.get_rng_state()
    torch.manual_seed(8)
    found = job.evaluate(loader, lambda batch: {"loss": nn.functional.mse_loss(own.model(batch[0]), batch[1])})
    assert torch.equal(torch.get_rng_state(), expected_state)  # as after a plain loop
    sums = job.evaluate(loader, lambda batch: ((own.model(batch[0]) - batch[1]).pow(2).sum(), len(batch[0])))
    alone = job.evaluate(lambda: nn.functional.mse_loss(own.model(x), y))
    with torch.no_grad():
        expected = float(nn.functional.mse_loss(own.model(x), y))
    assert found["loss"] == pytest.approx(expected, rel=1e-6) and sums == pytest.approx(expected, rel=1e-6)
    assert alone == pytest.approx(expected, rel=1e-6)
    assert own.model.training and model.training
    with own.run(shared_tmp_path) as run:
        for _, (x, y) in run:
            states = [torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()]
            run.evaluate(loader, lambda batch: nn.functional.mse_loss(own.model(batch[0]) * torch.rand(1), batch[1]))
            assert torch.equal(torch.get_rng_state(), states[0])
            assert [np.random.get_state()[1].tolist(), random.getstate()] == states[1:]
            own.update(x, y)


@pytest.mark.ranks(1, 2, 3)
def test_validation_between_epochs_keeps_the_order_of_a_plain_program(job: Any, shared_tmp_path: Path) -> None:
    validation = DataLoader(_dataset(), batch_size=9)
    plain = Plain("shuffled")
    found = []
    for _ in range(3):
        for x, y in plain.loader:
            plain.update(x, y)
        with torch.no_grad():
            found.append(sum(float(nn.functional.mse_loss(plain.model(x), y, reduction="sum")) for x, y in validation))
    own = Own(job, "shuffled")
    with own.run(shared_tmp_path) as run:
        for epoch in run.epochs(3):
            for _, (x, y) in run:
                own.update(x, y)
            mean = run.evaluate(validation, lambda batch: nn.functional.mse_loss(own.model(batch[0]), batch[1]))
            assert mean * SAMPLES == pytest.approx(found[epoch], abs=1e-5)
    _same(own.weights(), plain.model)


@pytest.mark.ranks(1, 2)
def test_an_evaluation_by_means_over_targets_is_warned_about(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = job.wrap(nn.Linear(3, 4))
    x, y = torch.randn(12, 3), torch.arange(12) % 4
    y[::3] = -100
    loader = DataLoader(TensorDataset(x, y), batch_size=5)

    def mean(batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def sums(batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), (batch[1] >= 0).sum()

    with caplog.at_level("WARNING", "hpctrain"):
        exact = job.evaluate(loader, sums)
        assert not caplog.records
        job.evaluate(loader, mean)
        job.evaluate(loader, mean)
    with torch.no_grad():
        assert exact == pytest.approx(float(mean((x, y))), rel=1e-6)
    assert len(caplog.records) == (job.rank == 0)
    assert all("ignores targets (ignore_index = -100)" in one.getMessage() for one in caplog.records)


@pytest.mark.ranks(1, 2)
def test_an_update_outside_of_the_loop_is_refused(job: Any, shared_tmp_path: Path) -> None:
    own = Own(job, "in order")
    with pytest.raises(UsageError, match="steps outside of the run's loop.*for step, batch in run") as found:
        with own.run(shared_tmp_path):
            for x, y in own.loader:
                own.update(x, y)
    assert found.value.everywhere


@pytest.mark.ranks(1, 2)
def test_another_dataset_in_the_middle_of_an_epoch_is_warned_about(
    job: Any, shared_tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Halt):
        Own(job, "shuffled").go(shared_tmp_path, halt=2, every=1)
    job.comm.barrier()
    own = Own(job, "shuffled")
    own.loader = DataLoader(TensorDataset(*(each[:16] for each in _data())), batch_size=8, shuffle=True)
    with caplog.at_level("WARNING", "hpctrain"):
        own.go(shared_tmp_path)
    said = [one.getMessage() for one in caplog.records if "has 16 samples and had 22" in one.getMessage()]
    assert len(said) == (job.rank == 0)


@pytest.mark.ranks(1, 2)
def test_stop_is_agreed_and_final(job: Any, shared_tmp_path: Path) -> None:
    def train(**options: Any) -> int:
        own = Own(job, "in order")
        with own.run(shared_tmp_path, **options) as run:
            for epoch in run.epochs(4):
                for step, (x, y) in run:
                    own.update(x, y)
                    if step == 4 and job.rank == job.size - 1:
                        run.stop("converged")
                own.ends.append(epoch)
        return run.step

    assert train() == 4
    job.comm.barrier()
    assert train() == 4
    job.comm.barrier()
    assert train(resume="reopen") == 12


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("when", ["after the update", "of epochs"])
def test_break_on_one_rank_raises_on_all(job: Any, shared_tmp_path: Path, when: str) -> None:
    own = Own(job, "in order")
    with pytest.raises(UsageError, match=r"left the loop by break") as found:
        with own.run(shared_tmp_path) as run:
            for _ in run.epochs(3):
                for step, (x, y) in run:
                    own.update(x, y)
                    if step == 2 and job.rank == 1 and when == "after the update":
                        break
                if job.rank == 1 and when == "of epochs":
                    break
    assert found.value.everywhere


@pytest.mark.ranks(1, 2)
def test_an_inner_break_ends_the_epoch_as_in_plain_python(job: Any, shared_tmp_path: Path) -> None:
    plain = Plain("shuffled")
    for _ in range(2):
        for number, (x, y) in enumerate(plain.loader):
            plain.update(x, y)
            if number == 1:
                break
    own = Own(job, "shuffled")
    with own.run(shared_tmp_path) as run:
        for _ in run.epochs(2):
            for number, (_, (x, y)) in enumerate(run):
                own.update(x, y)
                if number == 1:
                    break
    _same(own.weights(), plain.model)
    assert run.step == 4


@pytest.mark.ranks(2, 3)
def test_loaders_of_different_lengths_are_named_at_once(job: Any, shared_tmp_path: Path) -> None:
    own = Own(job, "in order")
    batches = [_data()] * (2 + job.rank)
    with pytest.raises(UsageError, match="rank 0's loader ended after the batch of step 2, rank 1's has more") as found:
        with job.run(own.model, own.optimizer, batches, checkpoints=str(shared_tmp_path)) as run:
            for _, (x, y) in run:
                own.update(x, y)
    assert found.value.everywhere


@pytest.mark.ranks(2)
def test_different_orders_on_ranks_are_an_error(job: Any, shared_tmp_path: Path) -> None:
    class Rankwise(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(np.random.default_rng(job.rank).permutation(SAMPLES).tolist())

        def __len__(self) -> int:
            return SAMPLES

    own = Own(job, "in order")
    loader = DataLoader(_dataset(), batch_size=4, sampler=Rankwise())
    with pytest.raises(UsageError, match="draw the samples of step 1 in different orders"):
        with job.run(own.model, own.optimizer, loader, checkpoints=str(shared_tmp_path)) as run:
            for _, (x, y) in run:
                own.update(x, y)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "loader, said",
    [
        (lambda: DataLoader(_dataset(), batch_size=None), "batch_size=None"),
        (lambda: [], "the loader has no batches"),
        (lambda: 7, "expected a DataLoader or another iterable"),
    ],
)
def test_unsupported_loaders_are_refused(job: Any, shared_tmp_path: Path, loader: Any, said: str) -> None:
    own = Own(job, "in order")
    with pytest.raises(UsageError, match=said) as found:
        with job.run(own.model, own.optimizer, loader(), checkpoints=str(shared_tmp_path)) as run:
            for _ in run:
                pass
    assert found.value.everywhere


def test_a_second_loop_is_refused(job: Any, tmp_path: Path) -> None:
    own = Own(job, "in order")
    with pytest.raises(UsageError, match=r"for epoch in run.epochs\(n\)"):
        with own.run(tmp_path) as run:
            for _ in range(2):
                for _, (x, y) in run:
                    own.update(x, y)


@pytest.mark.ranks(1, 2)
def test_steps_beyond_an_epoch_continue_with_the_next(job: Any, shared_tmp_path: Path) -> None:
    plain = Plain("shuffled").go(4)
    own = Own(job, "shuffled")
    with own.run(shared_tmp_path, steps=8) as run:
        for _, (x, y) in run:
            run.log(loss=own.update(x, y))
    job.comm.barrier()
    losses = [row["loss"] for row in metrics_of(shared_tmp_path)]
    assert run.step == 8 and losses[:3] == pytest.approx(plain.losses[:3], abs=1e-6) and run.epoch == 2


@pytest.mark.ranks(1, 2, 3)
def test_dropout_masks_differ_by_rank_and_the_program_draws_equal_numbers(job: Any, shared_tmp_path: Path) -> None:
    own = Own(job, "shuffled")
    drawn, outside = [], []
    with own.run(shared_tmp_path) as run:
        for _ in run.epochs(2):
            for _, (x, y) in run:
                drawn.append((torch.rand(1).item(), np.random.rand()))
                own.update(x, y)
            outside.append((torch.rand(1).item(), np.random.rand(), random.random()))
    everyone = job.comm.all_gather_object((drawn, outside))
    assert all(one[1] == outside for one in everyone)
    flat = [pair for one in everyone for pair in one[0]]
    assert len(set(flat)) == len(flat) == 6 * job.size


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("workers", [0, 1])
def test_augmentations_depend_on_the_sample_and_not_on_the_rank(job: Any, shared_tmp_path: Path, workers: int) -> None:
    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return torch.tensor([float(index), torch.rand(()).item(), np.random.rand(), random.random()])

    _seed()
    model = job.wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    loader = DataLoader(Noisy(), batch_size=6, num_workers=workers)
    with job.run(model, optimizer, loader, checkpoints=str(shared_tmp_path)) as run:
        for epoch in run.epochs(2):
            for _, x in run:
                seen += [(epoch, *row) for row in x.tolist()]
                model(x).mean().backward()
                optimizer.step()
    everyone = sorted(row for one in job.comm.all_gather_object(seen) for row in one)
    assert len(everyone) == len({row[2:] for row in everyone}) == 12
    assert [row[1] for row in everyone] == [0.0, 1, 2, 3, 4, 5] * 2
    assert [round(value, 6) for value in everyone[0][2:]] == EXPECTED


EXPECTED = [0.823299, 0.15556, 0.809724]  # for any number of ranks and workers


@pytest.mark.ranks(2)
def test_replicas_that_drift_apart_are_not_saved(job: Any, shared_tmp_path: Path) -> None:
    """The first update is the same on all ranks; later ones add different noise on each rank."""
    _seed()
    model = job.wrap(_net(), "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MismatchError, match=r"at the checkpoint of step 4: rank 1 holds other values .*random numbers"):
        with job.run(model, optimizer, LOADERS["in order"](), checkpoints=str(shared_tmp_path), every=2) as run:
            for epoch in run.epochs(2):
                for step, (x, y) in run:
                    nn.functional.mse_loss(model(x), y).backward()
                    if step == 3:
                        model[0].weight.grad.add_(0.1 * (1 + job.rank))
                    optimizer.step()
                    optimizer.zero_grad()
    assert [path.name for path in shared_tmp_path.rglob("step_*.h5")] == ["step_00000002.h5"]


@pytest.mark.ranks(1, 2)
def test_values_logged_after_the_loop_are_in_the_row_of_its_last_step(job: Any, shared_tmp_path: Path) -> None:
    model = job.wrap(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with job.run(model, optimizer, [torch.ones(3, 2)] * 2, checkpoints=str(shared_tmp_path), split=False) as run:
        for epoch in run.epochs(2):
            for _, batch in run:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            run.log(after=float(epoch))
    job.comm.barrier()
    assert [row.get("after") for row in metrics_of(shared_tmp_path)] == [None, 0.0, None, 1.0]
