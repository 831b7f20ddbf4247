"""Runs in which single bits of weights and moments change, as by a defective memory, and what must come out."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hpctrain.data.loader import Loader

PLACES = ("begin", "forward", "backward", "end")
SAMPLES, BATCH = 96, 24
CLASSES = 3


@dataclass(frozen=True)
class Flip:
    """One changed bit: in which step and where in it, on which rank, in which tensor, element and bit."""

    step: int
    place: str
    rank: int
    tensor: float  # fractions of the number of tensors, and of elements
    element: float
    bit: int


@dataclass
class Flips:
    """Bits that change once each while a program runs; ``tensors`` returns the tensors by name."""

    planned: list[Flip]
    rank: int
    tensors: Callable[[], dict[str, Tensor]] = dict
    done: list[tuple[int, int, str]] = field(default_factory=list)  # step, rank and name of the tensor

    def __call__(self, step: int, place: str) -> None:
        for flip in [each for each in self.planned if (each.step, each.place) == (step, place)]:
            self.planned.remove(flip)
            named = self.tensors()
            name = list(named)[int(flip.tensor * len(named))]
            self.done.append((step, flip.rank, name))
            if flip.rank == self.rank:
                words = named[name].detach().numpy().reshape(-1).view(np.uint32)  # autograd does not notice
                words[int(flip.element * len(words))] ^= np.uint32(1 << flip.bit)


def random_flips(count: int, steps: range, ranks: int, seed: int = 7) -> list[Flip]:
    """Return flips of random bits, each in a step of its own."""
    draw = random.Random(seed)
    return [
        Flip(step, draw.choice(PLACES), draw.randrange(ranks), draw.random(), draw.random(), int(draw.random() * 32))
        for step in sorted(draw.sample(steps, count))
    ]


def state_tensors(models: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return the weights and moments of a program by the names that messages have."""
    found: dict[str, Tensor] = {}
    for key, model in models.items():
        of = f" of model '{key}'" if key else ""
        found |= {f"parameter {name}{of}": each for name, each in model.named_parameters()}
    names = {id(each): name for model in models.values() for name, each in model.named_parameters()}
    for key, optimizer in optimizers.items():
        of = f" of optimizer '{key}'" if key else ""
        for parameter, state in optimizer.state.items():
            moments = {name: each for name, each in state.items() if name != "step"}
            found |= {f"{name} of {names[id(parameter)]}{of}": each for name, each in moments.items()}
    return found


def make_model(seed: int = 2, outputs: int = CLASSES) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, outputs))


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    classes = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return TensorDataset(torch.randn(SAMPLES, 5, generator=generator), classes)


class Stream(IterableDataset[Any]):
    """Samples in their order."""

    def __iter__(self) -> Iterator[Any]:
        return (dataset()[number] for number in range(SAMPLES))


@dataclass
class Result:
    """Bits of all weights and moments, and the last checkpoint's curves, at the end of a run; its log and receipt."""

    bits: dict[str, bytes]
    losses: list[float]
    rows: list[dict[str, Any]]
    count: int
    errors: list[dict[str, Any]]
    done: list[tuple[int, int, str]]


def train(
    job: Any, folder: Path, program: Callable[..., Any], planned: list[Flip], steps: int, **options: Any
) -> Result:
    """Run a program of ``PROGRAMS`` in a new folder that all ranks share, with some flips."""
    flips = Flips(list(planned), job.rank)
    torch.manual_seed(1)
    models, optimizers, losses = program(job, folder, flips, steps, **{"every": 20, **options})
    job.comm.barrier()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    attempt = json.loads((folder / "run.json").read_text())["attempts"][-1]
    tensors = {**state_tensors(models, optimizers)}
    bits = {name: each.detach().numpy().tobytes() for name, each in tensors.items()}
    saved = max((folder / "checkpoints").glob("*.h5"))
    with h5py.File(saved) as file:
        bits |= {f"curve {name}": each[()].tobytes() for name, each in file["train"].items()}
    last = attempt.get("last_memory_errors", [])
    return Result(bits, losses, rows, attempt.get("memory_errors", 0), last, flips.done)


# Programs: each trains for some steps, and lets bits change at the places of a step -----------------------------------


def in_epochs(job: Any, folder: Path, flips: Flips, steps: int, loader: Any = None, **options: Any) -> Any:
    """Epochs with a scheduler, dropout and shuffling."""
    model = make_model()
    job.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    flips.tensors = lambda: state_tensors({"": model}, {"": optimizer})
    losses: list[float] = []
    given = DataLoader(dataset(), batch_size=BATCH, shuffle=True) if loader is None else loader
    with job.run(model, optimizer, given, checkpoints=folder, **options) as run:
        for _ in run.epochs(steps * BATCH // SAMPLES):
            for step, (inputs, targets) in run:
                flips(step, "begin")
                outputs = model(inputs)
                flips(step, "forward")
                loss = F.cross_entropy(outputs, targets)
                loss.backward()  # type: ignore[no-untyped-call]
                flips(step, "backward")
                optimizer.step()
                optimizer.zero_grad()
                flips(step, "end")
                run.log(loss=loss, tokens=BATCH)
                losses.append(float(loss.detach()))
            scheduler.step()
    return {"": model}, {"": optimizer}, losses


def with_workers(job: Any, folder: Path, flips: Flips, steps: int, **options: Any) -> Any:
    loader = DataLoader(dataset(), batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True)
    return in_epochs(job, folder, flips, steps, loader, **options)


def from_a_stream(job: Any, folder: Path, flips: Flips, steps: int, **options: Any) -> Any:
    return in_epochs(job, folder, flips, steps, DataLoader(Stream(), batch_size=BATCH), **options)


def from_a_list(job: Any, folder: Path, flips: Flips, steps: int, **options: Any) -> Any:
    samples = dataset()[job.rank :: job.size]
    batches = list(zip(*(torch.split(each, BATCH // job.size) for each in samples)))
    return in_epochs(job, folder, flips, steps, batches, **options)


def accumulating(job: Any, folder: Path, flips: Flips, steps: int, **options: Any) -> Any:
    """One loop over all passes, two batches per update, clipping, a scheduler, and an average of the weights."""
    model, average = make_model(), make_model()
    job.wrap(model)
    job.wrap(average)
    average.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)  # multiplies the present learning rate
    flips.tensors = lambda: state_tensors({"model": model}, {"": optimizer})
    losses: list[float] = []
    given = {"model": model, "average": average}
    loader = DataLoader(dataset(), batch_size=BATCH, shuffle=True)
    with job.run(given, optimizer, loader, checkpoints=folder, steps=steps, **options) as run:
        for step, (inputs, targets) in run:
            if run.batch % 2 == 0:
                flips(step, "begin")
            loss = F.cross_entropy(model(inputs), targets) / 2
            loss.backward()  # type: ignore[no-untyped-call]
            if run.batch % 2:
                flips(step, "backward")
                run.clip(1.0, "model")
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for mean, each in zip(average.parameters(), model.parameters()):
                        mean.lerp_(each, 0.1)
                flips(step, "end")
            run.log(loss=loss)
    return {"model": model, "average": average}, {"": optimizer}, losses


def with_a_scaler(job: Any, folder: Path, flips: Flips, steps: int, **options: Any) -> Any:
    """A gradient scaler, which skips the update if a changed bit makes a gradient infinite."""
    model = make_model()
    job.wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", growth_interval=4, init_scale=16.0)
    flips.tensors = lambda: state_tensors({"": model}, {"": optimizer})
    loader = DataLoader(dataset(), batch_size=BATCH, shuffle=True)
    with job.run(
        model, optimizer, loader, checkpoints=folder, steps=steps, states={"scaler": scaler}, **options
    ) as run:
        for step, (inputs, targets) in run:
            flips(step, "begin")
            loss = F.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            flips(step, "backward")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            flips(step, "end")
            run.log(loss=loss, same={"scale": scaler.get_scale()})
    return {"": model}, {"": optimizer}, []


def adversarial(job: Any, folder: Path, flips: Flips, steps: int, **options: Any) -> Any:
    """Two models with an optimizer each, which make their updates one after the other in a step."""
    makes, judges = make_model(4, 5), make_model(5, 1)
    models: dict[str, nn.Module] = {"makes": makes, "judges": judges}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name, model in models.items():
        job.wrap(model)
        optimizers[name] = torch.optim.Adam(model.parameters(), lr=1e-3)
    flips.tensors = lambda: state_tensors(models, optimizers)
    loader = DataLoader(dataset(), batch_size=BATCH, shuffle=True)
    with job.run(models, optimizers, loader, checkpoints=folder, steps=steps, **options) as run:
        for step, (inputs, _) in run:
            flips(step, "begin")
            optimizers["judges"].zero_grad()
            made = makes(torch.randn(len(inputs), 5))
            loss = F.softplus(judges(made.detach())).mean() + F.softplus(-judges(inputs)).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizers["judges"].step()
            flips(step, "forward")
            optimizers["makes"].zero_grad()
            F.softplus(-judges(made)).mean().backward()  # type: ignore[no-untyped-call]
            flips(step, "backward")
            optimizers["makes"].step()
            flips(step, "end")
            run.log(loss=loss)
    return models, optimizers, []


class Samples:
    """The samples by numbers, as the loader of ``hpctrain train`` reads them."""

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, numbers: Any) -> Any:
        return dataset()[torch.as_tensor(numbers)]


def as_hpctrain_train(job: Any, folder: Path, flips: Flips, steps: int, **options: Any) -> Any:
    """The loader of runs from a settings file, which has a state of its own."""
    model = make_model()
    job.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    flips.tensors = lambda: state_tensors({"": model}, {"": optimizer})
    loader: Any = Loader(Samples(), batch=BATCH, rank=job.rank, size=job.size, seed=4)  # type: ignore[arg-type]
    losses: list[float] = []
    with job.run(model, optimizer, loader, checkpoints=folder, steps=steps, **options) as run:
        for step, batch in run:
            flips(step, "begin")
            loss = F.cross_entropy(model(batch.inputs), batch.targets)
            loss.backward()  # type: ignore[no-untyped-call]
            flips(step, "backward")
            optimizer.step()
            optimizer.zero_grad()
            flips(step, "end")
            run.log(loss=loss)
    return {"": model}, {"": optimizer}, losses


def evaluating(job: Any, folder: Path, flips: Flips, steps: int, **options: Any) -> Any:
    """Evaluation, the best checkpoint and early stopping in the code after each pass."""
    model = make_model()
    job.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    flips.tensors = lambda: state_tensors({"": model}, {"": optimizer})
    loader = DataLoader(dataset(), batch_size=BATCH, shuffle=True)
    samples = DataLoader(dataset(), batch_size=16)
    with job.run(model, optimizer, loader, checkpoints=folder, **{**options, "every": 100, "keep": 10}) as run:
        for epoch in run.epochs(steps * BATCH // SAMPLES):
            for step, (inputs, targets) in run:
                flips(step, "begin")
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                flips(step, "end")
                if step % 4 == 2:
                    inside = run.evaluate(samples, lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
                    run.log(same={"inside": float(inside)})
                run.log(loss=loss)
            flips(run.step, "after")
            value = run.evaluate(samples, lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
            flips(run.step, "evaluated")
            run.log(same={"validation": float(value)})
            run.save(best=value)
    return {"": model}, {"": optimizer}, []


PROGRAMS = {
    each.__name__: each
    for each in (
        in_epochs,
        with_workers,
        from_a_stream,
        from_a_list,
        accumulating,
        with_a_scaler,
        adversarial,
        as_hpctrain_train,
    )
}
