"""Initialisation of a model's weights, module by module, each from a generator of its own.

The weights depend only on torch's seed and on the module's name. They do not depend on the order in
which modules are built, nor on which modules a rank builds: a pipeline stage, or a module that is
materialised later, has exactly the weights of the whole model. They are drawn on the host in
float32, so that device and dtype only affect rounding. Two models with the same seed and names have
the same weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hpctrain.errors import UsageError

NORMS = (nn.LayerNorm, nn.BatchNorm2d)


def generator_for(name: str) -> torch.Generator:
    """Return a generator seeded by torch's own seed and a name; torch's generator is not changed."""
    digest = hashlib.sha256(f"{torch.initial_seed()} {name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:4], "little"))  # it uses 32 bits of a seed


@torch.no_grad()
def fill(tensor: Tensor, how: Callable[[Tensor], object]) -> None:
    """Fill a tensor of any device and dtype with values that ``how`` draws into a host tensor of the same shape."""
    direct = tensor.device.type == "cpu" and tensor.dtype is torch.float32 and tensor.is_contiguous()
    host = tensor if direct else torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
    how(host)
    if host is not tensor:
        tensor.copy_(host)


def initialise_as_torch(name: str, module: nn.Module) -> None:
    """Initialise the weights of one module in place with torch's distribution: uniform within 1/sqrt(fan in).

    They depend on torch's seed and the module's ``name`` in the model.
    """
    if not has_weights(module):
        return
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        bound, generator = 1 / math.sqrt(module.weight[0].numel()), generator_for(name)
        for tensor in module.parameters(recurse=False):
            fill(tensor, lambda host: host.uniform_(-bound, bound, generator=generator))
    else:
        reset_norm(name, module)


def has_weights(module: nn.Module) -> bool:
    """Return whether a module has own parameters that are not on the meta device."""
    return any(not parameter.is_meta for parameter in module.parameters(recurse=False))


def reset_norm(name: str, module: nn.Module) -> None:
    """Set the weight of a normalisation to ones and its bias to zeros. Raises ``UsageError`` for other modules."""
    if not isinstance(module, NORMS):
        raise UsageError(
            f"module {name!r} is a {type(module).__name__}, whose weights this model does not know how to draw: "
            "initialise it yourself"
        )
    module.reset_parameters()


class _NoInitialisers(TorchFunctionMode):
    """Mode that disables torch's initialisers: useless on meta tensors, and some load sympy, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else (kwargs or {}).get("tensor")
        return func(*args, **(kwargs or {}))


@contextmanager
def without_memory() -> Iterator[None]:
    """Build modules without memory and without initialisation in the ``with`` block."""
    with torch.device("meta"), _NoInitialisers():
        yield


def allocate(model: nn.Module) -> None:
    """Move a model from the meta device to torch's default device, without initialisation."""
    device = torch.get_default_device()
    # not to_empty: it calls empty_like, which loads sympy on the meta device
    model._apply(lambda one: torch.empty(one.shape, dtype=one.dtype, device=device))  # type: ignore[no-untyped-call]


def draw_weights(model: nn.Module, initialise: Callable[[str, nn.Module], None]) -> None:
    """Initialise the weights of every module of a model; a shared weight is drawn once."""
    drawn: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        own = set(module.parameters(recurse=False))
        if not own <= drawn:
            initialise(name, module)
            drawn |= own
