"""Logging with a rank prefix, only on request: the root logger belongs to the user."""

from __future__ import annotations

import logging
import socket
import sys
from typing import TextIO

from hpctrain.util.text import printable_lines

logger = logging.getLogger("hpctrain")
logger.addHandler(logging.NullHandler())

warned: set[str] = set()  # texts of warn_once
_early: list[str] = []  # warnings before configure, which knows the rank
_rank: int | None = None
_verbose = False


class _RankPrefix(logging.Formatter):
    """Formatter that puts ``[rank host]`` before the lines of every rank but the first."""

    def __init__(self, rank: int) -> None:
        super().__init__("%(message)s")
        self._prefix = f"[rank {rank} {socket.gethostname()}] " if rank else ""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{self._prefix}{level}{printable_lines(super().format(record))}"


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to the current ``sys.stderr`` without breaking a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        tqdm = sys.modules.get("tqdm")
        if tqdm is None:
            super().emit(record)
            return
        try:
            tqdm.tqdm.write(self.format(record), file=self.stream)
        except OSError:
            self.handleError(record)


def configure(rank: int = 0, *, verbose: bool = False) -> None:
    """Send the package's messages to standard error.

    Rank 0 shows INFO and above, the others WARNING and above; ``verbose`` lowers both by one level.
    A later call replaces the earlier choice.
    """
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = _StderrHandler()
    handler.setFormatter(_RankPrefix(rank))
    logger.addHandler(handler)
    level = logging.INFO if rank == 0 else logging.WARNING
    logger.setLevel(level - 10 if verbose else level)
    logger.propagate = False
    global _rank, _verbose
    _rank, _verbose = rank, verbose
    for text in early_warnings():
        if rank == 0:
            logger.warning("%s", text)


def renumber(rank: int) -> None:
    """Log as another rank from now on; the level of detail stays."""
    configure(rank, verbose=_verbose)


def warn_once(text: str) -> None:
    """Log a warning on rank 0, once per process. A warning before ``configure`` waits for it."""
    if text in warned:
        return
    warned.add(text)
    if _rank is None:
        _early.append(text)
    elif _rank == 0:
        logger.warning("%s", text)


def early_warnings() -> list[str]:
    """Return and remove the warnings that wait for ``configure``, for verbs that do not call it."""
    found = list(_early)
    _early.clear()
    return found
