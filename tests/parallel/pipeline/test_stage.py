"""Chain of chunks: the same bits as the model, forward and backward, wherever it is cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.models.build import ConvNet, MultiLayerPerceptron
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig
from hpctrain.parallel.objective import ONE_TENSOR, Slot, unflatten
from hpctrain.parallel.pipeline.channels import MessageFormat
from hpctrain.parallel.pipeline.layers import find_layers
from hpctrain.parallel.pipeline.skip import Join, Keep
from hpctrain.parallel.pipeline.split_backward import WeightGradStore
from hpctrain.parallel.pipeline.stage import Chunk, backward, make_chunks, prune, tied_parameters, used_twice
from hpctrain.parallel.recompute import recompute

SHAPE = {"heads": 2, "width": 16, "context": 8, "vocab_size": 31}
Make = Callable[[], nn.Module]


class Residual(nn.Module):
    """Layer that uses its input three times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, width]`` to the same shape."""
        return x + torch.tanh(self.linear(self.norm(x))) * x


class Apply(nn.Module):
    """Layer that computes a function."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> object:
        return self.function(x)


class Both(nn.Module):
    """Layer with three inputs and three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(6, 6), nn.Embedding(6, 6)

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, which, y = given
        return self.linear(x) + self.table(which), which, y * x


def product() -> nn.Module:
    return Apply(lambda given: given[0] * given[2])


def skipping() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(6, 6), Keep("far"), Residual(6), Keep("near"), Residual(6), nn.ReLU(inplace=True)),
        *(Join("near"), Residual(6), Join("far", "concat"), nn.Linear(12, 6), Keep("last"), Join("last", torch.mul)),
    )


def unet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), Keep("wide"), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Upsample(scale_factor=2), Join("wide", "concat")),
        *(nn.Conv2d(8, 3, 1), nn.Flatten(), nn.Linear(3 * 64, 5)),
    )


def words(dropout: float = 0.0, tie: bool = False) -> Make:
    return lambda: GPT(GPTConfig(layers=3, tied=tie, dropout=dropout, **SHAPE))


def inputs(*shape: int) -> list[Tensor]:
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(number)) for number in range(3)]


TOKENS = [torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(number)) for number in range(3)]
CASES: dict[str, tuple[Make, Sequence[Tensor]]] = {
    "gpt": (words(), TOKENS),
    "dropping gpt": (words(dropout=0.2), TOKENS),
    "mlp": (lambda: MultiLayerPerceptron((4, 5), 3, hidden=(6, 6)), inputs(7, 4, 5)),
    "convnet": (lambda: ConvNet((8, 8), 3, channels=(4, 4)), inputs(3, 8, 8)),
    "residual": (lambda: nn.Sequential(nn.Linear(6, 6), *(Residual(6) for _ in range(4))), inputs(5, 6)),
    "skips": (skipping, inputs(5, 6)),
    "unet": (unet, inputs(3, 2, 8, 8)),
    "tuples": (
        lambda: nn.Sequential(
            *(nn.Linear(6, 6), Apply(lambda x: (x * 2, x.detach().argmax(-1), torch.sin(x))), Both(), Both()),
            *(product(), Apply(lambda x: (x * 3,)), Apply(lambda given: given[0]), nn.ReLU(True)),
        ),
        inputs(5, 6),
    ),
}
every = pytest.mark.parametrize("make, batches", CASES.values(), ids=CASES.keys())


def made(make: Make) -> Any:
    torch.manual_seed(3)
    return make()


def loss(result: Tensor) -> Tensor:
    return result.sin().sum()


def whole(make: Make, batches: Sequence[Tensor]) -> tuple[list[Tensor], nn.Module]:
    """Return the results of the unsplit model for microbatches, after its backward passes."""
    model = made(make)
    torch.manual_seed(4)
    results = []
    for batch in batches:
        result = model(batch)
        loss(result).backward()
        results.append(result.detach())
    return results, model


def cut(count: int, dice: random.Random) -> list[range]:
    cuts = sorted(dice.sample(range(1, count), dice.randint(1, min(4, count - 1))))
    return [range(start, end) for start, end in zip([0, *cuts], [*cuts, count])]


Saved = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def forward(chunks: Sequence[Chunk], batch: Tensor, stores: Sequence[WeightGradStore] | None, key: int) -> list[Saved]:
    """Return inputs and outputs of each chunk, each in a separate graph."""
    saved: list[Saved] = []
    given: tuple[Tensor, ...] = (batch,)
    structure: Any = ONE_TENSOR
    for number, chunk in enumerate(chunks):
        given = tuple(one.detach().requires_grad_(number > 0 and one.is_floating_point()) for one in given)
        with nullcontext() if stores is None else stores[number].deferring(key):
            outputs = chunk(given, structure)
        saved.append((given, outputs.tensors))
        given, structure = outputs.tensors, outputs.structure
    return saved


def chained(
    models: Sequence[nn.Module], parts: Sequence[range], batches: Sequence[Tensor], *, deferred: bool = False
) -> list[Tensor]:
    """Train each stage in a separate model; return the results."""
    rows = [find_layers(model) for model in models]
    chunks = [make_chunks(row, parts)[number] for number, row in enumerate(rows)]
    stores = [WeightGradStore(used_twice(chunk.layers)) for chunk in chunks] if deferred else None
    torch.manual_seed(4)
    results = []
    for key, batch in enumerate(batches):
        saved = forward(chunks, batch, stores, key)
        results.append(saved[-1][1][0].detach())
        gradients = backward([loss(saved[-1][1][0])], None, saved[-1][0])
        for given, outputs in reversed(saved[:-1]):
            gradients = backward(outputs, gradients, given)
        assert all(one.grad is None for given, _ in saved for one in given)
    for store in stores or ():
        for key in range(len(batches)):
            store.flush(key)
    return results


def assert_same(models: Sequence[nn.Module], wanted: nn.Module) -> None:
    """Compare gradients and buffers of pruned models with those of the whole model, bit for bit."""
    parameters, buffers = dict(wanted.named_parameters()), dict(wanted.named_buffers())
    seen = set()
    for model in models:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.equal(parameter.grad, parameters[name].grad), name
            seen.add(name)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, buffers[name]), name
            seen.add(name)
    assert seen == {*parameters, *buffers}


@every
@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize("seed", range(4))
def test_any_cut_gives_the_bits_of_the_unsplit_model(
    make: Make, batches: Sequence[Tensor], seed: int, deferred: bool
) -> None:
    wanted, model = whole(make, batches)
    parts = cut(len(find_layers(model)), random.Random(seed))
    models = [made(make) for _ in parts]
    for stage, part in zip(models, parts):
        prune(stage, find_layers(stage), part)
    results = chained(models, parts, batches, deferred=deferred)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, wanted, strict=True))
    assert_same(models, model)


@every
def test_one_recomputed_chunk_per_layer_gives_the_same_bits(make: Make, batches: Sequence[Tensor]) -> None:
    wanted, model = whole(make, batches)
    parts = [range(number, number + 1) for number in range(len(find_layers(model)))]
    models = [made(make) for _ in parts]
    for number, stage in enumerate(models):
        layers = find_layers(stage)
        prune(stage, layers, [number])
        if not getattr(layers[number].module, "inplace", False):  # an in-place layer has overwritten its input
            recompute([layers[number].module])
    results = chained(models, parts, batches, deferred=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, wanted, strict=True))
    assert_same(models, model)


def test_gradients_of_tied_parameters_add_up() -> None:
    _, model = whole(words(tie=True), TOKENS[:1])
    parts = [range(0, 2), range(2, 4), range(4, 6)]
    models = [made(words(tie=True)) for _ in parts]
    (shared,) = tied_parameters(find_layers(models[0]), parts)
    for stage, part in zip(models, parts):
        prune(stage, find_layers(stage), part)
    chained(models, parts, TOKENS[:1])
    found = [models[number].get_parameter(shared.names[0]).grad for number in shared.chunks]
    assert shared.chunks == (0, 2)
    wanted = model.get_parameter(shared.names[1]).grad
    assert torch.equal(found[0] + found[1], wanted) and not torch.equal(found[0], wanted)


def test_gradients_of_tied_parameters_inside_one_chunk_add_up() -> None:
    wanted, model = whole(words(tie=True), TOKENS)
    alone = made(words(tie=True))
    results = chained([alone], [range(6)], TOKENS, deferred=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, wanted, strict=True))
    assert_same([alone], model)


def test_no_graph_is_recorded_without_gradients() -> None:
    model = made(skipping)
    chunks = make_chunks(find_layers(model), [range(0, 5), range(5, 12)])
    with torch.no_grad():
        given = chunks[0]((torch.randn(2, 6),)).tensors
        assert len(given) == 3 and chunks[1].carried_in == ("far", "near") and chunks[1].carried_out == ()
        (result,) = chunks[1](given).tensors
    assert not result.requires_grad


def test_only_float_inputs_get_gradients_and_missing_ones_are_zero() -> None:
    (chunk,) = make_chunks(find_layers(nn.Sequential(Both(), product())), [range(2)])
    x, which, y = torch.randn(2, 6, requires_grad=True), torch.tensor([1, 2]), torch.randn(2, 6, requires_grad=True)
    other = torch.randn(2, requires_grad=True)
    (result,) = chunk((x, which, y), (Slot(0), Slot(1), Slot(2))).tensors
    found = backward([result.sum()], None, [x, which, y, other])
    assert [tuple(one.shape) for one in found] == [(2, 6), (2, 6), (2,)]
    assert found[0].abs().sum() > 0 and found[2].tolist() == [0, 0] and other.grad is None


def test_outputs_without_gradients_are_skipped() -> None:
    x = torch.randn(3, requires_grad=True)
    outputs = (x * 2, torch.ones(3), torch.tensor([1, 2]))
    (gradient,) = backward(outputs, [torch.ones(3), torch.full((3,), 7.0)], [x])
    assert gradient.tolist() == [2, 2, 2]
    assert backward(outputs[1:], [torch.ones(3)], [torch.ones(2)]) == ()
    with pytest.raises(ValueError):
        backward(outputs, [torch.ones(3)], [x])


@pytest.mark.parametrize(
    "what",
    [
        lambda x: {"a": x, "b": None},
        lambda x: [x, 3],
        lambda x: (x, (x * 2, "mean"), {"deep": [x * 3]}),
        lambda x: (x,),
    ],
)
def test_nested_values_are_sent(what: Callable[[Tensor], object]) -> None:
    seen = Apply(lambda x: x)
    chunks = make_chunks(find_layers(nn.Sequential(nn.Tanh(), Apply(what), seen)), [range(2), range(2, 3)])
    given = chunks[0]((torch.ones(2),))
    assert all(isinstance(each, Tensor) for each in given.tensors)
    result = chunks[1](given.tensors, given.structure)
    wanted = what(torch.ones(2).tanh())
    assert str(unflatten(result.structure, result.tensors)) == str(wanted)


@pytest.mark.parametrize(
    "what, called",
    [
        (lambda x: (x, {1, 2}), "output[1] of type set"),
        (lambda x: {"a": [x, torch.nn.Tanh()]}, "output['a'][1] of type Tanh"),
        (lambda x: (1, None), "no tensor"),
    ],
)
def test_values_that_cannot_be_sent_are_named(what: Callable[[Tensor], object], called: str) -> None:
    chunks = make_chunks(find_layers(nn.Sequential(nn.Tanh(), Apply(what), nn.Tanh())), [range(2), range(2, 3)])
    with pytest.raises(UsageError) as error:
        chunks[0]((torch.ones(2),))
    assert str(error.value).startswith(f"layer 1 returned {called}, after which the model cannot be cut")


@pytest.mark.parametrize(
    "structure, text",
    [
        ((Slot(0), 4), r"output\[1\] is 4 and was 3; what is no tensor must follow from the shape"),
        ((Slot(0), None), r"output\[1\] is None and was 3"),
        ((Slot(0), Slot(1)), r"output\[1\] is a tensor and was 3"),
        (Slot(0), r"output\[0\] is missing and was a tensor"),
    ],
)
def test_changed_structures_are_named(structure: Any, text: str) -> None:
    message_format = MessageFormat((), (Slot(0), 3))
    message_format.check_structure((Slot(0), 3), "two")
    with pytest.raises(UsageError, match=rf"^layer two, after which the model is cut, returned another .*: {text}"):
        message_format.check_structure(structure, "two")


def test_a_layer_that_keeps_only_sometimes_is_named() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keep, self.on = Keep("x"), False

        def forward(self, x: Tensor) -> Tensor:
            return self.keep(x) if self.on else x  # type: ignore[no-any-return]

    model = nn.Sequential(Sometimes(), nn.Tanh(), Join("x"))
    chunks = make_chunks(find_layers(model), [range(2), range(2, 3)])
    with pytest.raises(UsageError, match=r"^layers 0 to 1 have kept \[\], expected \['x'\]: every Keep and Join of a"):
        chunks[0]((torch.ones(2),))
    model[0].on = True
    assert len(chunks[0]((torch.ones(2),)).tensors) == 2
