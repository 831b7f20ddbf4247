"""Division of a model into units: parameters that are gathered together just before their module runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.fsdp.units_by_pattern import modules_by_pattern
from hpctrain.parallel.fsdp.units_by_size import modules_by_size

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
    places: list[list[tuple[nn.Module, str]]]


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
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, attribute))
    units = {module: Unit(name, module, [], []) for module, name in names.items()}
    for name, parameter in model.named_parameters():
        unit = units[owners[parameter]]
        unit.parameters.append((name, parameter))
        unit.places.append(places[parameter])
    return [unit for unit in units.values() if unit.parameters or unit.module is model]
