"""Choice of units by their size, for a model of unknown structure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from torch import nn

from hpctrain.parallel.fsdp.uncalled import uncalled


def modules_by_size(model: nn.Module, smallest: int, largest: int) -> set[nn.Module]:
    """Return modules that make good units; sizes are in bytes of parameters. The model itself is not included.

    Repeated blocks are units whatever their size. They are the members of the outermost
    ``ModuleList`` or ``ModuleDict``, and of a ``Sequential`` with two or more composite members of
    one class. A list counts as one of blocks only if it holds at least ``smallest``, or at least a
    sixteenth of the model. A block is searched for further lists only if it is larger than
    ``largest``.

    Outside of blocks, a module between the two sizes is a unit, and a smaller one belongs to the
    unit around it. A module that is larger, or has blocks inside, is searched. It becomes a unit
    itself if the parameters left to it are at least ``smallest``. Modules that are never called are
    not units, but their members may be.
    """
    search = _Search(model, smallest, largest)
    search.look_into(model, smallest)
    return search.chosen


class _Search:
    def __init__(self, model: nn.Module, smallest: int, largest: int) -> None:
        self.largest = largest
        self.short = min(smallest, size(model.parameters()) / 16)  # a list that holds less is not a list of blocks
        self.uncalled = uncalled(model)
        self.chosen: set[nn.Module] = set()

    def look_into(self, module: nn.Module, smallest: float) -> None:
        blocks = self.repeats(module)
        for child in module.children():
            if blocks:
                self.add_block(child)
            else:
                self.visit(child, smallest)

    def add_block(self, module: nn.Module) -> None:
        """Choose a member of a list, or its members if it is never called."""
        held = size(module.parameters())
        if held == 0:
            return
        if module in self.uncalled:
            for child in module.children():
                self.add_block(child)
            return
        self.chosen.add(module)
        if held > self.largest:
            self.look_into(module, math.inf)  # only lists of blocks qualify

    def visit(self, module: nn.Module, smallest: float) -> None:
        """Choose by size a module that is not a member of a list."""
        held = size(module.parameters())
        if held == 0:
            return
        callable_ = module not in self.uncalled
        if not callable_ or held > self.largest or any(self.repeats(inner) for inner in module.modules()):
            self.look_into(module, smallest)
            held = self.left(module)
        if callable_ and held >= smallest:
            self.chosen.add(module)

    def repeats(self, module: nn.Module) -> bool:
        """Return whether a module's members are repeated blocks."""
        if size(module.parameters()) < self.short:
            return False
        return isinstance(module, (nn.ModuleList, nn.ModuleDict)) or _has_composite_members(module)

    def left(self, module: nn.Module) -> int:
        """Return the bytes of a module that are in no unit inside it."""
        taken = {parameter for inner in module.modules() if inner in self.chosen for parameter in inner.parameters()}
        return size(parameter for parameter in module.parameters() if parameter not in taken)


def _has_composite_members(module: nn.Module) -> bool:
    """Return whether a ``Sequential`` repeats a class of modules that have submodules themselves."""
    if not isinstance(module, nn.Sequential):
        return False
    kinds = Counter(type(child) for child in module if any(True for _ in child.children()) and size(child.parameters()))
    return any(count > 1 for count in kinds.values())


def size(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of parameters."""
    return sum(parameter.nbytes for parameter in parameters)
