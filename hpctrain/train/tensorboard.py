"""TensorBoard events of a run, written by its rank 0 beside ``metrics.jsonl`` (``train.tensorboard``).

Every start of a run writes a file of its own. It begins with a mark from which TensorBoard knows that
steps from there on replace those of earlier files.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.log import logger
from hpctrain.train.metrics import Metrics

FOLDER = "tensorboard"
_NOT_SHOWN = ("step", "unix_time")


def check_installed() -> None:
    """Raise ``UsageError`` if the package that writes events is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError("train.tensorboard needs tensorboard: pip install 'hpctrain[trackers]'", everywhere=True)


def scalars_of(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the values of a row of metrics that trackers draw as curves."""
    for name, value in row.items():
        if name not in _NOT_SHOWN and type(value) in (int, float) and math.isfinite(value):
            yield name, float(value)


class EventFile:
    """File of events in a folder, whose first step is ``first_step``. Raises ``OSError`` if it cannot be written."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._make_event, self._make_summary = Event, Summary
        self._writer = EventFileWriter(str(folder), max_queue_size=1000, flush_secs=10)
        self._writer.add_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, row: Mapping[str, Any]) -> None:
        """Add the values of a row of metrics."""
        values = [self._make_summary.Value(tag=name, simple_value=value) for name, value in scalars_of(row)]
        time = float(row.get("unix_time", 0.0))
        self._writer.add_event(
            self._make_event(wall_time=time, step=row["step"], summary=self._make_summary(value=values))
        )

    def close(self) -> None:
        self._writer.close()


class MetricsWithEvents(Metrics):
    """Writer of ``metrics.jsonl`` that writes events, too. If these cannot be written, the run continues without."""

    def __init__(self, folder: Path, last_step: int, rows: Sequence[Mapping[str, Any]] | None = None) -> None:
        super().__init__(folder, last_step, rows)
        self._folder = folder / FOLDER
        self._events: EventFile | None = None
        self._begin(last_step + 1)

    def write(self, row: dict[str, Any]) -> None:
        super().write(row)
        if self._events is not None:
            try:
                self._events.write(row)
            except (OSError, ValueError, RuntimeError) as error:
                self._give_up(error)

    def rewind(self, last_step: int, rows: Sequence[Mapping[str, Any]] | None = None) -> None:
        super().rewind(last_step, rows)
        self._begin(last_step + 1)

    def close(self) -> None:
        super().close()
        self._end()

    def _begin(self, first_step: int) -> None:
        self._end()
        try:
            self._events = EventFile(self._folder, first_step)
        except OSError as error:
            self._give_up(error)

    def _end(self) -> None:
        events, self._events = self._events, None
        try:
            if events is not None:
                events.close()
        except (OSError, ValueError, RuntimeError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._events = None
        logger.warning("cannot write events into %s: %s; continuing without", self._folder, error)
