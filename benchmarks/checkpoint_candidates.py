"""Candidates of the checkpoint benchmark: plain writes and reads, hpctrain, torch.save and torch DCP."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint_state import Values, Work, bytes_of, compare_file, delete, difference, flush, read_at, write_at
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hpctrain import checkpoint
from hpctrain.checkpoint.format.layout import crc32
from hpctrain.checkpoint.format.reader import verify_file
from hpctrain.checkpoint.storage import Storage
from hpctrain.errors import HpctrainError


class Name(StrEnum):
    """Candidates: methods to save, to load, and to save from within a training loop."""

    RAW = "raw pwrite"  # one file per rank: the reference
    RAW_ONE = "raw pwrite, one file"  # the same bytes, all ranks into one file
    OURS = "hpctrain"
    MPIIO = "hpctrain mpiio"
    TORCH = "torch.save"
    DCP = "torch DCP"

    RAW_READ = "raw preadv"
    CRC = "crc32"  # of bytes in memory: the cost of the checksum alone
    LOAD = "hpctrain load"
    VERIFY = "hpctrain verify"
    TORCH_LOAD = "torch.load"
    DCP_LOAD = "torch DCP load"

    FOREGROUND = "hpctrain foreground"
    BACKGROUND = "hpctrain background"
    ASYNC = "torch DCP async"


WRITERS, READERS = tuple(Name)[:6], tuple(Name)[6:12]


def load_from(ranks: int) -> str:
    """Return the name of loading a file that ``ranks`` ranks wrote."""
    return f"{Name.LOAD}, {ranks} wrote"


@dataclass
class Candidate:
    """Method to save or to load; all ranks call each of its parts.

    ``check`` returns the error in the result, empty if it is right. ``nbytes`` are moved by each
    rank that takes part, or by all together if they share the work.
    """

    name: str
    nbytes: int
    call: Callable[[], object]
    check: Callable[[], str] = str
    prepare: Callable[[], object] = lambda: None
    needed: bool = False  # an error in it ends the benchmark


class WrongResult(HpctrainError, RuntimeError):
    """Wrong result of a candidate, which makes its time meaningless."""


# Saving ---------------------------------------------------------------------------------------------------------------


def writers(work: Work) -> Iterator[Candidate]:
    """Yield all candidates that save: plain writes, by each rank of its share of the bytes; hpctrain; torch."""
    share, first = work.setting.share(work.nbytes), work.setting.rank == 0
    yield _raw_writer(work, Name.RAW, work.file(f"raw-{work.setting.rank}"), share, 0)
    yield _raw_writer(work, Name.RAW_ONE, work.file("raw"), share, share.start)

    def writer(name: Name, path: Path, call: Callable[[], object], check: Callable[[], str]) -> Candidate:
        """Return a candidate whose result rank 0 checks and deletes."""
        needed = name == Name.OURS
        return Candidate(name, work.nbytes, call, check if first else str, partial(clear, work, path), needed)

    def check(path: Path) -> str:
        return compare_file(path, work.state.tensors())

    ours, mpiio, plain, dcp = map(work.file, ("hpctrain.h5", "hpctrain-mpiio.h5", "torch.pt", "torch-dcp"))
    yield writer(Name.OURS, ours, lambda: save(work, ours), lambda: check(ours))
    yield writer(Name.MPIIO, mpiio, lambda: save(work, mpiio, how=Storage(io="mpiio")), lambda: check(mpiio))

    def torch_save() -> None:
        if first:
            private = plain.with_suffix(".tmp")
            torch.save(work.state.dicts(), private)
            flush(private)
            os.rename(private, plain)

    yield writer(Name.TORCH, plain, torch_save, lambda: after_load(work, work.state.tensors(), partial(_take, work)))
    # Torch DCP has its defaults: FileSystemWriter, one file per rank, each flushed.
    yield writer(
        Name.DCP,
        dcp,
        lambda: dcp_save(work.state.dicts(), checkpoint_id=dcp),
        lambda: after_load(work, work.state.tensors(), lambda: dcp_load_into(work, dcp, alone=True)),
    )


def clear(work: Work, path: Path) -> None:
    """Delete a file or folder, on rank 0."""
    if work.setting.rank == 0:
        delete(path)


def _raw_writer(work: Work, name: str, path: Path, share: slice, offset: int) -> Candidate:
    data = bytes_of(work.flat)[share]

    def check() -> str:
        found = np.fromfile(path, np.uint8, count=len(data), offset=offset)
        same = np.array_equal(found, np.frombuffer(data, np.uint8))
        return "" if same else f"{path.name} does not hold what was written"

    call = partial(write_at, path, data, offset)
    return Candidate(name, work.nbytes, call, check, prepare=partial(delete, path), needed=True)


def save(work: Work, path: Path, **options: Any) -> None:
    """Save the state. Collective."""
    state = work.state
    checkpoint.save(path, model=state.model, optimizer=state.optimizer, comm=work.setting.comm, **options)


# Loading --------------------------------------------------------------------------------------------------------------


def readers(work: Work) -> Iterator[Candidate]:
    """Yield all candidates that load, on every rank; a missing file of hpctrain is written first.

    They are plain reads, and the checksum of equally many bytes; hpctrain's loading of files by the
    numbers of ranks that wrote them, the same number first, and verifying by one rank, as on a login
    node; torch's loading of the files of its candidates for saving.
    """
    setting, target = work.setting, work.target
    own = work.from_ranks(setting.size)
    if not own.exists():
        save(work, own)
    data, flat = bytes_of(work.spare), bytes_of(work.flat)
    # From the start: the number of bytes matters, not their order.
    yield Candidate(Name.RAW_READ, work.nbytes, lambda: read_at(own, data), needed=True)
    yield Candidate(Name.CRC, work.nbytes, lambda: crc32(flat), needed=True)

    def loader(name: str, call: Callable[[], object], *, needed: bool = False) -> Candidate:
        def check() -> str:
            return difference(target.tensors(), work.state.tensors())

        return Candidate(name, work.nbytes, call, check, target.spoil, needed)

    def load(path: Path) -> None:
        checkpoint.load(path, model=target.model, optimizer=target.optimizer, comm=setting.comm)

    yield loader(Name.LOAD, lambda: load(own), needed=True)
    for ranks in written_by(setting.folder):
        if ranks != setting.size:
            yield loader(load_from(ranks), partial(load, work.from_ranks(ranks)), needed=True)
    yield Candidate(Name.VERIFY, work.nbytes, lambda: verify_file(own) if setting.rank == 0 else None, needed=True)
    yield loader(Name.TORCH_LOAD, partial(_take, work))
    yield loader(Name.DCP_LOAD, lambda: dcp_load_into(work, work.file("torch-dcp")))


def written_by(folder: Path) -> list[int]:
    """Return the numbers of ranks that wrote the files in the folder."""
    return sorted(int(path.stem.removeprefix("from-")) for path in folder.glob("from-*.h5"))


def _take(work: Work) -> None:
    """Load the file of torch.save."""
    work.target.take(torch.load(work.file("torch.pt"), mmap=False, weights_only=True))


def dcp_load_into(work: Work, path: Path, alone: bool = False) -> None:
    """Load a checkpoint of torch DCP into the target; ``alone``: by this rank only."""
    dicts = work.target.dicts()  # its tensors are the target's own, and are filled in place
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # expected with no_dist
        dcp_load(dicts, checkpoint_id=path, no_dist=alone)
    work.target.take(dicts)


def after_load(work: Work, expected: Values, load: Callable[[], None]) -> str:
    """Load into the target, and return how it differs from the saved values."""
    work.target.spoil()
    load()
    return difference(work.target.tensors(), expected)
