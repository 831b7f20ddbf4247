"""Synchronised batch norm: equal to plain batch norm on the whole batch, and its automatic use."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.models.build import ConvNet
from hpctrain.parallel import sync_batchnorm
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.ddp import DataParallel
from hpctrain.parallel.sync_batchnorm import SyncBatchNorm, convert
from hpctrain.parallel.wrap import attach

FEATURES = 5
SHAPES = {"1d": (), "1d-long": (6,), "2d": (4, 3), "3d": (2, 3, 2)}
PLAIN = {"1d": nn.BatchNorm1d, "1d-long": nn.BatchNorm1d, "2d": nn.BatchNorm2d, "3d": nn.BatchNorm3d}
Kept = dict[str, Tensor]


def whole_batch(kind: str, step: int, samples: int = 12) -> tuple[Tensor, Tensor]:
    """Return inputs far from zero, and their weights in the loss."""
    generator = torch.Generator().manual_seed(step)
    shape = (samples, FEATURES, *SHAPES[kind])
    return 3 + 2 * torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def make(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(7)
    norm = PLAIN[kind](FEATURES, **options)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


def run(norm: nn.Module, inputs: Tensor, factors: Tensor) -> Kept:
    """Return output and gradients of one pass."""
    norm.zero_grad()
    inputs = inputs.clone().requires_grad_()
    output = norm(inputs)
    (output * factors).sum().backward()
    assert inputs.grad is not None
    return {"output": output.detach(), "input": inputs.grad}


def cut(tensor: Tensor, comm: Any, counts: Sequence[int]) -> Tensor:
    return torch.split(tensor, list(counts))[comm.rank]


def even(comm: Any, total: int = 12) -> list[int]:
    return [total // comm.size] * comm.size


def uneven(comm: Any) -> list[int]:
    """Return eight samples for rank 0, then four, then none."""
    return [8, 4, 0, 0][: comm.size]


def compare(comm: Any, kind: str, counts: Sequence[int], **options: Any) -> None:
    plain = make(kind, **options)
    ours = convert(nn.Sequential(make(kind, **options)), comm)[0]
    assert isinstance(ours, SyncBatchNorm)
    for step in range(3):
        inputs, factors = whole_batch(kind, step, sum(counts))
        wanted = run(plain, inputs, factors)
        found = run(ours, cut(inputs, comm, counts), cut(factors, comm, counts))
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, cut(wanted[name], comm, counts), rtol=1e-4, atol=1e-5)
        for name, parameter in ours.named_parameters():
            total = comm.all_reduce(parameter.grad.clone())
            torch.testing.assert_close(total, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-4)
        for name, buffer in ours.named_buffers():
            torch.testing.assert_close(buffer, plain.get_buffer(name))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("counts_of", [even, uneven])
def test_it_equals_plain_batch_norm_on_the_whole_batch(comm: Any, kind: str, counts_of: Any) -> None:
    compare(comm, kind, counts_of(comm))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
def test_options_have_the_same_meaning(comm: Any, options: dict[str, Any]) -> None:
    compare(comm, "2d", even(comm), **options)


@pytest.mark.ranks
def test_sums_in_parts_equal_the_whole_sum(comm: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sync_batchnorm, "ELEMENTS_PER_PRODUCT", 1)
    compare(comm, "1d-long", even(comm, 60 * comm.size))  # more samples than parts


@pytest.mark.ranks
def test_large_offsets_do_not_cancel(comm: Any) -> None:
    plain, ours = nn.BatchNorm1d(FEATURES, dtype=torch.float64), SyncBatchNorm(comm, FEATURES)
    inputs = whole_batch("1d", 0)[0] + 1000
    wanted = plain(inputs.double())
    torch.testing.assert_close(ours(cut(inputs, comm, even(comm))).double(), cut(wanted, comm, even(comm)), **_LOOSE)


_LOOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.ranks
def test_all_ranks_keep_the_same_statistics(comm: Any) -> None:
    norm = SyncBatchNorm(comm, FEATURES)
    inputs, factors = whole_batch("1d", 0)
    run(norm, cut(inputs, comm, uneven(comm)), cut(factors, comm, uneven(comm)))
    for other in comm.all_gather_object(dict(norm.named_buffers())):
        assert all(torch.equal(other[name], buffer) for name, buffer in norm.named_buffers())


@pytest.mark.ranks
@pytest.mark.parametrize("tracking", [True, False])
def test_evaluation_is_plain_and_does_not_communicate(comm: Any, tracking: bool) -> None:
    plain = make("2d", track_running_stats=tracking)
    ours = convert(nn.Sequential(copy.deepcopy(plain)), comm).eval()
    plain.eval()
    if comm.rank == 0:
        with comm.recording() as recorder:
            inputs = whole_batch("2d", 0)[0]
            torch.testing.assert_close(ours(inputs), plain(inputs))
        assert not recorder.calls


@pytest.mark.ranks
def test_sixteen_bit_inputs_give_sixteen_bit_outputs(comm: Any) -> None:
    plain = make("2d")
    ours = convert(nn.Sequential(make("2d")), comm)[0]
    inputs, factors = (tensor.bfloat16() for tensor in whole_batch("2d", 0))
    wanted = run(plain, inputs.float(), factors.float())
    found = run(ours, cut(inputs, comm, even(comm)), cut(factors, comm, even(comm)))
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16} == {nn.BatchNorm2d(FEATURES)(inputs).dtype}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.float(), cut(wanted[name], comm, even(comm)), rtol=2e-2, atol=2e-2)
    assert ours.weight.grad.dtype is torch.float32


@pytest.mark.ranks
def test_each_pass_has_two_messages(comm: Any) -> None:
    norm = SyncBatchNorm(comm, FEATURES)
    inputs, factors = (cut(tensor, comm, even(comm)) for tensor in whole_batch("2d", 0))
    with comm.recording() as recorder:
        run(norm, inputs, factors)
    assert recorder.calls == {"all_reduce": 2}
    assert recorder.bytes == {"all_reduce": 8 * (2 * FEATURES + 1 + 2 * FEATURES)}


@pytest.mark.ranks
def test_invalid_inputs_are_refused(comm: Any) -> None:
    norm = SyncBatchNorm(comm, FEATURES)
    for shape in ((FEATURES,), (3, FEATURES + 1)):
        with pytest.raises(UsageError, match=r"^batch norm of 5 features got input of shape .*: allowed is \[samples,"):
            norm(torch.zeros(shape))


# Conversion -----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Model with several batch norms, one of them in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(FEATURES)
        self.again = self.first
        self.block = nn.Sequential(nn.Conv2d(FEATURES, 3, 1), nn.BatchNorm2d(3, affine=False), nn.GroupNorm(1, 3))
        self.inner = nn.ModuleDict({"first": self.first, "late": nn.BatchNorm1d(4, momentum=None)})
        self.absent = None
        self.inner["late"].eval()


def test_conversion_keeps_names_tensors_and_sharing(comm: Any) -> None:
    net = Net()
    before, parameters = net.state_dict(keep_vars=True), list(net.parameters())
    assert convert(net, comm) is net
    after = net.state_dict(keep_vars=True)
    assert list(after) == list(before) and all(after[name] is tensor for name, tensor in before.items())
    assert all(new is old for new, old in zip(net.parameters(), parameters, strict=True))
    assert net.first is net.again is net.inner["first"] and isinstance(net.first, SyncBatchNorm)
    assert isinstance(net.block[1], SyncBatchNorm) and not net.block[1].affine
    assert isinstance(net.block[2], nn.GroupNorm)
    assert net.inner["late"].momentum is None and not net.inner["late"].training and net.first.training
    assert not any(type(module) in PLAIN.values() for module in net.modules())


def test_conversion_of_a_batch_norm_returns_a_new_module(comm: Any) -> None:
    plain = nn.BatchNorm1d(3)
    converted = convert(plain, comm)
    assert isinstance(converted, SyncBatchNorm) and converted.weight is plain.weight
    assert convert(converted, comm) is converted


def test_a_converted_model_can_be_copied(comm: Any) -> None:
    net = convert(Net(), comm)
    twin = copy.deepcopy(net)
    assert twin.first is not net.first and twin.first.comm is net.first.comm


# With a strategy ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_a_rank_without_a_sample_is_refused(comm: Any) -> None:
    strategy = DataParallel(convert(nn.Sequential(nn.BatchNorm1d(FEATURES)), comm), comm)
    with pytest.raises(UsageError, match=f"^rank {comm.rank} has no sample in this step, but synchronised batch norm"):
        strategy.join_empty()


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
        attach(model, comm, ParallelSettings(**parallel))
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
        attach(model, comm, ParallelSettings(data=data))
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
