"""Text for terminals: untrusted text without control characters and shortened, tables, quantities with units."""

from __future__ import annotations

import os

import pytest

from hpctrain.errors import UsageError
from hpctrain.util.text import (
    columns,
    counted,
    format_bandwidth,
    format_bytes,
    format_number,
    format_seconds,
    parse_bytes,
    printable,
    printable_lines,
    short_repr,
    shorten,
    unit_of_bytes,
)


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


# Bytes, rates, durations and counts, and the parser of byte sizes -----------------------------------------------------


@pytest.mark.parametrize(
    "text, nbytes",
    [("40GiB", 40 * 2**30), ("40 GB", 40 * 10**9), ("512M", 512 * 2**20)]
    + [("1.5T", 3 * 2**39), (" 9 ", 9), ("80gib", 80 * 2**30)],
)
def test_sizes_with_units_are_parsed(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-4GiB", "40 GiG", "4,5GB", "0", "1e3", "nan"])
def test_malformed_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a number of bytes"):
        parse_bytes(text)


def test_sizes_with_decimals_are_written_with_a_number_below_1024() -> None:
    assert [format_bytes(size, 2) for size in (0, 1023, 1024, 2**20 - 1, 2.5 * 2**30, 150 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.00 MiB",
        "2.50 GiB",
        "150.0 GiB",
    ]
    assert [format_bytes(size, 1) for size in (1, 1536, 150 * 2**20)] == ["1 B", "1.5 KiB", "150.0 MiB"]
    assert unit_of_bytes(3 * 2**30) == ("GiB", 2**30) and unit_of_bytes(0) == ("B", 1)


@pytest.mark.parametrize(
    "nbytes, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1448, "1.41 KiB"),
        (4096, "4 KiB"),
        (2**20 - 1, "1024 KiB"),
        (2**30, "1 GiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (2**36, "64 GiB"),
        (2**60, "1024 PiB"),
    ],
)
def test_sizes_have_three_significant_digits(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.0, "0 us"),
        (2e-6, "2 us"),
        (0.0123, "12.3 ms"),
        (0.25, "250 ms"),
        (2.5, "2.5 s"),
        (120, "120 s"),
        (9000, "2.5 h"),
        (1e6, "11.6 d"),
    ],
)
def test_durations_are_written_in_a_suitable_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_rates_and_counts() -> None:
    assert [format_bandwidth(rate) for rate in (2e7, 1.57e9)] == ["20 MB/s", "1.57 GB/s"]
    assert [format_number(number) for number in (0.1234, 99.9, 1234.5)] == ["0.123", "99.9", "1,234"]
    assert [counted(number, "rank") for number in (0, 1, 2000)] == ["0 ranks", "1 rank", "2000 ranks"]
    assert counted(2000, "microbatch", ",") == "2,000 microbatches"
