"""Have checkpoints written by a process of their own, while the rank goes on."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from typing import Any

from hpctrain import errors
from hpctrain.checkpoint.file import commit
from hpctrain.checkpoint.file.extents import Written
from hpctrain.checkpoint.together.desk import Order, Place
from hpctrain.checkpoint.together.snapshot import Copied, Snapshot
from hpctrain.checkpoint.together.worker import Places, Share
from hpctrain.errors import CheckpointError, HpctrainError

_PIPE = 1 << 20  # bytes: an order for a model of a thousand tensors goes in without waiting for its reader
_FOR_RANKS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}
_FAREWELL = 5.0  # seconds that an idle process gets to end
_PROGRAM = """
import sys
sys.path[:] = {path!r}
from hpctrain.checkpoint.together.scribe import main
main(*{arguments!r})
"""


class Aside:
    """Work in another process; see ``worker.Worker`` for the calls."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._copied: Sequence[Copied] = ()
        self._place: Place | None = None  # of the file that this rank is to clear away
        self._under_way = 0  # answers that have not come
        self._start()

    def take(self, share: Share) -> None:
        """Copy what to write."""
        if self._process.poll() is not None:
            self._start()
        self._copied = self._snapshot.take(share.sources, share.parts)

    def lay_out(self, order: Order) -> None:
        """Begin to lay the file out."""
        self._place = order.place
        self._send("lay_out", order)

    def write(self, place: Place, places: Places) -> None:
        """Begin to write what was copied."""
        rows = [((places[each.name] or 0) + each.to, each.at, each.nbytes, each.name) for each in self._copied]
        self._send("write", place, rows)

    def write_as_laid_out(self, place: Place) -> None:
        """Begin to write what was copied, to where the process has laid it out."""
        self._send("write_as_laid_out", place, [tuple(each) for each in self._copied])

    def finish(self, written: Written) -> None:
        """Begin to complete the file."""
        self._send("finish", written)

    @property
    def busy(self) -> bool:
        """Tell whether the process has not answered yet."""
        return self._under_way > 0 and not self._answers.poll()

    def result(self) -> Any:
        """Wait for the answer; return it, or raise what it says."""
        try:
            error, result = self._answers.recv()
        except EOFError:
            raise CheckpointError(f"the process that writes checkpoints is gone: {self._fate()}") from None
        finally:
            self._under_way -= 1
        if error is None:
            return result
        kind = getattr(errors, error, None)
        known = isinstance(kind, type) and issubclass(kind, HpctrainError)
        raise kind(result) if known and kind is not None else CheckpointError(f"{error}: {result}")

    def give_up(self) -> None:
        """Drop what is under way; the process, which cannot be stopped in the middle, is replaced when it is needed."""
        self._end(0 if self._under_way else _FAREWELL)
        if self._place is not None:
            commit.discard(self._place.private)
        self._place = None

    def close(self) -> None:
        """End the process."""
        self.give_up()
        self._snapshot.close()

    def _start(self) -> None:
        inbox, self._orders = Pipe(duplex=False)
        self._answers, outbox = Pipe(duplex=False)
        fcntl.fcntl(self._orders.fileno(), fcntl.F_SETPIPE_SZ, _PIPE)
        descriptors = self._snapshot.handle, inbox.fileno(), outbox.fileno()
        program = _PROGRAM.format(path=sys.path, arguments=(os.getpid(), *descriptors))
        # Signals to the whole job are for its ranks: the process is born with them blocked, and never unblocks them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_RANKS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            inbox.close()
            outbox.close()

    def _send(self, name: str, *arguments: Any) -> None:
        self._under_way += 1
        try:
            self._orders.send((name, arguments))
        except OSError:
            pass  # it is gone; who asks for the result hears of it

    def _fate(self) -> str:
        code = self._process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"

    def _end(self, patience: float) -> None:
        """End the process: idle, it goes when its pipe is closed; at work, it is killed."""
        self._orders.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._under_way = 0
