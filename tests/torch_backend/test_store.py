"""Store over MPI: the same results as torch's TCPStore and HashStore, timeouts, threads, forks, the end of rank 0."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.jobs import JobStarter
from support.pace import scaled
from torch.distributed.distributed_c10d import _store_based_barrier

LONG = timedelta(seconds=40)
SHORT = timedelta(milliseconds=60)
Call = tuple[Any, ...]  # name of a method and its arguments

ranks = pytest.mark.ranks


@pytest.fixture(scope="module")
def mpi() -> Any:
    """Return the communicator of all ranks."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def store(mpi: Any) -> Iterator[Any]:
    """Return a store of all ranks."""
    from hpctrain.torch_backend.store import MpiStore

    store = MpiStore(mpi, LONG)
    yield store
    mpi.Barrier()
    store.close()


@pytest.fixture
def stores(mpi: Any) -> Iterator[list[Any]]:
    """Return one store per rank, so that each rank can use one alone."""
    from hpctrain.torch_backend.store import MpiStore

    stores = [MpiStore(mpi, LONG) for _ in range(mpi.size)]
    yield stores
    mpi.Barrier()
    for store in stores:
        store.close()


def plain_stores() -> dict[str, Any]:
    """Return torch's own stores, in this process."""
    return {"tcp": dist.TCPStore("127.0.0.1", 0, 1, True, LONG, wait_for_workers=False), "hash": dist.HashStore()}


def outcomes(store: Any, calls: Sequence[Call]) -> list[Any]:
    """Return the result, or the type of the error, of each call."""
    found = []
    for name, *arguments in calls:
        try:
            result = getattr(store, name)(*arguments)
            found.append(sorted(result) if name == "list_keys" else result)
        except (RuntimeError, TypeError) as error:
            found.append(type(error))
    return found


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + scaled(seconds)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# The same results as torch's stores -----------------------------------------------------------------------------------

PLAIN: list[Call] = [
    *[("num_keys",), ("list_keys",), ("check", []), ("check", ["a"]), ("wait", []), ("multi_get", [])],
    *[
        ("set", "a", "1"),
        ("get", "a"),
        ("set", "a", b"\x00\xff"),
        ("get", "a"),
        ("set", b"bytes", "x"),
        ("get", "bytes"),
    ],
    *[("set", "", ""), ("get", ""), ("set", "ü", "ä"), ("get", "ü"), ("set", "a\0b", bytearray(b"y")), ("get", "a\0b")],
    *[("multi_set", ["m", "n"], ["1", b"2"]), ("multi_get", ["n", "a", "m", "n"]), ("multi_set", [], [])],
    *[
        ("add", "count", 2),
        ("add", "count", -5),
        ("get", "count"),
        ("add", "count", True),
        ("set", "k", "7"),
        ("add", "k", 1),
    ],
    *[
        ("append", "text", ""),
        ("check", ("text",)),
        ("append", "text", "po"),
        ("append", "text", b"t"),
        ("get", "text"),
    ],
    *[("compare_set", "c", "x", "y"), ("check", ["c"]), ("compare_set", "c", "", "y"), ("compare_set", "c", "", "z")],
    *[("compare_set", "c", "y", "z"), ("compare_set", "c", "y", "w"), ("get", "c"), ("check", ["c", "none"])],
    *[("wait", ["a", "c"]), ("wait", ["a"], LONG), ("wait", ["a"], 1.5)],
    *[("delete_key", "a"), ("delete_key", "a"), ("check", ["a"]), ("num_keys",), ("list_keys",), ("has_extended_api",)],
]
QUEUES: list[Call] = [
    *[("queue_len", "q"), ("queue_pop", "q", False), ("queue_push", "q", "1"), ("queue_push", "q", b"\xff")],
    *[("queue_push", "q", ""), ("check", ["q"]), ("wait", ["q"]), ("num_keys",), ("list_keys",), ("delete_key", "q")],
    *[("queue_len", "q"), ("queue_pop", "q"), ("queue_pop", "q", True), ("queue_pop", "q", False), ("check", ["q"])],
    *[("append", "q", "x"), ("queue_push", "q", "y"), ("get", "q"), ("delete_key", "q"), ("queue_len", "q")],
]
BARRIERS: list[Call] = [("barrier", "b", 1), ("barrier", "b", 1), ("barrier", "c", 0), ("barrier", "d", 1, LONG)]
WRONG: list[Call] = [
    *[("set", 3, "x"), ("set", "a", 3), ("set", "a", None), ("set", "a", memoryview(b"x")), ("set", "\ud800", "x")],
    *[("get", None), ("get", ["a"]), ("check", "ab"), ("check", [1]), ("wait", "ab"), ("multi_get", b"ab")],
    *[("add", "n", 1.0), ("add", "n", "1"), ("add", "n", 2**63), ("add", "n", None), ("append", "n", 1)],
    *[("compare_set", "n", 1, "x"), ("multi_set", ["a", "b"], ["c"]), ("multi_set", ["a"], [1]), ("num_keys",)],
    *[("delete_key", 1), ("queue_push", "q", 1), ("queue_len", 1), ("barrier", "b", "1"), ("barrier", 1, 1)],
]


@ranks
@pytest.mark.parametrize("calls", [PLAIN, QUEUES, BARRIERS, WRONG], ids=["plain", "queues", "barriers", "wrong"])
def test_all_methods_return_what_tcp_store_returns(mpi: Any, stores: list[Any], calls: list[Call]) -> None:
    tcp = plain_stores()["tcp"]
    assert outcomes(stores[mpi.rank], calls) == outcomes(tcp, calls)
    # The state that they leave is the same, too.
    final: list[Call] = [("list_keys",), *(("get", key) for key in tcp.list_keys())]
    assert outcomes(stores[mpi.rank], final) == outcomes(tcp, final)


@ranks
def test_most_methods_return_what_hash_store_returns(mpi: Any, stores: list[Any]) -> None:
    assert outcomes(stores[mpi.rank], PLAIN + QUEUES) == outcomes(plain_stores()["hash"], PLAIN + QUEUES)


@ranks
def test_prefix_stores_return_what_those_of_tcp_store_return(mpi: Any, stores: list[Any]) -> None:
    ours, tcp = stores[mpi.rank], plain_stores()["tcp"]
    missing = ("list_keys", "queue_push", "queue_len", "barrier")  # barriers of 0 ranks would not end
    calls = [call for call in PLAIN + WRONG if call[0] not in missing] + [("barrier", "b", 1), ("barrier", "b", 1)]
    nested = [dist.PrefixStore("outer", dist.PrefixStore("inner", each)) for each in (ours, tcp)]
    assert outcomes(nested[0], calls) == outcomes(nested[1], calls)
    assert sorted(ours.list_keys()) == sorted(tcp.list_keys())


@ranks
@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(20))
def test_random_calls_return_what_tcp_store_returns(mpi: Any, stores: list[Any], seed: int) -> None:
    chance = random.Random(1000 * seed + mpi.rank)
    tcp, existing, calls = plain_stores()["tcp"], set[str](), []
    for _ in range(300):
        key, value = chance.choice("abcd"), bytes(chance.choices(b"01\xff", k=chance.randrange(3)))
        name = chance.choice(["set", "get", "append", "compare_set", "check", "delete_key", "num_keys", "list_keys",
                              "queue_push", "queue_pop", "queue_len", "multi_set", "multi_get", "add"])  # fmt: skip
        if name in ("get", "multi_get") and key not in existing:
            continue
        arguments: dict[str, Call] = {
            "compare_set": (key, chance.choice([b"", b"0", value]), value),
            **dict.fromkeys(["get", "delete_key", "queue_len"], (key,)),
            **dict.fromkeys(["num_keys", "list_keys"], ()),
            **{
                "check": ([key, "a"],),
                "queue_pop": (key, False),
                "multi_get": ([key, key],),
                "add": (f"n{key}", len(value)),
            },
            "multi_set": ([key, "a"], [value, b"1"]),
        }
        calls.append((name, *arguments.get(name, (key, value))))
        expected = outcomes(tcp, calls[-1:])
        assert outcomes(stores[mpi.rank], calls[-1:]) == expected, calls
        existing = set(tcp.list_keys())


# Timeouts -------------------------------------------------------------------------------------------------------------


@ranks
@pytest.mark.parametrize("prefixed", [False, True])
def test_a_timeout_names_missing_keys_and_seconds_once(mpi: Any, stores: list[Any], prefixed: bool) -> None:
    store = dist.PrefixStore("p", stores[mpi.rank]) if prefixed else stores[mpi.rank]
    store.set("there", "1")
    start = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="wait timeout after 0.06 s") as caught:
        store.wait(["there", *(f"key{number}" for number in range(1000))], SHORT)
    assert time.monotonic() - start >= SHORT.total_seconds()
    message = str(caught.value)
    assert "key0'" in message and "key2'" in message and "and others" in message
    assert "there" not in message and "key3'" not in message and len(message) < 200
    store.set_timeout(SHORT)
    calls: list[Call] = [("get", "no"), ("multi_get", ["there", "no"]), ("wait", ["no"]), ("barrier", "b", 2, SHORT)]
    assert outcomes(store, calls) == [dist.DistStoreError] * 4
    # No late reply is taken for that of another request; later requests work.
    assert outcomes(store, [("set", "no", "2"), ("get", "no"), ("get", "there")]) == [None, b"2", b"1"]
    if not prefixed:
        assert (
            outcomes(store, [("queue_pop", "q"), ("queue_push", "q", "x"), ("queue_pop", "q")])[0]
            is dist.DistStoreError
        )


@ranks
def test_the_timeout_is_that_of_prefix_stores_and_not_that_of_clones(mpi: Any, store: Any) -> None:
    assert store.timeout == LONG and dist.PrefixStore("p", store).timeout == LONG
    dist.PrefixStore("p", dist.PrefixStore("q", store)).set_timeout(SHORT)
    assert store.timeout == SHORT
    # Only C++ refers to the clone.
    clone = dist.PrefixStore("p", store).clone()
    other = store.clone()
    other.set_timeout(LONG)
    assert store.timeout == clone.timeout == SHORT
    clone.set(f"{mpi.rank}", "1")
    assert other.get(f"p/{mpi.rank}") == b"1"
    with pytest.raises(dist.DistStoreError, match="0.06 s, keys: 'p/none'"):
        clone.get("none")


@ranks
def test_a_rank_that_does_not_come_to_a_barrier_is_an_error_on_the_others(mpi: Any, store: Any) -> None:
    _store_based_barrier(mpi.rank, store, "all", mpi.size, LONG)
    if mpi.rank != mpi.size - 1:
        with pytest.raises(dist.DistStoreError, match="barrier: wait timeout after 0.06 s, keys: 'b'"):
            store.barrier("b", mpi.size, SHORT)
    mpi.Barrier()
    if mpi.rank == mpi.size - 1:
        store.barrier("b", mpi.size, SHORT)  # those who gave up have been counted


# Several threads and ranks --------------------------------------------------------------------------------------------


@ranks
def test_threads_of_all_ranks_get_their_own_replies(mpi: Any, store: Any) -> None:
    threads, rounds, failures = 6, 60, []

    def work(number: int) -> None:
        me, peer = f"{mpi.rank}.{number}", f"{(mpi.rank + 1) % mpi.size}.{(number + 1) % threads}"
        try:
            for step in range(rounds):
                store.set(f"{me}/{step}", f"{me} in {step}")
                assert store.get(f"{peer}/{step}") == f"{peer} in {step}".encode()
                store.add("sum", number)
                if step % 10 == 0:
                    with pytest.raises(dist.DistStoreError, match=f"'never {me}'"):
                        store.wait([f"never {me}"], timedelta(milliseconds=step / 10))
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=[number]) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    mpi.Barrier()
    assert store.add("sum", 0) == mpi.size * rounds * sum(range(threads))


@ranks
def test_concurrent_changes_by_all_ranks_take_place_one_after_the_other(mpi: Any, store: Any) -> None:
    mine = []
    for step in range(100):
        store.append("letters", chr(97 + mpi.rank))
        store.queue_push("queue", f"{mpi.rank} {step}")
        mine.append(store.queue_pop("queue").decode())
        while (
            store.compare_set("lock", "free" if step or store.check(["lock"]) else "", f"{mpi.rank}")
            != b"%d" % mpi.rank
        ):
            pass
        inside = int(store.get("inside") if store.check(["inside"]) else 0)
        store.set("inside", str(inside + 1))
        store.set("lock", "free")
    popped = [each for one in mpi.allgather(mine) for each in one]
    assert sorted(popped) == sorted(f"{rank} {step}" for rank in range(mpi.size) for step in range(100))
    letters = store.get("letters").decode()
    assert all(letters.count(chr(97 + rank)) == 100 for rank in range(mpi.size)) and len(letters) == 100 * mpi.size
    assert store.get("inside") == b"%d" % (100 * mpi.size) and store.queue_len("queue") == 0


@ranks
def test_waiting_pops_get_one_value_each(mpi: Any, store: Any) -> None:
    if mpi.rank:
        value = store.queue_pop("q")
        assert mpi.gather(value) is None
    else:
        for rank in range(1, mpi.size):
            store.queue_push("q", f"{rank}")
        assert sorted(mpi.gather(b"")[1:]) == [b"%d" % rank for rank in range(1, mpi.size)]


@ranks
def test_gloo_meets_through_the_store(mpi: Any, store: Any) -> None:
    group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), mpi.rank, mpi.size, LONG)
    tensor = torch.full((5,), float(mpi.rank))
    group.allreduce([tensor]).wait()
    assert torch.equal(tensor, torch.full((5,), float(sum(range(mpi.size)))))


# Messages -------------------------------------------------------------------------------------------------------------


@ranks
def test_each_request_is_one_message_and_one_reply(mpi: Any) -> None:
    from mpi4py import MPI

    from hpctrain.torch_backend.store import MpiStore

    class Counting(MPI.Intracomm):
        sent = 0

        def Isend(self, *arguments: Any, **options: Any) -> Any:
            Counting.sent += 1
            return super().Isend(*arguments, **options)

    store = MpiStore(Counting(mpi), LONG)
    calls = [call for call in PLAIN + QUEUES + BARRIERS if call[0] != "has_extended_api"]
    calls += [("multi_set", list("abcdefgh"), ["x"] * 8), ("multi_get", list("abcdefgh")), ("wait", ["none"], SHORT)]
    calls += [("wait", [f"late {mpi.rank}"])]
    late = threading.Timer(0.1, lambda: store.set(f"late {mpi.rank}", ""))
    for rank in range(1, mpi.size):  # one rank at a time, so that no pop of a queue takes the value of another rank
        if mpi.rank == rank:
            late.start()
            outcomes(store, calls)
            late.join()
        mpi.Barrier()
    sent = mpi.allgather(Counting.sent)
    store.close()
    requests = len(calls) + 1
    assert sent == [(mpi.size - 1) * requests, *[requests] * (mpi.size - 1)]


@ranks
@pytest.mark.limit(180)
@pytest.mark.parametrize("size", [0, 1, 4096, 2**17, 2**24, pytest.param(2**26, marks=pytest.mark.long)])
def test_values_of_all_sizes_arrive(mpi: Any, store: Any, size: int) -> None:
    value = random.Random(size).randbytes(size)
    if mpi.rank == mpi.size - 1:
        store.set("a", value)
        store.append("b", value)
        store.append("b", b"end")
    assert store.get("a") == value
    store.wait(["b"])
    mpi.Barrier()
    assert store.multi_get(["b", "a"]) == [value + b"end", value]
    mpi.Barrier()
    if mpi.rank == 0:
        store.set("c", value)
    assert store.get("c") == value


@ranks
def test_values_that_no_message_holds_are_refused(mpi: Any, store: Any) -> None:
    half = bytes(2**30)
    with pytest.raises(ValueError, match="2,147,483,648 bytes; at most 2,146,435,072 are possible"):
        store.multi_set(["a", "b"], [half, half])
    assert not store.check(["a"])


@ranks
def test_replies_that_no_message_holds_are_refused() -> None:
    from hpctrain.torch_backend.key_server import OK, REFUSED, KeyRequest, KeyTable

    table, replies = KeyTable(message_bytes=10), list[Any]()

    def ask(operation: str, *arguments: Any) -> Any:
        table.request(KeyRequest(operation, arguments, time.monotonic() + 40, replies.append))
        return replies.pop()

    assert ask("set", ["a", "b"], [b"12345678", b"12345678"]) == (OK, None)
    assert ask("append", "a", b"90") == (OK, None)
    status, text = ask("append", "a", b"1")
    assert status == REFUSED and "11 bytes" in text and "(10)" in text
    assert ask("multi_get", ["a", "b"])[0] == REFUSED and ask("multi_get", ["a"]) == (OK, [b"1234567890"])


@ranks
@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (("set", 3, "x"), TypeError, "key of a store: 3; it must be str"),
        (("check", "ab"), TypeError, "keys of a store: 'ab'; they must be a list of str"),
        (("set", "a", 3), TypeError, "value of a store: int; it must be str or bytes"),
        (("add", "a", 2**63), TypeError, "at most 64 bits"),
        (("add", "text", 1), dist.DistStoreError, "add 'text': .*no whole number: b'abc'"),
        (("barrier", "text", 1), dist.DistStoreError, "barrier 'text': .*no whole number"),
        (("add", "most", 1), dist.DistStoreError, "add 'most': the sum has more than 64 bits"),
        (("multi_set", ["a"], []), dist.DistStoreError, "multi_set: 1 keys, but 0 values; give one per key"),
    ],
)
def test_wrong_calls_have_one_clear_error(store: Any, call: Call, kind: type[Exception], message: str) -> None:
    store.multi_set(["text", "most"], ["abc", str(2**63 - 1)])
    name, *arguments = call
    with pytest.raises(kind, match=message):
        getattr(store, name)(*arguments)
    assert store.get("text") == b"abc"


# Forks, the end of rank 0, the cost of waiting ------------------------------------------------------------------------


class Asking(torch.utils.data.Dataset[int]):
    """Data set that asks the store in a worker."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return int(self.store.get("a"))


@ranks
def test_a_forked_worker_gets_an_error_and_leaves_the_store_intact(mpi: Any, store: Any) -> None:
    store.set("a", "1")
    loader = torch.utils.data.DataLoader(Asking(store), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(
        dist.DistStoreError, match=f"get.*belongs to process {os.getpid()}.*ask the store before the fork"
    ) as caught:
        list(loader)
    # Frees the iterator now: if the garbage collector finds it later, torch waits 5 s for its worker.
    caught.value.__traceback__ = None
    child = os.fork()
    if child == 0:
        store.close()  # as at the exit of the child
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    store.add("sum", 1)
    mpi.Barrier()
    assert store.add("sum", 0) == mpi.size


def store_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "hpctrain store"}


@ranks
def test_ranks_that_wait_hear_of_the_end_of_rank_0(mpi: Any) -> None:
    from hpctrain.torch_backend.store import MpiStore

    before = store_threads()  # of process groups of other tests
    store, other = MpiStore(mpi, LONG), MpiStore(mpi, LONG)
    if mpi.rank == 0:
        until(lambda: store.add("waiting", 0) == mpi.size - 1)
        store.close()
        with pytest.raises(dist.DistStoreError, match="this rank has closed the store; make a new one"):
            store.get("a")
    else:
        store.add("waiting", 1)
        started = time.monotonic()
        with pytest.raises(dist.DistNetworkError, match="wait 'never': rank 0, which keeps the store, has closed it"):
            store.wait(["never"])
        for _ in range(3):
            with pytest.raises(dist.DistNetworkError, match="let rank 0 end last"):
                store.set("a", bytes(2**20))
        assert time.monotonic() - started < LONG.total_seconds() / 2
    mpi.Barrier()
    other.set(f"{mpi.rank}", "1")
    other.wait([f"{rank}" for rank in range(mpi.size)])
    mpi.Barrier()
    other.close()
    assert store_threads() <= before


PROGRAM = """
import datetime, sys, time
import torch.distributed as dist
from mpi4py import MPI
from hpctrain.torch_backend import key_server, store

key_server.LEAVE_SECONDS = store.LEAVE_SECONDS = {leave}
keys = store.MpiStore(MPI.COMM_WORLD, datetime.timedelta(seconds=300))
keys.set("there", "1")
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 0:
    sys.exit()
begin = time.monotonic()
{body}
"""


@pytest.mark.limit(240)
def test_the_exit_of_rank_0_ends_waits_but_answers_what_it_can(launch: JobStarter) -> None:
    body = """
try:
    keys.wait(["never"])
except dist.DistNetworkError as error:
    sys.stdout.write(f"{error}\\n")  # in one piece
keys.wait(["there"])
sys.stdout.write(f"{keys.get('there')} {keys.add('there', 1)}\\n")
assert time.monotonic() - begin < 100
"""
    job = launch(3, PROGRAM.format(leave=20.0, body=body))
    assert job.returncode == 0, job.stderr
    ended = "wait 'never': rank 0, which keeps the store, has closed it or ended"
    assert job.stdout.count(ended) == 2 and job.stdout.count("b'1' 2") == 1, job.stdout
    assert job.seconds < scaled(40)


@pytest.mark.limit(240)
def test_requests_long_after_the_exit_of_rank_0_are_errors(launch: JobStarter) -> None:
    body = """
while True:
    try:
        keys.set("large", bytes(2**22))
    except dist.DistNetworkError as error:
        print(error)
        break
"""
    job = launch(2, PROGRAM.format(leave=0.05, body=body))
    assert job.returncode == 0, job.stderr
    assert "set 'large': rank 0, which keeps the store, has closed it or ended; let rank 0 end last" in job.stdout


@ranks
def test_an_idle_store_uses_little_of_a_core(mpi: Any, store: Any) -> None:
    """0.8 % on two cores that ten other processes use, of which the pauses alone take 0.6."""
    threads = [each for each in threading.enumerate() if each.name == "hpctrain store"]
    thread = threads[-1] if mpi.rank == 0 else None  # process groups of other tests have an older one
    share = 0.0
    mpi.Barrier()
    if thread is not None:
        clock = time.pthread_getcpuclockid(thread.ident)
        start, used = time.monotonic(), time.clock_gettime(clock)
        until(lambda: time.monotonic() - start > 1)
        share = (time.clock_gettime(clock) - used) / (time.monotonic() - start)
    mpi.Barrier()
    assert share < 0.05  # a thread that does not pause takes a whole core
