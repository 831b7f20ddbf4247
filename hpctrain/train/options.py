"""Options of a run, checked at construction, and the check that every optimizer parameter belongs to a model."""

from __future__ import annotations

import gc
import math
import numbers
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import nn

from hpctrain.checkpoint.format.layout import ALIGNMENT
from hpctrain.checkpoint.retention import Best, RetentionPolicy
from hpctrain.checkpoint.storage import IO, Storage
from hpctrain.cluster.deadline import seconds_of
from hpctrain.errors import UsageError
from hpctrain.settings import unknown
from hpctrain.train.config import Only, check_trace_steps
from hpctrain.train.failure_policy import OnFailure, check_replicate
from hpctrain.train.health import OnCorruption, check_straggler
from hpctrain.train.metrics import Metrics
from hpctrain.train.profile.kernels import KernelRecorder
from hpctrain.train.schedulers import free_name
from hpctrain.train.tensorboard import MetricsWithEvents, check_installed
from hpctrain.train.updates import Policy
from hpctrain.util.text import short_repr

SINGLE = "model"  # the key of a run's one model, if other modules join it
_SHOWN = 8  # parameters that an error message names; the rest are counted


def adoptable(
    optimizers: Mapping[str, torch.optim.Optimizer],
    models: Mapping[str, nn.Module],
    wrapped_modules: Iterable[nn.Module],
) -> dict[str, nn.Module]:
    """Return, by name, the wrapped modules that own parameters which an optimizer has and no model has.

    The name is the class name in snake case (``center_loss``). The second and later modules of a
    class are numbered (``center_loss_1``) in the order in which they were wrapped. ``joined``
    merges the result with the models.
    """
    lost = {id(parameter) for _, parameter in _without_owner(optimizers, models.values())}
    known = {id(module) for module in models.values()}
    candidates = [module for module in wrapped_modules if id(module) not in known and lost & _ids(module)]
    inner = {id(part) for module in candidates for part in module.modules() if part is not module}
    found: dict[str, nn.Module] = {}
    for module in candidates:
        if id(module) not in inner:
            base = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(module).__name__).lower()
            found[free_name(base, {*models, *found, SINGLE}, "_")] = module
    return found


def joined(models: Mapping[str, nn.Module], more: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the models of a run plus those that ``adoptable`` found; a single model gets the key ``model``."""
    if not more:
        return dict(models)
    return {**{key or SINGLE: module for key, module in models.items()}, **more}


def check_owned(optimizers: Mapping[str, torch.optim.Optimizer], models: Mapping[str, nn.Module]) -> None:
    """Raise ``UsageError`` on all ranks if optimizer parameters belong to no model; the message lists them."""
    lost = list(_without_owner(optimizers, models.values()))
    if not lost:
        return
    lines = [f"{where}, {_origin(parameter)}, shape {tuple(parameter.shape)}" for where, parameter in lost[:_SHOWN]]
    more = f"; and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
    modules = ", ".join(f'"{key or SINGLE}": ...' for key in models)
    count = len(lost)
    subject = f"{count} parameters of the optimizer belong" if count > 1 else "1 parameter of the optimizer belongs"
    raise UsageError(
        f"{subject} to no model of the run: {'; '.join(lines)}{more}; "
        "a checkpoint stores parameters by their names in a model; "
        "wrap the module that has them (job.wrap(criterion); a loose parameter goes into a module first) and pass it: "
        f'job.run({{{modules}, "criterion": criterion}}, ...)',
        everywhere=True,
    )


def _without_owner(
    optimizers: Mapping[str, torch.optim.Optimizer], models: Iterable[nn.Module]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the optimizer parameters that belong to no model, each with its position in the optimizer."""
    owned = set().union(*map(_ids, models))
    for key, optimizer in optimizers.items():
        of = f'optimizer "{key}", ' if key else ""
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in owned:
                    yield f"{of}parameter {position} of group {number}", parameter


def _ids(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _origin(parameter: torch.Tensor) -> str:
    """Return the attribute and module class of a parameter, e.g. ``Linear.weight``, for an error message."""
    tables = [one for one in gc.get_referrers(parameter) if type(one) is dict]
    for table, holder in ((table, holder) for table in tables for holder in gc.get_referrers(table)):
        module: Any = holder
        if type(holder) is dict and holder.get("_parameters") is table:
            module = next((one for one in gc.get_referrers(holder) if isinstance(one, nn.Module)), None)
        if isinstance(module, nn.Module) and module._parameters is table:
            name = next(name for name, value in table.items() if value is parameter)
            return f"{type(module).__name__}.{name}"
    return "in no module"


# Options of a run, checked at construction ----------------------------------------------------------------------------

Resume = Literal["auto", "never", "must", "reopen"]
OnError = Literal["stop", "continue"]

_AT_LEAST = {
    "steps": 1,
    "every": 1,
    "keep": 1,
    "keep_every": 0,
    "microbatch": 0,
    "fingerprint_every": 0,
    "replicate": 0,
}
_ITEMS = {"start_skip": "patterns", "hints": "name=value"}
_KINDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "checkpoints": ((str, os.PathLike), "the path of a folder"),
    "states": (Mapping, "a dict of objects with a state"),
    "config": (str, "text"),
    "provenance": (Mapping, "a dict"),
}


_PROFILED = 8  # ranks whose operators are recorded by default: a step of one has thousands


@dataclass(frozen=True)
class RunOptions:
    """Options of ``job.run``: how long a run trains, when it saves, and how it reacts to errors."""

    steps: int | None = None  # updates in total, over all resumes; None: as long as the loader has batches
    every: int = 100  # steps between checkpoints
    keep: int = 2  # number of newest checkpoints to keep
    keep_every: int = 0  # also keep checkpoints whose step is a multiple of this; 0: no such checkpoints
    keep_best: str = ""  # a logged metric: also keep the checkpoint with its best value; empty: none
    best: Best = "lowest"  # whether the lowest or the highest value is the best
    only: Only = "all"  # "trained": checkpoints without parameters that require no gradient, as with LoRA
    on_error: OnError = "stop"  # after a failed save: end the run, or continue until the next one is due
    background: bool = False  # write checkpoints from a copy, in a separate process per rank
    replicate: int = 0  # steps between copies of each rank's shards to another node ("shrink"); 0: none
    io: IO = "posix"  # how files are written: by each rank independently, or by collective MPI-IO
    alignment: int = ALIGNMENT  # bytes: tensors of this size or larger start at multiples of it
    hints: Sequence[str] = ()  # for MPI-IO, as name=value
    resume: Resume = "auto"  # "reopen": continue although run.stop has ended the run
    checks: bool = True  # check the first step for mistakes that train a wrong model without an error
    split: bool | None = None  # split the batches of a DataLoader over the ranks; None: unless it splits by rank itself
    strict: bool = False  # raise an error if the newest checkpoint is damaged
    on_failure: OnFailure = "restart"  # when a rank has died: end the job, or continue without it (Open MPI with ULFM)
    on_nonfinite: Policy = "abort"  # reaction to NaN or infinite gradients: stop, skip the update, or roll back
    fingerprint_every: int = 0  # steps between comparisons of weights and moments over the ranks (ddp); 0: none
    on_corruption: OnCorruption = "repair"  # reaction to a memory error that they find: repair it, or stop
    straggler_factor: float = 1.5  # a rank that is this many times slower than the others is named; 0: no check
    straggler_steps: int = 20  # consecutive steps after which it is named
    start_from: str | Path = ""  # a checkpoint whose model initializes a new run
    start_skip: Sequence[str] = ()  # patterns of tensor names that need not fit that model
    walltime: str = ""  # time limit of the job from now on, as 04:00:00; empty: the scheduler's
    margin: float = 0.0  # seconds before the end of the job at which the run saves and exits; 0: measured
    microbatch: int = 0  # samples per microbatch (parallel.reproducible); 0: an eighth of the batch, rounded up
    trace: bool = False  # write trace.json: a timeline of every rank in some steps
    trace_steps: Sequence[int] = (3, 12)  # the first and the last of these steps, counted from this start
    trace_kernels: bool = False  # also record the operators and GPU kernels of these steps, by torch.profiler
    kernel_ranks: Sequence[int] = ()  # the ranks to record them on; empty: the first eight
    tensorboard: bool = False  # write events for TensorBoard into the folder, too

    def __post_init__(self) -> None:
        self._convert()
        for name, least in _AT_LEAST.items():
            count = getattr(self, name)
            if count is not None and count < least:
                raise UsageError(f"a run with {name} = {count}: must be at least {least}", everywhere=True)
        if self.background and self.io == "mpiio":
            raise UsageError("a run with background and io = 'mpiio': take io = 'posix'", everywhere=True)
        if self.walltime:
            seconds_of(self.walltime)
        if not 0 <= self.margin < math.inf:
            text = f"a run with margin = {self.margin}: must be a number of seconds >= 0"
            raise UsageError(text, everywhere=True)
        self.storage  # raises if it is wrong
        check_replicate(self.replicate, self.on_failure, "a run with ")
        check_straggler(self.straggler_factor, self.straggler_steps, "a run with ")
        check_trace_steps(self.trace_steps, "a run with trace_steps")
        if self.tensorboard:
            check_installed()

    def _convert(self) -> None:
        """Convert each option to its type, in place. Raises ``UsageError`` for a value of another type."""
        for field, hint in zip(fields(self), get_type_hints(RunOptions).values(), strict=True):
            value = getattr(self, field.name)
            if value is None and field.default in (None, ""):
                value = field.default
            else:
                value = _converted(field.name, hint, value)
            object.__setattr__(self, field.name, value)  # the dataclass is frozen

    @property
    def storage(self) -> Storage:
        """Return how checkpoints are written."""
        pairs = [hint.partition("=") for hint in self.hints]
        if not all(map(all, pairs)):
            raise UsageError(f"a run with hints {list(self.hints)}: give each as name=value", everywhere=True)
        return Storage(self.io, self.alignment, {name: value for name, _, value in pairs})

    @property
    def records(self) -> dict[str, Any]:
        """Return how the records in the folder are written."""
        writer = MetricsWithEvents if self.tensorboard else Metrics
        return {"lenient": self.on_error == "continue", "metrics": writer}

    @property
    def traced(self) -> Sequence[int] | None:
        """Return the first and the last step to trace, or None."""
        return self.trace_steps if self.trace or self.trace_kernels else None

    def kernels(self, rank: int, size: int) -> KernelRecorder | None:
        """Return this rank's recorder of operators and kernels, None if they are not wanted. Raises ``UsageError``."""
        if wrong := [each for each in self.kernel_ranks if not 0 <= each < size]:
            text = f"a run with kernel_ranks = {wrong}: this job has the ranks 0 to {size - 1}"
            raise UsageError(text, everywhere=True)
        if self.kernel_ranks and not self.trace_kernels:
            text = (
                f"a run with kernel_ranks = {list(self.kernel_ranks)}: nothing is recorded without trace_kernels = true"
            )
            raise UsageError(text, everywhere=True)
        return KernelRecorder(rank in (self.kernel_ranks or range(_PROFILED))) if self.trace_kernels else None

    @property
    def retention(self) -> RetentionPolicy:
        """Return the retention rule for checkpoints."""
        return RetentionPolicy(self.keep, self.keep_every, self.keep_best, self.best)

    @property
    def kept(self) -> RetentionPolicy:
        """Return the retention rule under its former name."""
        return self.retention


def _converted(name: str, hint: Any, value: Any) -> Any:
    """Return a value of the type that an option has."""
    kinds = get_args(hint) or (hint,)
    if get_origin(hint) is Literal:
        if value in kinds:
            return value
        raise UsageError(f"a run with {name} = {value!r}: allowed are {', '.join(kinds)}", everywhere=True)
    if get_origin(hint) is Sequence:
        if isinstance(value, (list, tuple)) and all(_is_a(kinds[0], one) for one in value):
            return value
        items = _ITEMS.get(name, "whole numbers")
        raise UsageError(f"a run with {name} = {short_repr(value)}: give a list of {items}", everywhere=True)
    kind = next((each for each in kinds if _is_a(each, value)), None)
    if kind is None:
        raise UsageError(f"a run with {name} = {short_repr(value)}: expected {_KINDS[kinds[0]]}", everywhere=True)
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
            text = f"job.run({name}={short_repr(given)}): expected {what}, or a dict of several"
            raise UsageError(text, everywhere=True)
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        text = f"job.run(loader={short_repr(loader)}): expected a DataLoader or another iterable"
        raise UsageError(text, everywhere=True)
    for name, value in others.items():
        kind, what = _ARGUMENTS[name]
        missing = name == "checkpoints" and not str(value or "").strip()
        if missing or value is not None and not isinstance(value, kind):
            raise UsageError(f"job.run({name}={short_repr(value)}): expected {what}", everywhere=True)


def run_options(given: Mapping[str, Any]) -> RunOptions:
    """Return the options of a call of ``job.run``. Raises ``UsageError`` for an unknown name."""
    known = [field.name for field in fields(RunOptions)]
    for name in given:
        if name not in known:
            raise UsageError(unknown(f"option {name!r} of job.run", name, known), everywhere=True)
    return RunOptions(**given)
