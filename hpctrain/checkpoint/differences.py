"""Comparison of the tensors in a file with those that a program expects; all differences are reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from hpctrain.checkpoint.format.layout import Record, shape_text
from hpctrain.shard import Shard
from hpctrain.util.text import columns


@dataclass(frozen=True)
class Difference:
    """One difference: ``in_file`` and ``in_program`` describe the two sides; ``-`` marks a missing one."""

    name: str
    problem: str
    in_file: str
    in_program: str


def compare(in_file: Mapping[str, Record], in_program: Mapping[str, Shard]) -> list[Difference]:
    """Return all differences in names, shapes and dtypes: in the program's order, then names that only the file has."""
    found: list[Difference] = []
    for name, expected in in_program.items():
        stored = in_file.get(name)
        if stored is None:
            found.append(Difference(name, "missing", "-", described(expected)))
        elif stored.shape != expected.shape:
            found.append(Difference(name, "shape", described(stored), described(expected)))
        elif stored.dtype != expected.dtype:
            found.append(Difference(name, "dtype", described(stored), described(expected)))
    unexpected = [name for name in in_file if name not in in_program]
    return found + [Difference(name, "unexpected", described(in_file[name]), "-") for name in unexpected]


class Described(Protocol):
    """Tensor of a file or of a program, of which only these facts are needed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""

    @property
    def dtype(self) -> str:
        """Return the torch name of the element type."""


def described(tensor: Described) -> str:
    """Return dtype and shape of a tensor as text."""
    return f"{tensor.dtype} {shape_text(tensor.shape)}"


def table(differences: Sequence[Difference]) -> str:
    """Return the differences as aligned columns under a heading."""
    rows = [("name", "problem", "in the file", "in the program")]
    rows += [(each.name, each.problem, each.in_file, each.in_program) for each in differences]
    return "\n".join("  " + line for line in columns(rows))


def is_skipped(name: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns (``"head.*"``) matches a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
