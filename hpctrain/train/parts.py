"""State of objects other than models and optimizers that a run saves: how it is read and restored.

The state of an object with ``state_dict`` and ``load_state_dict`` is what these methods exchange. A
tensor, a NumPy array, and a torch or NumPy generator is its own state and is filled in place.
Lists, tuples and dicts may contain any of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from hpctrain.errors import CheckpointError


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
