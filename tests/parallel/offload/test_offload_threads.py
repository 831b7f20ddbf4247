"""Threads that share items, and a worker thread with a queue of jobs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import pytest
import torch
from support.pace import scaled

from hpctrain.errors import DeadlineError, UsageError
from hpctrain.parallel.offload.threads import SliceThreads, WorkerThread


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


# A worker thread: order, errors, deadlines, forks, the end of the program ---------------------------------------------


NAME = "hpctrain-test-worker"


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_jobs_run_in_order_in_one_thread_that_starts_with_the_first() -> None:
    prepared: list[int] = []
    worker = WorkerThread(NAME, lambda: prepared.append(threading.get_ident()))
    assert not threads()
    done: list[int] = []

    def job(number: int) -> int:
        done.append(number)
        return threading.get_ident()

    handles = [worker.submit(partial(job, number)) for number in range(50)]
    idents = {handle.wait() for handle in handles}
    assert done == list(range(50)) and prepared == list(idents) and threading.get_ident() not in idents
    assert all(handle.done() for handle in handles)
    worker.close()
    assert not threads()
    assert worker.submit(lambda: 7).wait() == 7 and len(threads()) == 1
    worker.close()


def test_an_error_is_raised_in_wait_and_the_thread_continues() -> None:
    worker = WorkerThread(NAME)
    bad, good = worker.submit(lambda: 1 // 0), worker.submit(lambda: "fine")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            bad.wait()
    assert good.wait() == "fine"
    worker.close()


def test_a_hanging_job_is_abandoned_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "0.05")
    hold, worker = threading.Event(), WorkerThread(NAME)
    handle = worker.submit(hold.wait)
    with pytest.raises(DeadlineError, match=f"{NAME}: not done within 0.05 s"):
        handle.wait()
    hold.set()
    worker.close()


def test_a_dropped_worker_ends_its_thread_and_frees_pending_jobs() -> None:
    hold, begun, worker = threading.Event(), threading.Event(), WorkerThread(NAME)

    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    worker.submit(lambda thing=thing: None).wait()
    running = worker.submit(lambda: begun.set() or hold.wait())
    waits = worker.submit(lambda: None)
    begun.wait()
    del thing
    gc.collect()
    assert gone() is None
    threading.Timer(0.05, hold.set).start()
    del worker
    gc.collect()
    assert running.wait() and not threads()
    with pytest.raises(UsageError, match="closed before"):
        waits.wait()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_starts_its_own_thread() -> None:
    hold, worker = threading.Event(), WorkerThread(NAME)
    handle = worker.submit(hold.wait)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            right = worker.submit(os.getpid).wait() == os.getpid()
            try:
                handle.wait()
            except UsageError:
                code = 0 if right else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    hold.set()
    assert handle.wait()
    worker.close()


def test_a_program_exits_cleanly_during_a_job() -> None:
    program = (
        "import time, torch\n"
        "from hpctrain.parallel.offload.threads import WorkerThread\n"
        "memory, worker = torch.zeros(1 << 20), WorkerThread('busy')\n"
        "def job():\n"
        "    for _ in range(200): memory.add_(1)\n"
        "for _ in range(10_000): worker.submit(job)\n"
        "time.sleep(0.05)\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and time.monotonic() - began < scaled(30)
