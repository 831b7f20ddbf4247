"""Saver: all ranks together write the state of a training run into one file, in the foreground or in the background."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from hpctrain.checkpoint import content
from hpctrain.checkpoint.collective_save import CollectiveSave, RankSave
from hpctrain.checkpoint.file_writer import InlineWriter, Places, ShareWriter, Target, WriteRequest, WriteShare
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.plan import BoxPart, WritePlan, plan
from hpctrain.checkpoint.format.source import described, nbytes_of
from hpctrain.checkpoint.local_state import Holdings, StateDescription, exchange, joined
from hpctrain.checkpoint.names import Models, by_key
from hpctrain.comm.agreement import agreed
from hpctrain.errors import UsageError
from hpctrain.plain_tensors import as_parts
from hpctrain.shard import Split
from hpctrain.util import atomic
from hpctrain.util.claim import Claim

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

IO = Literal["posix", "mpiio"]
SMALL = layout.ALIGNMENT  # bytes: smaller tensors are not divided over ranks, however wide the filesystem's stripes are
BURDEN = 128 << 10  # bytes that rank 0 could write in the time in which it makes the layout of one dataset

_KNOWN = 8
PLACES: dict[bytes, dict[str, int | None]] = {}  # by digest of the written state: offsets of the tensors in such a file


@dataclass(frozen=True)
class Storage:
    """Method of writing files: ``pwrite`` by each rank, or collective MPI-IO with hints.

    Tensors of at least ``alignment`` bytes start at multiples of ``alignment``, a power of two. The
    stripe size of a parallel filesystem is a good choice.
    """

    io: IO = "posix"
    alignment: int = layout.ALIGNMENT
    hints: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.io not in get_args(IO):
            raise UsageError(f"io = {self.io!r}: allowed are {', '.join(get_args(IO))}", everywhere=True)
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise UsageError(f"alignment = {self.alignment}: must be a power of two", everywhere=True)
        if self.hints and self.io != "mpiio":
            raise UsageError("hints are for io = 'mpiio'", everywhere=True)


class Saver:
    """Writer of checkpoints, one at a time; all ranks of ``comm`` make the same calls.

    In the foreground ``save`` returns when the file is complete under its name. In the background
    it returns as soon as the tensors are copied. A writer process per rank then writes the copy,
    and the ranks call ``advance`` from time to time, preferably when no rank is ``busy``. The file
    is complete when no save is ``pending``. There is one copy, so a ``save`` waits for the previous
    one.
    """

    def __init__(
        self, comm: Communicator | None = None, how: Storage | None = None, *, background: bool = False
    ) -> None:
        self._comm = comm if comm is not None else _alone()
        self._how = how or Storage()
        self._worker = _worker(self._comm, self._how, background)
        self._background = background
        self._saving: CollectiveSave | None = None
        self._planned: tuple[bytes, WritePlan] | None = None
        self._written: tuple[bytes, list[str]] = (b"", [])
        self.claim: Claim | None = None  # on the folder, held by rank 0: it is checked before a file is written

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self.close()

    @as_parts
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

        ``own`` are rank-local tensors, which ``load_own`` loads again. With several models, their
        names begin with the key of the model and ``/``.
        """
        self.wait()
        comm = self._comm
        models = agreed(comm, lambda: Models.of(model, split))
        optimizers = agreed(comm, lambda: by_key(optimizer, "optimizer"))
        held = agreed(comm, lambda: Holdings.of(models, optimizers, own, comm.rank))
        digest, descriptions, deal = self._plan(held.description(), str(Path(path).absolute()))
        parts = deal.parts[comm.rank]
        agreed(comm, lambda: held.check_finite())
        plain = agreed(comm, lambda: content.plain_rng(rng))
        told = comm.all_gather_object((plain, digest in PLACES))
        states = [each for each, _ in told]
        # MPI-IO calls are collective: they cannot be made while rank 0 makes the layout, and rank
        # 0 may not reach them.
        known = all(knows for _, knows in told) and self._how.io == "posix"
        expected = PLACES[digest] if known else None

        def job() -> RankSave:
            if comm.rank:
                return RankSave(WriteShare(held.sources, parts), None, expected)
            if self.claim is not None:
                self.claim.check()
            rest = content.rest(train or {}, states, config, provenance, comm.size)
            rest.groups.update(content.model_groups(models))
            return replace(self._order(Path(path), held, descriptions, deal, rest), expected=expected)

        self._saving = CollectiveSave(comm, self._worker, agreed(comm, job))
        self._written = digest, [dataset.name for dataset in deal.datasets]
        if not self._background:
            self.wait()

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
            _remember(self._written, self._saving.places)
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
        self._worker.close()

    def _plan(self, own: StateDescription, target: str) -> tuple[bytes, list[StateDescription], WritePlan]:
        """Return the digest and descriptions of all ranks' state, and the write plan; it is cached per digest."""
        digest, descriptions = exchange(self._comm, own, target)
        alignment = self._how.alignment
        if self._planned is None or self._planned[0] != digest:
            boxes = [each.boxes for each in descriptions]
            self._planned = digest, agreed(self._comm, lambda: plan(boxes, min(alignment, SMALL), BURDEN))
        return digest + bytes(str(alignment), "ascii"), descriptions, self._planned[1]

    def _order(
        self,
        path: Path,
        held: Holdings,
        descriptions: Sequence[StateDescription],
        deal: WritePlan,
        rest: content.Content,
    ) -> RankSave:
        """Return rank 0's job: its share, and everything that is not a tensor of a model or optimizer."""
        sources = [*held.sources, *rest.sources]
        parts = [*deal.parts[0]]
        for number, source in enumerate(rest.sources, len(held.sources)):
            if 0 not in source.box.extent:
                parts.append(BoxPart(number, 0, math.prod(source.box.extent)))
        datasets = [*deal.datasets, *(described(source) for source in rest.sources)]
        groups = {**rest.groups, **content.optimizer_groups(joined(descriptions))}
        nbytes = sum(map(nbytes_of, datasets))
        attributes = {source.path: source.attributes for source in rest.sources}
        place, create = Target(path, atomic.private_name(path), nbytes), self._how.io != "mpiio"
        order = WriteRequest(place, datasets, groups, attributes, self._how.alignment, create, self.claim)
        return RankSave(WriteShare(sources, parts), order)


def _remember(written: tuple[bytes, list[str]], places: Places | None) -> None:
    """Cache the offsets of the tensors for the next file with the same state."""
    if places is None:
        return
    digest, names = written
    PLACES.pop(digest, None)
    PLACES[digest] = {name: places[name] for name in names}
    if len(PLACES) > _KNOWN:
        PLACES.pop(next(iter(PLACES)))


def _alone() -> Communicator:
    from hpctrain.comm.communicator import Communicator
    from hpctrain.comm.transport.single import SingleTransport

    return Communicator(SingleTransport())


def _worker(comm: Communicator, how: Storage, background: bool) -> ShareWriter:
    if how.io == "mpiio":
        return _collective(comm, how, background)
    if not background:
        return InlineWriter()
    from hpctrain.checkpoint.background import BackgroundWriter

    return BackgroundWriter()


def _collective(comm: Communicator, how: Storage, background: bool) -> ShareWriter:
    if background:
        raise UsageError(
            "io = 'mpiio' writes by calls of all ranks, which a process beside each cannot make: "
            "write in the foreground, or by io = 'posix'",
            everywhere=True,
        )
    if comm.transport.name != "mpi":
        raise UsageError("io = 'mpiio' needs ranks that MPI has started: use io = 'posix'", everywhere=True)
    from hpctrain.checkpoint.collective_save import Collective
    from hpctrain.comm.transport.mpi import MpiTransport

    assert isinstance(comm.transport, MpiTransport)
    return Collective(comm.transport, how.hints)
