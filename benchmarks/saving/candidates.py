"""Candidate of the checkpoint benchmark: a name, and its actions before, during and after timing."""

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
    """Method to save or to load; all ranks call each of its parts.

    ``check`` returns the error in the result, empty if it is right. ``nbytes`` are moved by each
    rank that takes part, or by all together if they share the work.
    """

    name: str
    nbytes: int
    call: Callable[[], object]
    check: Callable[[], str] = _right
    prepare: Callable[[], object] = _nothing
    needed: bool = False  # an error in it ends the benchmark


class WrongResult(HpctrainError, RuntimeError):
    """Wrong result of a candidate, which makes its time meaningless."""
