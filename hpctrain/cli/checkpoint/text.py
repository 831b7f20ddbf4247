"""Text and JSON output of values, and a progress bar for long reads."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hpctrain.checkpoint.tools.inspect import newest_of
from hpctrain.util.format import format_bytes
from hpctrain.util.text import printable

BIG = 256 << 20  # minimum bytes for a progress bar


@contextmanager
def progress(files: Sequence[str | Path]) -> Iterator[Callable[[int], object] | None]:
    """Show a progress bar over the bytes to read, on a terminal and for large files only."""
    total = sum(Path(file).stat().st_size for file in files if Path(file).is_file())
    if total < BIG or not sys.stderr.isatty():
        yield None
        return
    with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="reading", leave=False) as bar:
        yield bar.update


def chosen(path: str) -> str:
    """Return a checkpoint: the path, or the newest valid one in a run folder, which is reported on stderr."""
    if not Path(path).is_dir():
        return path
    found = newest_of(path)
    print(printable(f"{path}: using its newest valid checkpoint, {found}"), file=sys.stderr)
    return str(found)


def shape(numbers: Sequence[int]) -> str:
    """Return a shape in readable form."""
    return "x".join(map(str, numbers)) or "scalar"


def size(nbytes: int) -> str:
    """Return a number of bytes with one decimal, in the largest unit in which it is at least 1."""
    return format_bytes(nbytes, 1)


def one_line(value: Any, longest: int = 100) -> str:
    """Return a value in one line, truncated if it is too long."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."


def print_json(value: Any) -> None:
    """Print JSON, with null for NaN and infinity, which JSON does not have."""
    print(json.dumps(_finite(value), indent=2))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
