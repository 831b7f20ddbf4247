"""Learning-rate schedulers of a program, found without being named, so that a checkpoint never lacks one.

Note: the search. A scheduler refers to its optimizer, so it is among ``gc.get_referrers(optimizer)``. That takes 26
ms with 290,000 objects alive (torch imported, 600 parameters; Python 3.11, one core of a cloud machine), against 96 ms
for a look at the type of everything in ``gc.get_objects()``. One pass serves all optimizers. A second one, over what
the first found, is made only if a scheduler's ``__dict__`` was asked for, as ``state_dict`` does: then that dict is
what refers to the optimizer.

Found are torch's classes and what derives from them. A schedule written by hand, such as a function that sets ``lr``,
is not found: name it in ``states`` if it has a state.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Collection, Iterable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hpctrain.errors import UsageError

NAME = "scheduler"
SCALER = "scaler"
_KINDS = (LRScheduler, ReduceLROnPlateau)  # in older versions of torch the second does not derive from the first
_ENDS = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, type, ModuleType, FunctionType, MethodType, str, bytes)
_MOST = 100_000  # objects looked at inside of what is saved already


def find_schedulers(
    optimizers: Mapping[str, torch.optim.Optimizer], states: Mapping[str, object]
) -> dict[str, Any]:
    """Return the schedulers of the optimizers that are neither in ``states`` nor inside of an object there, by name.

    That of the only optimizer is called ``scheduler``, of several ``scheduler.KEY``. Several independent ones of one
    optimizer are numbered from the second on (``scheduler.1``), in an order that follows from their classes and
    settings: it is the same in every process. Parts of a SequentialLR or ChainedScheduler are left to it. Schedulers
    written by hand are not found.
    """
    found = _holders(optimizers.values())
    if len(found) > len(optimizers):
        found.clear()
        gc.collect()  # drop those of unreachable cycles: the program has replaced them
        found = _holders(optimizers.values())
    inside = _reachable([*states.values(), *(part for one in found for part in getattr(one, "_schedulers", ()))])
    named: dict[str, Any] = {}
    for key, optimizer in optimizers.items():
        own = [one for one in found if one.optimizer is optimizer and id(one) not in inside]
        base = f"{NAME}.{key}" if key else NAME
        for one in sorted(own, key=_settings):
            named[_free(base, {*states, *named})] = one
    return named


def find_scalers(states: Mapping[str, object]) -> list[Any]:
    """Return the enabled GradScalers of the process that no object in ``states`` holds.

    A scaler refers to no optimizer, so this looks at the types of all objects: 15 ms with 290,000 of them alive.
    """
    kinds = _with_subclasses(torch.amp.GradScaler)
    found = [one for one in gc.get_objects() if type(one) in kinds and one.is_enabled()]
    if found:
        found.clear()
        gc.collect()  # drop those of unreachable cycles: the program has replaced them
        found = [one for one in gc.get_objects() if type(one) in kinds and one.is_enabled()]
    inside = _reachable(list(states.values())) if found else set()
    return [one for one in found if id(one) not in inside]


def _with_subclasses(kind: type[Any]) -> set[type[Any]]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def check_saved(saved: Collection[str], present: Mapping[str, object], found: Collection[str], path: object) -> None:
    """Compare the names of states in a file with those of the program, before anything is restored.

    ``found`` are the names of ``present`` that ``find_schedulers`` gave. Raises ``UsageError`` for a scheduler that one
    side lacks.
    """
    lost = [name for name in saved if re.fullmatch(rf"{NAME}(\..+)?", name) and name not in present]
    if lost:
        raise UsageError(
            f"{path} holds the learning-rate scheduler {lost[0]!r} and the program has none of that name "
            f"(it saves {_listed(present)}); make the scheduler before the run is entered, or name it: "
            f'states={{"{lost[0]}": scheduler}}',
            everywhere=True,
        )
    new = [name for name in found if name not in saved]
    if new:
        kind = type(present[new[0]]).__name__
        raise UsageError(
            f"the program has the learning-rate scheduler {new[0]!r}, a {kind}, and {path} holds none of that name "
            f'(it holds {_listed(saved)}); give it the name that it was saved under: states={{"NAME": scheduler}}, or '
            "start a new run from the checkpoint's model (start_from)",
            everywhere=True,
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "no states"


def _holders(optimizers: Iterable[torch.optim.Optimizer]) -> list[Any]:
    """Return the schedulers that hold one of the optimizers, in no particular order."""
    wanted = list(optimizers)
    referrers = gc.get_referrers(*wanted) if wanted else []
    found = {id(one): one for one in referrers if isinstance(one, _KINDS)}
    # Their dict, not they, may be what refers to the optimizer; others have no such pair of keys.
    dicts = [one for one in referrers if type(one) is dict and "optimizer" in one and "_last_lr" in one]
    for one in gc.get_referrers(*dicts) if dicts else []:
        if isinstance(one, _KINDS):
            found[id(one)] = one
    return [one for one in found.values() if any(getattr(one, "optimizer", None) is each for each in wanted)]


def _reachable(roots: Iterable[object]) -> set[int]:
    """Return the ids of all objects that attributes, lists, tuples, sets and dicts lead to from the roots."""
    seen: set[int] = set()
    waiting = list(roots)
    while waiting and len(seen) < _MOST:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _ENDS):
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            waiting.extend(one.values())
        elif isinstance(one, (list, tuple, set, frozenset)):
            waiting.extend(one)
        else:
            waiting.extend(getattr(one, "__dict__", {}).values())
    return seen


def _settings(scheduler: Any) -> tuple[str, str]:
    kind = type(scheduler)
    text = json.dumps(list(scheduler.state_dict().items()), default=lambda value: type(value).__name__)
    return f"{kind.__module__}.{kind.__qualname__}", text


def _free(base: str, taken: Collection[str]) -> str:
    name, number = base, 0
    while name in taken:
        number += 1
        name = f"{base}.{number}"
    return name
