"""Memory of a process as reported by Linux; needs no other module, as ranks of any program import it."""

from __future__ import annotations

from pathlib import Path

STATUS, ROLLUP = Path("/proc/self/status"), Path("/proc/self/smaps_rollup")


def memory_fields(path: Path | str) -> dict[str, int]:
    """Return the fields of a proc file that are numbers of kB, in bytes."""
    return fields_of(Path(path).read_text())


def fields_of(text: str) -> dict[str, int]:
    words = (line.split() for line in text.splitlines())
    return {one[0].rstrip(":"): int(one[1]) * 1024 for one in words if len(one) == 3 and one[2] == "kB"}
