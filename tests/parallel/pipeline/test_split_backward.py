"""Deferred weight gradients: the same bits as those of autograd, and backward passes from given gradients."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpctrain.parallel.pipeline.split_backward import WeightGradStore, backward_from
from hpctrain.parallel.recompute import recompute

SIZES = [(64, 48), (7, 5), (33, 257), (1, 3), (3, 1), (1, 1)]
LEADING = [(5,), (1,), (3, 4), (2, 3, 5), (4, 1), (8, 64)]


def rows(leading: tuple[int, ...], width: int) -> dict[str, Callable[[], Tensor]]:
    """Return tensors ``[*leading, width]`` with different memory layouts."""
    backwards = tuple(range(len(leading), -1, -1))
    return {
        "contiguous": lambda: torch.randn(*leading, width),
        "transposed": lambda: torch.randn(width, *reversed(leading)).permute(backwards),
        "strided": lambda: torch.randn(*leading, 2 * width)[..., ::2],
        "expanded": lambda: torch.randn(*[1] * len(leading), width).expand(*leading, width),
    }


def trained(
    inputs: list[Tensor],
    gradients: list[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    wants: bool,
    store: WeightGradStore | None,
) -> list[Tensor | None]:
    """Return outputs and gradients of microbatches through one layer."""
    own = nn.Parameter(weight.clone(memory_format=torch.preserve_format))
    added = None if bias is None else nn.Parameter(bias.clone())
    found: list[Tensor | None] = []
    for key, (x, gradient) in enumerate(zip(inputs, gradients)):
        x = x.detach().requires_grad_(wants)
        with store.deferring(key) if store is not None else nullcontext():
            y = F.linear(x, weight=own, bias=added)
        y.backward(gradient)
        found += [y.detach(), x.grad]
    if store is not None:
        assert own.grad is None and list(store.deferred) == list(range(len(inputs)))
        for key in range(len(inputs)):
            store.flush(key)
        assert not store.deferred
    return [*found, own.grad, None if added is None else added.grad]


def assert_same(ours: list[Tensor | None], theirs: list[Tensor | None], *, exactly: bool = True) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if not exactly:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
            continue
        assert one is None or other is None or torch.equal(one, other) and one.dtype is other.dtype


@pytest.mark.parametrize("leading", LEADING, ids=str)
@pytest.mark.parametrize("width, outputs", SIZES)
def test_bits_equal_those_of_autograd(leading: tuple[int, ...], width: int, outputs: int) -> None:
    torch.manual_seed(0)
    for name, wants, with_bias, by_columns in product(rows(leading, width), *[[False, True]] * 3):
        inputs = [rows(leading, width)[name]() for _ in range(2)]
        gradients = [torch.randn(*leading, outputs) for _ in range(2)]
        weight = torch.randn(width, outputs).t() if by_columns else torch.randn(outputs, width)
        bias = torch.randn(outputs) if with_bias else None
        arguments = inputs, gradients, weight, bias, wants
        # With AVX-512, the BLAS library uses another kernel for one column, depending on its strides.
        assert_same(trained(*arguments, WeightGradStore()), trained(*arguments, None), exactly=width > 1)


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


class Twice(nn.Module):
    """Model with one layer used three times, one weight in two layers, and a layer with a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.three.bias.requires_grad_(False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, 6]`` to the same shape."""
        x = torch.relu_(self.one(torch.tanh(self.one(self.norm(x)))))  # in place, in a tensor that was deferred
        return self.three(self.one(self.two(x)))  # type: ignore[no-any-return]


def run(model: nn.Module, store: WeightGradStore | None, autocast: bool = False) -> list[Tensor | None]:
    """Train on three microbatches, with all weight gradients at the end; return losses and gradients."""
    losses: list[Tensor | None] = []
    for key in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(key))
        deferring = store.deferring(key) if store is not None else nullcontext()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), deferring:
            value = model(x).square().sum()
        value.backward()
        losses.append(value.detach())
    for key in range(3) if store is not None else ():
        store.flush(key)
    return [*losses, *gradients_of(model)]


def test_parameters_may_be_used_more_than_once() -> None:
    assert_same(run(Twice(), WeightGradStore()), run(Twice(), None))


def test_only_linear_layers_that_need_gradients_are_deferred() -> None:
    model, store = Twice(), WeightGradStore()
    with store.deferring("key"):
        value = model(torch.ones(2, 6)).sum()
        with torch.no_grad():
            model(torch.ones(2, 6))
    value.backward()
    assert model.norm.weight.grad is not None
    assert all(layer.weight.grad is None for layer in (model.one, model.three))
    store.flush("key")
    assert model.one.weight.grad is not None and model.three.bias.grad is None
    before = model.one.weight.grad.clone()
    store.flush("key")  # no gradient is pending any more
    assert torch.equal(model.one.weight.grad, before)
    model(torch.ones(2, 6)).sum().backward()  # outside, gradients are computed immediately
    assert not torch.equal(model.one.weight.grad, before)


def test_keys_are_separate_and_can_be_dropped() -> None:
    layer, store = nn.Linear(2, 2, bias=False), WeightGradStore()
    for key, scale in {"a": 1.0, "b": 10.0, "c": 100.0}.items():
        with store.deferring(key):
            layer(torch.full((1, 2), scale)).sum().backward()
    store.flush("b")
    assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[10, 10]] * 2
    store.flush("a")
    assert layer.weight.grad.tolist() == [[11, 11]] * 2 and list(store.deferred) == ["c"]
    store.deferred.clear()
    store.flush("c")
    assert layer.weight.grad.tolist() == [[11, 11]] * 2 and not store.deferred


def test_hooks_on_parameters_run_when_their_gradient_is_computed() -> None:
    layer, store, seen = nn.Linear(3, 3), WeightGradStore(), []
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda one, name=name: seen.append((name, one.grad is not None)))
    layer.weight.register_hook(lambda gradient: gradient * 2)
    with store.deferring(0):
        layer(torch.ones(2, 3)).sum().backward()
    assert seen == []
    store.flush(0)
    assert sorted(seen) == [("bias", True), ("weight", True)]
    assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[4] * 3] * 3


def test_excluded_parameters_and_computed_weights_are_not_deferred() -> None:
    layer = nn.Linear(3, 3)
    store = WeightGradStore([layer.weight])
    with store.deferring(0):
        layer(torch.ones(2, 3)).sum().backward()
    assert layer.weight.grad is not None and not store.deferred
    made = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    other = WeightGradStore()
    with other.deferring(0):
        made(torch.ones(2, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters()) and not other.deferred


@pytest.mark.parametrize("within", [True, False], ids=["within", "after"])
def test_recomputed_layers_are_deferred_and_keep_only_their_inputs(within: bool) -> None:
    model, store = nn.Sequential(Twice(), Twice()), WeightGradStore()
    recompute(list(model))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        if within:  # backward runs in the same ``with`` block as forward
            with store.deferring(0):
                model(torch.ones(4, 6)).sum().backward()
        else:
            with store.deferring(0):
                value = model(torch.ones(4, 6)).sum()
            value.backward()
    assert all(one.shape == (4, 6) for one in kept), "a tensor other than an input of a layer was kept"
    store.flush(0)
    plain = nn.Sequential(Twice(), Twice())
    plain(torch.ones(4, 6)).sum().backward()
    assert_same(gradients_of(model), gradients_of(plain))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_under_a_users_checkpoint_are_not_deferred(reentrant: bool) -> None:
    model, plain, store = Twice(), Twice(), WeightGradStore()
    x = torch.ones(4, 6, requires_grad=True)
    with store.deferring(0):
        value = checkpoint(model, x, use_reentrant=reentrant).sum()
    value.backward()
    assert not store.deferred
    plain(x).sum().backward()
    assert_same(gradients_of(model), gradients_of(plain))


def test_gradients_under_a_users_saved_tensor_hooks_are_deferred() -> None:
    model, plain, store = Twice(), Twice(), WeightGradStore()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.clone(), lambda one: one):
        with store.deferring(0):
            value = model(torch.ones(4, 6)).sum()
    value.backward()
    assert store.deferred
    store.flush(0)
    plain(torch.ones(4, 6)).sum().backward()
    assert_same(gradients_of(model), gradients_of(plain))


def test_autocast_multiplies_in_bfloat16_and_accumulates_in_float32() -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 3))

    ours = run(make(), WeightGradStore(), autocast=True)
    assert_same(ours, run(make(), None, autocast=True))
    assert not all(
        one is None or other is None or torch.equal(one, other) for one, other in zip(ours, run(make(), None))
    ), "autocast has changed nothing"
    wide = make().double()
    store = WeightGradStore()
    with torch.autocast("cpu", torch.bfloat16), store.deferring(0):
        result = wide[0](torch.ones(2, 6, dtype=torch.float64))
    assert result.dtype is torch.float64


def test_flush_frees_its_inputs_as_it_proceeds() -> None:
    model, store = Twice(), WeightGradStore()
    with store.deferring(0):
        model(torch.ones(2, 6)).sum().backward()
    seen = []
    for parameter in (model.three.weight, model.one.weight):
        parameter.register_post_accumulate_grad_hook(lambda one: seen.append(len(store.deferred)))
    store.flush(0)
    assert seen == [0, 0]


@pytest.mark.gpu
def test_deferral_works_on_a_gpu_with_a_separate_backward_thread() -> None:
    model, plain, store = (
        nn.Sequential(Twice(), Twice()).cuda(),
        nn.Sequential(Twice(), Twice()).cuda(),
        WeightGradStore(),
    )
    recompute([model[0]])
    x = torch.randn(4, 6, device="cuda")
    with store.deferring(0):
        value = model(x).square().sum()
    value.backward()
    assert model[0].one.weight.grad is None and model[1].one.weight.grad is None
    store.flush(0)
    plain(x).square().sum().backward()
    for one, other in zip(gradients_of(model), gradients_of(plain)):
        if other is not None:
            torch.testing.assert_close(one, other)


# Backward passes from given gradients ---------------------------------------------------------------------------------


def test_gradients_equal_those_of_torch() -> None:
    torch.manual_seed(0)
    found = []
    for run in (torch.autograd.backward, backward_from):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(3, 4, generator=generator).requires_grad_()
        outputs = [x.sin(), (x * 2).sum(0)]
        run(outputs, [torch.randn(one.shape, generator=generator) for one in outputs])  # type: ignore[operator]
        found.append(x.grad)
    assert torch.equal(found[0], found[1])  # type: ignore[arg-type]


def test_a_leaf_accumulates_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        backward_from([x], [torch.full((2,), 3.0)])
    assert torch.equal(x.grad, torch.full((2,), 6.0))  # type: ignore[arg-type]


def test_shapes_must_fit() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\) for an output of \(2,\)"):
        backward_from([torch.ones(2, requires_grad=True) * 1], [torch.ones(3)])


def test_no_compiler_is_imported() -> None:
    code = (
        "import sys, torch; from hpctrain.parallel.pipeline.stage import backward\n"
        "x = torch.ones(2, requires_grad=True); backward([x * 2], [torch.ones(2)], [x])\n"
        "assert 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
