"""Messages of sharded parameters: exactly the bytes of the formulas, and none in node memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.replicas import Branches, backward, make_gpt, part, share, token_loss, tokens
from support.shards import VARIANTS, communicator, shard
from torch import nn

from hpctrain.comm.transport.base import Recorder
from hpctrain.parallel.fsdp.strategy import ShardedDataParallel

pytestmark = [pytest.mark.ranks, pytest.mark.limit(30)]
EVEN = 192  # a layer with this many inputs and outputs fills its cache lines, and 2, 3 or 4 ranks share these equally


def make_even() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(EVEN, EVEN), nn.Tanh(), nn.Linear(EVEN, EVEN))


@pytest.fixture
def apart(comm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a communicator of ranks without common memory, which use the ring algorithm."""
    with communicator(comm, VARIANTS["fsdp_alone"]) as own:
        monkeypatch.setattr(own, "all_gather", partial(own.all_gather, algorithm="ring"))
        monkeypatch.setattr(own, "reduce_scatter", partial(own.reduce_scatter, algorithm="ring"))
        yield own


def psi(strategy: ShardedDataParallel, own_unit: bool = True) -> int:
    """Return the bytes of all flat tensors, padding included, with or without the model's own unit."""
    groups = strategy.components.groups
    if not own_unit:
        own = getattr(strategy.components.residency, "units")[0].groups
        groups = [group for group in groups if group not in own]
    return sum(group.flat.numel() * group.flat.itemsize for group in groups)


def used(comm: Any, parameters: int) -> int:
    """Return the bytes that tell which parameters were used: one each, to their owners and back to all ranks."""
    own = parameters // comm.size + (comm.rank < parameters % comm.size)
    return parameters + own * comm.size


def train(model: nn.Module, comm: Any, kind: str, steps: int = 3) -> list[Recorder]:
    """Return the recorder of each step: a forward and a backward pass and an update."""
    optimizer, recorders = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        with comm.recording() as recorder:
            if kind == "gpt":
                inputs, targets = (share(tensor, comm) for tensor in tokens(step))
                token_loss(model(inputs), targets).backward()
            elif kind == "mlp":
                backward(model, part(comm, comm.rank, step))
            else:
                model(torch.randn(2, EVEN)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        recorders.append(recorder)
    return recorders


def check(recorder: Recorder, comm: Any, sent: int, parameters: int) -> None:
    """Compare the messages that this rank sent: those of the given bytes, and the one about used parameters."""
    assert set(recorder.calls) <= {"send", "recv", "all_to_all"}
    assert recorder.bytes["send"] * comm.size == sent * (comm.size - 1)
    assert recorder.bytes["recv"] == recorder.bytes["send"]
    assert recorder.bytes["all_to_all"] == used(comm, parameters)


@pytest.mark.parametrize("data, times", [("zero1_alone", 2), ("zero2_alone", 2), ("fsdp_alone", 3)])
def test_a_step_sends_a_known_multiple_of_parameters_and_padding(apart: Any, data: str, times: int) -> None:
    for kind, limit in (("even", 4), ("gpt", 4), ("gpt", 1e-6)):
        model = make_even() if kind == "even" else make_gpt()
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        units = ("Linear",) if kind == "even" else ("Block",)
        strategy = shard(model, apart, VARIANTS[data], units=units, bucket_mib=limit)
        padded = psi(strategy)
        assert kind == "gpt" or padded == nbytes, "there is padding"
        # The model's own unit stays whole from the forward pass to the end of the backward pass: gathered once.
        sent = 2 * padded + (psi(strategy, own_unit=False) if times == 3 else 0)
        for recorder in train(model, apart, kind):
            check(recorder, apart, sent, len(list(model.parameters())))


def test_mpi_gathers_and_reduces_the_same_bytes(comm: Any) -> None:
    for data, gathered in (("zero1_alone", 1), ("zero2_alone", 1), ("fsdp_alone", 2)):
        with communicator(comm, VARIANTS[data]) as own:
            model = make_even()
            strategy = shard(model, own, VARIANTS[data], units=("Linear",))
            groups = len(strategy.components.groups)
            for recorder in train(model, own, "even"):
                # MPI is called with this rank's share for a gather, and with the whole tensor for a reduction.
                assert recorder.calls == {"all_gather": gathered * groups, "reduce_scatter": groups, "all_to_all": 2}
                assert recorder.bytes["all_gather"] * own.size == gathered * psi(strategy)
                assert recorder.bytes["reduce_scatter"] == psi(strategy)


@pytest.mark.parametrize("trains", [False, True], ids=["evaluation", "accumulation"])
def test_passes_without_reduction_send_no_gradients(apart: Any, trains: bool) -> None:
    for data, gathered in (("zero1_alone", 0), ("fsdp_alone", 1 + trains)):
        model = make_even()
        strategy = shard(model, apart, VARIANTS[data], units=("Linear",))
        train(model, apart, "even", 1)
        with torch.no_grad():
            model(torch.randn(2, EVEN))  # after an update whole parameters are stale
        with apart.recording() as recorder, strategy.no_sync(), torch.set_grad_enabled(trains):
            outputs = model(torch.randn(2, EVEN))
            if trains:
                outputs.sum().backward()
        assert recorder.bytes["send"] * apart.size == gathered * psi(strategy) * (apart.size - 1)
        assert not recorder.calls["all_to_all"]


def test_mixed_precision_gathers_half_of_the_bytes(apart: Any) -> None:
    model = make_even()
    strategy = shard(model, apart, VARIANTS["zero2_alone"], units=("Linear",), mixed_precision="bfloat16")
    assert 2 * psi(strategy) == sum(parameter.nbytes for parameter in make_even().parameters())
    model.eval()
    with apart.recording() as recorder, torch.no_grad():
        model(torch.randn(2, EVEN))
    assert recorder.bytes["send"] * apart.size == psi(strategy) * (apart.size - 1)


def test_frozen_parameters_are_gathered_once_and_never_reduced(apart: Any) -> None:
    for data in ("zero1_alone", "fsdp_alone"):
        model = make_even()
        model[0].requires_grad_(False)
        nbytes = sum(parameter.nbytes for parameter in model[0].parameters())  # as many as in the other layer
        shard(model, apart, VARIANTS[data], units=("Linear",))
        first, second, third = train(model, apart, "even")
        if data == "zero1_alone":
            check(first, apart, 3 * nbytes, 2)
            check(second, apart, 2 * nbytes, 2)
            check(third, apart, 2 * nbytes, 2)
        else:
            # No layer before the trained one needs gradients: backward never reaches the frozen layer.
            for recorder in (first, second, third):
                check(recorder, apart, (1 + 3) * nbytes, 2)


def test_units_needed_on_one_rank_are_gathered_on_all_ranks(apart: Any) -> None:
    model = Branches()
    strategy = shard(model, apart, VARIANTS["fsdp_alone"], units=("Linear",))
    for use in ("abc", "abc" if apart.rank else "a", "abc"):
        with apart.recording() as recorder:
            backward(model, part(apart, apart.rank), 1, *use)
        check(recorder, apart, 3 * psi(strategy), 6)


# In node memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["zero1", "zero2", "fsdp"])
def test_mapped_parameters_are_never_copied(near: Any, data: str) -> None:
    model = make_even()
    strategy = shard(model, near, VARIANTS[data], units=("Linear",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with near.recording() as recorder, torch.no_grad():
            model(torch.randn(2, EVEN))
        assert not +recorder.bytes
        model(torch.randn(2, EVEN)).sum().backward()
        with near.recording() as recorder:
            optimizer.step()
            optimizer.zero_grad()
            with strategy.unshard():
                pass
        assert not +recorder.bytes


def test_mapped_gradients_are_read_in_place(near: Any) -> None:
    model = make_even()
    shard(model, near, VARIANTS["fsdp"])
    for recorder in train(model, near, "even"):
        # A rank reduces into its own memory; it only tells the others that it used the parameters.
        lines = 64 * (-(-near.size * 64 // 64))
        assert sum(recorder.bytes.values()) <= lines + used(near, 4)
