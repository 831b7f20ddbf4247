"""Candidates of hpctrain: saving by all ranks, loading files of other numbers of ranks, verifying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from saving.background import Way
from saving.candidates import Candidate
from saving.disk import delete
from saving.names import BACKGROUND, FOREGROUND, LOAD, MPIIO, OURS, VERIFY, load_from
from saving.state import Values, difference
from saving.work import Work, compare_file

from hpctrain import checkpoint
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.saver import Saver, Storage


def writers(work: Work) -> Iterator[Candidate]:
    """Yield hpctrain's candidates for saving."""
    yield _writer(work, OURS, work.file("hpctrain.h5"))
    yield _writer(work, MPIIO, work.file("hpctrain-mpiio.h5"), how=Storage(io="mpiio"))


def _writer(work: Work, name: str, path: Path, **options: Any) -> Candidate:
    place = work.place

    def prepare() -> None:
        if place.rank == 0:
            delete(path)

    return Candidate(
        name,
        work.nbytes,
        call=lambda: save(work, path, **options),
        check=lambda: compare_file(path, work.state) if place.rank == 0 else "",
        prepare=prepare,
        needed=name == OURS,
    )


def save(work: Work, path: Path, **options: Any) -> None:
    """Save the state. Collective."""
    state = work.state
    checkpoint.save(path, model=state.model, optimizer=state.optimizer, comm=work.place.comm, **options)


def readers(work: Work, written_by: Sequence[int]) -> Iterator[Candidate]:
    """Yield loading of files by the numbers of ranks that wrote them, the same number first, and verifying."""
    yield _loader(work, LOAD, work.from_ranks(work.place.size))
    for ranks in written_by:
        if ranks != work.place.size:
            yield _loader(work, load_from(ranks), work.from_ranks(ranks))
    yield _verifier(work, work.from_ranks(work.place.size))


def _loader(work: Work, name: str, path: Path) -> Candidate:
    target = work.target
    return Candidate(
        name,
        work.nbytes,
        call=lambda: checkpoint.load(path, model=target.model, optimizer=target.optimizer, comm=work.place.comm),
        check=lambda: difference(target, work.state),
        prepare=target.spoil,
        needed=True,
    )


def _verifier(work: Work, path: Path) -> Candidate:
    """Return the verification by one rank, as on a login node."""

    def verify() -> None:
        if work.place.rank == 0:
            with Reader(path) as reader:
                reader.verify()

    return Candidate(VERIFY, work.nbytes, call=verify, needed=True)


def ways(work: Work) -> Iterator[Way]:
    """Yield hpctrain's methods to save between the steps of a training."""
    yield Between(work, FOREGROUND, work.file("foreground.h5"), Saver(work.place.comm))
    yield Between(work, BACKGROUND, work.file("background.h5"), Saver(work.place.comm, background=True))


class Between:
    """Saving between steps, as in training: in the foreground, or by a background process."""

    def __init__(self, work: Work, name: str, path: Path, saver: Saver) -> None:
        self.name = name
        self._work, self._path, self._saver = work, path, saver

    def begin(self, step: int) -> None:
        """Save; the values may change afterwards."""
        state = self._work.state
        self._saver.save(self._path, model=state.model, optimizer=state.optimizer, train={"step": step})

    @property
    def pending(self) -> bool:
        """Return whether the file has not been committed yet."""
        return self._saver.pending

    def advance(self) -> None:
        """Make progress of the write if no rank would have to wait for it."""
        if not any(self._work.place.comm.all_gather_object(self._saver.busy)):
            self._saver.advance()

    def check(self, expected: Values) -> str:
        """Return the errors in the file."""
        return compare_file(self._path, expected) if self._work.place.rank == 0 else ""

    def delete(self) -> None:
        """Delete the written file."""
        if self._work.place.rank == 0:
            delete(self._path)

    def close(self) -> None:
        """End the writer process."""
        self._saver.close()
