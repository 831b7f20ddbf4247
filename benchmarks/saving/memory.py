"""Peak memory growth of this process."""

from __future__ import annotations

from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Growth:
    """Largest growth of resident memory since construction, if Linux allows resetting the peak."""

    def __init__(self) -> None:
        try:
            _CLEAR.write_text("5")  # proc(5): reset the peak resident set size
            self._start: int | None = _field("VmRSS")
        except OSError:
            self._start = None

    def bytes(self) -> int | None:
        """Return the growth up to the peak; ``None`` if unknown."""
        return None if self._start is None else max(_field("VmHWM") - self._start, 0)


def _field(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {name}")
