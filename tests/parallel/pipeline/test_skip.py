"""Skip connections by Keep and Join: in one process, with recomputed layers, and after failed passes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpctrain.errors import UsageError
from hpctrain.parallel.pipeline.layers import Layer, find_layers
from hpctrain.parallel.pipeline.skip import Join, Keep, carried, carrying
from hpctrain.parallel.recompute import recompute


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(4, 4), Keep("a"), nn.Linear(4, 4), Keep("b")),
        *(nn.Tanh(), Join("a"), nn.Linear(4, 4), Join("b", "concat")),
    )


def plain(model: nn.Sequential, x: Tensor) -> Tensor:
    a = model[0](x)
    b = model[2](a)
    return torch.cat([model[6](torch.tanh(b) + a), b], 1)


def gradients(model: nn.Module, result: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(result.square().sum(), list(model.parameters())))


def test_a_sequential_computes_what_a_function_would() -> None:
    model, x = net(), torch.randn(3, 4)
    for _ in range(2):
        assert torch.equal(model(x), plain(model, x))
        for ours, theirs in zip(gradients(model, model(x)), gradients(model, plain(model, x))):
            torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        assert torch.equal(model(x), plain(model, x))


def test_tensors_are_joined_by_addition_concatenation_or_a_function() -> None:
    x = torch.randn(2, 3, 4)

    def joined(join: Join) -> Tensor:
        return nn.Sequential(Keep("k"), nn.ReLU(), join)(x)  # type: ignore[no-any-return]

    assert torch.equal(joined(Join("k")), x.relu() + x)
    assert torch.equal(joined(Join("k", "concat", dim=-1)), torch.cat([x.relu(), x], -1))
    assert torch.equal(joined(Join("k", lambda now, kept: now - 2 * kept)), x.relu() - 2 * x)
    with pytest.raises(UsageError, match="allowed are 'add', 'concat' and functions of two tensors"):
        Join("k", "multiply")  # type: ignore[arg-type]
    assert repr(Keep("k")) == "Keep('k')" and repr(Join("k", "concat")) == "Join('k', 'concat', dim=1)"
    assert repr(Join("k", torch.mul)) == "Join('k', mul)"
    with pytest.raises(UsageError, match=r"^Keep\('k'\) can keep a tensor, not a tuple$"):
        Keep("k")((x, x))  # type: ignore[arg-type]


def test_threads_have_separate_kept_tensors() -> None:
    model, results = net(), {}
    turns = threading.Barrier(2)

    class Turn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            turns.wait(10)
            return x

    rest = nn.Sequential(*model[:4], Turn(), *model[4:])
    inputs = {number: torch.randn(3, 4) for number in range(2)}

    def run(number: int) -> None:
        results[number] = rest(inputs[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[number], plain(model, inputs[number])) for number in inputs)


@pytest.mark.parametrize("inside", [slice(0, 3), slice(1, 7), slice(4, 6), slice(0, 8), slice(3, 8)])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "carrying"])
def test_recomputed_layers_find_kept_tensors(inside: slice, alone: bool) -> None:
    model, xs = net(), [torch.randn(3, 4) for _ in range(2)]
    parts = list(model)
    part = nn.Sequential(*parts[inside])
    parts[inside] = [part]
    again = nn.Sequential(*parts)
    recompute([part])
    runs = []
    for index, module in enumerate(part):
        module.register_forward_pre_hook(lambda *_, index=index: runs.append(index))
    results = []
    for x in xs:  # two microbatches forward, then backward
        if alone:
            results.append(again(x))
        else:
            with carrying({}) as kept:
                results.append(again(x))
            assert not kept
    forward = len(runs)
    for x, result in reversed(list(zip(xs, results))):
        for ours, theirs in zip(gradients(model, result), gradients(model, plain(model, x))):
            torch.testing.assert_close(ours, theirs)
    assert len(runs) > forward, "nothing ran again"
    assert torch.equal(again(xs[0]), plain(model, xs[0]))


def test_torchs_checkpoint_may_enclose_both() -> None:
    model, x = net(), torch.randn(3, 4)
    result = checkpoint(model, x, use_reentrant=False)
    for ours, theirs in zip(gradients(model, result), gradients(model, plain(model, x))):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(model(x), plain(model, x))


class Failing(nn.Module):
    """Layer that fails on request, and keeps its input."""

    fails = True

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError("broken")
        return x


def test_a_pass_that_fails_leaves_nothing_for_the_next() -> None:
    model, failing = net(), Failing()
    whole = nn.Sequential(*model[:4], failing, *model[4:])
    with pytest.raises(ArithmeticError):
        whole(torch.randn(3, 4))
    failing.fails = False
    x = torch.randn(3, 4)
    assert torch.equal(whole(x), plain(model, x))


def test_memory_is_freed_when_a_carrying_pass_fails() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def watch(x: Tensor) -> Tensor:
        y = x * 2
        seen.append(weakref.ref(y.untyped_storage()))  # type: ignore[arg-type]
        return y

    def run() -> None:
        with carrying({}):
            nn.Sequential(Keep("a"), Failing(), Join("a"))(watch(torch.ones(3)))

    kept: dict[str, Tensor] = {}
    with pytest.raises(ArithmeticError), carrying(kept):
        Keep("a")(torch.ones(2))
        raise ArithmeticError
    assert not kept
    with pytest.raises(ArithmeticError):
        run()
    gc.collect()
    assert len(seen) == 1
    with carrying({}):
        nn.Sequential(Keep("a"), Join("a"))(torch.ones(2))


def test_carrying_exposes_kept_tensors_and_accepts_given_ones() -> None:
    with carrying({}) as kept:
        x = torch.ones(2)
        assert torch.equal(Keep("a")(x), x)
        assert list(kept) == ["a"] and torch.equal(kept["a"], x)
        with carrying({"a": torch.zeros(2)}) as inner:
            assert Join("a")(x).tolist() == [1, 1] and not inner
        assert Join("a")(x).tolist() == [2, 2] and not kept


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "carrying"])
def test_mistakes_are_reported_in_the_layer_that_makes_them(alone: bool) -> None:
    def run(*parts: nn.Module) -> Callable[[], object]:
        def call() -> object:
            if alone:
                return nn.Sequential(*parts)(torch.ones(2))
            with carrying({}):
                return nn.Sequential(*parts)(torch.ones(2))

        return call

    with pytest.raises(UsageError, match=r"^Join\('x'\) has nothing to join: put Keep\('x'\) before it, and keep it"):
        run(Join("x"), Keep("x"))()
    with pytest.raises(UsageError, match=r"^Keep\('x'\) comes twice before a Join\('x'\): choose another name"):
        run(Keep("x"), Keep("x"), Join("x"))()
    run(Keep("x"), Join("x"), Keep("x"), Join("x"))()  # successive pairs may share a name


class Inside(nn.Module):
    """Layer that keeps and joins inside, and joins a tensor kept before it."""

    def __init__(self) -> None:
        super().__init__()
        self.keep, self.join = Keep("own"), Join("own")
        self.other, self.more = Join("far"), Keep("new")

    def forward(self, x: Tensor) -> Tensor:
        return self.more(self.other(self.join(self.keep(x))))  # type: ignore[no-any-return]


def row(*parts: nn.Module) -> list[Layer]:
    return find_layers(nn.Sequential(*parts))


def test_needed_tensors_of_each_layer_are_found() -> None:
    layers = row(nn.Tanh(), Keep("far"), nn.Tanh(), Inside(), nn.Tanh(), Join("new"))
    assert carried(layers) == [(), (), ("far",), ("far",), ("new",), ("new",), ()]
    assert carried(find_layers(net())) == [(), (), ("a",), ("a",), ("a", "b"), ("a", "b"), ("b",), ("b",), ()]


def test_a_layer_may_keep_a_name_again_after_joining_it() -> None:
    class Renew(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.join, self.keep = Join("x"), Keep("x")

    layers = row(Keep("x"), Renew(), Join("x"))
    assert carried(layers) == [(), ("x",), ("x",), ()]


@pytest.mark.parametrize(
    "parts, wanted",
    [
        ([Join("x")], r"^layer 0 joins 'x', which no layer before it has kept: put Keep\('x'\) before it, and"),
        ([Keep("x"), Join("x"), Join("x")], "^layer 2 joins 'x', which no layer before it has kept"),
        ([Keep("x"), Keep("x"), Join("x")], r"^Keep\('x'\) comes twice before a Join\('x'\): .* \(at layer 1\)$"),
        ([Keep("x"), nn.Tanh()], r"^Keep\('x'\) is never joined: put Join\('x'\) after it, or take it out$"),
    ],
)
def test_unmatched_keeps_and_joins_are_refused(parts: list[nn.Module], wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted) as error:
        carried(row(*parts))
    assert error.value.everywhere
