"""Division of a model into units: parameters that are gathered together just before their module runs.

Such modules have no ``forward``, or other modules read their parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.utils import parametrize

from hpctrain.errors import UsageError


def uncalled(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules inside a model that are never called, each with the reason and the name to use instead.

    These are modules without a ``forward`` (``ModuleList``, ``ModuleDict``, ``ParameterList``), and
    the modules inside a ``MultiheadAttention``, which reads the weight of its projection.
    Parametrizations are included too, because they run when a weight is read.
    """
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if not has_forward(module):
            members = f"{name}.*" if name else "*"
            found.setdefault(module, f"never runs, being a {type(module).__name__}: name its members, {members!r}")
        for part in _parts_read(module):
            found[part] = f"is read by the {type(module).__name__} around it and never called: name that, {name!r}"
    return found


def has_forward(module: nn.Module) -> bool:
    """Return whether a module has a ``forward`` method."""
    return getattr(type(module), "forward", None) is not nn.Module.forward or "forward" in vars(module)


def _parts_read(module: nn.Module) -> list[nn.Module]:
    """Return all modules inside ``module`` if it reads their parameters directly."""
    if isinstance(module, nn.MultiheadAttention):
        return [part for part in module.modules() if part is not module]
    if parametrize.is_parametrized(module):
        parametrizations = module.parametrizations
        assert isinstance(parametrizations, nn.Module)
        return list(parametrizations.modules())
    return []


# Choice of units by patterns of the user ------------------------------------------------------------------------------


EXAMPLES = 8  # module names that an error lists


def modules_by_pattern(model: nn.Module, patterns: Sequence[str]) -> set[nn.Module]:
    """Return the modules whose class name or own name matches a pattern, except those that are never called.

    Raises ``UsageError`` for a pattern that matches no module with parameters.
    """
    others = uncalled(model)
    named = [(name, module) for name, module in model.named_modules(remove_duplicate=False)]
    chosen: set[nn.Module] = set()
    for pattern in patterns:
        matching = [(name, module) for name, module in named if _matches(pattern, name, module)]
        useful = {module for _, module in matching if module not in others and _holds_parameters(module)}
        if not useful:
            raise UsageError(_nothing_chosen(pattern, matching, model, others), everywhere=True)
        chosen |= useful
    return chosen


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    """Return whether a pattern matches the class name, or each part of the module name (``*`` stays within a part)."""
    if fnmatchcase(type(module).__name__, pattern):
        return True
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(part, want) for part, want in zip(parts, wanted))


def _holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _nothing_chosen(
    pattern: str, matching: list[tuple[str, nn.Module]], model: nn.Module, others: dict[nn.Module, str]
) -> str:
    """Return the error message for a pattern that matches no usable module."""
    for name, module in matching:
        if module in others and _holds_parameters(module):
            return f"unit pattern {pattern!r} matches {name}, which {others[module]}"
    if matching:
        return f"unit pattern {pattern!r} matches only modules without parameters, such as {matching[0][0]}"
    usable = {
        name: module for name, module in model.named_modules() if module not in others and _holds_parameters(module)
    }
    classes = sorted({type(module).__name__ for module in usable.values()})
    names = [name for name in usable if name]
    more = ", ..." if len(names) > EXAMPLES else ""
    return (
        f"unit pattern {pattern!r} matches no module: the model has the classes {', '.join(classes)} and modules named "
        f"{', '.join(names[:EXAMPLES])}{more}"
    )


# Choice of units by their size, for a model of unknown structure ------------------------------------------------------


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
    search.descend(model, smallest)
    return search.chosen


class _Search:
    def __init__(self, model: nn.Module, smallest: int, largest: int) -> None:
        self.largest = largest
        self.least_list = min(smallest, size(model.parameters()) / 16)  # a list that holds less is not a list of blocks
        self.uncalled = uncalled(model)
        self.chosen: set[nn.Module] = set()

    def descend(self, module: nn.Module, smallest: float) -> None:
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
            self.descend(module, math.inf)  # only lists of blocks qualify

    def visit(self, module: nn.Module, smallest: float) -> None:
        """Choose by size a module that is not a member of a list."""
        held = size(module.parameters())
        if held == 0:
            return
        callable_ = module not in self.uncalled
        if not callable_ or held > self.largest or any(self.repeats(inner) for inner in module.modules()):
            self.descend(module, smallest)
            held = self.remaining_bytes(module)
        if callable_ and held >= smallest:
            self.chosen.add(module)

    def repeats(self, module: nn.Module) -> bool:
        """Return whether a module's members are repeated blocks."""
        if size(module.parameters()) < self.least_list:
            return False
        return isinstance(module, (nn.ModuleList, nn.ModuleDict)) or _has_composite_members(module)

    def remaining_bytes(self, module: nn.Module) -> int:
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


# Division of a model into units: parameters that are gathered together just before their module runs ------------------


Chain = tuple[nn.Module, ...]  # the units around a parameter, from the model to the innermost
Use = tuple[str, Chain]  # one of a parameter's names, and the units around this use


@dataclass(frozen=True, eq=False)
class Unit:
    """Unit: parameters that are gathered together, those of a module except those of units inside it."""

    # Name of the module; "" for the model itself.
    name: str
    module: nn.Module
    # Each parameter once, under its first name in the whole model, in the model's order.
    parameters: list[tuple[str, nn.Parameter]]
    # For each parameter, all modules and attributes where it is registered (tied ones have
    # several).
    locations: list[list[tuple[nn.Module, str]]]

    def entries(self) -> Iterator[tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]]:
        """Yield the name, the parameter and its locations, for each parameter."""
        for (name, parameter), locations in zip(self.parameters, self.locations):
            yield name, parameter, locations


def find_units(
    model: nn.Module, patterns: Sequence[str] = (), *, smallest: int = 2**20, largest: int = 64 * 2**20
) -> list[Unit]:
    """Return the units of a model: first the model itself, with the remaining parameters, then the others in its order.

    A pattern is the name of a class (``Block``) or of a module (``blocks.*``, where ``*`` does not
    cross a dot). Without patterns, units are chosen by size, in bytes of parameters (see
    ``modules_by_size``). A parameter belongs to the innermost unit around it. A parameter that is
    also used outside of that unit belongs to the unit around all its uses. Raises ``UsageError``
    for a pattern that matches no module, and if patterns put one parameter into two separate units.
    """
    chosen = modules_by_pattern(model, patterns) if patterns else modules_by_size(model, smallest, largest)
    chosen.add(model)
    names = {module: name for name, module in model.named_modules() if module in chosen}
    uses: dict[nn.Parameter, list[Use]] = {}
    for name, parameter, chain in _walk(model, chosen):
        uses.setdefault(parameter, []).append((name, chain))
    if patterns:
        for used in uses.values():
            _check_not_shared(used, names)
    owners = {parameter: _owner([chain for _, chain in used]) for parameter, used in uses.items()}
    return _build(model, names, owners)


def _walk(
    module: nn.Module, chosen: set[nn.Module], prefix: str = "", chain: Chain = ()
) -> Iterator[tuple[str, nn.Parameter, Chain]]:
    """Yield every use of every parameter; a module that is reachable by several paths is visited once per path."""
    if module in chosen:
        chain = (*chain, module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter, chain
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, chosen, f"{prefix}{name}.", chain)


def _owner(chains: list[Chain]) -> nn.Module:
    """Return the innermost module around all uses of a parameter."""
    if len({chain[-1] for chain in chains}) == 1:
        return chains[0][-1]  # this module may be reachable by several paths
    common: list[nn.Module] = [level[0] for level in zip(*chains) if len(set(level)) == 1]
    return common[-1]


def _check_not_shared(uses: list[Use], names: dict[nn.Module, str]) -> None:
    """Raise ``UsageError`` if two units use the same parameter and neither is inside the other."""
    for number, (name, chain) in enumerate(uses):
        for other, far in uses[number + 1 :]:
            if chain[-1] is not far[-1] and any(one is not two for one, two in zip(chain, far)):
                raise UsageError(
                    f"units {names[chain[-1]]} and {names[far[-1]]} share a parameter, {name} being {other}: choose "
                    "one unit around both, or leave both to the model by choosing neither",
                    everywhere=True,
                )


def _build(model: nn.Module, names: dict[nn.Module, str], owners: dict[nn.Parameter, nn.Module]) -> list[Unit]:
    locations: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                locations.setdefault(parameter, []).append((module, attribute))
    units = {module: Unit(name, module, [], []) for module, name in names.items()}
    for name, parameter in model.named_parameters():
        unit = units[owners[parameter]]
        unit.parameters.append((name, parameter))
        unit.locations.append(locations[parameter])
    return [unit for unit in units.values() if unit.parameters or unit.module is model]
