"""Candidates of torch: torch.save by rank 0, and torch.distributed.checkpoint by all ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from saving.background import Way
from saving.candidates import Candidate
from saving.disk import delete, flush
from saving.names import ASYNC, DCP, DCP_LOAD, TORCH, TORCH_LOAD
from saving.state import Values, difference
from saving.work import Work
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save


def writers(work: Work) -> Iterator[Candidate]:
    """Yield torch's candidates for saving."""
    yield _torch_writer(work, work.file("torch.pt"))
    yield _dcp_writer(work, work.file("torch-dcp"))


def readers(work: Work) -> Iterator[Candidate]:
    """Yield torch's candidates for loading, which read the files of those for saving."""
    yield _torch_reader(work, work.file("torch.pt"))
    yield _dcp_reader(work, work.file("torch-dcp"))


def ways(work: Work) -> Iterator[Way]:
    """Yield torch's method to save during training."""
    yield Async(work, work.file("torch-dcp-async"))


class Async:
    """Saving by ``async_save`` with its defaults: a copy first, then a thread writes."""

    name = ASYNC

    def __init__(self, work: Work, path: Path) -> None:
        self._work, self._path = work, path
        self._future: Any = None

    def begin(self, step: int) -> None:
        """Start to save; return as soon as the values may change."""
        self._future = dcp_async_save(self._work.state.dicts(), checkpoint_id=self._path)

    @property
    def pending(self) -> bool:
        """Return whether any rank was still writing at the last poll."""
        return self._future is not None

    def advance(self) -> None:
        """Poll whether all ranks are done, and raise their errors."""
        if all(self._work.place.comm.all_gather_object(self._future.done())):
            self._future.result()
            self._future = None

    def check(self, expected: Values) -> str:
        """Return the errors in the file."""
        if self._work.place.rank:
            return ""
        return _after(self._work, expected, lambda: _load(self._work, self._path, alone=True))

    def delete(self) -> None:
        """Delete the written file."""
        _deletes(self._work, self._path)()

    def close(self) -> None:
        """Do nothing, as there is no process to end."""


def _torch_writer(work: Work, path: Path) -> Candidate:
    first = work.place.rank == 0

    def call() -> None:
        if first:
            private = path.with_suffix(".tmp")
            torch.save(work.state.dicts(), private)
            flush(private)
            os.rename(private, path)

    def check() -> str:
        return _after(work, work.state, lambda: work.target.take(_read(path))) if first else ""

    return Candidate(TORCH, work.nbytes, call=call, check=check, prepare=_deletes(work, path))


def _dcp_writer(work: Work, path: Path) -> Candidate:
    """Return DCP with its defaults: FileSystemWriter, one file per rank, each flushed."""

    def check() -> str:
        return _after(work, work.state, lambda: _load(work, path, alone=True)) if work.place.rank == 0 else ""

    return Candidate(
        DCP,
        work.nbytes,
        call=lambda: dcp_save(work.state.dicts(), checkpoint_id=path),
        check=check,
        prepare=_deletes(work, path),
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
        call=lambda: _load(work, path),
        check=lambda: difference(work.target, work.state),
        prepare=work.target.spoil,
    )


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, mmap=False, weights_only=True)
    return found


def _load(work: Work, path: Path, alone: bool = False) -> None:
    dicts = work.target.dicts()  # its tensors are the target's own, and are filled in place
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # expected with no_dist
        dcp_load(dicts, checkpoint_id=path, no_dist=alone)
    work.target.take(dicts)


def _after(work: Work, expected: Values, load: Callable[[], None]) -> str:
    """Load into the target, and return how it differs from the saved values."""
    work.target.spoil()
    load()
    return difference(work.target, expected)


def _deletes(work: Work, path: Path) -> Callable[[], None]:
    def prepare() -> None:
        if work.place.rank == 0:
            delete(path)

    return prepare
