"""Figures: the guarded import of matplotlib, the common set-up of figures and axes, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.util import atomic

KINDS = (".png", ".svg", ".pdf")
INK = "#333333"  # colour of text


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of a size in inches. Raises ``UsageError`` if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("drawing needs matplotlib: pip install 'hpctrain[plot]'", everywhere=True) from error
    return Figure(figsize=(width, height), layout="constrained")


def add_grid(axes: Any, which: str = "both", color: str = "#ececec", linewidth: float = 0.8) -> None:
    """Draw a grid behind the data, along one axis or both, and hide the top and right border."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis=which, color=color, linewidth=linewidth)
    axes.set_axisbelow(True)


def check_suffix(path: Path) -> None:
    """Raise ``UsageError`` if no picture can have this name."""
    if path.suffix not in KINDS:
        raise UsageError(f"cannot draw {path}: its name must end in {', '.join(KINDS)}", everywhere=True)


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure in the format of the file's suffix, atomically. Raises ``UsageError`` if this fails."""
    path = Path(path)
    check_suffix(path)
    try:
        with atomic.replacing(path) as out:
            figure.savefig(out, format=path.suffix[1:], dpi=150)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}", everywhere=True) from error
