"""State of objects other than models and optimizers that a run saves; learning-rate schedulers are found automatically.

The state of an object with ``state_dict`` and ``load_state_dict`` is what these methods exchange. A
tensor, a NumPy array, and a torch or NumPy generator is its own state and is filled in place.
Lists, tuples and dicts may contain any of these.
"""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hpctrain.errors import CheckpointError, UsageError


@runtime_checkable
class Stateful(Protocol):
    """Object that returns and restores its state: a loader, a scheduler, an averaged model."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore a state."""


def state_of(thing: Any) -> Any:
    """Return the state of an object; plain values are their own state."""
    if isinstance(thing, (torch.Tensor, np.ndarray)):
        return thing.detach() if isinstance(thing, torch.Tensor) else thing
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, np.random.Generator):
        return thing.bit_generator.state
    if isinstance(thing, np.random.RandomState):
        return thing.get_state(legacy=False)
    if isinstance(thing, Stateful) and not isinstance(thing, type):
        return dict(thing.state_dict())
    if isinstance(thing, dict):
        return {key: state_of(item) for key, item in thing.items()}
    if isinstance(thing, (list, tuple)):
        items = [state_of(item) for item in thing]
        return items if isinstance(thing, list) else tuple(items)
    return thing


def restore(thing: Any, state: Any, where: str) -> Any:
    """Restore the state of an object; return the object, or the new value if it is a plain value.

    Raises ``CheckpointError``, which names ``where``, if the state does not fit.
    """
    if isinstance(thing, torch.Tensor):
        return _fill_tensor(thing, state, where)
    if isinstance(thing, np.ndarray):
        if not isinstance(state, np.ndarray) or state.shape != thing.shape:
            raise _misfit(where, state, thing)
        thing[...] = state
        return thing
    try:
        if isinstance(thing, torch.Generator):
            thing.set_state(state.cpu())
        elif isinstance(thing, np.random.Generator):
            thing.bit_generator.state = state
        elif isinstance(thing, np.random.RandomState):
            thing.set_state(state)
        elif isinstance(thing, Stateful):
            thing.load_state_dict(like(state, thing.state_dict()))
        else:
            return _restore_items(thing, state, where)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{where} cannot load its state: {type(error).__name__}: {error}") from error
    return thing


def _restore_items(thing: Any, state: Any, where: str) -> Any:
    """Restore the items of a list, tuple or dict; for a plain value, return the state itself."""
    if isinstance(thing, dict):
        lost = [key for key, item in thing.items() if key not in state and not is_plain(item)]
        if lost:
            raise CheckpointError(f"{where}: the checkpoint has no state of {', '.join(map(repr, lost))}")
        new = {key: _item(thing, key, state[key], where) if key in thing else state[key] for key in state}
        thing.clear()
        thing.update(new)
    elif isinstance(thing, list):
        if len(state) < len(thing) and not all(map(is_plain, thing[len(state) :])):
            raise CheckpointError(f"{where} has {len(thing)} items and {len(state)} in the checkpoint")
        kept = min(len(thing), len(state))
        thing[:] = [*(_item(thing, number, state[number], where) for number in range(kept)), *state[kept:]]
    elif isinstance(thing, tuple):
        if len(state) != len(thing):
            raise CheckpointError(f"{where} has {len(thing)} items and {len(state)} in the checkpoint")
        for number, item in enumerate(thing):
            found = _item(thing, number, state[number], where)
            if found is not item and found != item:
                raise CheckpointError(f"{where}[{number}] is {found!r} in the checkpoint: a tuple cannot change it")
    else:
        return state
    return thing


def _item(thing: Any, key: Any, state: Any, where: str) -> Any:
    return restore(thing[key], state, f"{where}[{key!r}]")


def _fill_tensor(thing: torch.Tensor, state: Any, where: str) -> torch.Tensor:
    if not isinstance(state, torch.Tensor) or state.shape != thing.shape:
        raise _misfit(where, state, thing)
    with torch.no_grad():
        thing.copy_(state)
    return thing


def _misfit(where: str, state: Any, thing: Any) -> CheckpointError:
    found = f"shape {tuple(state.shape)}" if hasattr(state, "shape") else f"of type {type(state).__name__}"
    return CheckpointError(f"{where} is {found} in the checkpoint and has shape {tuple(thing.shape)} in the program")


def is_plain(item: Any) -> bool:
    """Return whether an item is a value that cannot be filled in place."""
    return item is None or isinstance(item, (bool, int, float, str))


def like(saved: Any, present: Any) -> Any:
    """Convert a saved state to the structure of the present one: its devices, tuples, keys and Counters.

    Files of format 1.2 store tuples as lists, and all keys as text.
    """
    if isinstance(saved, torch.Tensor):
        return saved.to(present.device) if isinstance(present, torch.Tensor) else saved
    if isinstance(saved, dict):
        known = present if isinstance(present, Mapping) else {}
        names = {str(key): key for key in known if not isinstance(key, str)}
        keys = {key: key if key in known else names.get(key, key) for key in saved}
        table = {keys[key]: like(item, known.get(keys[key])) for key, item in saved.items()}
        return Counter(table) if isinstance(saved, Counter) or isinstance(present, Counter) else table
    if isinstance(saved, (list, tuple)):
        others = list(present) if isinstance(present, (list, tuple)) else []
        others += [None] * (len(saved) - len(others))
        items = [like(item, other) for item, other in zip(saved, others)]
        return tuple(items) if isinstance(saved, tuple) or isinstance(present, tuple) else items
    return saved


# Learning-rate schedulers of a program, found automatically so that every checkpoint includes them --------------------
#
# A scheduler refers to its optimizer, so it is among ``gc.get_referrers(optimizer)``. This search
# takes 26 ms with 290,000 live objects (torch imported, 600 parameters; Python 3.11, one core of a
# cloud machine). A check of the type of every object in ``gc.get_objects()`` takes 96 ms. One pass
# serves all optimizers. A second pass, over the results of the first, is made only if a scheduler's
# ``__dict__`` has been accessed, as ``state_dict`` does: then this dict is the object that refers to
# the optimizer.
#
# The search finds torch's classes and their subclasses. A hand-written schedule, such as a function
# that sets ``lr``, is not found: if it has a state, name it in ``states``.


NAME = "scheduler"
SCALER = "scaler"
_KINDS = (LRScheduler, ReduceLROnPlateau)  # in older versions of torch, the second is not a subclass of the first
_ENDS = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, type, ModuleType, FunctionType, MethodType, str, bytes)
_MOST = 100_000  # objects visited inside objects that are already saved


def find_schedulers(
    optimizers: Mapping[str, torch.optim.Optimizer], states: Mapping[str, object]
) -> dict[str, Any]:
    """Return, by name, the optimizers' schedulers that are neither in ``states`` nor inside an object there.

    The scheduler of a single optimizer is named ``scheduler``; with several optimizers, the names
    are ``scheduler.KEY``. If one optimizer has several independent schedulers, the second and later
    ones are numbered (``scheduler.1``). Their order follows from their classes and settings, so it
    is the same in every process. Parts of a SequentialLR or ChainedScheduler are saved by it, so
    they are not returned. Hand-written schedulers are not found.
    """
    found = _holders(optimizers.values())
    if len(found) > len(optimizers):
        found.clear()
        gc.collect()  # drop unreachable cycles: the program has replaced these schedulers
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
    """Return the enabled GradScalers of the process that no object in ``states`` contains.

    A scaler does not refer to an optimizer, so this checks the types of all objects: 15 ms with
    290,000 live objects.
    """
    kinds = _with_subclasses(torch.amp.GradScaler)
    found = [one for one in gc.get_objects() if type(one) in kinds and one.is_enabled()]
    if found:
        found.clear()
        gc.collect()  # drop unreachable cycles: the program has replaced these scalers
        found = [one for one in gc.get_objects() if type(one) in kinds and one.is_enabled()]
    inside = _reachable(list(states.values())) if found else set()
    return [one for one in found if id(one) not in inside]


def _with_subclasses(kind: type[Any]) -> set[type[Any]]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def check_saved(saved: Collection[str], present: Mapping[str, object], found: Collection[str], path: object) -> None:
    """Compare the names of states in a file with those of the program before anything is restored.

    ``found`` contains the names in ``present`` that ``find_schedulers`` returned. Raises
    ``UsageError`` if a scheduler is missing on one side.
    """
    lost = [name for name in saved if re.fullmatch(rf"{NAME}(\..+)?", name) and name not in present]
    if lost:
        raise UsageError(
            f"{path} holds the learning-rate scheduler {lost[0]!r} and the program has none of that name "
            f"(it saves {_listed(present)}); create the scheduler before the run is entered, or name it: "
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
    """Return the schedulers that refer to one of the optimizers, in no particular order."""
    wanted = list(optimizers)
    referrers = gc.get_referrers(*wanted) if wanted else []
    found = {id(one): one for one in referrers if isinstance(one, _KINDS)}
    # The dict of a scheduler may be the referrer instead; no other dict has this pair of keys.
    dicts = [one for one in referrers if type(one) is dict and "optimizer" in one and "_last_lr" in one]
    for one in gc.get_referrers(*dicts) if dicts else []:
        if isinstance(one, _KINDS):
            found[id(one)] = one
    return [one for one in found.values() if any(getattr(one, "optimizer", None) is each for each in wanted)]


def _reachable(roots: Iterable[object]) -> set[int]:
    """Return the ids of all objects that are reachable from the roots by attributes, lists, tuples, sets and dicts."""
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
