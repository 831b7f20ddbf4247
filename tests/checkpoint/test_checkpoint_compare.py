"""Comparison of a checkpoint with a program: all differences are found and shown together."""

from __future__ import annotations

from hpctrain.checkpoint.format.layout import TensorDescription
from hpctrain.checkpoint.restore import Difference, compare, table

A, B = TensorDescription((2, 3), "float32"), TensorDescription((), "int64")


def test_every_kind_of_difference_is_found() -> None:
    in_file = {"same": A, "shape": A, "dtype": A, "extra": B}
    in_program = {"same": A, "shape": B, "dtype": TensorDescription((2, 3), "bfloat16"), "gone": B}
    assert compare(in_file, in_program) == [
        Difference("shape", "shape", "float32 2x3", "int64 scalar"),
        Difference("dtype", "dtype", "float32 2x3", "bfloat16 2x3"),
        Difference("gone", "missing", "-", "int64 scalar"),
        Difference("extra", "unexpected", "int64 scalar", "-"),
    ]
    assert compare(in_file, in_file) == []


def test_the_table_is_aligned() -> None:
    lines = table(compare({"a": A}, {"a.longer.name": B})).splitlines()
    assert [line.split() for line in lines] == [
        ["name", "problem", "in", "the", "file", "in", "the", "program"],
        ["a.longer.name", "missing", "-", "int64", "scalar"],
        ["a", "unexpected", "float32", "2x3", "-"],
    ]
    assert len({line.index(word) for line, word in zip(lines, ("problem", "missing", "unexpected"))}) == 1
