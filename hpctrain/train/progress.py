"""Progress display of a run, on rank 0 only: a bar on a terminal, otherwise a log line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from hpctrain.log import logger

SAMPLES = "samples"  # since the beginning of the run: in rows of data without tokens
LINE_EVERY = 10.0  # seconds between two lines without a terminal


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the displayed values of a step's row, by short name."""
    labels = {"loss": "loss", "validation_loss": "validation"}
    found = {label: f"{row[name]:.4f}" for name, label in labels.items() if name in row}
    return found | ({SAMPLES: str(row[SAMPLES])} if SAMPLES in row else {})


class Progress:
    """Display of the steps done, metrics, tokens/s or samples/s, and the remaining time."""

    def __init__(self, first: int, last: int | None, tokens: int, *, shown: bool) -> None:
        self._first, self._last, self._tokens = first, last, tokens
        self._shown = shown
        self._bar: Any = None
        self._kept: dict[str, str] = {}
        self._begun = self._spoken = time.monotonic()
        if shown and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=last, initial=first, unit="step", dynamic_ncols=True, smoothing=0.05)

    def update(self, step: int, tokens: int, facts: dict[str, str]) -> None:
        """Display a completed step; each fact stays until it changes.

        ``tokens`` counts from the beginning of the run, as does the fact ``samples``. Either is
        displayed as a rate.
        """
        self._kept.update(facts)
        if not self._shown:
            return
        now = time.monotonic()
        shown = dict(self._kept)
        if tokens > self._tokens:
            shown["tokens/s"] = f"{(tokens - self._tokens) / (now - self._begun):,.0f}"
        if SAMPLES in shown:
            batch = int(shown.pop(SAMPLES)) / step
            shown["samples/s"] = f"{batch * (step - self._first) / (now - self._begun):,.0f}"
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
        elif now - self._spoken >= LINE_EVERY or step == self._last:
            self._spoken = now
            logger.info("%s", self._line(step, now, shown))

    def expect(self, last: int) -> None:
        """Set the number of the last step."""
        self._last = last
        if self._bar is not None:
            self._bar.total = last

    def close(self) -> None:
        """Close the bar and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()

    def _line(self, step: int, now: float, facts: dict[str, str]) -> str:
        parts = [f"step {step}" + (f"/{self._last}" if self._last else "")]
        parts += [f"{name} {value}" for name, value in facts.items()]
        if self._last and step > self._first:
            left = round((now - self._begun) / (step - self._first) * (self._last - step))
            parts.append(f"ETA {left // 60}:{left % 60:02d}")
        return "  ".join(parts)
