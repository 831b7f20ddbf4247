"""Learning-rate schedulers and gradient scalers of a program, found so that every checkpoint includes them.

A scheduler refers to its optimizer, so it is among ``gc.get_referrers(optimizer)``. This search
takes 26 ms with 290,000 live objects (torch imported, 600 parameters; Python 3.11, one core of a
cloud machine). A check of the type of every object in ``gc.get_objects()`` takes 96 ms. One pass
serves all optimizers. A second pass, over the results of the first, is made only if a scheduler's
``__dict__`` has been accessed, as ``state_dict`` does: then this dict is the object that refers to
the optimizer.

The search finds torch's classes and their subclasses. A hand-written schedule, such as a function
that sets ``lr``, is not found: if it has a state, name it in ``states``.
"""

from __future__ import annotations

import gc
import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.log import logger

NAME = "scheduler"
SCALER = "scaler"
_ENDS = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, type, ModuleType, FunctionType, MethodType, str, bytes)
_MOST = 100_000  # objects visited inside objects that are already saved


def find_schedulers(optimizers: Mapping[str, torch.optim.Optimizer], states: Mapping[str, object]) -> dict[str, Any]:
    """Return, by name, the optimizers' schedulers that are neither in ``states`` nor inside an object there.

    The scheduler of a single optimizer is named ``scheduler``; with several optimizers, the names
    are ``scheduler.KEY``. If one optimizer has several independent schedulers, the second and later
    ones are numbered (``scheduler.1``). Their order follows from their classes and settings, so it
    is the same in every process. Parts of a SequentialLR or ChainedScheduler are saved by it, so
    they are not returned.
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
            named[free_name(base, {*states, *named}, ".")] = one
    return named


def find_on_all_ranks(
    optimizers: Mapping[str, torch.optim.Optimizer], states: Mapping[str, object], comm: Communicator
) -> dict[str, Any]:
    """Return what ``find_schedulers`` finds. Collective. Raises ``UsageError`` on all ranks if the ranks differ."""
    found = find_schedulers(optimizers, states)
    everyone = comm.all_gather_object([(name, type(one).__name__) for name, one in found.items()])
    for rank, names in enumerate(everyone):
        if names != everyone[0]:
            raise UsageError(
                f"rank 0 has the learning-rate schedulers {everyone[0]} and rank {rank} {names}; all ranks must "
                "make the same ones",
                everywhere=True,
            )
    return found


def find_scaler(states: Mapping[str, object], comm: Communicator) -> Any | None:
    """Return the process's only enabled GradScaler that no object in ``states`` contains. Collective.

    Logs a warning if there are several. A scaler does not refer to an optimizer, so this checks the
    types of all objects: 15 ms with 290,000 live objects.
    """
    kinds = _with_subclasses(torch.amp.GradScaler)

    def search() -> list[Any]:
        return [one for one in gc.get_objects() if type(one) in kinds and one.is_enabled()]

    found = search()
    if found:
        found.clear()
        gc.collect()  # drop unreachable cycles: the program has replaced these scalers
        found = search()
    inside = _reachable(list(states.values())) if found else set()
    found = [one for one in found if id(one) not in inside]
    counts = comm.all_gather_object(len(found))
    if max(counts) > 1 and comm.rank == 0:
        logger.warning(
            "%d GradScalers are not in states: their scales are not saved; add those of this run: "
            'states={"scaler": scaler}',
            max(counts),
        )
    return found[0] if set(counts) == {1} and SCALER not in states else None


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
    found = {id(one): one for one in referrers if isinstance(one, LRScheduler)}
    # The dict of a scheduler may be the referrer instead; no other dict has this pair of keys.
    dicts = [one for one in referrers if type(one) is dict and "optimizer" in one and "_last_lr" in one]
    for one in gc.get_referrers(*dicts) if dicts else []:
        if isinstance(one, LRScheduler):
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


def free_name(base: str, taken: Collection[str], sign: str) -> str:
    """Return a name that is not taken: the base, or the base with a sign and the first free number."""
    names = itertools.chain([base], (f"{base}{sign}{number}" for number in itertools.count(1)))
    return next(name for name in names if name not in taken)
