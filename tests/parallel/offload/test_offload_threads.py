"""Threads that share items: each item once, each thread alone, errors raised when all are done."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from hpctrain.parallel.offload.threads import SliceThreads


def test_every_item_is_done_once_by_single_threaded_workers() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        done: list[tuple[int, str, int]] = []

        def do(item: int) -> None:
            torch.zeros(100_000).add_(1)
            done.append((item, threading.current_thread().name, torch.get_num_threads()))
            time.sleep(0.001)

        SliceThreads(3).each(do, range(60))
        assert sorted(item for item, _, _ in done) == list(range(60))
        assert {name for _, name, _ in done} == {f"hpctrain-slices-{number}" for number in range(3)}
        assert {threads for _, _, threads in done} == {1}
        assert torch.get_num_threads() == 2  # the number of threads is unchanged here and in later threads
        others: list[int] = []
        thread = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert others == [2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count, items", [(1, 5), (3, 1), (3, 0)])
def test_a_single_worker_needs_no_thread(count: int, items: int) -> None:
    done: list[int] = []
    pool = SliceThreads(count)
    pool.each(lambda item: done.append(threading.get_ident()), range(items))
    assert done == [threading.get_ident()] * items


def test_an_error_is_raised_after_all_threads_have_finished() -> None:
    working: set[int] = set()

    def do(item: int) -> None:
        if item == 1:
            raise ValueError("one")
        working.add(item)
        time.sleep(0.05)
        working.remove(item)

    pool = SliceThreads(2)
    with pytest.raises(ValueError, match="one"):
        pool.each(do, range(1000))
    assert not working
    done: list[int] = []
    pool.each(done.append, range(10))
    assert sorted(done) == list(range(10))
