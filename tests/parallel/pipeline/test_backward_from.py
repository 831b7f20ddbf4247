"""Backward pass from given gradients: equal to torch's own, without the modules that torch imports for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hpctrain.parallel.pipeline.split_backward import backward_from


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
