"""Draw a model's weights module by module, each from a generator of its own.

So they depend on torch's seed and on the module's name, and neither on the order in which modules are built nor on
which of them a rank builds: a stage of a pipeline, or a part that gets its memory later, has the very weights of the
whole model. They are drawn on the host in float32, so that device and dtype change nothing but the rounding. Two models
of one seed and the same names have the same weights.
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
    """Return a generator seeded by torch's own seed and a name; torch's generator is left alone."""
    digest = hashlib.sha256(f"{torch.initial_seed()} {name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:4], "little"))  # it takes 32 bits of a seed


@torch.no_grad()
def draw(tensor: Tensor, how: Callable[[Tensor], object]) -> None:
    """Fill a tensor of any device and dtype with what is drawn into a host tensor of its shape."""
    direct = tensor.device.type == "cpu" and tensor.dtype is torch.float32 and tensor.is_contiguous()
    host = tensor if direct else torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
    how(host)
    if host is not tensor:
        tensor.copy_(host)


def initialise_as_torch(name: str, module: nn.Module) -> None:
    """Draw the weights of one module in place, distributed as torch's own are: uniform, within 1/sqrt(fan in)."""
    if not has_weights(module):
        return
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        bound, generator = 1 / math.sqrt(module.weight[0].numel()), generator_for(name)
        for tensor in module.parameters(recurse=False):
            draw(tensor, lambda host: host.uniform_(-bound, bound, generator=generator))
    else:
        reset_norm(name, module)


def has_weights(module: nn.Module) -> bool:
    """Tell whether a module has parameters of its own, in memory."""
    return any(not parameter.is_meta for parameter in module.parameters(recurse=False))


def reset_norm(name: str, module: nn.Module) -> None:
    """Set a normalisation to ones and zeros; raise ``UsageError`` for a module that is none."""
    if not isinstance(module, NORMS):
        raise UsageError(
            f"module {name!r} is a {type(module).__name__}, whose weights this model does not know how to draw: "
            "initialise it yourself"
        )
    module.reset_parameters()


class _Undrawn(TorchFunctionMode):
    """Let torch's initialisers do nothing: on the meta device some load sympy, which takes seconds, to no end."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else (kwargs or {}).get("tensor")
        return func(*args, **(kwargs or {}))


@contextmanager
def blank() -> Iterator[None]:
    """Build modules that have no memory, and whose weights nobody draws, in the ``with`` block."""
    with torch.device("meta"), _Undrawn():
        yield


def give_memory(model: nn.Module) -> None:
    """Move a model that was built on meta to torch's default device, its weights not drawn yet."""
    device = torch.get_default_device()
    # to_empty by empty_like, which on the meta device loads sympy
    model._apply(lambda one: torch.empty(one.shape, dtype=one.dtype, device=device))  # type: ignore[no-untyped-call]


def draw_weights(model: nn.Module, initialise: Callable[[str, nn.Module], None]) -> None:
    """Draw the weights of every module of a model, and those that two share once."""
    drawn: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        own = set(module.parameters(recurse=False))
        if not own <= drawn:
            initialise(name, module)
            drawn |= own
