"""Meetings of ranks: no rank passes before the last, few messages, and the missing ranks are named."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from typing import Any

import pytest

from hpctrain.comm.transport.meeting import Barrier, meet, meeting_tag
from hpctrain.errors import DeadlineError

TAG = 7


class Network:
    """Mailboxes of all ranks, in memory; counts the messages that each rank has sent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.boxes: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.sent: dict[int, int] = defaultdict(int)


class Post:
    """Messenger of one rank."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank

    def Get_rank(self) -> int:
        return self._rank

    def send(self, rank: int, tag: int) -> None:
        with self._network.lock:
            self._network.boxes[rank, tag].append(self._rank)
            self._network.sent[self._rank] += 1

    def received(self, rank: int | None, tag: int) -> int | None:
        with self._network.lock:
            box = self._network.boxes[self._rank, tag]
            found = next((one for one in box if rank in (None, one)), None)
            if found is not None:
                box.remove(found)
            return found


@pytest.mark.parametrize("size", range(1, 18))
def test_no_rank_passes_before_the_last_has_come(size: int) -> None:
    network = Network()
    ranks = [3 * rank for rank in range(size)]  # members of a larger world
    last = size // 2
    early = [Barrier(Post(network, rank), ranks, TAG) for index, rank in enumerate(ranks) if index != last]
    for _ in range(2 * size):
        assert not any([barrier.done() for barrier in early])
    barriers = [*early, Barrier(Post(network, ranks[last]), ranks, TAG)]
    for _ in range(2 * size):
        done = [barrier.done() for barrier in barriers]
    assert all(done)
    assert set(network.sent.values()) in ({math.ceil(math.log2(size))}, set())
    assert not any(network.boxes.values())


def met(network: Network, ranks: list[int], present: list[int], seconds: float = 0.1) -> dict[int, str]:
    """Let some ranks meet, each in its thread; return the message of each one's error."""
    errors: dict[int, str] = {}

    def come(rank: int) -> None:
        try:
            meet(Post(network, rank), ranks, TAG, seconds, "new_group")
        except DeadlineError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_ranks_that_all_come_pass() -> None:
    network = Network()
    assert met(network, [0, 2, 5, 6], [6, 5, 2, 0], seconds=20) == {}
    assert set(network.sent.values()) == {2}


@pytest.mark.parametrize(
    ("present", "missing"),
    [([0, 2, 3, 4], "rank 1 has"), ([0], "ranks 1, 2, 3, 4 have"), ([1, 3], "ranks 0, 2, 4 have")],
)
def test_every_rank_names_the_missing_ones(present: list[int], missing: str) -> None:
    errors = met(Network(), [0, 1, 2, 3, 4], present)
    assert errors.keys() == set(present)
    for text in errors.values():
        assert text.startswith(f"new_group: {missing} not called it within 0.1 s"), errors


def test_a_long_list_of_missing_ranks_is_cut() -> None:
    text = met(Network(), list(range(20)), [19])[19]
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 11 more have not" in text


def test_a_later_meeting_does_not_take_messages_of_a_failed_one() -> None:
    network: Any = Network()
    assert len(met(network, [0, 1, 2], [0, 1])) == 2
    again = [Barrier(Post(network, rank), [0, 1, 2], TAG + 1) for rank in (0, 1)]
    assert not any(barrier.done() for barrier in [*again, *again])


def test_tags_depend_on_members_and_number() -> None:
    tags = [meeting_tag(ranks, number) for ranks in ([0, 1], [0, 2], [1, 0], range(4)) for number in (1, 2)]
    assert len(set(tags)) == len(tags) and meeting_tag((0, 1), 1) == tags[0]
