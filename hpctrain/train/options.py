"""Options of a run, checked at construction."""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from hpctrain.checkpoint.file.layout import ALIGNMENT
from hpctrain.checkpoint.keep import Best, Keep
from hpctrain.checkpoint.saver import IO, Storage
from hpctrain.cluster.deadline import seconds_of
from hpctrain.errors import UsageError
from hpctrain.settings import unknown
from hpctrain.train.health import Policy
from hpctrain.train.settings import check_trace_steps
from hpctrain.util.text import shown

Resume = Literal["auto", "never", "must", "reopen"]
OnError = Literal["stop", "continue"]

_AT_LEAST = {"steps": 1, "every": 1, "keep": 1, "keep_every": 0}
_ALLOWED = {
    "resume": get_args(Resume),
    "on_nonfinite": get_args(Policy),
    "on_error": get_args(OnError),
    "best": get_args(Best),
    "io": get_args(IO),
}


_ITEMS = {"start_skip": "patterns", "hints": "name=value"}
_KINDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "checkpoints": ((str, os.PathLike), "the path of a folder"),
    "states": (Mapping, "a dict of objects with a state"),
    "config": (str, "text"),
    "provenance": (Mapping, "a dict"),
}


@dataclass(frozen=True)
class RunOptions:
    """Options of ``job.run``: how long a run trains, when it saves, and how it reacts to errors."""

    steps: int | None = None  # updates in total, over all resumes; None: as long as the loader has batches
    every: int = 100  # steps between checkpoints
    keep: int = 2  # number of newest checkpoints to keep
    keep_every: int = 0  # also keep checkpoints whose step is a multiple of this; 0: no such checkpoints
    keep_best: str = ""  # a logged metric: also keep the checkpoint with its best value; empty: none
    best: Best = "lowest"  # whether the lowest or the highest value is the best
    on_error: OnError = "stop"  # after a failed save: end the run, or continue until the next one is due
    background: bool = False  # write checkpoints from a copy, in a separate process per rank
    io: IO = "posix"  # how files are written: by each rank independently, or by collective MPI-IO
    alignment: int = ALIGNMENT  # bytes: tensors of this size or larger start at multiples of it
    hints: Sequence[str] = ()  # for MPI-IO, as name=value
    resume: Resume = "auto"  # "reopen": continue although run.stop has ended the run
    checks: bool = True  # check the first step for mistakes that train a wrong model without an error
    split: bool | None = None  # split the batches of a DataLoader over the ranks; None: unless it splits by rank itself
    strict: bool = False  # raise an error if the newest checkpoint is damaged
    on_nonfinite: Policy = "abort"  # reaction to NaN or infinite gradients: stop, skip the update, or roll back
    start_from: str | Path = ""  # a checkpoint whose model initializes a new run
    start_skip: Sequence[str] = ()  # patterns of tensor names that need not fit that model
    walltime: str = ""  # time limit of the job from now on, as 04:00:00; empty: the scheduler's
    margin: float = 0.0  # seconds before the end of the job at which the run saves and exits; 0: measured
    trace: bool = False  # write trace.json: a timeline of every rank in some steps
    trace_steps: Sequence[int] = (3, 12)  # the first and the last of these steps, counted from this start

    def __post_init__(self) -> None:
        self._convert()
        for name, least in _AT_LEAST.items():
            count = getattr(self, name)
            if count is not None and count < least:
                raise UsageError(f"a run with {name} = {count}: must be at least {least}", everywhere=True)
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(f"a run with {name} = {value!r}: allowed are {', '.join(allowed)}", everywhere=True)
        if self.background and self.io == "mpiio":
            raise UsageError("a run with background and io = 'mpiio': take io = 'posix'", everywhere=True)
        if self.walltime:
            seconds_of(self.walltime)
        if not 0 <= self.margin < math.inf:
            text = f"a run with margin = {self.margin}: must be a number of seconds >= 0"
            raise UsageError(text, everywhere=True)
        self.storage  # raises if it is wrong
        check_trace_steps(self.trace_steps, "a run with trace_steps")

    def _convert(self) -> None:
        """Convert each option to its type, in place. Raises ``UsageError`` for a value of another type."""
        for field, hint in zip(fields(self), get_type_hints(RunOptions).values(), strict=True):
            value = getattr(self, field.name)
            if value is None and field.default in (None, ""):
                value = field.default
            elif get_origin(hint) is not Literal:  # the allowed values are compared later
                value = _converted(field.name, hint, value)
            object.__setattr__(self, field.name, value)  # the dataclass is frozen

    @property
    def storage(self) -> Storage:
        """Return how checkpoints are written."""
        pairs = [hint.partition("=") for hint in self.hints]
        for name, sign, value in pairs:
            if not (name and sign and value):
                raise UsageError(f"a run with hints {list(self.hints)}: give each as name=value", everywhere=True)
        return Storage(self.io, self.alignment, {name: value for name, _, value in pairs})

    @property
    def traced(self) -> Sequence[int] | None:
        """Return the first and the last step to trace, or None."""
        return self.trace_steps if self.trace else None

    @property
    def kept(self) -> Keep:
        """Return the retention rule for checkpoints."""
        return Keep(self.keep, self.keep_every, self.keep_best, self.best)


def _converted(name: str, hint: Any, value: Any) -> Any:
    """Return a value of the type that an option has."""
    kinds = get_args(hint) or (hint,)
    if get_origin(hint) is Sequence:
        if isinstance(value, (list, tuple)) and all(_is_a(kinds[0], one) for one in value):
            return value
        items = _ITEMS.get(name, "whole numbers")
        raise UsageError(f"a run with {name} = {shown(value)}: give a list of {items}", everywhere=True)
    kind = next((each for each in kinds if _is_a(each, value)), None)
    if kind is None:
        raise UsageError(f"a run with {name} = {shown(value)}: expected {_KINDS[kinds[0]]}", everywhere=True)
    return value if issubclass(kind, (str, Path)) else kind(value)


def _is_a(kind: type, value: Any) -> bool:
    """Return whether a value converts to this type without loss: 1e3 to int, NumPy's numbers, 0 to bool."""
    if kind is bool:
        return isinstance(value, np.bool_) or isinstance(value, int) and value in (0, 1)
    if kind is str or kind is Path:
        return isinstance(value, str if kind is str else os.PathLike)
    if isinstance(value, bool) or kind not in (int, float):
        return False
    if kind is float:
        return isinstance(value, float) or isinstance(value, numbers.Real) and -(2**63) < value < 2**63  # type: ignore
    try:
        operator.index(value)
    except TypeError:
        return isinstance(value, float) and value.is_integer()
    return True


def check_arguments(model: Any, optimizer: Any, loader: Any, **others: Any) -> None:
    """Raise ``UsageError`` for an argument of ``job.run`` of another type; ``others`` are all but the options."""
    for name, given, attribute, what in (
        ("model", model, "_modules", "a torch.nn.Module"),
        ("optimizer", optimizer, "param_groups", "a torch.optim.Optimizer"),
    ):
        each = list(given.values()) if isinstance(given, Mapping) else [given]
        if not all(hasattr(one, attribute) for one in each):
            raise UsageError(f"job.run({name}={shown(given)}): expected {what}, or a dict of several", everywhere=True)
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise UsageError(f"job.run(loader={shown(loader)}): expected a DataLoader or another iterable", everywhere=True)
    for name, value in others.items():
        kind, what = _ARGUMENTS[name]
        missing = name == "checkpoints" and not str(value or "").strip()
        if missing or value is not None and not isinstance(value, kind):
            raise UsageError(f"job.run({name}={shown(value)}): expected {what}", everywhere=True)


def run_options(given: Mapping[str, Any]) -> RunOptions:
    """Return the options of a call of ``job.run``. Raises ``UsageError`` for an unknown name."""
    known = [field.name for field in fields(RunOptions)]
    for name in given:
        if name not in known:
            raise UsageError(unknown(f"option {name!r} of job.run", name, known), everywhere=True)
    return RunOptions(**given)
