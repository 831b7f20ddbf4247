"""Saving and restoring of the complete state of a run: a resumed run continues bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hpctrain.checkpoint import content
from hpctrain.checkpoint import retention as files
from hpctrain.checkpoint.content import SaveRequest
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import crc32, group_of, keys_in
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.frozen import check_unchanged, frozen_fingerprint
from hpctrain.checkpoint.local_state import Models, by_key
from hpctrain.checkpoint.restore import Loaded, load, load_rank_local
from hpctrain.checkpoint.retention import RetentionPolicy
from hpctrain.checkpoint.states import Leaf, is_plain, pack_states, restore_state, state_of, to_numpy
from hpctrain.comm.agreement import agreed, on_first_rank
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.log import logger
from hpctrain.parallel.strategy import AsyncStrategy, SplitStrategy, Strategy, consensus_view
from hpctrain.plain_tensors import on_shards
from hpctrain.shard import Split
from hpctrain.train import schedulers
from hpctrain.train.config import NOT_JUDGED, Only
from hpctrain.train.metrics import Curves
from hpctrain.util.text import printable

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

LOADER = "loader"  # the state that contains the data position, for a loader with a state of its own
FEED = "feed"  # the state that contains the pass over the loader and the progress in it
SAVED_FOR = "best"  # the name under which run.save(best=...) logs its value
STOPPED = "stopped"  # the key of a checkpoint's reason why the program has ended the run for good


class TrainState:
    """Saved state of a run: models, optimizers, data position, step, curves, generators, objects of the user.

    ``models``, ``optimizers`` and ``strategies`` (how each model is split over the ranks) are by
    key; a single one has the key ``""``. ``parts`` are other objects with a state, by name (see
    ``checkpoint.states``). ``keep`` is the retention rule for the folder's checkpoints.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        parts: Mapping[str, Any],
        comm: Communicator,
        folder: Path,
        keep: RetentionPolicy = RetentionPolicy(),
        strategies: Mapping[str, Strategy] = MappingProxyType({}),
    ) -> None:
        self.models: dict[str, nn.Module] = by_key(models, "model")
        self.optimizers: dict[str, torch.optim.Optimizer] = by_key(optimizers, "optimizer")
        self.strategies = {key: strategies[key] for key in self.models if key in strategies}
        self.parts: dict[str, Any] = dict(parts)
        self.comm = comm
        self.schedulers: set[str] = set()  # names of schedulers that were found, not passed by the program
        self.found_scaler = False  # whether a GradScaler was found, not passed by the program
        self.folder = folder
        self.retention = files.Retention(folder, keep)
        self.step = 0
        self.tokens = 0
        self.curves = Curves()
        self.logged: dict[str, float] = {}  # in the current step, by name
        self.capture: Callable[[], Mapping[str, Any]] = content.capture_rng  # returns the generator states to save
        self.stopped: str | None = None  # why the program has ended the run for good
        self.only: Only = "all"  # parameters that a checkpoint holds
        self._frozen: str | None = None  # fingerprint of the others at the start of the run
        self.config: str | None = None  # text to store with each checkpoint
        self.provenance: Mapping[str, Any] = {}  # facts to store with each checkpoint
        self._warned = False  # whether a warning about a checkpoint that cannot be the best was logged

    @property
    def splits(self) -> dict[str, Split | None]:
        """Return the layout of each model over the ranks, by key."""
        return {key: strategy.split for key, strategy in self.strategies.items()}

    def stored_models(self) -> Models:
        """Return the models with the parameters that a checkpoint holds. Collective."""
        models = agreed(self.comm, lambda: Models.of(self.models, self.splits, ranks=self.comm.size))
        return replace(models, only=self.only)

    def note_frozen(self) -> None:
        """Record the frozen parameters at the start of a run whose checkpoints lack them. Collective."""
        if self.only == "trained":
            self._frozen = frozen_fingerprint(self.stored_models(), self.comm)

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.h5"

    def note(self, row: Mapping[str, Any]) -> None:
        """Record the values logged in the current step: a checkpoint contains them, and may be kept because of them."""
        self.curves.add(dict(row))
        self.logged = {
            name: float(value)
            for name, value in row.items()
            if name not in NOT_JUDGED and isinstance(value, (int, float)) and math.isfinite(value)
        }

    @contextmanager
    def consensus_view(self) -> Iterator[None]:
        """Show the parameters that a checkpoint stores, which asynchronous strategies do not train on. Collective."""
        with ExitStack() as views:
            for strategy in self.strategies.values():
                views.enter_context(consensus_view(strategy))
            yield

    def save_request(self, path: Path | None = None) -> SaveRequest:
        """Return the request to save the current step, in its ``consensus_view``; ``path`` is that of its file."""
        self._warn_if_unrated()
        train = {
            "step": self.step,
            "batches": 0,  # of earlier versions, which counted those of all passes; now a part of the feed's state
            "tokens": self.tokens,
            "states": self._states(),
            "curves": self.curves.columns,
            files.LOGGED: self.logged,
            **({} if self.stopped is None else {STOPPED: self.stopped}),
        }
        policy = self.retention.policy
        if policy.best:
            train |= {files.KEEP_BEST: policy.best, files.BEST: policy.which}
        models = self.stored_models()
        if self._frozen is not None:
            check_unchanged(self._frozen, models, self.comm)
        return SaveRequest(
            path or self.path(self.step),
            models,
            self.optimizers,
            train=train,
            rng=self.capture(),
            config=self.config,
            provenance=self.provenance,
            rank_local=self._rank_local_state(),
            frozen=self._frozen,
        )

    def find_schedulers(self) -> list[str]:
        """Add schedulers and a scaler that the program did not pass to the saved states; return the schedulers' names.

        Collective. Called before the run resumes, and again before the first save, for schedulers
        created in between.
        """
        found = schedulers.find_on_all_ranks(self.optimizers, self.parts, self.comm)
        self.parts |= found
        self.schedulers |= set(found)
        scaler = schedulers.find_scaler(self.parts, self.comm)
        if scaler is not None:
            self.parts[schedulers.SCALER] = scaler
            self.found_scaler = True
        return list(found)

    @on_shards
    def check_storable(self) -> None:
        """Refuse states that a checkpoint cannot contain. Collective, before the first step.

        Raises ``CheckpointError`` on all ranks for a parameter or buffer of a type that cannot be
        stored, such as a complex one. Raises ``UsageError`` on all ranks for a value of a type that
        cannot be stored, and for tensors that differ between the ranks: a checkpoint stores those
        of rank 0.
        """
        agreed(self.comm, lambda: Models.of(self.models, self.splits, ranks=self.comm.size).shards())
        if self.only == "trained" and any(isinstance(one, AsyncStrategy) for one in self.strategies.values()):
            text = 'only = "trained" with workers that make their own updates: not possible; set only = "all"'
            raise UsageError(text, everywhere=True)
        for name, part in self.parts.items():
            if is_plain(part):
                raise UsageError(
                    f"{_described_state(name)} is {part!r}, which a resume cannot restore in place; "
                    f'allowed are mutable objects; put it into a dict: states={{"{name}": {{"value": ...}}}}',
                    everywhere=True,
                )
        tensors = agreed(self.comm, lambda: pack_states(self._states(), _described_state)[1].tensors)
        everyone = self.comm.all_gather_object({path: _fingerprint(leaf) for path, leaf in tensors.items()})
        for rank, found in enumerate(everyone):
            differing = [path for path in {**everyone[0], **found} if everyone[0].get(path) != found.get(path)]
            if differing:
                raise UsageError(
                    f"{differing[0].removeprefix('/')} differs between rank 0 and rank {rank}; a checkpoint stores "
                    "states that are equal on all ranks; draw numbers that differ from torch's global generator; pass "
                    "the average of a model that is split over the ranks as a model of its own (job.wrap, job.run)",
                    everywhere=True,
                )

    def _states(self) -> dict[str, Any]:
        return {name: state_of(part) for name, part in self.parts.items()}

    def keep_best(self) -> None:
        """Keep the checkpoint with the best value given to ``run.save(best=...)``."""
        if not self.retention.policy.best:
            self.retention.policy = replace(self.retention.policy, best=SAVED_FOR)

    def _warn_if_unrated(self) -> None:
        """Warn once on rank 0 if the metric that selects the best checkpoint was not logged in this step."""
        name = self.retention.policy.best
        if name == SAVED_FOR:
            return  # given for some checkpoints only
        if name and name not in self.logged and not self._warned and self.comm.rank == 0:
            self._warned = True
            logger.warning(
                "step %d logged no finite number called %s: its checkpoint cannot become the best",
                self.step,
                name,
            )

    def find(self, *, strict: bool) -> Path | None:
        """Return on all ranks the newest valid checkpoint that rank 0 sees."""
        return on_first_rank(self.comm, lambda: files.newest_valid(self.folder, strict=strict))

    def _rank_local_state(self) -> dict[str, torch.Tensor]:
        """Return the rank-local state of this rank; if there are several models, names begin with the model's key."""
        found: dict[str, torch.Tensor] = {}
        for key, strategy in self.strategies.items():
            if not isinstance(strategy, AsyncStrategy) or not strategy.has_local_state:
                continue
            own = strategy.rank_local_state(self._optimizer_of(key))
            found |= {f"{key}/{name}" if key else name: tensor for name, tensor in own.items()}
        return found

    def _optimizer_of(self, key: str) -> torch.optim.Optimizer:
        """Return the only optimizer of a model whose ranks have rank-local state."""
        parameters = {id(parameter) for parameter in self.models[key].parameters()}
        found = [one for one in self.optimizers.values() if parameters & _held_by(one)]
        if len(found) != 1 or not _held_by(found[0]) <= parameters:
            raise UsageError(
                f"the model {key!r} has {len(found)} optimizers; with this parallel.data it must have exactly one, "
                "which holds parameters of no other model",
                everywhere=True,
            )
        return found[0]

    @on_shards
    def restore(
        self,
        path: Path,
        *,
        rewind_data: bool = True,
        before: Callable[[Mapping[str, Any]], object] = lambda groups: None,
    ) -> Loaded:
        """Restore a checkpoint; without ``rewind_data``, the data position does not change.

        ``before`` gets the param_groups in the checkpoint, by optimizer, before they overwrite those of the program.
        Raises ``UsageError`` on all ranks if only one of the checkpoint and the program has a
        learning-rate scheduler.
        """
        saved, groups = on_first_rank(self.comm, lambda: _names_and_groups(path))
        schedulers.check_saved(saved, self.parts, sorted(self.schedulers), path)
        before(groups)
        loaded = load(path, model=self.models, optimizer=self.optimizers, comm=self.comm, split=self.splits)
        for strategy in self.strategies.values():
            strategy.refresh()
        own = self._rank_local_state()
        if own and not load_rank_local(path, own, comm=self.comm) and self.comm.rank == 0:  # by as many ranks only
            logger.warning("%s has no state of these workers: all start from the center", path)
        train = loaded.train
        with _plain_values(path):
            states = dict(train.get("states", {}))
            _count(train.get("batches", loaded.step))  # used to resume if there is no state of a feed
            tokens = _count(train.get("tokens", 0))
            logged = {str(name): float(value) for name, value in dict(train.get(files.LOGGED, {})).items()}
            curves = {str(name): list(map(float, values)) for name, values in dict(train.get("curves", {})).items()}
        missing = sorted(set(self.parts) - set(states) - {FEED})
        if schedulers.SCALER in missing and self.found_scaler:
            missing.remove(schedulers.SCALER)
            if self.comm.rank == 0:
                logger.warning("%s has no state of a GradScaler: it starts with its initial scale", path)
        if missing:
            raise CheckpointError(f"{path} holds no state of {', '.join(missing)}", everywhere=True)
        for name, part in self.parts.items():
            if name in states and (rewind_data or name not in (LOADER, FEED)):
                agreed(self.comm, partial(restore_state, part, states[name], _described_state(name)))
        if loaded.rng is not None:
            content.restore_rng(loaded.rng)
        for strategy in self.strategies.values():
            if isinstance(strategy, SplitStrategy):
                strategy.agree_on_generators()
        self.step = loaded.step
        if train.get(files.KEEP_BEST) == SAVED_FOR and not self.retention.policy.best:
            self.keep_best()  # as the program requested by run.save(best=...)
        stopped = train.get(STOPPED)
        self.stopped = None if stopped is None else str(stopped)
        self.tokens, self.logged, self.curves.columns = tokens, logged, curves
        return loaded


@contextmanager
def _plain_values(path: Path) -> Iterator[None]:
    """Raise ``CheckpointError`` on all ranks if a file contains values that no run writes."""
    try:
        yield
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        reason = printable(f"{type(error).__name__}: {error}")[:100]
        text = f"cannot resume from {path}: {reason}; hpctrain checkpoint show {path} prints what it holds"
        raise CheckpointError(text, everywhere=True) from None


def _count(value: Any) -> int:
    """Return a count of batches or tokens. Raises ``ValueError`` for other values."""
    if isinstance(value, bool) or not 0 <= (found := int(value)) < 2**63 or found != value:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return found


def _names_and_groups(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the names of a file's states, and the param_groups of its optimizers by key."""
    with Reader(path) as reader:
        keys = keys_in(reader, layout.OPTIMIZER)
        groups = {key: reader.values(group_of(layout.OPTIMIZER, key)).get("param_groups", ()) for key in keys}
        with _plain_values(path):
            return list(dict(reader.values(layout.TRAIN).get("states", {}))), groups


def _described_state(name: str) -> str:
    return "the loader's state" if name == LOADER else f'states["{name}"]'


def _fingerprint(leaf: Leaf) -> tuple[object, ...]:
    """Return a tuple that identifies a tensor: dtype, shape and checksum."""
    array = to_numpy(leaf) if isinstance(leaf, torch.Tensor) else leaf
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return str(leaf.dtype), tuple(leaf.shape), crc32(data)


def _held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
