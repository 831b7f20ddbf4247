"""NCCL communicator with its own stream, loaded through CuPy; detection of completed and hanging operations."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.device.streams import Streams
from hpctrain.comm.transport.waiting import timeout_seconds, waiting
from hpctrain.errors import CommunicationError, DeadlineError

BYTES = 1  # ncclUint8: operations without arithmetic treat tensors as bytes

DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.bool: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_OPS = {"sum": 0, "product": 1, "max": 2, "min": 3, "average": 4}
# A bool is a byte that is 0 or 1. These operations give the same result as in torch: its sum is
# "any".
_BOOL_OPS = {"sum": 2, "max": 2, "min": 3, "product": 3}
_WITH_SEND = 2700
_WITH_AVERAGE = 21000


def op_code(dtype: torch.dtype, op: str, version: int) -> int | None:
    """Return NCCL's code of an operation if its result equals torch's, else None.

    Excluded are 16-bit floats (NCCL rounds to 16 bits after every rank), minimum and maximum of
    floats (NCCL drops NaN), and 16-bit integers (NCCL does not support them).
    """
    if dtype is torch.bool:
        return _BOOL_OPS.get(op)
    if dtype not in DTYPES or dtype in (torch.float16, torch.bfloat16):
        return None
    if dtype.is_floating_point:
        known = op in ("sum", "product") or op == "average" and version >= _WITH_AVERAGE
    else:
        known = op in ("sum", "product", "min", "max")
    return _OPS[op] if known else None


def reason_unavailable(has_gpu: bool | None = None) -> str:
    """Return why NCCL cannot be used on this rank; an empty text if it can.

    ``has_gpu`` tells whether a GPU is visible; by default torch is asked.
    """
    if not (torch.cuda.is_available() if has_gpu is None else has_gpu):
        return "no GPU is visible"
    try:
        load()
    except CommunicationError as error:
        return str(error)
    return ""


def load() -> Any:
    """Return CuPy's NCCL module; raise ``CommunicationError`` with an installation hint if it is missing."""
    # torch has already loaded its own libnccl, so CuPy finds that library by name.
    try:
        from cupy.cuda import nccl
    except Exception as error:  # CuPy built for another CUDA version fails in many ways, with exceptions of any type
        raise CommunicationError(f"NCCL needs CuPy (pip install hpctrain[cuda]): {error}") from error
    if not getattr(nccl, "available", False):
        raise CommunicationError("CuPy has no NCCL: install nvidia-nccl-cu12, or CuPy's own with cupyx.tools")
    version = int(nccl.get_version())
    if version < _WITH_SEND:
        raise CommunicationError(f"NCCL {version} cannot send from rank to rank: 2.7 or newer is needed")
    return nccl


# NCCL communicator with its own stream, and detection of completed and hanging operations -----------------------------
#
# Note: the order of NCCL's operations and the caller's. Every operation is enqueued on the channel's
# own stream, which first waits for the work on the caller's stream. ``wait`` of a ``Work`` makes the
# caller's stream wait for the operation. The host waits in neither case (see the note in
# ``streams``). Therefore a program uses ``done`` to learn that an operation has completed, and
# ``check`` to learn that one hangs or has failed.
#
# Point-to-point messages are deferred until one of them is waited for or the next operation starts.
# They are then enqueued as one group. NCCL executes the messages of one group concurrently, but those
# of two groups one after the other. With separate groups, two ranks that send to each other would
# deadlock.


Call = Callable[[Any, int], None]  # enqueues an operation, given NCCL's communicator and the stream


class NcclWork:
    """Handle of an operation on NCCL's stream, or of a deferred message."""

    def __init__(self, channel: NcclChannel, operation: str, tensors: Sequence[Tensor]) -> None:
        self._channel = channel
        self.operation = operation
        self.tensors = tensors
        self.event: Any = None
        self.launched = 0.0

    def done(self) -> bool:
        """Return whether the result is in memory; raise if NCCL has failed."""
        self._channel.flush()
        self._channel.check()
        return self._channel.streams.done(self.event)

    def wait(self) -> None:
        """Make the caller's stream, but not the host, wait for the result."""
        self._channel.flush()
        self._channel.streams.wait(self._channel.streams.current(), self.event)


class NcclChannel:
    """One NCCL communicator and its stream. Construction is collective."""

    def __init__(self, library: Any, streams: Streams, size: int, rank: int, unique: Sequence[int]) -> None:
        self.streams = streams
        self.library = library
        self._where = f"rank {rank} of {size}, {streams.device}"
        self._comm: Any = None
        self._deferred: list[tuple[NcclWork, Call]] = []
        self._pending: deque[NcclWork] = deque()
        with waiting("nccl_init"), streams.entered(), self._comm_errors("NCCL cannot start"):
            self._comm = library.NcclCommunicator(size, tuple(unique), rank)
        self._stream = streams.new()

    def start(self, operation: str, tensors: Sequence[Tensor], call: Call) -> NcclWork:
        """Enqueue an operation on the stream, behind all deferred messages."""
        self.flush()
        work = NcclWork(self, operation, tensors)
        self._launch([work], call)
        return work

    def defer(self, operation: str, tensor: Tensor, call: Call) -> NcclWork:
        """Defer a message until the next group."""
        work = NcclWork(self, operation, [tensor])
        self._deferred.append((work, call))
        return work

    def flush(self) -> None:
        """Enqueue the deferred messages on the stream, as one group."""
        if self._deferred:
            deferred, self._deferred = self._deferred, []

            def together(comm: Any, stream: int) -> None:
                with self.group():
                    for _, call in deferred:
                        call(comm, stream)

            self._launch([work for work, _ in deferred], together)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Make NCCL execute the calls of a ``with`` block concurrently; groups may be nested."""
        self.library.groupStart()
        try:
            yield
        finally:
            self.library.groupEnd()

    def check(self) -> None:
        """Raise if NCCL has failed, or if an operation has not completed within ``HPCTRAIN_TIMEOUT``."""
        with self._comm_errors("NCCL failed"):
            self._comm.check_async_error()
        while self._pending and self.streams.done(self._pending[0].event):
            self._pending.popleft()
        hanging = self.hanging_operation(timeout_seconds()) if self._pending else ""
        if hanging:
            self.abort_kernels()
            raise DeadlineError(hanging)

    def hanging_operation(self, limit: float) -> str:
        """Return a text about an operation in progress for more than ``limit`` seconds, else an empty text.

        A watchdog may call this from its own thread: it changes no state.
        """
        for work in list(self._pending):
            if not self.streams.done(work.event):
                if time.monotonic() - work.launched <= limit:
                    return ""
                return f"nccl {work.operation} has not ended within {limit:g} s (HPCTRAIN_TIMEOUT) on {self._where}"
        return ""

    def abort_kernels(self) -> None:
        """Abort NCCL's kernels on this rank, which would otherwise spin for missing ranks."""
        if self._comm is not None:
            self._comm.abort()

    def close(self) -> None:
        """Wait for pending operations, and destroy the communicator. Collective."""
        self.flush()
        for work in self._pending:
            self.streams.synchronize(work.event)
        self._pending.clear()
        self._comm.destroy()

    def _launch(self, works: Sequence[NcclWork], call: Call) -> None:
        streams = self.streams
        if self._pending:
            self.check()
        streams.wait(self._stream, streams.record(streams.current()))
        # The first operation of each kind connects the ranks, and NCCL blocks the host for this.
        with waiting(f"nccl_{works[0].operation}"), streams.entered(), self._comm_errors("NCCL failed"):
            call(self._comm, streams.handle(self._stream))
        event = streams.record(self._stream)
        for work in works:
            work.event, work.launched = event, time.monotonic()
            for tensor in work.tensors:
                streams.keep(tensor, self._stream)
            work.tensors = ()
        self._pending.append(works[-1])

    @contextmanager
    def _comm_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.abort_kernels()
            raise CommunicationError(f"{what} on {self._where}: {error}") from error
