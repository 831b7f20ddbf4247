"""Measurement of algorithms: on a fake clock the table is known beforehand; on real ranks all get the same table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.nodes import by_memory
from torch import Tensor

from hpctrain.comm.prepared import ALGORITHMS
from hpctrain.comm.tuning.measure import (
    DTYPES,
    MAX_CALLS,
    ROW_SECONDS,
    AlgorithmTimes,
    TensorBuffers,
    TimingCase,
    keys_of,
    layout_of,
    measure,
    rows_of_slowest,
)
from hpctrain.comm.tuning.table import RankLayout
from hpctrain.errors import CommunicationError

KEY = ("all_reduce", "host", "carried")
CPU = torch.device("cpu")


class FakeRanks:
    """Rank 0 of two equal ranks; a call of n bytes advances the fake clock by the seconds of a formula."""

    rank, size, nodes, local_size, shares_memory = 0, 2, 1, 2, False

    def __init__(self, costs: dict[str, Callable[[int], float]]) -> None:
        self.now = 0.0
        self.costs = costs
        self.calls: Counter[tuple[str, str, int]] = Counter()
        self.wrong: set[str] = set()
        self.transport = SimpleNamespace(barrier=lambda: None)

    def clock(self) -> float:
        return self.now

    def all_gather_object(self, item: Any) -> list[Any]:
        return [item, item]

    def broadcast_object(self, item: Any) -> Any:
        return item

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def _pass_time(self, operation: str, name: str, tensor: Tensor) -> None:
        if name not in self.costs:
            raise CommunicationError(f"unknown algorithm {name!r} of {operation}")
        nbytes = tensor.numel() * tensor.element_size()
        self.calls[operation, name, nbytes] += 1
        self.now += self.costs[name](nbytes)

    def all_reduce(self, tensor: Tensor, algorithm: str) -> None:
        self._pass_time("all_reduce", algorithm, tensor)
        tensor.mul_(2).add_(2 if algorithm in self.wrong else 1)  # the other rank's values are one higher

    def reduce(self, tensor: Tensor, root: int, algorithm: str) -> None:
        self._pass_time("reduce", algorithm, tensor)
        tensor.mul_(2).add_(1)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, algorithm: str) -> None:
        self._pass_time("reduce_scatter", algorithm, tensor)
        out.copy_(tensor[: out.numel()] * 2 + 1)

    def all_gather(self, out: Tensor, tensor: Tensor, algorithm: str) -> None:
        self._pass_time("all_gather", algorithm, out)
        torch.cat([tensor, tensor + 1], out=out)

    def broadcast(self, tensor: Tensor, root: int, algorithm: str) -> None:
        self._pass_time("broadcast", algorithm, tensor)


def two_lines() -> Any:
    # Equal at 5000 bytes.
    return FakeRanks({"mpi": lambda n: 1e-3 + n * 1e-6, "tree": lambda n: 5e-3 + n * 0.2e-6})


def test_the_table_follows_from_the_measured_times() -> None:
    ranks = two_lines()
    found = measure(ranks, [1024, 4096, 16384], 300.0, clock=ranks.clock)
    rules = found.table().rules
    assert set(rules) == set(keys_of(ranks, CPU)) and len(rules) == 8
    for key, steps in rules.items():
        assert steps == (((8192, "mpi"), (inf, "tree")) if "tree" in ALGORITHMS[key[0]] else ((inf, "mpi"),))
    assert found.complete and found.layout == RankLayout(2, 1, 2)
    assert found.times[KEY]["tree"][4096] == pytest.approx(5e-3 + 4096 * 0.2e-6)
    assert found.left_out[KEY, "ring"] == "unknown algorithm 'ring' of all_reduce"


def test_the_time_limit_is_kept() -> None:
    ranks = two_lines()
    said: list[float] = []
    measure(ranks, [1024, 4096, 16384], 20.0, progress=lambda seconds, what: said.append(seconds), clock=ranks.clock)
    assert 20.0 <= ranks.now < 20.2 and said == sorted(said) and said[-1] < 20.0
    undecided = [number for (operation, *_), number in ranks.calls.items() if "tree" in ALGORITHMS[operation]]
    assert min(undecided) > 25  # every size got its share of the time


def test_sizes_that_were_not_measured_have_no_entry() -> None:
    ranks = two_lines()
    ranks.costs = {"mpi": lambda n: 20.0 if n > 20_000 else 1e-3, "tree": lambda n: 1e-2}
    found = measure(ranks, [1024, 16384, 65536, 2**20], 20.0, clock=ranks.clock)
    table = found.table()
    assert not found.complete
    assert table.best(*KEY, 16384) == "mpi" and table.best(*KEY, 65536) == "tree"
    assert table.best(*KEY, 65537) is None and table.best("broadcast", "host", "carried", 65536) is None


def test_an_algorithm_with_wrong_numbers_is_never_chosen() -> None:
    ranks = two_lines()
    ranks.wrong = {"mpi"}
    ranks.costs["mpi"] = lambda n: 1e-4  # otherwise the best at every size
    found = measure(ranks, [1024, 2**21], 100.0, clock=ranks.clock)  # the larger size is not checked any more
    assert found.wrong == {(KEY, "mpi"), (("all_reduce", "host", "own"), "mpi")}
    assert found.left_out[KEY, "mpi"] == "it returned wrong values on rank 0, 1"
    assert found.table().rules[KEY] == ((inf, "tree"),)
    assert found.table().best("reduce", "host", "carried", 1024) == "mpi"


def test_a_much_slower_algorithm_is_not_measured_again() -> None:
    ranks = two_lines()
    ranks.costs["ring"] = lambda n: 0.1
    found = measure(ranks, [4096], 60.0, clock=ranks.clock)
    assert ranks.calls["all_reduce", "ring", 4096] < 50 < ranks.calls["all_reduce", "tree", 4096]
    assert found.times[KEY]["ring"][4096] == pytest.approx(0.1)


@pytest.mark.parametrize("nodes", [1, 2])
def test_hierarchical_is_a_candidate_on_several_nodes(nodes: int) -> None:
    ranks = two_lines()
    ranks.nodes, ranks.local_size = nodes, 2 // nodes
    ranks.costs["hierarchical"] = lambda n: 1e-4
    found = measure(ranks, [4096], 1.0, clock=ranks.clock)
    assert ("hierarchical" in found.times[KEY]) == (nodes == 2)
    assert found.layout == RankLayout(2, nodes, 2 // nodes)


def test_the_median_row_of_the_slowest_rank_counts() -> None:
    others = [{"mpi": [1.0, 9.0, 2.0]}, {"tree": [5.0]}]
    ranks: Any = SimpleNamespace(all_gather_object=lambda own: [own, others])
    slowest = rows_of_slowest(ranks, [{"mpi": [3.0, 1.0, 1.0]}, {"tree": [4.0]}])
    assert slowest == [{"mpi": [3.0, 9.0, 2.0]}, {"tree": [5.0]}]
    found = AlgorithmTimes(RankLayout(2, 1, 2))
    case: Any = SimpleNamespace(key=KEY, size=64, first={"mpi": 7.0, "ring": 8.0}, left_out={}, wrong=set())
    found.add(case, slowest[0])
    assert found.times[KEY] == {"mpi": {64: 3.0}, "ring": {64: 8.0}}


def test_the_keys_to_measure_depend_on_device_and_shared_memory() -> None:
    ranks = two_lines()
    assert {key[1] for key in keys_of(ranks, CPU)} == {"host"}
    ranks.shares_memory = True
    assert len(keys_of(ranks, CPU)) == 16
    assert {key[1] for key in keys_of(ranks, torch.device("cuda", 0))} == {"window", "host", "cuda"}
    assert len(set(keys_of(ranks, torch.device("cuda", 0)))) == 24


def test_one_rank_has_no_algorithm_to_choose(comm: Any) -> None:
    found = measure(comm, [4], 1.0)
    assert not found.times and not found.table().rules and found.complete


@pytest.mark.ranks(2, 4)
def test_all_ranks_measure_the_same_table(own: Any) -> None:
    seconds = 8.0 if own.size > 2 else 2.0
    found = measure(own, [4, 5000], seconds)
    while not found.complete and seconds < 30:  # a busy machine needs longer to reach the last case
        seconds *= 2
        found = measure(own, [4, 5000], seconds)
    assert own.all_gather_object(found) == [found] * own.size
    assert found.layout == layout_of(own) == RankLayout(own.size, own.nodes, own.local_size)
    assert not found.wrong
    table = found.table()
    for key in keys_of(own, CPU):
        name = table.best(*key, 4)
        assert name in found.times[key] and found.times[key][name][4] > 0
    assert "mpi" not in found.times["all_reduce", "host", "own"]
    assert by_memory(own) in found.times["all_reduce", "window", "own"]


# Cases ----------------------------------------------------------------------------------------------------------------


def ranks(size: int, rank: int = 0) -> Any:
    return SimpleNamespace(size=size, rank=rank, transport=SimpleNamespace(barrier=lambda: None))


def part(operation: str, size: int, of: int, kind: str = "carried", rank: int = 0) -> TimingCase:
    comm = ranks(of, rank)
    return TimingCase(comm, (operation, "host", kind), size, TensorBuffers(comm, "host", size, CPU))


@pytest.mark.parametrize(
    "operation, kind, size, of, whole, share",
    [
        ("all_reduce", "carried", 4, 3, 1, 0),
        ("all_reduce", "own", 4, 3, 2, 0),
        ("reduce_scatter", "carried", 4, 3, 3, 1),
        ("all_gather", "carried", 100, 7, 28, 4),
        ("reduce_scatter", "own", 4096, 4, 2048, 512),
        ("broadcast", "carried", 5, 2, 2, 1),
    ],
)
def test_sizes_become_elements_that_the_ranks_can_share(
    operation: str, kind: str, size: int, of: int, whole: int, share: int
) -> None:
    one = part(operation, size, of, kind)
    assert (one.whole.numel(), one.share.numel()) == (whole, share)
    assert one.whole.dtype == DTYPES[kind]


@pytest.mark.parametrize("of", [2, 3, 8])
@pytest.mark.parametrize("kind", DTYPES)
def test_expected_values_follow_the_definition(of: int, kind: str) -> None:
    whole = {rank: part("all_reduce", 4 * 24, of, kind, rank) for rank in range(of)}
    for one in whole.values():
        one.fill()
    summed = torch.stack([one.whole.double() for one in whole.values()]).sum(0)
    for one in whole.values():
        assert not one.is_right()  # not yet reduced
        one.whole.copy_(summed)
        assert one.is_right()
        one.whole[-1] += 1
        assert not one.is_right()
    gathering = [part("all_gather", 4 * 24, of, "carried", rank) for rank in range(of)]
    for one in gathering:
        one.fill()
    gathered = torch.cat([one.share for one in gathering])
    for one in gathering:
        one.whole.copy_(gathered)
        assert one.is_right()
    gathering[0].whole.copy_(gathered.flip(0))
    assert not gathering[0].is_right()


def test_each_rank_is_root_in_turn_and_rows_are_whole_rounds() -> None:
    roots: list[int] = []
    comm = ranks(3)
    comm.broadcast = lambda tensor, root, algorithm: roots.append(root)
    case = TimingCase(comm, ("broadcast", "host", "carried"), 64, TensorBuffers(comm, "host", 64, CPU))
    case.time_row("mpi", case.row_length(ROW_SECONDS / 4))
    assert roots == [0, 1, 2, 0, 1, 2]
    assert part("all_reduce", 64, 3).row_length(ROW_SECONDS / 4) == 4
    assert part("all_reduce", 64, 3).row_length(1.0) == 1 and case.row_length(1.0) == 3
    assert part("all_reduce", 64, 3).row_length(1e-9) == MAX_CALLS


@pytest.mark.parametrize("device", ["cuda", "host"])
def test_a_row_ends_when_the_device_has_finished(device: str) -> None:
    happened: list[str] = []
    comm = ranks(2)
    comm.all_reduce = lambda tensor, algorithm: happened.append("call")
    buffers = TensorBuffers(comm, "host", 64, CPU)
    synchronize = (lambda: happened.append("device has finished")) if device == "cuda" else None
    key = ("all_reduce", device, "carried")
    case = TimingCase(comm, key, 64, buffers, clock=lambda: float(len(happened)), synchronize=synchronize)
    assert case.time_row("nccl", 3) == (4 / 3 if device == "cuda" else 1.0)
