"""Candidates of the checkpoint benchmark: plain writes and reads, hpctrain, torch.save and torch DCP."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint_state import Values, Work, bytes_of, compare_file, delete, difference, flush, read_at, write_at
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hpctrain import checkpoint
from hpctrain.checkpoint.format.layout import crc32
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.saver import Storage
from hpctrain.errors import HpctrainError

RAW = "raw pwrite"  # one file per rank: the reference
RAW_ONE = "raw pwrite, one file"  # the same bytes, all ranks into one file
OURS = "hpctrain"
MPIIO = "hpctrain mpiio"
TORCH = "torch.save"
DCP = "torch DCP"
WRITERS = (RAW, RAW_ONE, OURS, MPIIO, TORCH, DCP)

RAW_READ = "raw preadv"
CRC = "crc32"  # of bytes in memory: the cost of the checksum alone
LOAD = "hpctrain load"
VERIFY = "hpctrain verify"
TORCH_LOAD = "torch.load"
DCP_LOAD = "torch DCP load"
READERS = (RAW_READ, CRC, LOAD, VERIFY, TORCH_LOAD, DCP_LOAD)

FOREGROUND = "hpctrain foreground"
BACKGROUND = "hpctrain background"
ASYNC = "torch DCP async"


def load_from(ranks: int) -> str:
    """Return the name of loading a file that ``ranks`` ranks wrote."""
    return f"{LOAD}, {ranks} wrote"


def _nothing() -> None:
    pass


def _no_error() -> str:
    return ""


@dataclass
class Candidate:
    """Method to save or to load; all ranks call each of its parts.

    ``check`` returns the error in the result, empty if it is right. ``nbytes`` are moved by each
    rank that takes part, or by all together if they share the work.
    """

    name: str
    nbytes: int
    call: Callable[[], object]
    check: Callable[[], str] = _no_error
    prepare: Callable[[], object] = _nothing
    needed: bool = False  # an error in it ends the benchmark


class WrongResult(HpctrainError, RuntimeError):
    """Wrong result of a candidate, which makes its time meaningless."""


def deletes(work: Work, path: Path) -> Callable[[], None]:
    """Return the deletion of a file or folder by rank 0."""

    def prepare() -> None:
        if work.setting.rank == 0:
            delete(path)

    return prepare


# Plain writes and reads, and the checksum alone -----------------------------------------------------------------------


def raw_writers(work: Work) -> Iterator[Candidate]:
    """Yield the plain writes: each rank writes its share of the bytes, to a separate file or to one common file."""
    share = work.setting.share(work.nbytes)
    yield _raw_writer(work, RAW, work.file(f"raw-{work.setting.rank}"), share, 0)
    yield _raw_writer(work, RAW_ONE, work.file("raw"), share, share.start)


def _raw_writer(work: Work, name: str, path: Path, share: slice, offset: int) -> Candidate:
    data = bytes_of(work.flat)[share]

    def check() -> str:
        found = np.fromfile(path, np.uint8, count=len(data), offset=offset)
        same = np.array_equal(found, np.frombuffer(data, np.uint8))
        return "" if same else f"{path.name} does not hold what was written"

    return Candidate(
        name,
        work.nbytes,
        call=lambda: write_at(path, data, offset),
        check=check,
        prepare=lambda: delete(path),
        needed=True,
    )


def raw_readers(work: Work, path: Path) -> Iterator[Candidate]:
    """Yield the plain read of the bytes of a load, on every rank, and the checksum of equally many bytes."""
    data = bytes_of(work.spare)
    yield Candidate(
        RAW_READ,
        work.nbytes,
        call=lambda: read_at(path, data),  # from the start: the number of bytes matters, not their order
        needed=True,
    )
    flat = bytes_of(work.flat)
    yield Candidate(CRC, work.nbytes, call=lambda: crc32(flat), needed=True)


# hpctrain -------------------------------------------------------------------------------------------------------------


def own_writers(work: Work) -> Iterator[Candidate]:
    """Yield hpctrain's candidates for saving."""
    yield _own_writer(work, OURS, work.file("hpctrain.h5"))
    yield _own_writer(work, MPIIO, work.file("hpctrain-mpiio.h5"), how=Storage(io="mpiio"))


def _own_writer(work: Work, name: str, path: Path, **options: Any) -> Candidate:
    setting = work.setting

    return Candidate(
        name,
        work.nbytes,
        call=lambda: save(work, path, **options),
        check=lambda: compare_file(path, work.state) if setting.rank == 0 else "",
        prepare=deletes(work, path),
        needed=name == OURS,
    )


def save(work: Work, path: Path, **options: Any) -> None:
    """Save the state. Collective."""
    state = work.state
    checkpoint.save(path, model=state.model, optimizer=state.optimizer, comm=work.setting.comm, **options)


def own_readers(work: Work, written_by: Sequence[int]) -> Iterator[Candidate]:
    """Yield loading of files by the numbers of ranks that wrote them, the same number first, and verifying."""
    yield _loader(work, LOAD, work.from_ranks(work.setting.size))
    for ranks in written_by:
        if ranks != work.setting.size:
            yield _loader(work, load_from(ranks), work.from_ranks(ranks))
    yield _verifier(work, work.from_ranks(work.setting.size))


def _loader(work: Work, name: str, path: Path) -> Candidate:
    target = work.target
    return Candidate(
        name,
        work.nbytes,
        call=lambda: checkpoint.load(path, model=target.model, optimizer=target.optimizer, comm=work.setting.comm),
        check=lambda: difference(target, work.state),
        prepare=target.spoil,
        needed=True,
    )


def _verifier(work: Work, path: Path) -> Candidate:
    """Return the verification by one rank, as on a login node."""

    def verify() -> None:
        if work.setting.rank == 0:
            with Reader(path) as reader:
                reader.verify()

    return Candidate(VERIFY, work.nbytes, call=verify, needed=True)


# torch ----------------------------------------------------------------------------------------------------------------


def torch_writers(work: Work) -> Iterator[Candidate]:
    """Yield torch's candidates for saving."""
    yield _torch_writer(work, work.file("torch.pt"))
    yield _dcp_writer(work, work.file("torch-dcp"))


def torch_readers(work: Work) -> Iterator[Candidate]:
    """Yield torch's candidates for loading, which read the files of those for saving."""
    yield _torch_reader(work, work.file("torch.pt"))
    yield _dcp_reader(work, work.file("torch-dcp"))


def _torch_writer(work: Work, path: Path) -> Candidate:
    first = work.setting.rank == 0

    def call() -> None:
        if first:
            private = path.with_suffix(".tmp")
            torch.save(work.state.dicts(), private)
            flush(private)
            os.rename(private, path)

    def check() -> str:
        return after_load(work, work.state, lambda: work.target.take(_read(path))) if first else ""

    return Candidate(TORCH, work.nbytes, call=call, check=check, prepare=deletes(work, path))


def _dcp_writer(work: Work, path: Path) -> Candidate:
    """Return DCP with its defaults: FileSystemWriter, one file per rank, each flushed."""

    def check() -> str:
        return (
            after_load(work, work.state, lambda: dcp_load_into(work, path, alone=True))
            if work.setting.rank == 0
            else ""
        )

    return Candidate(
        DCP,
        work.nbytes,
        call=lambda: dcp_save(work.state.dicts(), checkpoint_id=path),
        check=check,
        prepare=deletes(work, path),
    )


def _torch_reader(work: Work, path: Path) -> Candidate:
    return Candidate(
        TORCH_LOAD,
        work.nbytes,
        call=lambda: work.target.take(_read(path)),
        check=lambda: difference(work.target, work.state),
        prepare=work.target.spoil,
    )


def _dcp_reader(work: Work, path: Path) -> Candidate:
    return Candidate(
        DCP_LOAD,
        work.nbytes,
        call=lambda: dcp_load_into(work, path),
        check=lambda: difference(work.target, work.state),
        prepare=work.target.spoil,
    )


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, mmap=False, weights_only=True)
    return found


def dcp_load_into(work: Work, path: Path, alone: bool = False) -> None:
    """Load a checkpoint of torch DCP into the target; ``alone``: by this rank only."""
    dicts = work.target.dicts()  # its tensors are the target's own, and are filled in setting
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # expected with no_dist
        dcp_load(dicts, checkpoint_id=path, no_dist=alone)
    work.target.take(dicts)


def after_load(work: Work, expected: Values, load: Callable[[], None]) -> str:
    """Load into the target, and return how it differs from the saved values."""
    work.target.spoil()
    load()
    return difference(work.target, expected)
