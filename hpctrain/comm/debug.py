"""Collective mismatch detection, enabled by ``HPCTRAIN_CHECK=order``: ranks compare each collective before it starts.

Without the check, a collective with different shapes, dtypes or operations gives wrong numbers or
hangs. With the check, each rank sends a record of its call and call site to all other ranks before
each collective. The records travel on a separate transport. All ranks raise an error at the first
difference. The check costs 2 (p - 1) messages of ``RECORD`` bytes per rank and collective, so it is
meant for debugging and not for production. Records are exchanged among all pairs, instead of
through one rank, so that each waiting rank can name the missing ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from hpctrain.comm.transport.base import Transport, Work
from hpctrain.comm.transport.waiting import limits, timeout_seconds, waiting
from hpctrain.errors import CommunicationError, DeadlineError, MismatchError, SettingsError
from hpctrain.log import logger
from hpctrain.shard import dtype_name

VARIABLE = "HPCTRAIN_CHECK"
RECORD = 4096  # bytes per rank's record
_TEXT_LENGTH = 180  # characters per text field (each may expand to twelve bytes); longer texts are truncated
_MAX_NAMED = 8  # number of ranks named in a message before the others are only counted

PACKAGE = str(Path(__file__).parents[1]) + os.sep
_COMMUNICATION = (f"{PACKAGE}comm{os.sep}", f"{PACKAGE}torch_backend{os.sep}")
_INTERNAL = (PACKAGE, str(Path(torch.__file__).parent) + os.sep, "<frozen ")


@dataclass(frozen=True)
class CollectiveRecord:
    """Record of the collective that one rank is about to start: its ``number``-th."""

    number: int
    operation: str
    detail: str  # reduction, root, or offset in node-shared memory
    dtype: str
    shape: str
    site: str

    def __str__(self) -> str:
        what = f"{self.operation}({self.detail})" if self.detail else self.operation
        return f"{what} of {self.dtype} {self.shape}" if self.dtype else what


def check_enabled() -> bool:
    """Return whether ``HPCTRAIN_CHECK`` enables the check. Raises ``SettingsError`` for an unknown value."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "order"):
        raise SettingsError(f"{VARIABLE}={value!r}: allowed is order, which compares every collective across ranks")
    return value == "order"


def mismatch_detector(transport: Transport) -> MismatchDetector | None:
    """Return the detector of a communicator, or None if the check is disabled. Collective.

    Raises ``MismatchError`` on all ranks if the variable differs between ranks.
    """
    modes = transport.all_gather_object(os.environ.get(VARIABLE, ""))
    if len(set(modes)) > 1:
        differing = next(rank for rank, mode in enumerate(modes) if mode != modes[0])
        raise MismatchError(
            f"{VARIABLE} is {modes[0]!r} on rank 0 and {modes[differing]!r} on rank {differing}: "
            "set it alike for all ranks",
            everywhere=True,
        )
    return MismatchDetector(transport.split(0, transport.rank)) if check_enabled() and transport.size > 1 else None


class MismatchDetector:
    """Collective mismatch detector: compares the calls of all ranks over its own transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._others = [rank for rank in range(transport.size) if rank != transport.rank]
        self._number = 0
        self._previous: dict[int, CollectiveRecord] = {}
        self._reported_sites: set[tuple[str, ...]] = set()
        self._unfinished_messages: list[tuple[Tensor, Work]] = []

    def __call__(self, operation: str, *tensors: Tensor, detail: str = "", site: str = "") -> None:
        """Wait until all ranks have reached this collective; raise if their calls differ. Collective.

        ``tensors`` are those whose shape and dtype must be equal on all ranks. ``site`` is the line
        that called the collective, if that was another thread. Raises ``MismatchError`` on all
        ranks, or ``DeadlineError`` on the ranks that wait for others longer than the limit of the
        operation, or ``HPCTRAIN_TIMEOUT`` without one.
        """
        self._number += 1
        own_call = _describe(self._number, operation, tensors, detail, site)
        calls = {self._transport.rank: own_call, **self._collect(own_call)}
        self._compare([calls[rank] for rank in range(self._transport.size)])
        self._previous = calls

    def free(self) -> None:
        """Free the transport. Collective."""
        self._transport.free()

    def _collect(self, own_call: CollectiveRecord) -> dict[int, CollectiveRecord]:
        record = pack_record(own_call)
        receives: dict[int, tuple[Tensor, Work]] = {}
        for rank in self._others:
            buffer = torch.empty(RECORD, dtype=torch.uint8)
            receives[rank] = (buffer, self._transport.irecv(buffer, rank))
        sends = [(record, self._transport.isend(record, rank)) for rank in self._others]
        missing = self._missing_after_deadline({rank: work for rank, (_, work) in receives.items()}, own_call)
        calls = {rank: unpack_record(buffer) for rank, (buffer, _) in receives.items() if rank not in missing}
        if missing:
            # MPI may still write into these buffers; they must outlive this call.
            self._unfinished_messages += [*sends, *(receives[rank] for rank in missing)]
            raise DeadlineError(self._report(missing, {self._transport.rank: own_call, **calls}))
        for _, work in sends:
            work.wait()
        return calls

    def _missing_after_deadline(self, works: dict[int, Work], own_call: CollectiveRecord) -> set[int]:
        """Return the ranks whose record has not arrived before the deadline."""
        limit = limits.left if limits.exist else timeout_seconds()
        started, missing = time.monotonic(), set(works)
        with waiting(f"check of {own_call.operation} at {own_call.site}"):
            while missing:
                missing = {rank for rank in missing if not works[rank].done()}
                waited = time.monotonic() - started
                if waited > limit:
                    break
                if waited < 0.001:
                    os.sched_yield()
                else:
                    time.sleep(min(waited / 10, 0.005))
        return missing

    def _compare(self, calls: Sequence[CollectiveRecord]) -> None:
        for what in ("operation", "detail", "dtype", "shape"):
            if len({getattr(call, what) for call in calls}) > 1:
                called = _grouped(calls, lambda call: f"{call} at {call.site}")
                name = {"detail": "root, reduction or place"}.get(what, what)
                raise MismatchError(f"collective {self._number}: the ranks differ in {name}: {called}", everywhere=True)
        sites = tuple(call.site for call in calls)
        if len(set(sites)) > 1 and sites not in self._reported_sites:
            # Different call sites are often intended (if rank == 0: ...), so this is a warning. If
            # values are wrong, these lines are the first place to look.
            self._reported_sites.add(sites)
            if self._transport.rank == 0:
                called = _grouped(calls, lambda call: call.site)
                logger.warning("collective %d, %s, is called from different lines: %s", self._number, calls[0], called)

    def _report(self, missing: set[int], calls: dict[int, CollectiveRecord]) -> str:
        size = self._transport.size
        waits = _grouped([calls.get(rank) for rank in range(size)], lambda call: f"waiting in {call} at {call.site}")
        who = f"{_name(sorted(missing))} {'has' if len(missing) == 1 else 'have'} not arrived"
        text = f"{limits.message(f'collective {self._number}', who)}; {waits}"
        before = [self._previous.get(rank) if rank in missing else None for rank in range(size)]
        if any(before):
            text += "; " + _grouped(before, lambda call: f"last in {call} at {call.site}")
        return text


def call_site() -> str:
    """Return the line that called a collective: the first stack frame outside of the communication layer.

    If that line belongs to the package (a strategy's hook), the first line of user code is
    appended.
    """
    frame: FrameType | None = sys._getframe(1)
    inner = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_COMMUNICATION):
            line = f"{_short(path)}:{frame.f_lineno}"
            if not path.startswith(_INTERNAL):
                return f"{inner} from {line}" if inner else line
            inner = inner or line
        frame = frame.f_back
    return inner or "an unknown line"


def _short(path: str) -> str:
    """Return the last two parts of a path: they identify the file and are equal on nodes with different mounts."""
    return "/".join(Path(path).parts[-2:])


def _describe(number: int, operation: str, tensors: Sequence[Tensor], detail: str, site: str) -> CollectiveRecord:
    dtype = ", ".join(dtype_name(tensor.dtype) for tensor in tensors)
    shape = ", ".join(str(list(tensor.shape)) for tensor in tensors)
    site = site or call_site()
    return CollectiveRecord(number, operation, detail, dtype[:_TEXT_LENGTH], shape[:_TEXT_LENGTH], site[-_TEXT_LENGTH:])


def pack_record(call: CollectiveRecord) -> Tensor:
    data = json.dumps(asdict(call)).encode()
    return torch.frombuffer(bytearray(data.ljust(RECORD)), dtype=torch.uint8)


def unpack_record(record: Tensor) -> CollectiveRecord:
    try:
        return CollectiveRecord(**json.loads(bytes(record.numpy()).decode()))
    except (ValueError, TypeError) as error:
        raise CommunicationError(f"a rank sent no readable record of its collective: {error}") from error


def _grouped(calls: Sequence[CollectiveRecord | None], text: Callable[[CollectiveRecord], str]) -> str:
    """Return a text that lists ranks by what they do; None marks a rank to leave out."""
    groups: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        if call is not None:
            groups.setdefault(text(call), []).append(rank)
    return "; ".join(f"{_name(ranks)}: {text}" for text, ranks in groups.items())


def _name(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_MAX_NAMED]))
    rest = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{rest}"
