"""Memory samples of a step, compared with the known sizes of the model; memory as reported by Linux."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from fsdp_step import Candidate
from fsdp_step_memory import SMALL, Name, Task
from fsdp_step_samples import (
    ACTIVATIONS,
    GRADIENTS,
    PARAMETERS,
    STATES,
    Buckets,
    CandidateTensors,
    MemorySampler,
    Resident,
    Sample,
    SharedMap,
    release_freed_memory,
    resident,
    size,
    tensors,
    union,
)
from torch import nn

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError

TASK = Task(SMALL)
BYTES = TASK.parameter_bytes


@pytest.fixture(scope="module")
def candidate() -> Candidate:
    made = Candidate(Name.ALONE, TASK.model(), Communicator.world())
    made.step(*next(TASK.batches(0)))
    return made


@pytest.fixture(scope="module")
def samples(candidate: Candidate) -> list[Sample]:
    with MemorySampler(candidate, Buckets(candidate.model)) as watch:
        candidate.step(*next(TASK.batches(0)), sample=watch.sample)
    return watch.samples


def at(samples: list[Sample], moment: str) -> list[Sample]:
    return [one for one in samples if one.moment == moment]


def most(samples: list[Sample], kind: str) -> int:
    return max(one.held[kind].private for one in samples)


def test_the_model_has_the_bytes_of_the_task(candidate: Candidate) -> None:
    assert sum(parameter.nbytes for parameter in candidate.model.parameters()) == BYTES


def test_every_layer_and_every_gradient_is_sampled(candidate: Candidate, samples: list[Sample]) -> None:
    layers = [one for one in candidate.model.modules() if next(one.parameters(recurse=False), None) is not None]
    assert len(at(samples, "forward")) == len(at(samples, "backward")) == len(layers)
    assert len(at(samples, "gradient")) == len(list(candidate.model.parameters()))
    for moment in ("end of forward", "end of backward", "end of step"):
        assert len(at(samples, moment)) == 1


def test_memory_of_parameters_and_states_is_constant(candidate: Candidate, samples: list[Sample]) -> None:
    assert {one.held[PARAMETERS].private for one in samples} == {BYTES}
    counters = 4 * len(candidate.optimizer.state)
    assert {one.held[STATES].private for one in samples} == {2 * BYTES + counters}


def test_memory_of_gradients_grows_one_by_one(samples: list[Sample]) -> None:
    assert most(at(samples, "forward"), GRADIENTS) == 0
    coming = [one.held[GRADIENTS].private for one in at(samples, "gradient")]
    assert coming == sorted(coming) and coming[-1] == BYTES  # the newest gradient counts, too
    assert most(at(samples, "end of step"), GRADIENTS) == BYTES


def test_activations_grow_in_forward_and_shrink_in_backward(samples: list[Sample]) -> None:
    growing = [one.held[ACTIVATIONS].private for one in at(samples, "forward")]
    assert growing == sorted(growing)
    kept = most(at(samples, "end of forward"), ACTIVATIONS)
    hidden = TASK.context * 4 * 64 * 4  # input and output of GELU, kept per block
    assert kept > 2 * 2 * hidden
    going = [one.held[ACTIVATIONS].private for one in at(samples, "backward")]
    assert going == sorted(going, reverse=True) and going[-1] < kept / 10
    assert most(at(samples, "end of backward"), ACTIVATIONS) == 0


def test_the_activations_of_one_layer_are_its_input(candidate: Candidate) -> None:
    layer = nn.Linear(64, 32)
    watch = MemorySampler(candidate, Buckets(candidate.model))
    with watch:
        result = layer(torch.ones(100, 64))
        watch.sample("now")
    del result
    gc.collect()
    watch.sample("later")
    now, later = watch.samples
    assert now.held[ACTIVATIONS].private == 100 * 64 * 4 and later.held[ACTIVATIONS].private == 0


def test_a_watch_removes_its_hooks(candidate: Candidate) -> None:
    def hooks() -> int:
        return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in candidate.model.modules())

    before = hooks()
    with MemorySampler(candidate, Buckets(candidate.model)):
        assert hooks() > before
    assert hooks() == before


def test_a_storage_counts_once_and_a_freed_one_does_not_count(candidate: Candidate) -> None:
    holdings = CandidateTensors(candidate, Buckets(candidate.model))
    base, gone = torch.ones(1000), torch.ones(500)
    gone.untyped_storage().resize_(0)
    empty = torch.ones(300)[:0]
    held = holdings.now([], [base[:10], base[5:], base.view(10, 100).t(), gone, empty, *candidate.model.parameters()])
    assert held[ACTIVATIONS].private == 4000  # the parameters are counted already


def test_tensors_are_found_in_nested_values() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    nest = {"a": [one, (two, None)], "b": {"c": three, "d": "text", "e": 5}}
    assert [len(tensor) for tensor in tensors(nest)] == [1, 2, 3]


# Memory as reported by Linux ------------------------------------------------------------------------------------------


SIZE = 32 * 2**20
SLACK = 2 * 2**20

ROLLUP = """00400000-7fff0000 ---p 00000000 00:00 0    [rollup]
Rss:              5000 kB
Pss:              3000 kB
Pss_Anon:         1000 kB
Pss_File:         1500 kB
Pss_Shmem:         500 kB
"""
MAPS = """00400000-00500000 r-xp 00000000 08:01 77     /usr/bin/python
7f0000000000-7f0000100000 rw-s 00000000 00:01 1234  /dev/shm/window (deleted)
7f0000100000-7f0000200000 rw-s 00100000 00:01 1234  /dev/shm/window (deleted)
7f0000200000-7f0000300000 rw-p 00000000 00:00 0
7f0000400000-7f0000500000 rw-s 00000000 00:01 99    /dev/shm/other
"""


def test_memory_of_libraries_is_excluded() -> None:
    assert resident(ROLLUP) == Resident(1000 * 1024, 500 * 1024)
    assert resident(ROLLUP).total == 1500 * 1024


def test_a_system_without_the_figures_is_refused() -> None:
    with pytest.raises(UsageError, match="memory cannot be measured here: .*smaps_rollup"):
        resident(ROLLUP.replace("Pss_Anon", "Anon"))


def test_touched_pages_count_as_private_or_shared() -> None:
    gc.collect()
    release_freed_memory()  # memory left by earlier tests: otherwise it is given back below, and counted
    before = resident()
    own = np.ones(SIZE, np.uint8)
    after = resident()
    assert abs(after.private - before.private - SIZE) < SLACK and abs(after.shared - before.shared) < SLACK
    del own
    release_freed_memory()
    assert abs(resident().private - before.private) < SLACK
    with mmap.mmap(-1, SIZE) as shared:
        view = np.frombuffer(shared, np.uint8)
        untouched = resident().shared
        np.copyto(np.ndarray(SIZE, np.uint8, shared), 1)
        assert abs(resident().shared - untouched - SIZE) < SLACK
        del view


def test_an_address_is_mapped_to_an_offset_in_an_object() -> None:
    memory = SharedMap(MAPS)
    assert memory.find(0x7F0000000040, 64) == ("00:01 1234", 64, 128)
    assert memory.find(0x7F0000100040, 64) == ("00:01 1234", 2**20 + 64, 2**20 + 128)
    assert memory.find(0x7F0000400000, 8) == ("00:01 99", 0, 8)


@pytest.mark.parametrize("address", [0, 0x00400010, 0x7F0000200000, 0x7F0000300000, 0x7F0000500000])
def test_private_memory_is_not_reported_as_shared(address: int) -> None:
    assert SharedMap(MAPS).find(address, 8) is None


def test_shared_memory_of_this_process_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(SIZE))
    with path.open("r+b") as file:
        one, other = (np.frombuffer(mmap.mmap(file.fileno(), SIZE), np.uint8) for _ in range(2))
    memory = SharedMap()
    places = [memory.find(view[4096:].ctypes.data, 100) for view in (one, other)]
    assert places[0] == places[1] and places[0] is not None and places[0][1:] == (4096, 4196)
    assert memory.find(np.ones(SIZE, np.uint8).ctypes.data, 100) is None


def test_bytes_are_counted_once() -> None:
    found = union([("b", 0, 10), ("a", 5, 20), ("a", 0, 10), ("a", 20, 30), ("a", 40, 50), ("a", 42, 45)])
    assert found == [("a", 0, 30), ("a", 40, 50), ("b", 0, 10)] and size(found) == 50
    assert union([]) == [] and size([]) == 0
