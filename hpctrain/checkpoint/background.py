"""Background writer: a separate process writes a snapshot of a rank's share while the rank continues to train.

The memory is an anonymous file (``memfd_create``). Only the rank and its writer process can access
it. It is reused for all checkpoints, and is freed when both processes end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from hpctrain import errors
from hpctrain.checkpoint.format.direct import BLOCK, LEAST
from hpctrain.checkpoint.format.finite import Allowed
from hpctrain.checkpoint.format.layout import Array
from hpctrain.checkpoint.format.plan import BoxPart, Offsets, Source, Target, WriteRequest, WriteShare
from hpctrain.checkpoint.format.writer import ShareWriter
from hpctrain.checkpoint.writer_process import EXIT, SnapshotRange, WriterProcess
from hpctrain.errors import CheckpointError, CheckpointFaultError, HpctrainError
from hpctrain.log import logger
from hpctrain.util import atomic
from hpctrain.util.probe import python

_ALIGNMENT = 64  # bytes: alignment of small parts, sufficient for any element type


def round_up(nbytes: int, unit: int) -> int:
    """Return the next multiple of ``unit``."""
    return -(-nbytes // unit) * unit


class Snapshot:
    """Memory shared with another process; it grows to the size of the largest checkpoint."""

    def __init__(self) -> None:
        self.handle = os.memfd_create("hpctrain-checkpoint")
        self._memory: mmap.mmap | None = None
        self._bytes: Array = np.empty(0, dtype=np.uint8)
        self._address = 0
        self._pinned = self._try_to_pin = False

    @property
    def nbytes(self) -> int:
        """Return the size of the memory in bytes."""
        return self._bytes.nbytes

    def copy(self, share: WriteShare) -> list[SnapshotRange]:
        """Copy a share; return the location of each of its byte ranges."""
        found, begins, nbytes = [], [], 0
        for part in share.parts:
            source = share.sources[part.box]
            ranges = list(source.byte_ranges(part.begin, part.end))
            size = (part.end - part.begin) * source.itemsize
            # Large tensors begin at whole blocks of the file: with the same place within a block in memory, they
            # can be written without a copy.
            whole = size >= LEAST
            begin = round_up(nbytes, BLOCK) + ranges[0][0] % BLOCK if whole else round_up(nbytes, _ALIGNMENT)
            begins.append(begin)
            found += [SnapshotRange(source.path, to, begin + offset, length) for to, offset, length in ranges]
            nbytes = begin + size
        self._reserve(nbytes, share.sources)
        for part, begin in zip(share.parts, begins):
            self._copy(share.sources[part.box], part, begin)
        return found

    def close(self) -> None:
        """Free the memory."""
        self._unmap()
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1

    def _reserve(self, nbytes: int, sources: Sequence[Source]) -> None:
        if nbytes > self.nbytes:
            self._unmap()
            try:
                os.ftruncate(self.handle, nbytes)
                self._memory = mmap.mmap(self.handle, nbytes)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"cannot get {nbytes} bytes of memory for a checkpoint: {error}") from error
            with suppress(AttributeError, OSError):  # no huge pages on this system
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            self._try_to_pin = True
            self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
            self._address = self._bytes.ctypes.data
        if self._try_to_pin and any(getattr(source.box.tensor, "is_cuda", False) for source in sources):
            self._pin()

    def _copy(self, source: Source, part: BoxPart, begin: int) -> None:
        tensor, size = source.box.tensor, source.itemsize
        nbytes = (part.end - part.begin) * size
        # The rule; the other ways take several times as long per tensor. torch copies large ones with several threads.
        if (nbytes < LEAST or torch.get_num_threads() == 1) and _is_plain(tensor, part.end, size):
            ctypes.memmove(self._address + begin, tensor.data_ptr() + part.begin * size, nbytes)
            return
        out = self._bytes[begin : begin + nbytes]
        if isinstance(tensor, torch.Tensor):
            target = torch.from_numpy(out.view(np.uint8)).view(tensor.dtype)
            target.copy_(tensor.detach().contiguous().view(-1)[part.begin : part.end])  # from a GPU, too
        else:
            out[:] = np.frombuffer(source.bytes(part.begin, part.end), dtype=np.uint8)

    def _pin(self) -> None:
        """Pin the memory for direct copies from the GPU; without pinning, copies are slower and equally correct."""
        self._try_to_pin = False
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        outcome = int(runtime.cudaHostRegister(self._bytes.ctypes.data, self.nbytes, 0))
        self._pinned = outcome == 0
        if outcome:
            logger.warning("memory for checkpoints cannot be pinned (CUDA error %d): copies take longer", outcome)

    def _unmap(self) -> None:
        if self._pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self._bytes.ctypes.data)
            self._pinned = False
        self._bytes = np.empty(0, dtype=np.uint8)
        if self._memory is not None:
            with suppress(BufferError):  # an error in progress may have views of it, which are freed with the error
                self._memory.close()
            self._memory = None


def _is_plain(tensor: Any, count: int, itemsize: int) -> bool:
    """Return whether the memory of a tensor contains its elements in order, and at least ``count`` of that size."""
    kind = type(tensor)
    plain = (kind is torch.Tensor or kind is torch.nn.Parameter) and tensor.is_cpu and tensor.is_contiguous()
    there = plain and tensor.element_size() == itemsize and tensor.numel() >= count and tensor.data_ptr() != 0
    return there and not tensor.is_neg()


_SIGNALS_FOR_RANKS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}
_EXIT_TIMEOUT = 5.0  # seconds that an idle process gets to exit
_PROGRAM = """
import sys
sys.path[:] = {path!r}
from hpctrain.checkpoint.writer_process import main
main(*{arguments!r})
"""


class BackgroundWriter(ShareWriter):
    """Background writer: the share writer that passes its calls to a writer process."""

    def __init__(self) -> None:
        super().__init__()
        self._snapshot = Snapshot()
        self._copied: Sequence[SnapshotRange] = ()
        self._values: Mapping[str, tuple[Allowed, str]] = {}  # for the check of the copied tensors: type by path
        self._expected: Offsets | None = None
        self._target: Target | None = None  # of the file that this rank must remove
        self._start_process()

    def stage(self, share: WriteShare) -> None:
        """Copy the data to write."""
        if self.process.poll() is not None:
            self._start_process()
        self._copied = self._snapshot.copy(share)
        sources = (share.sources[part.box] for part in share.parts)
        self._values = {one.path: (one.allowed, one.box.dtype) for one in sources if one.allowed is not Allowed.ANY}

    def create(self, request: WriteRequest, expected: Offsets | None) -> None:
        """Create the private file; the process allocates its blocks."""
        super().create(request, None)
        self._expected = expected

    def lay_out(self, request: WriteRequest) -> None:
        """Start to make the layout."""
        self._target = request.target
        self._start(WriterProcess.lay_out, request, self._expected)

    def write(self, target: Target, offsets: Offsets | None = None) -> None:
        """Start to write the copied data."""
        if offsets is not None:
            offsets = {each.name: offsets[each.name] for each in self._copied}
        self._start(WriterProcess.write_ranges, target, self._copied, offsets, self._values)

    @property
    def busy(self) -> bool:
        """Return whether the process has not answered all requests."""
        while not self._ended and self._answers.poll():
            self._receive()
        return not self._ended and len(self._outcomes) < self._pending

    def result(self) -> Any:
        """Wait for the earliest answer; return its result, or raise its error."""
        if not self._outcomes and not self._ended:
            self._receive()
        if not self._outcomes:
            raise self._exit_error()
        self._pending -= 1
        return super().result()

    def abort(self) -> None:
        """Drop pending work and remove the private file.

        A busy process cannot be stopped in the middle of a request: it is killed, and replaced at
        the next save.
        """
        self._end_process(0 if self._pending else _EXIT_TIMEOUT)
        if self._target is not None:
            atomic.discard(self._target.private)
        self._target = None

    def close(self) -> None:
        """End the process."""
        self.abort()
        self._snapshot.close()

    def _start_process(self) -> None:
        self._outcomes.clear()
        self._pending, self._ended = 0, False  # answers not taken yet; whether the process is gone
        request_end, self._requests = Pipe(duplex=False)
        self._answers, answer_end = Pipe(duplex=False)
        try:
            self.process = _launch(self._snapshot.handle, request_end.fileno(), answer_end.fileno())
        except OSError as error:
            self._requests.close()
            self._answers.close()
            raise CheckpointError(f"cannot start a process that writes checkpoints: {error.strerror}") from error
        finally:
            request_end.close()
            answer_end.close()
        # A pipe buffers little, and the process may be blocked on sending an answer: only this
        # thread blocks on the pipe.
        self._outgoing: SimpleQueue[Any] = SimpleQueue()
        self._sender = threading.Thread(target=_send_all, args=(self._requests, self._outgoing), daemon=True)
        self._sender.start()

    def _start(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._pending += 1
        self._outgoing.put((call.__name__, arguments))

    def _receive(self) -> None:
        try:
            error, result = self._answers.recv()
        except (EOFError, OSError):
            self._ended = True
        else:
            self._outcomes.append((result, None) if error is None else (None, _error(error, result)))

    def _exit_error(self) -> CheckpointError:
        """Return the error of a process that has ended: another one may succeed if a signal killed it."""
        code, said = self.process.wait(), "the process that writes checkpoints has ended"
        if code < 0:
            return CheckpointFaultError(f"{said}: killed by {signal.Signals(-code).name}")
        return CheckpointError(f"{said}: it ended with exit code {code}")

    def _end_process(self, timeout: float) -> None:
        """End the process: an idle one exits on request, a busy one is killed."""
        if self.process.poll() is None:
            self._outgoing.put((EXIT, ()))
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self._outgoing.put(None)
        self._sender.join()
        self._requests.close()
        self._answers.close()
        self._outcomes.clear()
        self._pending, self._ended = 0, True


def _error(name: str, text: str) -> Exception:
    kind: type = getattr(errors, name, type(None))
    return kind(text) if issubclass(kind, HpctrainError) else CheckpointError(f"{name}: {text}")


def _launch(*descriptors: int) -> subprocess.Popen[bytes]:
    """Start the process with the job's signals blocked: those are for the ranks. It never unblocks them."""
    program = _PROGRAM.format(path=sys.path, arguments=(os.getpid(), *descriptors))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_FOR_RANKS)
    try:
        return subprocess.Popen(
            python("-c", program),
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send_all(requests: Any, outgoing: SimpleQueue[Any]) -> None:
    while (request := outgoing.get()) is not None:
        try:
            requests.send(request)
        except OSError:
            return  # the process is gone; ``result`` raises the error
