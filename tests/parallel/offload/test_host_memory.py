"""Host memory and its backing files: allocation, refusals, cleanup; optimizer states in such memory."""

from __future__ import annotations

import copy
import fcntl
import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import SmallDisk
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.parallel.offload.memory import HostMemory, PlacedStates

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KIB = 1024


def host(
    folder: Path | None = None, chunk: int = 64 * KIB, rank: int = 0, device: torch.device = CPU, **pin: Any
) -> HostMemory:
    return HostMemory(OffloadSettings(optimizer=True, disk=str(folder or "")), device, rank, chunk, **pin)


@pytest.mark.parametrize("on_disk", [False, True])
def test_tensors_are_aligned_to_cache_lines_and_do_not_overlap(on_disk: bool, tmp_path: Path) -> None:
    memory = host(tmp_path if on_disk else None)
    sizes = [1, 17, 1000, 40_000, 5, 16_000]
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    given = [memory.empty(size, dtypes[number % 3]) for number, size in enumerate(sizes)]
    for number, tensor in enumerate(given):
        assert (tensor.numel(), tensor.dtype) == (sizes[number], dtypes[number % 3])
        assert tensor.data_ptr() % 64 == 0 and tensor.is_contiguous()
        tensor.fill_(number + 1)
    assert all(bool((tensor == number + 1).all()) for number, tensor in enumerate(given))
    assert memory.empty(0, torch.float32).numel() == 0
    wanted = sum(tensor.nbytes for tensor in given)
    assert wanted <= memory.nbytes <= wanted + 3 * 64 * KIB


def test_reserved_memory_is_allocated_at_once_and_used_afterwards() -> None:
    memory = host()
    memory.reserve(1000 * KIB)
    assert memory.nbytes == 1000 * KIB
    first, second = memory.empty(100 * KIB, torch.float32), memory.empty(150 * KIB, torch.float32)
    assert memory.nbytes == 1000 * KIB
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_a_file_reserves_its_space_is_unlinked_and_freed_with_its_memory(tmp_path: Path) -> None:
    tmp_path = tmp_path / "disk"
    disk = SmallDisk(tmp_path)
    why = "that takes root" if os.geteuid() else disk.mount()
    if why:
        pytest.skip(f"cannot mount a small disk: {why}")
    try:
        free = free_bytes(tmp_path)
        memory = host(tmp_path)
        memory.reserve(256 * KIB)
        assert free - free_bytes(tmp_path) >= 256 * KIB and not list(tmp_path.iterdir())
        tensor = memory.empty(60 * KIB, torch.float32).fill_(3)
        with pytest.raises(UsageError) as refused:
            host(tmp_path, rank=1).reserve(1 << 30)
        found = re.search(r"1024 MiB more are needed, (\d+) MiB are free: (\d+) MiB are missing", str(refused.value))
        assert found and int(found[1]) + int(found[2]) in (1023, 1024, 1025)
        assert not list(tmp_path.iterdir()) and bool((tensor == 3).all())
        del memory, tensor
        assert free - free_bytes(tmp_path) < 64 * KIB
    finally:
        disk.unmount()


def free_bytes(folder: Path) -> int:
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def test_a_file_of_a_killed_process_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    here = socket.gethostname()
    mine, used = (tmp_path / f"hpctrain-offload-rank3-{here}-{number}" for number in (1, 2))
    others = [tmp_path / f"hpctrain-offload-{whose}-1" for whose in (f"rank30-{here}", "rank3-far")]
    for path in (mine, used, *others):
        path.write_bytes(b"left")
    with used.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        host(tmp_path, rank=3)
    assert set(tmp_path.iterdir()) == {used, *others}


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, torch\n"
        "from hpctrain.parallel.offload.memory import HostMemory\n"
        "from hpctrain.parallel.offload.config import OffloadSettings\n"
        "memory = HostMemory(OffloadSettings(optimizer=True, disk=sys.argv[1]), torch.device('cpu'), 0, 65536)\n"
        "memory.empty(1000, torch.float32).fill_(1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, timeout=60)
    assert done.returncode == -9, done
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match=r"offload.disk = .*file: File exists: must be a folder in which every rank"):
        host(file)


def test_memory_that_cannot_be_pinned_is_pageable_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def full(nbytes: int) -> torch.Tensor:
        raise RuntimeError("no room\nand a trace")

    memory = host(device=CUDA, pin=full)
    with caplog.at_level(logging.WARNING, logger="hpctrain"):
        tensors = [memory.empty(60 * KIB, torch.float32).fill_(1) for _ in range(3)]
    assert [record.getMessage() for record in caplog.records] == [
        "offload: no more pinned memory (no room): copies from and to the device will be slower"
    ]
    assert len({tensor.data_ptr() for tensor in tensors}) == 3


def test_pinned_memory_is_requested_in_powers_of_two() -> None:
    asked: list[int] = []

    def pin(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    memory = host(device=CUDA, pin=pin)
    for _ in range(4):
        memory.empty(25 * KIB, torch.float32)
    assert asked == [128 * KIB] * 4 and memory.nbytes == 512 * KIB
    memory.empty(7 * KIB, torch.float32)  # from the rest of the last request
    assert len(asked) == 4


@pytest.mark.gpu
def test_pinned_memory_is_pinned() -> None:
    memory = host(device=CUDA)
    assert memory.empty(1000, torch.float32).is_pinned() and memory.empty(5, torch.bfloat16).is_pinned()


# Optimizer states -----------------------------------------------------------------------------------------------------


class Shelf:
    """Allocator that recognises its own memory."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []

    def __call__(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.given.append(torch.full((numel,), float("nan"), dtype=dtype))
        return self.given[-1]

    def holds(self, tensor: Tensor) -> bool:
        return any(tensor.data_ptr() == one.data_ptr() for one in self.given)


def trained(steps: int = 1) -> tuple[list[nn.Parameter], torch.optim.AdamW]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (1,), (7,))]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    for number in range(steps):
        step(parameters, optimizer, number)
    return parameters, optimizer


def step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, number: int) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, number + 0.5)
    optimizer.step()


def values(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    return [{name: value.clone() for name, value in state.items()} for state in optimizer.state.values()]


def same(one: list[dict[str, Tensor]], two: list[dict[str, Tensor]]) -> bool:
    pairs = zip(one, two, strict=True)
    return all(a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a) for a, b in pairs)


def test_states_move_with_their_values_and_are_updated_where_they_are() -> None:
    (parameters, optimizer), (others, plain) = trained(), trained()
    shelf, before = Shelf(), values(optimizer)
    states = PlacedStates(shelf)
    states.place(optimizer, parameters[:2])
    assert same(values(optimizer), before) and len(shelf.given) == 4
    for parameter in parameters:
        state = optimizer.state[parameter]
        moved = parameter is not parameters[2]
        assert shelf.holds(state["exp_avg"]) is moved and shelf.holds(state["exp_avg_sq"]) is moved
        assert not shelf.holds(state["step"]) and state["exp_avg"].shape == parameter.shape
    step(parameters, optimizer, 1)
    step(others, plain, 1)
    assert same(values(optimizer), values(plain)) and shelf.holds(optimizer.state[parameters[0]]["exp_avg"])


def test_loaded_states_move_to_the_memory_of_those_that_they_replace() -> None:
    parameters, optimizer = trained(0)
    shelf = Shelf()
    states = PlacedStates(shelf)
    states.place(optimizer, parameters)
    assert not shelf.given
    step(parameters, optimizer, 0)
    states.place(optimizer, parameters)
    assert len(shelf.given) == 6
    _, plain = trained(3)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert not shelf.holds(optimizer.state[parameters[0]]["exp_avg"])
    states.place(optimizer, parameters)
    assert len(shelf.given) == 6 and same(values(optimizer), values(plain))
    assert all(shelf.holds(optimizer.state[parameter]["exp_avg"]) for parameter in parameters)
