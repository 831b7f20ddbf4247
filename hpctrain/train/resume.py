"""Opening of a run: locks its folder, resumes from the newest checkpoint or starts with another run's model."""

from __future__ import annotations

import json
import os
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpctrain.checkpoint import content
from hpctrain.checkpoint import retention as files
from hpctrain.checkpoint.differences import is_skipped
from hpctrain.checkpoint.dtensor import is_dtensor
from hpctrain.checkpoint.restore import load
from hpctrain.checkpoint.tools.inspect import newest_of
from hpctrain.comm.agreement import on_first_rank
from hpctrain.data.random_streams import broadcast_generators
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.jobs.request import FOLDER
from hpctrain.log import logger
from hpctrain.parallel.asynchronous.config import FORMER_SECTION, SECTION
from hpctrain.settings import flatten
from hpctrain.train.control import StopSaveFlags, warn_if_unwatched
from hpctrain.train.feed import Feed
from hpctrain.train.microbatches import CONTRACT, check_conditions
from hpctrain.train.options import RunOptions
from hpctrain.train.receipt.write import earlier_attempts, number
from hpctrain.train.run_folder import CONFIG, RunFolder
from hpctrain.train.state import FEED, TrainState
from hpctrain.util.retry import TRANSIENT, cannot_write, retries

if TYPE_CHECKING:
    from hpctrain.train.job import Job

# Provenance keys of the checkpoint from which the run started; each resume keeps them.
FACTS = ("start_from", "start_step", "start_skip")
# Settings that affect when a run stops, saves, evaluates and logs, but not the numbers that it computes.
_WITHOUT_EFFECT = {  # besides all of the sections checkpoint and health
    "data": {"cache", "prefetch"},
    "run": {"folder", "resume", "strict", "walltime", "margin", "oversubscribe", "on_failure"},
    "train": {
        "evaluate_every",
        "start_from",
        "start_skip",
        "trace",
        "trace_steps",
        "trace_kernels",
        "kernel_ranks",
        "tensorboard",
        "prompt",
    },
}
# Entries of a param_group that are not compared: its parameters, and how torch computes the update.
_NOT_COMPARED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
# Settings that earlier versions lacked, with the value that they computed with.
_ADDED: dict[str, Any] = {
    "data.cache": "none",
    "data.document_masks": False,
    "data.inputs": "inputs",
    "data.prefetch": 0,
    "data.targets": "targets",
    "parallel.whole_parameters": [],
    "parallel.reproducible": False,
    "train.microbatch": 0,
}
_MISSING = object()
_LONGEST = 60  # characters of a value


def carried(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance of a resumed run: the origin of its model is copied from the checkpoint."""
    rest = {name: value for name, value in now.items() if name not in FACTS}
    return {**rest, **{name: before[name] for name in FACTS if name in before}}


def _newest(path: Path) -> Path:
    """Return the file, or the newest valid checkpoint if ``path`` is a folder."""
    try:
        found = newest_of(path)
    except UsageError as error:
        raise CheckpointError(f"cannot start from {path}: {error}") from error
    if found != path:
        logger.info("%s is a folder: using its newest valid checkpoint, %s", path, found)
    return found


def _log_start(path: Path, step: int, models: Mapping[str, nn.Module], skip: Sequence[str]) -> None:
    several = len(models) > 1
    logger.info("starting from the model%s of %s, written after step %d", "s" if several else "", path, step)
    names = [f"{key}/{name}" if key else name for key, model in models.items() for name in model.state_dict()]
    left = [name for name in names if is_skipped(name, skip)]
    if left:
        logger.info("not loaded from it: %s", ", ".join(left))


class Opening:
    """Opening of a run; the methods are defined in the order in which they must be called."""

    def __init__(
        self, job: Job, folder: Path, options: RunOptions, state: TrainState, feed: Feed, run_folder: RunFolder
    ) -> None:
        self._job, self._folder, self._options = job, folder, options
        self._state, self._feed, self._run_folder = state, feed, run_folder
        self._fresh = content.capture_rng()
        self._finished = False

    def agree_on_seed(self) -> None:
        """Broadcast the run's seed; if the loader is split, synchronize the generators outside of steps. Collective."""
        streams = self._feed.streams
        streams.seed = int(self._job.comm.broadcast_object(streams.seed)) % 2**63
        if self._feed.splits:
            broadcast_generators(self._job.comm)

    def start_from_another(self) -> dict[str, Any]:
        """Load another run's model, unless there is a checkpoint to resume from; return the provenance entries.

        Collective. If ``start_from`` is a run folder, its newest valid checkpoint is used. Tensors
        whose names match a pattern of ``start_skip`` (``fnmatch`` syntax) need not fit and keep
        their initial values. Optimizer state, data position and generator states are not loaded.

        Raises on all ranks: ``CheckpointError`` if the file is missing, damaged or does not fit;
        ``UsageError`` if a pattern matches no name. Nothing has been written then.
        """
        given, skip, state, comm = self._options.start_from, self._options.start_skip, self._state, self._job.comm
        if not given or on_first_rank(comm, lambda: bool(files.list_checkpoints(state.folder))):
            return {}
        path = on_first_rank(comm, lambda: _newest(Path(given)))
        try:
            loaded = load(path, model=state.models, comm=comm, skip=tuple(skip), split=state.splits)
        except CheckpointError as error:
            hint = "name tensors that may differ in start_skip"
            raise CheckpointError(f"cannot start from {path} ({hint}): {error}", everywhere=error.everywhere) from error
        for strategy in state.strategies.values():
            strategy.refresh()
        if self._job.rank == 0:
            _log_start(path, loaded.step, state.models, skip)
        facts: dict[str, Any] = {"start_from": str(path.resolve()), "start_step": loaded.step}
        return {**facts, "start_skip": list(skip)} if skip else facts

    def take_folder(self) -> None:
        """Lock the folder on rank 0; all checks that need no writing are made first."""
        folder, resume = self._state.folder, self._options.resume
        if resume == "must" and not files.list_checkpoints(folder):
            raise CheckpointError(f"{self._folder} holds no checkpoint to resume from, and resume is 'must'")
        if resume == "never" and files.list_checkpoints(folder):
            raise CheckpointError(f"{self._folder} holds checkpoints, and resume is 'never': take another folder")
        try:
            retries.call(lambda: folder.mkdir(parents=True, exist_ok=True))
        except OSError as error:
            if error.errno in TRANSIENT:
                raise cannot_write(folder, error) from error
            raise UsageError(f"cannot make the run's folder {folder}: {error.strerror}") from error
        self._run_folder.lock()

    def resume(self, config: str | None, provenance: dict[str, Any]) -> dict[str, Any]:
        """Restore the newest valid checkpoint if there is one; return the run's provenance. Collective."""
        state, feed, first = self._state, self._feed, self._job.rank == 0
        found = state.find(strict=self._options.strict)
        if found is None:
            state.note_frozen()
            return provenance
        changed: list[str] = []
        loaded = state.restore(found, before=lambda groups: changed.extend(overwritten(groups, state.optimizers)))
        state.note_frozen()
        on_ranks = self._job.comm.all_gather_object(holding_nan(state.optimizers))
        if first and (damaged := sorted(set().union(*on_ranks))):
            text = "%s has NaN in the optimizer's %s: the next update spreads it; move it away to use an older one"
            logger.warning(text, found, ", ".join(damaged))
        if FEED not in loaded.train.get("states", {}):
            feed.resume_old(int(loaded.train.get("batches", loaded.step)), self._fresh, loaded.rng)
        if feed.splits:
            broadcast_generators(self._job.comm)
        if self._options.resume == "reopen":
            state.stopped = None
        steps = self._options.steps
        finished = self._finished = state.stopped is not None or steps is not None and state.step >= steps
        if first and state.stopped is not None:
            logger.info('the run was ended after step %d: %s; resume="reopen" continues it', state.step, state.stopped)
        elif first and finished:
            if config is None:  # a run from a TOML file reports it with its results
                logger.info("the run is finished: all %d steps are done", state.step)
            for line in changed_settings(loaded.config, config):
                logger.warning("not used, because the run is finished: %s", line)
        elif first:
            logger.info("resuming after step %d from %s", state.step, found)
            # A run from a TOML file sets its hyperparameters from the config in every step.
            for line in changed if config is None else changed_settings(loaded.config, config):
                logger.info("changed since: %s", line)
        if CONTRACT in provenance:
            check_conditions(loaded.provenance.get(CONTRACT, {}), provenance[CONTRACT], first=first)
        return carried(loaded.provenance, provenance)

    def open_records(self, stops: StopSaveFlags, config: str | None, facts: Mapping[str, Any]) -> None:
        """Begin an attempt in the run's records on rank 0."""
        files.remove_leftovers(self._state.folder)
        warn_if_unwatched(self._folder, os.environ.get(FOLDER))
        saves = [number(attempt, "last_save_seconds") for attempt in earlier_attempts(self._folder)]
        stops.open(saves, time.time() - self._run_folder.accounting.elapsed)
        known = {**facts, **self._job.circumstances(), "tokens_before": self._state.tokens}
        if self._options.steps is not None:
            known["target_step"] = self._options.steps
        if (deadline := stops.walltime_guard.deadline) is not None:
            known["job_ends"] = round(deadline.time, 3)
        if self._finished and (self._run_folder.folder / CONFIG).exists():
            config = None  # the file keeps the settings that the run has used
        self._run_folder.open(self._state.step, config, known)


def holding_nan(optimizers: Mapping[str, torch.optim.Optimizer]) -> set[str]:
    """Return the names of the states of optimizers that have NaN on this rank: ``exp_avg``.

    A checkpoint refuses NaN in parameters only: what the states of an optimizer mean is its own affair.
    States of other classes of tensors are not examined.
    """
    found = set()
    for state in (state for optimizer in optimizers.values() for state in optimizer.state.values()):
        for name, value in state.items():
            local = value.to_local() if is_dtensor(value) else value
            if type(local) in (torch.Tensor, torch.nn.Parameter) and local.is_floating_point():
                if bool(local.sum().isnan()) and bool(local.isnan().any()):
                    found.add(str(name))
    return found


# Changed settings and hyperparameters, one line each, for the log of a resume ----------------------------------------


def changed_settings(before_toml: str | None, now_toml: str | None) -> list[str]:
    """Return one line per setting that changed: ``optimizer.learning_rate 0.001 -> 0.5``.

    Settings without effect on the computed numbers are skipped. Text that is not TOML is compared
    as a whole.
    """
    if before_toml is None or now_toml is None or before_toml == now_toml:
        return []
    try:
        before, now = _alike(tomllib.loads(before_toml), tomllib.loads(now_toml))
    except (tomllib.TOMLDecodeError, RecursionError):
        return ["the config text differs from that in the checkpoint; it is not TOML, so no settings are compared"]
    names = [*now, *(name for name in before if name not in now)]
    return [
        f"{name} {_shown(before.get(name, _MISSING))} -> {_shown(now.get(name, _MISSING))}"
        for name in names
        if _has_effect(name) and _value(before, name) != _value(now, name)
    ]


def changed_hyperparameters(
    saved: Sequence[Mapping[str, Any]], present: Sequence[Mapping[str, Any]], optimizer: str = ""
) -> list[str]:
    """Return one line per hyperparameter that differs between the groups of a checkpoint and of the program.

    Call this before the checkpoint overwrites the program's values. ``optimizer`` is the key if
    there are several. Values that a scheduler changes (``lr``, and with cycled momentum
    ``momentum`` and ``betas``) are compared by their initial values.
    """
    lines = []
    for index, (old, new) in enumerate(zip(saved, present)):
        where = f"optimizer {optimizer}".rstrip() + (f", group {index}" if len(present) > 1 else "")
        moved = _moved(old) | _moved(new)
        for key in [*new, *(key for key in old if key not in new)]:
            # A key on one side only was added by a scheduler or by another version of torch.
            if key in _NOT_COMPARED or key in moved or key not in old or key not in new:
                continue
            before, now = _plain(old[key]), _plain(new[key])
            if before == now:
                continue
            used, given = _shown(before), _shown(now)
            lines.append(f"{where}: {key} is {used} as in the checkpoint, not {given} as in the program")
    return lines


def overwritten(
    saved: Mapping[str, Sequence[Mapping[str, Any]]], optimizers: Mapping[str, torch.optim.Optimizer]
) -> list[str]:
    """Return the changed hyperparameters of all optimizers; ``saved`` are their groups in the checkpoint, by key."""
    pairs = [(saved.get(key, ()), optimizer.param_groups, key) for key, optimizer in optimizers.items()]
    return [line for groups, present, key in pairs for line in changed_hyperparameters(groups, present, key)]


def _moved(group: Mapping[str, Any]) -> set[str]:
    """Return the keys of a group that a scheduler sets."""
    moved = {"lr"} if "initial_lr" in group else set()
    return moved | ({"momentum", "betas"} if "max_momentum" in group else set())


def _has_effect(name: str) -> bool:
    section, _, key = name.partition(".")
    return section not in ("checkpoint", "health") and key not in _WITHOUT_EFFECT.get(section, ())


def _value(settings: Mapping[str, Any], name: str) -> Any:
    return settings.get(name, _ADDED.get(name, _MISSING))


def _alike(before: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flat settings of two configs; a section has the same name in both if one has its former name."""
    for one, other in ((before, now), (now, before)):
        if FORMER_SECTION in one and SECTION in other and not (SECTION in one or FORMER_SECTION in other):
            one[SECTION] = one.pop(FORMER_SECTION)
    return flatten(before), flatten(now)


def _plain(value: Any) -> Any:
    """Return tensors as numbers and tuples as lists, as they are stored in a file."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _shown(value: Any) -> str:
    text = "(not set)" if value is _MISSING else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
