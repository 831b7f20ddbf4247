from __future__ import annotations

import pytest
from comm.sizes import LOOP_CALLS, calls_of, elements, parse_names, parse_sizes, size_text

from hpctrain.errors import UsageError


def test_sizes_are_parsed_with_their_units() -> None:
    assert parse_sizes("4,64K,1M") == [4, 65536, 1048576]
    assert parse_sizes(" 25m , 1KiB,8B, 2 G,") == [8, 1024, 26214400, 2147483648]


def test_sizes_are_sorted_and_unique() -> None:
    assert parse_sizes("1M,4,1024K") == [4, 1048576]


@pytest.mark.parametrize("text", ["x", "4,x", "-4", "0", "1.5M", "4;8", "4T", "K", "4 8"])
def test_an_invalid_size_is_named_and_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size: write sizes as in 4,64K,1M"):
        parse_sizes(text)


@pytest.mark.parametrize("text", ["", ",", " , "])
def test_an_empty_list_of_sizes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no sizes given"):
        parse_sizes(text)


def test_names_keep_their_order() -> None:
    assert parse_names("ring, auto,ring,,window ") == ["ring", "auto", "window"]
    assert parse_names("") == []


@pytest.mark.parametrize(
    "nbytes, text",
    [(4, "4 B"), (1023, "1023 B"), (65536, "64 KiB"), (65538, "64.0 KiB"), (26214400, "25 MiB"), (2**30, "1 GiB")],
)
def test_sizes_are_formatted_with_units(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


def test_formatted_sizes_are_parsed_back() -> None:
    for nbytes in (1, 8, 4096, 25 * 2**20, 3 * 2**30):
        assert parse_sizes(size_text(nbytes)) == [nbytes]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_numbers_of_elements_are_divisible_and_close_to_the_request(ranks: int, itemsize: int) -> None:
    for nbytes in (1, 4, 1000, 65536):
        numel = elements(nbytes, itemsize, ranks)
        assert numel % ranks == 0 and numel > 0
        assert nbytes - itemsize < numel * itemsize < nbytes + (ranks + 1) * itemsize


def test_small_messages_are_repeated_and_large_ones_are_sent_once() -> None:
    calls = [calls_of(nbytes) for nbytes in (4, 64 * 2**10, 2**20, 4 * 2**20, 25 * 2**20, 2**31)]
    assert calls == sorted(calls, reverse=True)
    assert calls[0] == LOOP_CALLS and calls[-2:] == [1, 1]
