"""Text of unknown origin: printed without characters that control a terminal, and shortened."""

from __future__ import annotations

import os

import pytest

from hpctrain.util.text import columns, printable, printable_lines, short_repr, shorten


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain \N{SNOWMAN}", "plain \N{SNOWMAN}"),
        ("\x1b]0;x\x07", "\\x1b]0;x\\x07"),
        ("a\nb\rc\x9bd", "a\\x0ab\\x0dc\\x9bd"),
        (os.fsdecode(b"a\xff"), "a\\xff"),
        ("\u202e", "\\u202e"),
        ("\U000e0001", "\\U000e0001"),
    ],
)
def test_control_characters_are_escaped(text: str, expected: str) -> None:
    assert printable(text) == expected and expected.isprintable()


def test_line_breaks_are_kept() -> None:
    assert printable_lines("a\x1b\nb") == "a\\x1b\nb"


@pytest.mark.parametrize("value", ["x" * 3000, b"x" * 3000, [[1] * 1000], "\x1b" * 3000, 1.5, None, "a"])
def test_values_are_short(value: object) -> None:
    assert len(short_repr(value)) <= 60 and short_repr(value).isprintable()


def test_a_huge_number_is_short() -> None:
    assert short_repr(10**5000) == "a whole number of 16610 bits"


def test_the_middle_of_a_long_text_is_omitted() -> None:
    assert shorten("a" * 50 + "b" * 50, 20).startswith("aaa") and shorten("a" * 50 + "b" * 50, 20).endswith("bbb")
    assert len(shorten("a" * 100, 20)) == 20


def test_columns_are_aligned() -> None:
    rows = [["name", "bytes", "note"], ["a", "10", "long note"], ["bcdef", "2"]]
    assert columns(rows) == ["name   bytes  note", "a      10     long note", "bcdef  2"]
    assert columns(rows, right=(1,)) == ["name   bytes  note", "a         10  long note", "bcdef      2"]
    assert columns([["a", "1"], ["long", "20"]], right=(1,)) == ["a      1", "long  20"]
    assert columns([["the last cell has any length"], ["a", "b"]]) == ["the last cell has any length", "a  b"]
    assert columns([]) == []
