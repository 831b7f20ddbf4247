"""Memory samples of a step, compared with the known sizes of the model."""

from __future__ import annotations

import gc

import pytest
import torch
from sharding.addresses import SharedMap
from sharding.candidates import Candidate
from sharding.holdings import Holdings, tensors
from sharding.names import ACTIVATIONS, ALONE, GRADIENTS, PARAMETERS, STATES
from sharding.peers import Buckets
from sharding.task import SMALL, Task
from sharding.watch import Sample, Watch
from torch import nn

from hpctrain.comm.communicator import Communicator

TASK = Task(SMALL)
BYTES = TASK.parameter_bytes


@pytest.fixture(scope="module")
def candidate() -> Candidate:
    made = Candidate(ALONE, TASK.model(), Communicator.world())
    made.step(*next(TASK.batches(0)))
    return made


@pytest.fixture(scope="module")
def samples(candidate: Candidate) -> list[Sample]:
    with Watch(candidate, Buckets(candidate.model)) as watch:
        candidate.step(*next(TASK.batches(0)), look=watch.look)
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
    watch = Watch(candidate, Buckets(candidate.model))
    with watch:
        result = layer(torch.ones(100, 64))
        watch.look("now")
    del result
    gc.collect()
    watch.look("later")
    now, later = watch.samples
    assert now.held[ACTIVATIONS].private == 100 * 64 * 4 and later.held[ACTIVATIONS].private == 0


def test_a_watch_removes_its_hooks(candidate: Candidate) -> None:
    def hooks() -> int:
        return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in candidate.model.modules())

    before = hooks()
    with Watch(candidate, Buckets(candidate.model)):
        assert hooks() > before
    assert hooks() == before


def test_a_storage_counts_once_and_a_freed_one_does_not_count(candidate: Candidate) -> None:
    holdings = Holdings(candidate, Buckets(candidate.model), SharedMap())
    base, gone = torch.ones(1000), torch.ones(500)
    gone.untyped_storage().resize_(0)
    empty = torch.ones(300)[:0]
    held = holdings.now([], [base[:10], base[5:], base.view(10, 100).t(), gone, empty, *candidate.model.parameters()])
    assert held[ACTIVATIONS].private == 4000  # the parameters are counted already


def test_tensors_are_found_in_nested_values() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    nest = {"a": [one, (two, None)], "b": {"c": three, "d": "text", "e": 5}}
    assert [len(tensor) for tensor in tensors(nest)] == [1, 2, 3]
