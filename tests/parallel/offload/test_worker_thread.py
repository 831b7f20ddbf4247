"""Worker thread with a queue of jobs: order, errors, deadlines, forks, the end of the program."""

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
from support.pace import scaled

from hpctrain.errors import DeadlineError, UsageError
from hpctrain.parallel.offload.threads import WorkerThread

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
