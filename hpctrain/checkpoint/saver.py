"""Saver: all ranks together write the state of a training run into one file, in the foreground or in the background."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from hpctrain.checkpoint import content
from hpctrain.checkpoint.content import SaveRequest
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.fingerprint import fingerprint_of_ranks
from hpctrain.checkpoint.format.plan import (
    BoxPart,
    Offsets,
    Source,
    Target,
    WritePlan,
    WriteRequest,
    WriteShare,
    add_newest,
    cached_plan,
    described,
)
from hpctrain.checkpoint.format.writer import ShareWriter, clear, reserve
from hpctrain.checkpoint.local_state import LocalState, Models, StateDescription, by_key, exchange, joined
from hpctrain.checkpoint.storage import Storage, writer_for
from hpctrain.comm.agreement import agreed
from hpctrain.plain_tensors import on_shards
from hpctrain.shard import Split
from hpctrain.util.atomic import Claim

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

T = TypeVar("T")
SMALL = layout.ALIGNMENT  # bytes: smaller tensors are not divided over ranks, however wide the filesystem's stripes are
BURDEN = 128 << 10  # bytes that rank 0 could write in the time in which it makes the layout of one dataset

OFFSETS: dict[bytes, dict[str, int | None]] = {}  # by digest of the written state: its tensors' offsets in the file


class Saver:
    """Writer of checkpoints, one at a time; all ranks of ``comm`` make the same calls.

    In the foreground ``save`` returns when the file is complete under its name. In the background
    it returns as soon as the tensors are copied. A writer process per rank checks and writes the copy.
    The ranks call ``advance`` from time to time, preferably when no rank is ``busy``, which raises
    the errors, NaN in a parameter too. The file is complete when no save is ``pending``. There is
    one copy, so a ``save`` waits for the previous one.
    """

    def __init__(
        self, comm: Communicator | None = None, how: Storage | None = None, *, background: bool = False
    ) -> None:
        self._comm = comm if comm is not None else _single_communicator()
        self._storage = how or Storage()
        self.writer = writer_for(self._comm, self._storage, background)
        self._background = background
        self._saving: CollectiveSave | None = None
        self._written: tuple[bytes, list[str]] = (b"", [])  # digest and datasets of the save in progress
        self.claim: Claim | None = None  # on the folder, held by rank 0: it is checked before a file is written

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self.close()

    @on_shards
    def save(
        self,
        path: str | Path,
        *,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        train: Mapping[str, Any] | None = None,
        rng: Mapping[str, Any] | None = None,
        config: str | None = None,
        provenance: Mapping[str, Any] | None = None,
        split: Split | Mapping[str, Split | None] | None = None,
        own: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """Write a complete checkpoint or none; see ``hpctrain.checkpoint.save``. Collective.

        ``own`` are rank-local tensors, which ``load_rank_local`` loads again. With several models, their
        names begin with the key of the model and ``/``.
        """
        self.wait()
        models = agreed(self._comm, lambda: Models.of(model, split, ranks=self._comm.size))
        optimizers = agreed(self._comm, lambda: by_key(optimizer, "optimizer"))
        self.start(SaveRequest(Path(path), models, optimizers, train or {}, rng, config, provenance, own))

    @on_shards
    def start(self, request: SaveRequest) -> None:
        """Start to write a checkpoint; in the foreground, return when it is complete. Collective."""
        self.wait()
        with without_collection():
            self._start(request)
        if not self._background:
            self.wait()

    def _start(self, request: SaveRequest) -> None:
        comm = self._comm
        local = agreed(comm, lambda: LocalState.of(request.models, request.optimizers, request.rank_local, comm.rank))
        digest, descriptions, plan = self._plan(local.description(), str(request.path.absolute()))
        if not self._background:
            agreed(comm, lambda: local.check_finite())
        rng = agreed(comm, lambda: content.plain_rng(request.rng))
        expected = OFFSETS.get(digest)
        gathered = comm.all_gather_object((rng, expected is not None))
        rng_states = [state for state, _ in gathered]
        # MPI-IO calls are collective: they cannot be made while rank 0 makes the layout, and rank
        # 0 may not reach them.
        known = all(knows for _, knows in gathered) and self._storage.io == "posix"

        def prepare() -> tuple[WriteShare, WriteRequest | None]:
            if comm.rank:
                return WriteShare(local.sources, plan.parts[comm.rank]), None
            if self.claim is not None:
                self.claim.check()
            rest = content.rest(request, rng_states, joined(descriptions), comm.size)
            return self._whole_file(request.path, local, plan, rest)

        share, file = agreed(comm, prepare)
        self._saving = CollectiveSave(comm, self.writer, share, file, expected if known else None)
        self._written = digest, [dataset.name for dataset in plan.datasets]

    @on_shards
    def fingerprint(self, models: Models, optimizers: Mapping[str, torch.optim.Optimizer]) -> str:
        """Return the fingerprint of a state, which a checkpoint of it has as well. Collective."""
        local = agreed(self._comm, lambda: LocalState.of(models, optimizers))
        plan = self._plan(local.description(), "")[2]
        return fingerprint_of_ranks(plan, local.sources, self._comm.rank, self._comm.all_gather_object)

    @property
    def pending(self) -> bool:
        """Return whether a checkpoint is not complete yet."""
        return self._saving is not None

    @property
    def busy(self) -> bool:
        """Return whether ``advance`` would wait for this rank's writer process."""
        return self._saving is not None and self._saving.busy

    def advance(self) -> None:
        """Make the next step of the pending checkpoint. Collective. An error on one rank is raised on all ranks."""
        if self._saving is None:
            return
        try:
            self._saving.advance()
            _cache_offsets(self._written, self._saving.offsets)
        finally:
            if self._saving.done:
                self._saving = None

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. Collective."""
        while self._saving is not None:
            self.advance()

    def close(self) -> None:
        """Drop a pending checkpoint, without the other ranks, and end the writer process."""
        self._saving = None
        self.writer.close()

    def _plan(self, local: StateDescription, target: str) -> tuple[bytes, list[StateDescription], WritePlan]:
        """Return the digest and descriptions of all ranks' state, and the write plan; it is cached per digest."""
        digest, descriptions = exchange(self._comm, local, target)
        digest += bytes(str(self._storage.alignment), "ascii")
        boxes, small = [each.boxes for each in descriptions], min(self._storage.alignment, SMALL)
        return digest, descriptions, agreed(self._comm, lambda: cached_plan(digest, boxes, small, BURDEN))

    def _whole_file(
        self, path: Path, local: LocalState, plan: WritePlan, rest: tuple[list[Source], content.Groups]
    ) -> tuple[WriteShare, WriteRequest]:
        """Return rank 0's share, with everything that is not a tensor of a model or optimizer, and the whole file."""
        more, groups = rest
        parts = [*plan.parts[0]]
        for number, source in enumerate(more, len(local.sources)):
            if 0 not in source.box.extent:
                parts.append(BoxPart(number, 0, math.prod(source.box.extent)))
        datasets = [*plan.datasets, *map(described, more)]
        file = WriteRequest(
            Target.of(path, datasets),
            datasets,
            groups,
            attributes={source.path: source.attributes for source in more},
            alignment=self._storage.alignment,
            create=self._storage.io != "mpiio",
            claim=self.claim,
        )
        return WriteShare([*local.sources, *more], parts), file


def save(
    path: str | Path,
    *,
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
    train: Mapping[str, Any] | None = None,
    rng: Mapping[str, Any] | None = None,
    config: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    comm: Communicator | None = None,
    split: Split | Mapping[str, Split | None] | None = None,
    how: Storage | None = None,
) -> None:
    """Write a complete checkpoint or none.

    Several models and optimizers are passed as mappings:
    ``model={"generator": g, "discriminator": d}``; their keys name groups of the file. An optimizer
    may contain parameters of any of the models. ``split`` is then a mapping with the keys of the
    models.

    ``train`` contains numbers, text, lists and tables under names that the caller chooses. Its
    ``step`` is the step of the file. Its ``curves`` (name to list of numbers) become arrays to
    plot. Its ``states`` (name to state) may contain tensors and NumPy arrays in dicts, lists and
    tuples; those of rank 0 are stored. ``rng`` is the state of this rank, from ``capture_rng()``.
    ``config`` is TOML text. ``provenance`` is added to the facts that are always recorded. With
    ``comm`` the call is collective: every rank writes its share, and all ranks succeed or raise the
    same error. ``split`` describes how the model is split over the ranks, ``how`` the way of
    writing.

    Raises ``NonFiniteError`` for a parameter that is NaN or infinite, ``CheckpointError`` if the
    file cannot be written. A file that existed before is then unchanged.
    """
    with Saver(comm, how) as saver:
        saver.save(
            path,
            model=model,
            optimizer=optimizer,
            train=train,
            rng=rng,
            config=config,
            provenance=provenance,
            split=split,
        )


@contextmanager
def without_collection() -> Iterator[None]:
    """Postpone garbage collections.

    The objects that describe thousands of tensors would start one over all objects of the program,
    which takes longer than the copy of the state (0.13 s with those of torch).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _cache_offsets(written: tuple[bytes, list[str]], offsets: Offsets | None) -> None:
    """Cache the offsets of the tensors for the next file with the same state."""
    if offsets is None:
        return
    digest, names = written
    add_newest(OFFSETS, digest, {name: offsets[name] for name in names})


def _single_communicator() -> Communicator:
    from hpctrain.comm.communicator import Communicator
    from hpctrain.comm.transport.base import SingleTransport

    return Communicator(SingleTransport())


# Collective save of one checkpoint ------------------------------------------------------------------------------------
#
# Rank 0 makes the layout, every rank writes its share, and rank 0 completes and commits the file.
# Between these steps the ranks exchange their outcome: an error on one rank is raised on all, and the
# file is removed.
#
# Note: writing without waiting. The offset of a dataset depends only on the datasets before it and on
# itself. So within a run each file has its tensors at the same offsets as the previous file. Then no
# rank waits for the layout: all ranks write while rank 0 makes it. The layout is compared with the
# expected one; if it differs, the shares are written again.


class CollectiveSave:
    """Collective save in progress; created by all ranks, which then all call ``advance`` until it is ``done``.

    ``request`` is the file to write, on rank 0 only. ``expected`` contains the expected offsets of
    the model and optimizer datasets, on all ranks or on no rank. ``advance`` waits for this rank's
    writer; while the writer is ``busy``, the rank can do other work. ``offsets`` are those of the
    datasets, once they are known.
    """

    def __init__(
        self,
        comm: Communicator,
        writer: ShareWriter,
        share: WriteShare,
        request: WriteRequest | None,
        expected: Offsets | None = None,
    ) -> None:
        self._comm, self._writer, self._request, self._expected = comm, writer, request, expected
        self.done = False
        self.offsets: Offsets | None = None
        self._steps: Iterator[Callable[[], None]] = iter((self._write, self._finish, self._end))
        self._agreed(lambda: writer.stage(share))
        # The file exists before any rank opens it.
        self._agreed(lambda: writer.create(request, expected) if request is not None else None)
        self._target: Target = comm.broadcast_object(request.target if request is not None else None)
        if request is not None:
            writer.lay_out(request)
        if expected is not None:
            self._steps = iter((self._compare, self._end))
            writer.write(self._target, expected if request is None else None)

    @property
    def busy(self) -> bool:
        """Return whether this rank's writer has not finished the current step."""
        return not self.done and self._writer.busy

    def advance(self) -> None:
        """Make the next step. Collective. If a rank failed, all ranks raise the same error."""
        next(self._steps)()

    def _write(self) -> None:
        offsets = self._result_of_rank_0()
        self._agreed(lambda: reserve(self._request, offsets) if self._request is not None else None)
        self.offsets = self._comm.broadcast_object(offsets)
        assert self.offsets is not None
        self._writer.write(self._target, self.offsets)

    def _compare(self) -> None:
        """Compare the layout with the expected one; if it differs, write again. Then complete the file."""
        laid_out, expected = self._result_of_rank_0(), self._expected
        assert expected is not None
        differs = laid_out is not None and any(laid_out[name] != offset for name, offset in expected.items())
        self.offsets = self._comm.broadcast_object(laid_out if differs else None) or expected
        if self.offsets is not expected:
            self._agreed(self._writer.result, alike=False)
            self._agreed(lambda: None if self._comm.rank else clear(self._target))
            self._writer.write(self._target, self.offsets)
        self._finish()

    def _finish(self) -> None:
        written = self._agreed(self._writer.result, alike=False)
        of_all_ranks = np.concatenate(self._comm.all_gather_object(written))
        if self._comm.rank == 0:
            self._writer.finish(of_all_ranks)

    def _end(self) -> None:
        self._result_of_rank_0()
        self.done = True

    def _result_of_rank_0(self) -> Any:
        """Return the result of rank 0's writer; ``None`` on the other ranks."""
        return self._agreed(lambda: None if self._comm.rank else self._writer.result())

    def _agreed(self, action: Callable[[], T], *, alike: bool = True) -> T:
        """Run an action that may fail; if it fails on any rank, drop the checkpoint and raise on all ranks."""
        try:
            return agreed(self._comm, action, alike=alike)
        except BaseException:
            self.done = True
            self._writer.abort()
            raise
