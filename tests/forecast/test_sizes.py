"""Sizes in bytes: parsing and formatting with units."""

from __future__ import annotations

import pytest

from hpctrain.errors import UsageError
from hpctrain.forecast.sizes import parse, tell


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
    assert parse(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-4GiB", "40 GiG", "4,5GB", "0", "1e3", "nan"])
def test_malformed_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a number of bytes"):
        parse(text)


def test_sizes_are_written_with_a_number_below_1024() -> None:
    assert [tell(one) for one in (0, 1023, 1024, 2**20 - 1, 2.5 * 2**30, 150 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.00 MiB",
        "2.50 GiB",
        "150.0 GiB",
    ]
