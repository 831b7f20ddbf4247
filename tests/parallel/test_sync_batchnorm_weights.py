"""Synchronised batch norm with sample weights, and its automatic use."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.models.build import ConvNet
from hpctrain.parallel import sync_batchnorm
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.sync_batchnorm import SyncBatchNorm, convert
from hpctrain.parallel.wrap import attach

FEATURES = 5
CPU = torch.device("cpu")


# Exact sums -----------------------------------------------------------------------------------------------------------


def whole_batch(step: int, samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return inputs far from zero, and their weights in the loss."""
    generator = torch.Generator().manual_seed(step)
    shape = (samples, FEATURES, 3)
    inputs, factors = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return (3 + 2 * inputs).to(dtype), factors.to(dtype)


def run(norm: nn.Module, inputs: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and input gradient of one pass, with the mean over the samples as the loss."""
    norm.zero_grad()
    inputs = inputs.clone().requires_grad_()
    output = norm(inputs)
    ((output * factors).sum() / len(inputs)).backward()
    assert inputs.grad is not None
    return output.detach(), inputs.grad


COUNTS = {"uneven": ([3, 2], [1, 2, 2], [1, 2, 1, 1]), "stand_in": ([0, 2], [1, 0, 1], [0, 1, 1, 0])}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_weighted_ranks_equal_one_process_on_the_whole_batch(
    comm: Any, counts: Any, dtype: torch.dtype, affine: bool
) -> None:
    torch.manual_seed(7)
    plain = nn.BatchNorm1d(FEATURES, dtype=dtype, affine=affine)
    if affine:
        nn.init.normal_(plain.weight)
        nn.init.normal_(plain.bias)
    ours = convert(nn.Sequential(copy.deepcopy(plain)), comm)[0]
    divided = counts[comm.size - 2]
    count, begin, total = divided[comm.rank], sum(divided[: comm.rank]), sum(divided)
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    ours.sample_weight = weight = count * comm.size / total
    for step in range(4):
        inputs, factors = whole_batch(step, total, dtype)
        outputs, gradient = run(plain, inputs, factors)
        own = slice(begin, begin + count)
        stand_in = torch.full_like(inputs[:1], 1.0)
        found, back = run(ours, *((inputs[own], factors[own]) if count else (stand_in, stand_in)))
        if count:
            torch.testing.assert_close(found, outputs[own], **tolerance)
            torch.testing.assert_close(back * weight / comm.size, gradient[own], **tolerance)
        else:
            axes = (0, 2)
            mean, variance = inputs.mean(axes), inputs.var(axes, correction=0)
            wanted = ((1 - mean) / (variance + plain.eps).sqrt())[None, :, None].expand_as(found)
            if affine:
                wanted = wanted * plain.weight[:, None] + plain.bias[:, None]
            torch.testing.assert_close(found, wanted.detach(), **tolerance)
            assert not back.any()
        for name, parameter in ours.named_parameters():
            averaged = comm.all_reduce(parameter.grad * weight / comm.size)
            torch.testing.assert_close(averaged, plain.get_parameter(name).grad, **tolerance)
        for name, buffer in ours.named_buffers():
            torch.testing.assert_close(buffer, plain.get_buffer(name), **tolerance)


@pytest.mark.ranks
def test_sums_in_parts_equal_the_whole_sum(comm: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sync_batchnorm, "ELEMENTS_PER_PRODUCT", 1)
    plain, norm = nn.BatchNorm1d(FEATURES, dtype=torch.float64), SyncBatchNorm(comm, FEATURES, dtype=torch.float64)
    inputs, factors = whole_batch(0, 20 * comm.size, torch.float64)  # more samples than parts
    wanted = run(plain, inputs, factors * comm.size)
    found = run(norm, *(each.chunk(comm.size)[comm.rank] for each in (inputs, factors)))
    for mine, whole in zip(found, wanted):
        torch.testing.assert_close(mine, whole.chunk(comm.size)[comm.rank], rtol=1e-10, atol=1e-12)


# Automatic use --------------------------------------------------------------------------------------------------------


def net(norm: type[nn.Module] = nn.BatchNorm1d) -> Any:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, FEATURES), norm(FEATURES), nn.ReLU(), nn.Linear(FEATURES, 4), nn.ReLU())


class WithActivation(nn.BatchNorm1d):
    """Batch norm with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return torch.relu(super().forward(input))


@contextmanager
def logged(caplog: Any) -> Iterator[list[str]]:
    """Yield the lines that the package logs in a ``with`` block."""
    logger, found = logging.getLogger("hpctrain"), []
    level, propagates = logger.level, logger.propagate
    logger.propagate = False
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    caplog.clear()
    try:
        yield found
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(level)
        logger.propagate = propagates
        found += [f"{record.levelname}: {record.getMessage()}" for record in caplog.records]


def attach_logged(comm: Any, caplog: Any, model: nn.Module, **parallel: Any) -> list[str]:
    with logged(caplog) as lines:
        attach(model, comm, ParallelSettings(**parallel), CPU)
    return lines


SYNCED = "INFO: batch norms: 1 synchronised over {ranks} data ranks; parallel.sync_batchnorm = false switches"
NOT_SYNCED = "WARNING: batch norms: 1 of class BatchNorm1d not synchronised, as "
AUTOMATIC: dict[str, tuple[Any, dict[str, Any], str]] = {  # model, settings, and the begin of the message
    **{data: (net, {"data": data}, SYNCED) for data in ("ddp", "zero1", "zero2", "fsdp")},
    "switched off": (net, {"sync_batchnorm": False}, ""),
    "no batch norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {}, ""),
    "easgd": (net, {"data": "easgd"}, NOT_SYNCED + 'parallel.data is "easgd": each of'),
    "itself": (lambda: nn.BatchNorm1d(4), {}, NOT_SYNCED + "the model itself is one"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", AUTOMATIC)
def test_batch_norms_are_synchronised_if_data_ranks_divide_the_samples(comm: Any, caplog: Any, case: str) -> None:
    make, settings, said = AUTOMATIC[case]
    model = make()
    lines = attach_logged(comm, caplog, model, **settings)
    model(torch.randn(4, 4)).square().sum().backward()
    assert any(isinstance(each, SyncBatchNorm) for each in model.modules()) is (said is SYNCED)
    expected = [True] if said and comm.rank == 0 else []
    assert [line.startswith(said.format(ranks=comm.size)) for line in lines] == expected, lines


def test_one_rank_keeps_plain_batch_norms(comm: Any, caplog: Any) -> None:
    model = net()
    assert attach_logged(comm, caplog, model) == [] and type(model[1]) is nn.BatchNorm1d


@pytest.mark.ranks
def test_a_batch_norm_with_its_own_forward_is_not_replaced(comm: Any, caplog: Any) -> None:
    model = nn.Sequential(net(), WithActivation(4))
    lines = attach_logged(comm, caplog, model)
    assert isinstance(model[0][1], SyncBatchNorm) and type(model[1]) is WithActivation
    if comm.rank == 0:
        assert "1 synchronised" in lines[0]
        assert "1 of class WithActivation not synchronised, as their class has a forward" in lines[1]


@pytest.mark.ranks(4)
def test_stages_give_a_warning_and_tensor_ranks_do_not_count_twice(comm: Any, caplog: Any) -> None:
    lines = attach_logged(comm, caplog, net(), pipe=2)
    assert ["as parallel.pipe is above 1: each of 2 data ranks" in line for line in lines] == [True][comm.rank :], lines
    model = net()
    lines = attach_logged(comm, caplog, model, tensor=2, tensor_plan=("3=column",))
    assert ["1 synchronised over 2 data ranks" in line for line in lines] == [True][comm.rank :], lines
    assert model[1].comm.size == 2


@pytest.mark.ranks
@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_a_model_on_the_meta_device_gets_the_same_values(comm: Any, data: Any) -> None:
    results = []
    for device in ("meta", "cpu"):
        torch.manual_seed(7)
        with torch.device(device):
            model = ConvNet((3, 8, 8), 10, channels=(4,))
        attach(model, comm, ParallelSettings(data=data), CPU)
        assert any(isinstance(module, SyncBatchNorm) for module in model.modules())
        results.append(model(torch.ones(2, 3, 8, 8)).detach())
    assert torch.equal(*results)


def test_hooks_and_attributes_are_kept(comm: Any) -> None:
    model, seen = net(), []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    model[1].tag = "mine"
    convert(model, comm)
    model(torch.randn(3, 4))
    assert seen == [1] and model[1].tag == "mine"
