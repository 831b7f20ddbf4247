"""Meetings of ranks before calls of MPI that cannot time out: a barrier of the members that names missing ones.

MPI's Comm_dup and Comm_create_group have to be called by all members, and wait without end for one that never does.
So the members first meet: by a dissemination barrier, in which each rank sends ceil(log2 p) empty messages (Hensgen,
Finkel, Manber, "Two Algorithms for Barrier Synchronization", 1988). A rank whose time is over asks the members
whether they wait, too. Those that do not answer are missing.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from hpctrain.comm.transport.waiting import waiting
from hpctrain.errors import DeadlineError

TAGS = 8000  # each meeting has a tag below this number, and the same plus _QUESTION and _ANSWER
_QUESTION, _ANSWER = TAGS, 2 * TAGS
ANSWER_SECONDS = 1.0  # how long a rank whose time is over waits for answers
MOST = 8  # missing ranks that an error names
_YIELD_SECONDS = 0.02  # how long a waiting rank only yields its core between two polls; then it sleeps
_PAUSE = 0.001


class Messenger(Protocol):
    """Part of a communicator that a meeting needs: empty messages with tags."""

    def Get_rank(self) -> int:
        """Return the own rank."""

    def send(self, rank: int, tag: int) -> None:
        """Send an empty message without waiting for its receiver."""

    def received(self, rank: int | None, tag: int) -> int | None:
        """Receive an empty message if there is one, from one rank or any; return its rank."""


class MpiMessenger:
    """Empty messages on a communicator of mpi4py."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._comm, self._mpi = comm, MPI

    def Get_rank(self) -> int:
        """Return the own rank."""
        return int(self._comm.Get_rank())

    def send(self, rank: int, tag: int) -> None:
        """Send an empty message without waiting for its receiver: there is no memory to keep until it has arrived."""
        self._comm.Isend([None, 0, self._mpi.BYTE], rank, tag).Free()

    def received(self, rank: int | None, tag: int) -> int | None:
        """Receive an empty message if there is one, from one rank or any; return its rank."""
        status = self._mpi.Status()
        message = self._comm.Improbe(self._mpi.ANY_SOURCE if rank is None else rank, tag, status)
        if message is None:
            return None
        message.Recv([None, 0, self._mpi.BYTE])
        return int(status.Get_source())


def meeting_tag(ranks: Iterable[int], count: int) -> int:
    """Return the tag of a meeting: the same on all its members, and most likely another one for other members."""
    return zlib.crc32(array("q", [*ranks, count]).tobytes()) % TAGS


class Barrier:
    """Dissemination barrier of some ranks; ``done`` makes progress and is polled."""

    def __init__(self, messenger: Messenger, ranks: Sequence[int], tag: int) -> None:
        self._messenger, self._ranks, self._tag = messenger, ranks, tag
        self._own = ranks.index(messenger.Get_rank())
        self._distance = 1
        self._send()

    def done(self) -> bool:
        """Return whether all ranks have come."""
        size = len(self._ranks)
        while self._distance < size:
            source = self._ranks[(self._own - self._distance) % size]
            if self._messenger.received(source, self._tag) is None:
                return False
            self._distance *= 2
            self._send()
        return True

    def _send(self) -> None:
        if self._distance < len(self._ranks):
            self._messenger.send(self._ranks[(self._own + self._distance) % len(self._ranks)], self._tag)


def meet(messenger: Messenger, ranks: Sequence[int], tag: int, seconds: float, what: str) -> None:
    """Wait until all these ranks have come. Collective over them. Raises ``DeadlineError`` with the missing ranks."""
    wait(messenger, ranks, Barrier(messenger, ranks, tag).done, tag, seconds, what)


def wait(
    messenger: Messenger, ranks: Sequence[int], ready: Callable[[], bool], tag: int, seconds: float, what: str
) -> None:
    """Poll ``ready``; raise ``DeadlineError`` with the ranks that are missing after ``seconds``."""
    present = {messenger.Get_rank()}
    start = time.monotonic()
    with waiting(what):
        while not ready():
            _answer(messenger, present, tag)
            waited = time.monotonic() - start
            if waited > seconds:
                if _ask(messenger, ranks, present, ready, tag):
                    return
                raise DeadlineError(_message(what, seconds, sorted({*ranks} - present), len(ranks)))
            time.sleep(0 if waited < _YIELD_SECONDS else _PAUSE)


def _answer(messenger: Messenger, present: set[int], tag: int) -> None:
    """Answer the ranks that ask, whose time is over; they have come themselves."""
    for rank in _senders(messenger, tag + _QUESTION):
        present.add(rank)
        messenger.send(rank, tag + _ANSWER)


def _ask(messenger: Messenger, ranks: Sequence[int], present: set[int], ready: Callable[[], bool], tag: int) -> bool:
    """Ask the other ranks whether they wait, too, and add those to ``present``; return whether all came after all."""
    for rank in ranks:
        if rank not in present:
            messenger.send(rank, tag + _QUESTION)
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline and not present.issuperset(ranks):
        if ready():
            return True
        _answer(messenger, present, tag)
        present.update(_senders(messenger, tag + _ANSWER))
        time.sleep(_PAUSE)
    return False


def _senders(messenger: Messenger, tag: int) -> Iterator[int]:
    """Receive all messages with this tag that have arrived; yield their senders."""
    while (rank := messenger.received(None, tag)) is not None:
        yield rank


def _message(what: str, seconds: float, missing: Sequence[int], size: int) -> str:
    if not missing:
        return f"{what}: the {size} ranks came at different times, not within the timeout of {seconds:g} s of the first"
    names = ", ".join(map(str, missing[:MOST])) + (f" and {len(missing) - MOST} more" if len(missing) > MOST else "")
    ranks = f"rank {names} has" if len(missing) == 1 else f"ranks {names} have"
    return (
        f"{what}: {ranks} not called it within {seconds:g} s; every rank must call it: "
        "see what they do instead, or give a larger timeout"
    )
