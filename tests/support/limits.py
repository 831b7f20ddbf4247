"""Time limit of tests: a hanging test prints the stacks of all threads and exits, which ends the whole job."""

from __future__ import annotations

import faulthandler
import os
import tempfile
import threading
import time

from support.pace import scaled

# The first rank that exits ends the others; until then each may write its own stacks.
_FAREWELL = 2.0
# If a thread holds the interpreter's lock, no Python code runs any more; then the watchdog in C prints the stacks.
_BACKSTOP = 5.0
_RUNNER = ("/_pytest/", "/pluggy/", "/pytest/__main__.py", "<frozen ")


class Watchdog:
    """Time limit of this process's current activity; the stacks are written to ``descriptor``."""

    def __init__(self, prefix: str, descriptor: int) -> None:
        self._prefix = prefix
        self._descriptor = descriptor
        self._timer: threading.Timer | None = None
        self._what = ""
        self._before = ""

    def remember(self, text: str) -> None:
        """Add this text to the output if the time runs out before the next activity begins."""
        self._before = text

    def arm(self, seconds: float, what: str | None = None) -> None:
        """Restart the limit: ``what`` (or the last activity) has so many seconds from now, more on a slow machine."""
        self.disarm()
        limit, seconds = seconds, scaled(seconds)
        if what:
            self._what, self._before = what, ""
        self._timer = threading.Timer(seconds, self._fire, (limit, seconds))
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(seconds + _BACKSTOP, exit=True, file=self._descriptor)

    def disarm(self) -> None:
        """Remove the limit."""
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self, limit: float, seconds: float) -> None:
        slow = f" (of a quiet machine, here {seconds:.0f} s)" if seconds > limit else ""
        lines = [f"{self._what} is not done after {limit:g} s{slow}; the stacks of all threads:", *_stacks()]
        lines += self._before.splitlines()  # last, because logs are cut at their beginning
        os.write(self._descriptor, "".join(f"{self._prefix}{line}\n" for line in lines).encode())
        time.sleep(_FAREWELL)
        os._exit(1)


def _stacks() -> list[str]:
    """Return the stacks of the other threads, without the frames of the test runner itself."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        blocks = file.read().decode(errors="replace").split("\n\n")
    lines = [line for block in blocks if not block.startswith("Current thread") for line in block.splitlines()]
    return [line for line in lines if not any(part in line for part in _RUNNER)]
