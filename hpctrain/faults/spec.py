"""Faults to inject, as text: ``kill rank=2 step=7 at=backward; pause step=9 seconds=5``.

This module needs no torch: ``hpctrain train`` checks the text before it imports torch. The number
of ranks, and the steps of the run, are checked when the run is made (``install``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.errors import UsageError
from hpctrain.settings import unknown
from hpctrain.util.text import short_repr

VARIABLE = "HPCTRAIN_FAULT"
EXAMPLE = "kill rank=2 step=7 at=backward"
PLACES = ("begin", "forward", "backward", "collective", "optimizer", "end", "save")
TARGETS = ("parameter", "moment", "checkpoint")  # of flip in=


@dataclass(frozen=True)
class FaultKind:
    """Kind of fault: its places, the default first, its required keys and further keys that it accepts."""

    what: str
    places: tuple[str, ...]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def _places(default: str) -> tuple[str, ...]:
    """Return all places, the default first."""
    return (default, *(place for place in PLACES if place != default))


KINDS: Mapping[str, FaultKind] = {
    "kill": FaultKind("the process gets SIGKILL", _places("backward")),
    "segfault": FaultKind("the process gets SIGSEGV", _places("backward")),
    "exception": FaultKind("the rank raises RuntimeError", _places("forward")),
    "exit": FaultKind("the rank exits with code 0", _places("begin")),
    "node": FaultKind("all ranks of the rank's node get SIGKILL", _places("backward")),
    "hang": FaultKind("the rank waits forever", _places("collective")),
    "pause": FaultKind("the process is stopped for some seconds", _places("collective"), ("seconds",)),
    "slow": FaultKind("the computation of each step takes longer, from this step on", (), ("factor",)),
    "nan": FaultKind("a gradient is NaN", ("backward",)),
    "flip": FaultKind("one bit is inverted", ("end", "begin", "optimizer", "save"), ("in",), ("tensor", "bit")),
    "full": FaultKind("writes fail with ENOSPC", ("save",), (), ("seconds",)),
    "eio": FaultKind("writes fail with EIO", ("save",), (), ("seconds",)),
}
_COMMON = ("rank", "seed", "step", "at")


@dataclass(frozen=True)
class Fault:
    """One fault; ``rank`` is None for the last rank, and ``"random"`` if it is drawn from ``seed``.

    ``text`` is the request in a fixed order of its keys, by which later starts recognise it.
    """

    kind: str
    step: int
    at: str = ""
    rank: int | str | None = None
    seed: int = 0
    seconds: float | None = None
    factor: float = 1.0
    target: str = ""
    tensor: str = ""
    bit: int | None = None
    text: str = field(default="", compare=False)

    def rank_of(self, size: int) -> int:
        """Return the rank that has the fault in a job of ``size`` ranks."""
        if self.rank == "random":
            return random.Random(self.text).randrange(size)
        if self.target == "checkpoint":
            return 0
        return self.rank if isinstance(self.rank, int) else size - 1

    def describe(self, size: int) -> str:
        """Return the fault with its rank and place, as in ``kill on rank 2 in step 7 at backward``."""
        more: dict[str, object] = {"seconds": self.seconds, "factor": self.factor if self.kind == "slow" else None}
        more |= {"in": self.target or None, "tensor": self.tensor or None, "bit": self.bit}
        shown = [f"{key}={_plain(value)}" for key, value in more.items() if value is not None]
        where = f"{self.kind} on rank {self.rank_of(size)} in step {self.step}"
        where += f" at {self.at}" if self.at else ""
        return f"{where} ({' '.join(shown)})" if shown else where


def parse(text: str) -> list[Fault]:
    """Return the faults of a text. Raises ``UsageError`` for anything that is not allowed, as all ranks do."""
    return [_parse_one(piece.strip()) for piece in text.split(";") if piece.strip()]


def refusal(message: str, allowed: str, where: str = "") -> UsageError:
    """Return the error about a wrong fault: what is wrong, what is allowed, an example."""
    return UsageError(
        f"{VARIABLE}: {f'{short_repr(where)}: ' if where else ''}{message}; {allowed}; for example '{EXAMPLE}'",
        everywhere=True,
    )


def _parse_one(text: str) -> Fault:
    name, *words = text.split()
    if name not in KINDS:
        what = unknown(f"kind {short_repr(name, 24)}", name, list(KINDS))
        raise UsageError(f"{VARIABLE}: {what}; for example 'kill step=7'", everywhere=True)  # one line, with all kinds
    kind, given = KINDS[name], dict[str, str]()
    allowed = [key for key in (*_COMMON, *kind.required, *kind.optional) if key != "at" or kind.places]
    for word in words:
        key, sign, value = word.partition("=")
        if key not in allowed:
            raise refusal(unknown(f"key {short_repr(key)} of {name}", key, allowed), "write key=value", text)
        if not sign or not value:
            raise refusal(f"{key} has no value", f"write {key}=value", text)
        if key in given:
            raise refusal(f"{key} is given twice", "give each key once", text)
        given[key] = value
    for key in ("step", *kind.required):
        if key not in given:
            raise refusal(f"{key} is missing", f"{name} needs {', '.join(('step', *kind.required))}", text)
    return _fault(name, given, text)


def _fault(name: str, given: Mapping[str, str], text: str) -> Fault:
    """Return the fault of a kind, with each value converted and checked."""
    target = given.get("in", "")
    if target and target not in TARGETS:
        raise refusal(f"in={short_repr(target)} is unknown", f"allowed are {', '.join(TARGETS)}", text)
    rank: int | str | None = None
    if "rank" in given:
        rank = "random" if given["rank"] == "random" else _whole(given, "rank", 0, text, "a number from 0, or random")
    if target == "checkpoint" and rank is not None:
        raise refusal("rank has no effect on a checkpoint", "leave out rank: rank 0 changes the file", text)
    if "seed" in given and rank != "random":
        raise refusal("seed has no effect without rank=random", "write rank=random seed=3", text)
    return Fault(
        name,
        step=_whole(given, "step", 1, text),
        at=_place(name, given.get("at"), target, text),
        rank=rank,
        seed=_whole(given, "seed", 0, text) if "seed" in given else 0,
        seconds=_number(given, "seconds", 0.0, text) if "seconds" in given else None,
        factor=_number(given, "factor", 1.0, text) if "factor" in given else 1.0,
        target=target,
        tensor=given.get("tensor", ""),
        bit=_whole(given, "bit", 0, text) if "bit" in given else None,
        text=" ".join([name, *(f"{key}={given[key]}" for key in sorted(given))]),
    )


def _place(name: str, given: str | None, target: str, text: str) -> str:
    """Return the place of a fault: the given one, or the default of its kind."""
    places = KINDS[name].places
    if name == "flip":
        places = ("save",) if target == "checkpoint" else tuple(place for place in places if place != "save")
    if given is None:
        return places[0] if places else ""
    if given not in PLACES:
        raise refusal(unknown(f"place {short_repr(given)}", given, PLACES), f"{name} allows {', '.join(places)}", text)
    if given not in places:
        what = f"{name} in={target}" if target else name
        raise refusal(f"at={given} does not fit {what}", f"allowed is at={', '.join(places)}", text)
    return given


def _whole(given: Mapping[str, str], key: str, least: int, text: str, what: str = "") -> int:
    value = given[key]
    if not (value.isascii() and value.isdigit() and len(value) < 19 and int(value) >= least):
        raise refusal(f"{key}={short_repr(value)}", f"{key} is {what or f'a whole number from {least}'}", text)
    return int(value)


def _number(given: Mapping[str, str], key: str, above: float, text: str) -> float:
    try:
        number = float(given[key])
    except ValueError:
        number = math.nan
    if not above < number < math.inf:
        raise refusal(f"{key}={short_repr(given[key])}", f"{key} is a number above {above:g}", text)
    return number


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
