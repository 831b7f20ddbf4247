"""Candidates of the communication benchmarks: hpctrain and torch.distributed; and their checks.

The reference of a result is computed by NumPy without messages. Values are small integers, so that
every dtype represents their sum exactly, and results can be compared bit by bit. Each rank's values
repeat with a prime period, so that a block in the wrong place is detected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness.ranks import OnRanks
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import CommunicationError


class Name(StrEnum):
    """Candidates; those of hpctrain with an algorithm or another dtype have names of their own."""

    OURS = "hpctrain"
    OUTSIDE = "hpctrain outside"  # tensors that are not allocated by comm.empty
    COMMON = "hpctrain common"  # shares within one tensor of comm.common
    LIBRARY = "mpi"
    MESSAGES = "mpi 16 MiB"
    GLOO = "gloo"
    NCCL = "torch nccl"
    COPY = "copy"  # of a tensor of the same size, on every rank: the streaming rate


PEERS = (Name.LIBRARY, Name.MESSAGES, Name.GLOO, Name.NCCL)
ORDER = (*PEERS, Name.COPY)
GLOO_EVERY = 4  # one of so many rounds: it takes ten times as long as the others together
LOOP_BYTES = 8 * 2**20  # target of bytes per repeat; the number of calls is at least 1 and at most LOOP_CALLS
LOOP_CALLS = 200
STREAM_SIZE = 64 * 2**20  # far more than caches hold: a copy of that size shows the memory bandwidth


@dataclass
class Setting(OnRanks):
    """Ranks, device, dtype and algorithms of a benchmark; ``world`` is mpi4py's communicator."""

    comm: Communicator
    device: torch.device
    dtype: torch.dtype
    algorithms: list[str] = field(default_factory=lambda: ["auto"])
    chosen: bool = False  # the user named the algorithms, so one that cannot take part is an error
    _shared: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)

    def plain(self, numel: int) -> Tensor:
        """Return a private tensor of zeros on the device."""
        return torch.zeros(numel, dtype=self.dtype, device=self.device)

    def common(self, numel: int) -> Tensor:
        """Return a tensor that all ranks of a node share; larger sizes must come first. Collective."""
        return self._begin_of("common", numel, self.dtype, self.comm.common)

    def shared(self, owner: str, numel: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of zeros from ``comm.empty``. Collective.

        That memory lives as long as the communicator. Therefore an owner gets the beginning of its
        earlier tensor, and larger sizes must come first.
        """
        return self._begin_of(owner, numel, dtype or self.dtype, self.comm.empty).zero_()

    def _begin_of(self, owner: str, numel: int, dtype: torch.dtype, make: Callable[..., Tensor]) -> Tensor:
        key = owner, dtype
        if key not in self._shared or self._shared[key].numel() < numel:
            self._shared[key] = make(numel, dtype)
        return self._shared[key][:numel]


# Operations -----------------------------------------------------------------------------------------------------------


PERIOD = 8191
LARGEST = 127  # of a sum: integers up to 256 are exact in bfloat16, up to 127 in every dtype

ROOT = 0


@dataclass(frozen=True)
class Operation:
    """Operation: initial values of the first tensor and the expected result, by (rank, ranks, elements of the first).

    ``second`` is the size of the second tensor, by (elements of the first, ranks).
    """

    name: str
    start: Callable[[int, int, int], Tensor]
    end: Callable[[int, int, int], Tensor]
    second: Callable[[int, int], int] = lambda numel, ranks: 0
    shared: bool = False  # the ranks have equal shares of the first tensor


def share(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Return a rank's equal share of a flat tensor."""
    each = whole.numel() // ranks
    return whole[rank * each : (rank + 1) * each]


def values(rank: int, ranks: int, numel: int) -> Tensor:
    """Return the input of a rank."""
    return _repeat(_period(rank, ranks), numel)


def total(ranks: int, numel: int) -> Tensor:
    """Return the elementwise sum of all ranks' inputs."""
    return _repeat(np.sum([_period(rank, ranks) for rank in range(ranks)], axis=0), numel)


def _period(rank: int, ranks: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.random.default_rng(rank).integers(0, max(LARGEST // ranks, 1) + 1, PERIOD, dtype=np.int64)


def _repeat(period: np.ndarray[tuple[int, ...], np.dtype[np.int64]], numel: int) -> Tensor:
    return torch.from_numpy(np.resize(period.astype(np.uint8), numel))


def _nothing(numel: int) -> Tensor:
    return torch.full((numel,), 255, dtype=torch.uint8)  # larger than all values and sums


def _own_share(rank: int, ranks: int, numel: int) -> Tensor:
    whole = _nothing(numel)
    share(whole, rank, ranks).copy_(share(values(rank, ranks, numel), rank, ranks))
    return whole


def _gathered(rank: int, ranks: int, numel: int) -> Tensor:
    return torch.cat([share(values(one, ranks, numel), one, ranks) for one in range(ranks)])


def _only_root(rank: int, ranks: int, numel: int) -> Tensor:
    return _of_root(rank, ranks, numel) if rank == ROOT else _nothing(numel)


def _of_root(rank: int, ranks: int, numel: int) -> Tensor:
    return values(ROOT, ranks, numel)


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", values, lambda rank, ranks, numel: total(ranks, numel)),
        Operation(
            "reduce_scatter",
            values,
            lambda rank, ranks, numel: share(total(ranks, numel), rank, ranks),
            second=lambda numel, ranks: numel // ranks,
            shared=True,
        ),
        Operation("all_gather", _own_share, _gathered, shared=True),
        Operation("broadcast", _only_root, _of_root),
        # Rank 1 returns the message, and rank 0 receives it in its second tensor.
        Operation("pingpong", _only_root, _of_root, second=lambda numel, ranks: numel),
    )
}


def elements(nbytes: int, itemsize: int, ranks: int) -> int:
    """Return the number of elements of a tensor of about ``nbytes`` bytes, rounded up to equal shares of the ranks."""
    return -(-max(nbytes // itemsize, 1) // ranks) * ranks


def calls_of(nbytes: int) -> int:
    """Return the number of consecutive calls in one repeat.

    Small messages need many calls, or the clock and the barrier would dominate. A call on a large
    message takes long enough to be timed alone.
    """
    return max(1, min(LOOP_CALLS, LOOP_BYTES // nbytes))


# Candidates and their checks ------------------------------------------------------------------------------------------


Call = Callable[[], object]

LOST = 99  # value that no rank has written


@dataclass
class Candidate:
    """Implementation of an operation; ``tensors`` are its inputs and outputs, ``result`` is a part of them."""

    name: str
    call: Call
    tensors: Sequence[Tensor]
    result: Tensor
    every: int = 1  # rounds per turn: slow candidates take fewer turns
    needed: bool = False  # an error in it ends the benchmark
    own: slice = field(default_factory=lambda: slice(None))  # part of the first tensor that only this rank writes

    @property
    def nbytes(self) -> int:
        return self.tensors[0].numel() * self.tensors[0].element_size()


def check(setting: Setting, operation: Operation, candidate: Candidate) -> str:
    """Run a candidate once on known values; return why it cannot take part, empty if it can.

    Raises ``CommunicationError`` on all ranks if a result is wrong, or if a needed candidate fails.
    """
    numel = candidate.tensors[0].numel()
    own = [candidate.tensors[0][candidate.own], *candidate.tensors[1:]]
    for tensor in own:
        tensor.fill_(LOST)
    own[0].copy_(operation.start(setting.rank, setting.size, numel)[candidate.own])
    synchronize(setting)
    setting.world.Barrier()
    try:
        candidate.call()
        synchronize(setting)
        problem = None
    except (RuntimeError, NotImplementedError, ValueError) as error:
        problem = str(error).splitlines()[0]
    expected = operation.end(setting.rank, setting.size, numel).to(setting.device, candidate.result.dtype)
    reports = setting.comm.all_gather_object((problem, torch.equal(candidate.result, expected)))
    for tensor in own:
        tensor.zero_()
    problems = [f"{why} (rank {rank})" for rank, (why, _) in enumerate(reports) if why]
    wrong = [str(rank) for rank, (_, right) in enumerate(reports) if not right]
    if problems and candidate.needed:
        raise CommunicationError(f"{candidate.name} cannot do {operation.name}: {problems[0]}", everywhere=True)
    if wrong and not problems:
        raise CommunicationError(
            f"wrong result: {operation.name} of {numel} elements of {candidate.result.dtype} by {candidate.name} "
            f"differs from the reference on rank {', '.join(wrong)}",
            everywhere=True,
        )
    return problems[0] if problems else ""


def result_of(setting: Setting, operation: Operation, tensors: Sequence[Tensor], scattered: Tensor) -> Tensor:
    """Return the tensor of the result; that of a reduce_scatter is ``scattered``."""
    if operation.name == "reduce_scatter":
        return scattered
    return tensors[operation.name == "pingpong" and setting.rank == ROOT]


def synchronize(setting: Setting) -> None:
    if setting.device.type == "cuda":
        torch.cuda.synchronize(setting.device)


def time_calls(setting: Setting, call: Call, calls: int) -> float:
    """Return the seconds per call on this rank, over ``calls`` calls after a barrier. Collective."""
    numbers = range(calls)
    setting.world.Barrier()
    started = time.perf_counter()
    for _ in numbers:
        call()
    synchronize(setting)
    return (time.perf_counter() - started) / calls


# hpctrain -------------------------------------------------------------------------------------------------------------


def own_candidates(setting: Setting, operation: Operation, numel: int) -> Iterator[Candidate]:
    """Yield hpctrain's candidates. Collective."""
    second = operation.second(numel, setting.size)
    if setting.device.type == "cuda":
        paths = setting.algorithms if setting.chosen else ["auto", "nccl", "mpi", "staged"]
        for path in ["auto"] if operation.name == "pingpong" else paths:
            tensors = [setting.plain(numel), setting.plain(second)]
            yield _candidate(setting, operation, _named(path), tensors, path, needed=setting.chosen or path == "auto")
        return
    for algorithm in setting.algorithms:
        name, needed = _named(algorithm), setting.chosen or algorithm == "auto"
        tensors = [setting.shared(f"{name} {which}", count) for which, count in enumerate((numel, second))]
        yield _candidate(setting, operation, name, tensors, algorithm, needed=needed)
    if operation.name == "all_gather":
        whole, each = setting.common(numel), numel // setting.size
        call = _own_call("all_gather", setting.comm, whole, whole, "auto")
        own = slice(setting.rank * each, (setting.rank + 1) * each)
        yield Candidate(Name.COMMON, call, [whole], whole, needed=True, own=own)
    yield _candidate(
        setting, operation, Name.OUTSIDE, [setting.plain(numel), setting.plain(second)], "auto", needed=True
    )
    if operation.name == "all_reduce" and setting.dtype in (torch.float32, torch.bfloat16):
        twin = twin_of(setting.dtype)
        tensors = [setting.shared("twin", numel, twin), setting.shared("twin 1", second, twin)]
        yield _candidate(setting, operation, twin_name(setting.dtype), tensors, "auto")


def _named(algorithm: str) -> str:
    return Name.OURS if algorithm == "auto" else f"{Name.OURS} {algorithm}"


def twin_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype whose reduction of equally many elements is measured for comparison."""
    return torch.float32 if dtype == torch.bfloat16 else torch.bfloat16


def twin_name(dtype: torch.dtype) -> str:
    return f"{Name.OURS} {str(twin_of(dtype)).removeprefix('torch.')}"


def _candidate(
    setting: Setting, operation: Operation, name: str, tensors: list[Tensor], algorithm: str, *, needed: bool = False
) -> Candidate:
    first, second = tensors
    call = _own_call(operation.name, setting.comm, first, second, algorithm)
    result = result_of(setting, operation, tensors, share(first, setting.rank, setting.size))
    return Candidate(name, call, tensors, result, needed=needed)


def _own_call(name: str, comm: Communicator, first: Tensor, second: Tensor, algorithm: str) -> Call:
    if name == "pingpong":
        return _pingpong(comm.rank, comm.send, comm.recv, first, second)
    own = share(first, comm.rank, comm.size)
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (first, "sum"),
        "reduce_scatter": (own, first, "sum"),
        "all_gather": (first, own),
        "broadcast": (first, ROOT),
    }
    return partial(getattr(comm, name), *arguments[name], algorithm=algorithm)


def _pingpong(
    rank: int, send: Callable[..., object], recv: Callable[..., object], first: Tensor, second: Tensor
) -> Call:
    """Return a message to the other rank and back; rank 0 receives it in its second tensor."""
    other = 1 - rank

    def ping() -> None:
        send(first, other)
        recv(second, other)

    def pong() -> None:
        recv(first, other)
        send(first, other)

    return ping if rank == ROOT else pong


# torch.distributed: gloo on the host, NCCL on GPUs --------------------------------------------------------------------


def torch_candidates(setting: Setting, operation: Operation, numel: int) -> Iterator[Candidate]:
    tensors = [setting.plain(numel), setting.plain(operation.second(numel, setting.size))]
    name, every = (Name.NCCL, 1) if setting.device.type == "cuda" else (Name.GLOO, GLOO_EVERY)
    result = result_of(setting, operation, tensors, tensors[1])
    yield Candidate(name, _torch_call(operation.name, setting, *tensors), tensors, result, every)


def _torch_call(name: str, setting: Setting, first: Tensor, second: Tensor) -> Call:
    if name == "pingpong":
        return _pingpong(setting.rank, dist.send, dist.recv, first, second)
    if name == "reduce_scatter":  # PyTorch 2.13 renamed this and the next one
        return partial(getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor, second, first)
    if name == "all_gather":
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return partial(call, first, share(first, setting.rank, setting.size))
    return partial(dist.all_reduce, first) if name == "all_reduce" else partial(dist.broadcast, first, ROOT)
