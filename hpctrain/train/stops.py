"""Stop and save requests to a run: signals, the job's deadline, and files in the run folder.

A signal may reach a single rank. The deadline is checked by rank 0 alone, because clocks differ.
The files are also checked by rank 0, so that not every rank of a large job queries the filesystem.
At the end of each step, the ranks exchange their requests (``exchange``) and act together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.cluster import deadline as deadlines
from hpctrain.cluster.deadline import Deadline
from hpctrain.log import logger
from hpctrain.train.governor import Governor
from hpctrain.train.signals import StopRequest
from hpctrain.util.retry import PASSING, retries

STOP, SAVE = "STOP", "SAVE"
_PAUSE = 1.0  # seconds between two checks of the folder


class Stops:
    """Requests known to this rank; ``first`` marks the rank that checks the clock and the folder."""

    def __init__(self, folder: Path, request: StopRequest, *, first: bool, walltime: str = "", margin: float = 0.0):
        self._folder, self._request, self._first = folder, request, first
        self._walltime, self._margin = walltime, margin
        self._started = time.time()
        self._looked = -_PAUSE
        self._found = {STOP: False, SAVE: False}
        self.governor = Governor(None)

    def open(self, saves: Sequence[float], begun: float | None = None) -> None:
        """Read the deadline, and set the durations ``saves`` of saves in earlier attempts.

        A STOP file from before this start is ignored; ``begun`` is the time of the start in seconds
        since the epoch.
        """
        if not self._first:
            return
        found = deadlines.find(os.environ, self._walltime, started=self._started)
        self.governor = Governor(found, self._margin)
        for seconds in saves:
            self.governor.save(seconds)
        self._forget_stop(self._started if begun is None else begun)
        if found is not None:
            logger.info("the job ends at %s, according to %s", _clock(found), found.source)

    def _forget_stop(self, begun: float) -> None:
        """Remove an old STOP file; a file created while this job was starting is meant for this job."""
        path = self._folder / STOP
        with suppress(FileNotFoundError):
            if retries.call(os.stat, path).st_mtime < begun:
                retries.call(os.unlink, path)

    def look(self) -> tuple[bool, bool]:
        """Return whether this rank knows of a reason to save and exit, and of one to save."""
        if self._first and time.monotonic() - self._looked >= _PAUSE:
            self._looked = time.monotonic()
            self._found = {name: self._is_there(self._folder / name) for name in (STOP, SAVE)}
        stop = self._request.signal is not None or self._found[STOP] or self.governor.is_due
        return stop, self._found[SAVE]

    @staticmethod
    def _is_there(path: Path) -> bool:
        """Return whether a file exists; False if the filesystem returns an error."""
        try:
            retries.call(os.stat, path)
        except OSError as error:
            if error.errno in PASSING:
                logger.warning("cannot look for %s: %s", path, error.strerror)
            return False
        return True

    @property
    def reason(self) -> str:
        """Reason why the run stops, as far as this rank knows."""
        if self._request.name:
            return self._request.name
        if self._found[STOP]:
            return f"the file {self._folder / STOP}"
        governor = self.governor
        if governor.deadline is not None and governor.is_due:
            ends = _clock(governor.deadline)
            return f"the job ends at {ends}, and saving and exiting may take {governor.margin:.0f} s"
        return "a signal to another rank"

    def saved(self) -> None:
        """Remove the save request that a checkpoint has fulfilled."""
        if self._first and self._found[SAVE]:
            self._found[SAVE] = False
            with suppress(FileNotFoundError):
                retries.call(os.unlink, self._folder / SAVE)


def warn_if_unwatched(folder: Path, watched: str | None) -> None:
    """Warn if the job script watches another folder than the run's for STOP files and new checkpoints."""
    if watched and Path(watched).resolve() != folder.resolve():
        logger.warning(
            "the job's script watches %s and this run writes into %s: use the same folder in hpctrain job "
            "--folder and job.run(checkpoints=...), or the script detects no progress of this run",
            watched,
            folder,
        )


def _clock(deadline: Deadline) -> str:
    return time.strftime("%H:%M:%S", time.localtime(deadline.time))
