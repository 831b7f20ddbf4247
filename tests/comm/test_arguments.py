"""Arguments of operations: each is checked before anything is sent, and only invalid ones are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hpctrain.comm.dispatch import USER_TAGS, ArgumentChecks, check_contiguous
from hpctrain.comm.transport.base import TAGS
from hpctrain.errors import CommunicationError

THIRD = ArgumentChecks(rank=2, size=4)
TWO, EIGHT = torch.zeros(2), torch.zeros(8)


@pytest.mark.parametrize(
    "check, message",
    [
        (lambda: THIRD.check_root(4), r"rank 4 is not in 0\.\.3"),
        (lambda: THIRD.check_root(-1), r"rank -1 is not in 0\.\.3"),
        (lambda: THIRD.check_tag(USER_TAGS), rf"tag {USER_TAGS} is not in 0\.\.{USER_TAGS - 1}"),
        (lambda: THIRD.check_tag(-1), "tag -1 is not in"),
        (lambda: THIRD.check_shares(EIGHT, TWO), "2 elements of torch.float32 are not 4 shares of 8 elements"),
        (lambda: THIRD.check_shares(TWO.long(), EIGHT), "not 4 shares of 2 elements of torch.int64"),
        (lambda: THIRD.check_exchanged(EIGHT, TWO), "all_to_all of 2 elements of torch.float32 into 8"),
        (lambda: THIRD.check_exchanged(TWO, TWO), "expected equal tensors that 4 ranks can share"),
        (lambda: THIRD.check_exchanged(EIGHT, EIGHT.int()), "of torch.int32 into 8 of torch.float32"),
        (lambda: THIRD.only_on(4, None, "out", TWO), r"rank 4 is not in 0\.\.3"),
        (lambda: THIRD.only_on(2, None, "out", TWO), "the root, rank 2, needs out: 4 shares of 2 elements"),
        (lambda: THIRD.only_on(2, TWO, "out", TWO), "2 elements of torch.float32 are not 4 shares"),
        (lambda: check_contiguous(torch.zeros(3, 2).t()), r"irecv wants a contiguous tensor, not strides \(1, 2\)"),
    ],
)
def test_invalid_arguments_are_refused(check: Callable[[], object], message: str) -> None:
    with pytest.raises(CommunicationError, match=message):
        check()


def test_valid_arguments_are_not_refused() -> None:
    for root in range(4):
        THIRD.check_root(root)
    for tag in (0, USER_TAGS - 1):
        THIRD.check_tag(tag)
    THIRD.check_shares(TWO, EIGHT)
    THIRD.check_exchanged(EIGHT, EIGHT)
    check_contiguous(torch.zeros(3, 2))


def test_only_the_root_passes_the_whole_tensor() -> None:
    assert THIRD.only_on(2, EIGHT, "out", TWO) is EIGHT
    assert THIRD.only_on(1, None, "out", TWO) is None and THIRD.only_on(1, TWO, "out", TWO) is None


def test_the_highest_tags_are_reserved_for_collectives() -> None:
    from hpctrain.comm.algorithms.base import TAG

    assert USER_TAGS <= TAG < TAGS
