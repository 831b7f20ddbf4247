"""Models of users in a pipeline, compared with a plain loop: several inputs, dicts, masks, uneven batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import Objective

WORDS, WIDTH, LENGTH = 13, 12, 5
SAMPLES, BATCH, STEPS = 21, 8, 5  # batches of 8, 8 and 5
CLOSE = 1e-6


# Models ---------------------------------------------------------------------------------------------------------------


class Embed(nn.Module):
    """Embedding of two sequences of words."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.source(source), self.target(target)


class Encode(nn.Module):
    """Layer of an encoder, which also returns the target unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, memory: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return memory + torch.tanh(self.linear(self.norm(memory))), x


class Decode(nn.Module):
    """Layer of a decoder that attends to the memory where the mask is set."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, memory: Tensor, x: Tensor, mask: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        scores = self.query(x) @ memory.transpose(1, 2) * scale / WIDTH**0.5
        scores = scores.masked_fill(~mask.unsqueeze(1), -1e9)
        return memory, x + torch.tanh(self.linear(scores.softmax(-1) @ memory))


class Head(nn.Module):
    """Scores of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WORDS)

    def forward(self, memory: Tensor, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class Translator(nn.Module):
    """Encoder and decoder, with a mask that is an argument of the decoder's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Embed(), Head()
        self.encoder = nn.ModuleList(Encode() for _ in range(3))
        self.decoder = nn.ModuleList(Decode() for _ in range(4))

    def layers(self) -> list[nn.Module]:
        return [self.embed, *self.encoder, *self.decoder, self.head]

    def forward(self, source: Tensor, target: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        memory, x = self.embed(source, target)
        for layer in self.encoder:
            memory, x = layer(memory, x)
        for layer in self.decoder:
            memory, x = layer(memory, x, mask, scale)
        return self.head(memory, x)  # type: ignore[no-any-return]


class Lookup(nn.Module):
    """Embedding of words, in a dict with the inputs of later layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        return {"x": self.table(ids), "mask": mask, "sums": (torch.zeros(len(ids), WIDTH), 0)}


class Update(nn.Module):
    """Layer that takes and returns a state: a nested dict with None and a number in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x, mask, (sums, count) = state["x"], state["mask"], state["sums"]
        y = torch.tanh(self.linear(x))
        y = y if mask is None else y * mask.unsqueeze(-1)
        return {"x": x + y, "mask": mask, "sums": (sums + y.mean(1), count + 1)}


class Mean(nn.Module):
    """Last layer of a sequence of states, with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, state: dict[str, Any]) -> dict[str, Tensor]:
        sums, count = state["sums"]
        return {"scores": self.linear(state["x"].mean(1) + sums / count), "penalty": sums.square().mean(1)}


class States(nn.Module):
    """Model whose layers take and return states."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.ModuleList([Lookup(), *(Update() for _ in range(6)), Mean()])

    def layers(self) -> nn.ModuleList:
        return self.row

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Any:
        state = self.row[0](ids, mask)
        for layer in self.row[1:]:
            state = layer(state)
        return state


# Batches --------------------------------------------------------------------------------------------------------------


class Sentences(Dataset[dict[str, Any]]):
    """Samples as dicts of tensors and a name."""

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(5)
        self.words = torch.randint(WORDS, (3, SAMPLES, LENGTH), generator=chance)
        self.mask = torch.rand(SAMPLES, LENGTH, generator=chance) < 0.7
        self.mask[:, 0] = True

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        source, target, labels = self.words[:, number]
        return {"source": source, "target": target, "labels": labels, "mask": self.mask[number], "name": f"s{number}"}


Compute = Callable[[nn.Module], Callable[[Any], Any]]


def by_position(model: nn.Module) -> Callable[[Any], Tensor]:
    def compute(batch: Any) -> Tensor:
        scores = model(batch["source"], batch["target"], batch["mask"])
        return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())

    return compute


def by_keyword(model: nn.Module) -> Callable[[Any], Tensor]:
    def compute(batch: Any) -> Tensor:
        scores = model(batch["source"], mask=batch["mask"], target=batch["target"], scale=0.5)
        return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())

    return compute


def counted(model: nn.Module) -> Callable[[Any], tuple[Tensor, Tensor]]:
    def compute(batch: Any) -> tuple[Tensor, Tensor]:
        scores = model(**{name: batch[name] for name in ("source", "target", "mask")})
        labels = batch["labels"].masked_fill(~batch["mask"], -100)
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum"), batch["mask"].sum()

    return compute


def states(model: nn.Module) -> Callable[[Any], Tensor]:
    def compute(batch: Any) -> Tensor:
        found = model(batch["source"], mask=batch["mask"])
        return F.cross_entropy(found["scores"], batch["labels"][:, 0] % 3) + found["penalty"].mean()

    return compute


def unmasked(model: nn.Module) -> Callable[[Any], Tensor]:
    def compute(batch: Any) -> Tensor:
        found = model(ids=batch["source"])
        return F.cross_entropy(found["scores"], batch["labels"][:, 0] % 3)

    return compute


CASES: dict[str, tuple[Callable[[], nn.Module], Compute]] = {
    "encoder and decoder": (Translator, by_position),
    "keyword arguments": (Translator, by_keyword),
    "sums and counts": (Translator, counted),
    "nested states": (States, states),
    "states without a mask": (States, unmasked),
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def loader(*, drop_last: bool = False) -> DataLoader[Any]:
    order = torch.Generator().manual_seed(3)
    return DataLoader(Sentences(), BATCH, shuffle=True, generator=order, drop_last=drop_last)


def endless(batches: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def plain(case: str, *, drop_last: bool = False) -> tuple[nn.Module, list[float]]:
    """Return the model that a loop of one process trains, and its losses."""
    make, of = CASES[case]
    model = made(make)
    compute, losses = of(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _, batch in zip(range(STEPS), endless(loader(drop_last=drop_last))):
        result = compute(batch)
        loss = result[0] / result[1] if isinstance(result, tuple) else result
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses


def trained(
    job: Any, folder: Path, case: str, settings: ParallelSettings, *, drop_last: bool = False, accumulate: int = 1
) -> tuple[nn.Module, list[float]]:
    """Return this rank's part of the trained model, and its losses."""
    make, of = CASES[case]
    model = job.wrap(made(make), settings)
    compute, losses = of(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    batches = loader(drop_last=drop_last)
    with job.run(model, optimizer, batches, checkpoints=str(folder), steps=STEPS) as run:
        for _ in run.epochs(9):
            for _, batch in run:
                losses.append(float(run.backward(batch, compute, accumulate=accumulate)))
                optimizer.step()
                optimizer.zero_grad()
    return model, losses


def largest_difference(job: Any, model: nn.Module, wanted: nn.Module) -> float:
    """Return the largest difference of this stage's parameters from those of the whole model."""
    mine, other = job.state_dict(model), wanted.state_dict()
    assert mine and (job.strategy(model).pipe is None or len(mine) < len(other))
    return max(float((tensor - other[name]).abs().max()) for name, tensor in mine.items())


MESHES = [
    pytest.param({"pipe": 2, "schedule": "gpipe"}, marks=pytest.mark.ranks(2)),
    pytest.param({"pipe": 2, "schedule": "1f1b"}, marks=pytest.mark.ranks(2)),
    pytest.param({"pipe": 2, "schedule": "1f1b"}, marks=pytest.mark.ranks(4)),
    pytest.param({"pipe": 2, "schedule": "gpipe", "data": "fsdp"}, marks=pytest.mark.ranks(4)),
    pytest.param({"pipe": 4, "schedule": "1f1b"}, marks=pytest.mark.ranks(4)),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_weights_equal_those_of_a_plain_loop(job: Any, shared_tmp_path: Path, case: str, mesh: dict[str, Any]) -> None:
    model, losses = trained(job, shared_tmp_path, case, ParallelSettings(**mesh))
    whole, wanted = plain(case)
    assert losses == pytest.approx(wanted, abs=CLOSE)
    assert largest_difference(job, model, whole) < CLOSE


@pytest.mark.parametrize("case", CASES)
def test_the_same_script_runs_on_one_rank_without_a_pipeline(job: Any, tmp_path: Path, case: str) -> None:
    model, losses = trained(job, tmp_path, case, ParallelSettings(), accumulate=2)
    whole, wanted = plain(case)
    assert losses == pytest.approx(wanted, abs=CLOSE)
    assert largest_difference(job, model, whole) < CLOSE


@pytest.mark.few(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1"])
def test_other_schedules_equal_a_plain_loop(job: Any, shared_tmp_path: Path, schedule: Any) -> None:
    settings = ParallelSettings(pipe=2, schedule=schedule, recompute=True)
    for case in ("keyword arguments", "nested states"):
        folder = shared_tmp_path / case.replace(" ", "-")
        model, losses = trained(job, folder, case, settings, drop_last=True, accumulate=2)
        whole, wanted = plain(case, drop_last=True)
        assert losses == pytest.approx(wanted, abs=CLOSE)
        assert largest_difference(job, model, whole) < CLOSE


@pytest.mark.ranks(2, 4)
def test_uneven_microbatches_equal_a_plain_loop(job: Any, shared_tmp_path: Path) -> None:
    for case in ("encoder and decoder", "sums and counts"):
        model, losses = trained(job, shared_tmp_path / case[:4], case, ParallelSettings(pipe=2), accumulate=3)
        whole, wanted = plain(case)
        assert losses == pytest.approx(wanted, abs=CLOSE)
        assert largest_difference(job, model, whole) < CLOSE


@pytest.mark.ranks(2)
def test_earlier_gradients_are_not_scaled(job: Any, shared_tmp_path: Path) -> None:
    """The gradients of two batches with different counts add up, each divided by its own count."""
    model, whole = job.wrap(made(Translator), ParallelSettings(pipe=2)), made(Translator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    batches = list(DataLoader(Sentences(), 6))[:2]
    with job.run(model, optimizer, batches, checkpoints=str(shared_tmp_path), split=False) as run:
        for _, batch in run:
            run.backward(batch, counted(model))
            loss, count = counted(whole)(batch)
            (loss / count).backward()
        for name, gradient in job.strategy(model).reduced_gradients():
            wanted = whole.get_parameter(name).grad
            torch.testing.assert_close(gradient.as_subclass(Tensor), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("pipe", [1, 2])
def test_evaluation_and_forward_passes_equal_a_plain_loop(job: Any, pipe: int) -> None:
    for case in ("keyword arguments", "nested states"):
        make, of = CASES[case]
        model, whole = job.wrap(made(make), ParallelSettings(pipe=pipe)), made(make)
        mine = job.evaluate(DataLoader(Sentences(), BATCH), of(model))
        with torch.no_grad():
            parts = [(float(of(whole)(batch)), len(batch["mask"])) for batch in DataLoader(Sentences(), BATCH)]
        assert mine == pytest.approx(sum(loss * count for loss, count in parts) / SAMPLES, abs=CLOSE)
    batch = next(iter(DataLoader(Sentences(), 7)))
    with torch.no_grad():
        found = model(batch["source"], mask=batch["mask"])
        torch.testing.assert_close(found, whole(batch["source"], batch["mask"]))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("pipe", [1, 2])
@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_forward_backward_takes_tuples_and_dicts_and_returns_the_loss_of_its_samples(
    job: Any, pipe: int, form: str
) -> None:
    """The loss is the same on all stages and differs between data ranks; gradients are averaged."""
    model, whole = job.wrap(made(Translator), ParallelSettings(pipe=pipe)), made(Translator)
    strategy = job.strategy(model)
    batch = next(iter(DataLoader(Sentences(), 8)))
    share = 8 // strategy.data.size
    begin = strategy.data.rank * share
    names = ("source", "target", "mask")

    def inputs(begin: int, end: int) -> Any:
        tensors = {name: batch[name][begin:end] for name in names}
        return tensors if form == "dict" else tuple(tensors.values())

    def compare(scores: Tensor, targets: Any) -> Tensor:
        return F.cross_entropy(scores.flatten(0, 1), targets["labels"].flatten()) * targets["factor"]

    targets = {"labels": batch["labels"][begin : begin + share], "factor": 2.0}
    loss = strategy.forward_backward(inputs(begin, begin + share), targets, Objective(compare))
    measured = strategy.measure(inputs(begin, begin + share), targets, Objective(compare))
    own = [batch[name][begin : begin + share] for name in names]
    with torch.no_grad():
        assert float(loss) == pytest.approx(float(compare(whole(*own), targets)), abs=CLOSE)
    assert float(measured) == pytest.approx(float(loss), abs=CLOSE)
    if strategy.pipe is not None:
        assert set(strategy.pipe.all_gather_object(float(loss))) == {float(loss)}
    everyone = strategy.data.all_gather_object(float(loss))
    assert len(set(everyone)) == strategy.data.size, "each of its own samples"
    compare(whole(*(batch[name] for name in names)), {"labels": batch["labels"], "factor": 2.0}).backward()
    for name, gradient in strategy.reduced_gradients():
        torch.testing.assert_close(gradient.as_subclass(Tensor), whole.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
