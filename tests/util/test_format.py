"""Text for bytes, rates, durations and counts, and the parser of byte sizes."""

from __future__ import annotations

import pytest

from hpctrain.errors import UsageError
from hpctrain.util.text import (
    counted,
    format_bandwidth,
    format_bytes,
    format_number,
    format_seconds,
    parse_bytes,
    unit_of_bytes,
)


@pytest.mark.parametrize(
    "text, nbytes",
    [
        ("40GiB", 40 * 2**30),
        ("40 GB", 40 * 10**9),
        ("512M", 512 * 2**20),
        ("1.5T", 3 * 2**39),
        (" 9 ", 9),
        ("80gib", 80 * 2**30),
    ],
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
