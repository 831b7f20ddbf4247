"""Live view in a terminal: reads the files again every few seconds, and keys between them."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from hpctrain.errors import UsageError
from hpctrain.watch.curves import Curve, CurveReader
from hpctrain.watch.screen import detail, framed, states_of, table
from hpctrain.watch.state import RunState

ESCAPES = {"\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left", "\x1bOA": "up", "\x1bOB": "down"}
NAMES = {"k": "up", "j": "down", "\r": "enter", "\n": "enter", "\x1b": "back", "\x7f": "back", "b": "back"}
PAUSE = 5.0  # least time between two reads, in times of a read
KEYS_TABLE = "up/down select   enter details   q quit"
KEYS_DETAIL = "c next curve   b all runs   q quit"


class View:
    """The table of runs, or the details of the selected run."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = list(folders)
        self.selected, self.details, self.curve = 0, len(folders) == 1, 0
        self.states: list[RunState] = []
        self._curves: dict[str, Curve] = {}
        self._reader: CurveReader | None = None
        self.seconds = 0.0  # of the last read

    def read(self) -> None:
        """Read the files of the runs that are shown."""
        began = time.monotonic()
        folder = self._folders[self.selected]
        self.states = states_of([folder] if self.details else self._folders)
        if self.details:
            self._reader = self._reader or CurveReader(folder)
            with suppress(UsageError):  # such as a deleted run: its last curves stay
                self._curves = self._reader.read()
        else:
            self._reader, self._curves = None, {}
        self.seconds = time.monotonic() - began

    def press(self, key: str) -> bool:
        """Act on a key; return whether the view ends."""
        last = len(self._folders) - 1
        if key in ("q", "\x03", "\x04"):
            return True
        if key in ("up", "down") and not self.details:
            self.selected = min(max(self.selected + (1 if key == "down" else -1), 0), last)
        elif key in ("enter", "right") and not self.details:
            self.details, self.curve = True, 0
            self.read()
        elif key in ("back", "left") and self.details and last:
            self.details = False
            self.read()
        elif key == "c":
            self.curve += 1
        return False

    def shown(self, console: Console) -> RenderableType:
        width, height, colour = console.width, console.height, console.color_system is not None
        if self.details:
            part = detail(self.states[0], self._curves, width, height - 2, curve=self.curve, colour=colour)
            return framed(part, KEYS_DETAIL if len(self._folders) > 1 else KEYS_DETAIL.replace("b all runs   ", ""))
        return framed(table(self.states, width, height - 2, self.selected), KEYS_TABLE)


def watch(folders: Sequence[Path], every: float, console: Console) -> None:
    """Show the runs until a key ends it; the files are read every so many seconds."""
    view = View(folders)
    view.read()
    with _keys() as pressed, Live(view.shown(console), console=console, screen=True, auto_refresh=False) as live:
        due = time.monotonic() + every
        while True:
            key = pressed(max(due - time.monotonic(), 0.0))
            if key and view.press(key):
                return
            if time.monotonic() >= due:
                view.read()
                due = time.monotonic() + max(every, PAUSE * view.seconds)  # on slow file systems less often
            live.update(view.shown(console), refresh=True)


@contextmanager
def _keys() -> Iterator[_Pressed]:
    """Read single keys in the ``with`` block; the terminal is restored afterwards."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _Pressed(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class _Pressed:
    """Reader of keys: returns the name of the next one pressed within some seconds, or nothing."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, seconds: float) -> str:
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return ""
        given = os.read(self._descriptor, 8).decode("utf-8", "replace")
        if not given:  # the terminal has been closed
            return "q"
        return ESCAPES.get(given) or NAMES.get(given[0], given[0])
