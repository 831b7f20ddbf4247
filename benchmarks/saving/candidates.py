"""Say what takes part in the benchmark: a name, what it does before the clock runs, while it runs, and afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpctrain.errors import HpctrainError


def _nothing() -> None:
    pass


def _right() -> str:
    return ""


@dataclass
class Candidate:
    """Hold one way to save or to load; all ranks call each of its parts.

    ``check`` returns what is wrong with the result, empty where it is right. ``nbytes`` are moved by each rank that
    moves any, or by all together where they share the work.
    """

    name: str
    nbytes: int
    call: Callable[[], object]
    check: Callable[[], str] = _right
    prepare: Callable[[], object] = _nothing
    needed: bool = False  # that it cannot serve is an error


class WrongResult(HpctrainError, RuntimeError):
    """A candidate did not write or read what it should, so that its time means nothing."""
