"""Running statistics of batch norms, compared with those of a plain loop of torch over the microbatches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rank_threads import RankThreads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpctrain.errors import UsageError
from hpctrain.parallel.recompute import recompute
from hpctrain.parallel.reproducible.batchnorm import MicrobatchStatistics, check_unchanged, other_buffers

COUNT = 7  # microbatches


class Twice(nn.Module):
    """Network that calls one batch norm twice, and another only for some microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.rare, self.linear = nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, given: Tensor) -> Tensor:
        inner = self.shared(self.linear(self.shared(given)))
        return self.rare(inner) if float(given.sum()) > 0 else inner


class Checkpointed(nn.Module):
    """Network that recomputes its inner layers, if ``recomputes``."""

    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, given: Tensor) -> Tensor:
        return checkpoint(self.inner, given, use_reentrant=False) if self.recomputes else self.inner(given)


def images(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5, **options), nn.ReLU(), nn.Flatten())


def vectors(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9, **options), nn.ReLU())


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [(torch.randn(shape, generator=generator) * 3 + 1).to(dtype) for _ in range(COUNT)]


def buffers_after(model: nn.Module, batches: list[Tensor], steps: int = 2) -> dict[str, Tensor]:
    """Return the buffers after plain forward passes."""
    for _ in range(steps):
        for batch in batches:
            model(batch)
    return dict(model.named_buffers())


def buffers_of_ranks(
    model: nn.Module, batches: list[Tensor], owners: list[int], steps: int = 2, *, blocks: bool = False
) -> dict[str, Tensor]:
    """Return the buffers after the same steps of ranks, of which ``owners`` compute the microbatches; all are equal.

    With ``blocks``, a step is one ``with`` block, and only forward passes are recorded.
    """
    ranks = max(owners) + 1
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def body(comm: Any) -> dict[str, Tensor]:
        own, held = models[comm.rank], dict(models[comm.rank].named_buffers())
        statistics = MicrobatchStatistics([own])
        mine = [index for index, owner in enumerate(owners) if owner == comm.rank]
        for _ in range(steps):
            if blocks:
                with statistics.step(comm):
                    for index in mine:
                        with statistics.recording(index):
                            result = own(batches[index])
                        result.sum().backward()
            else:
                for index in mine:
                    with statistics.recording(index):
                        own(batches[index]).sum().backward()
                statistics.finish(len(owners), comm)
        after = dict(own.named_buffers())
        assert all(after[name] is one for name, one in held.items())  # the same tensors, changed in place
        return after

    found = RankThreads(ranks).run(body)
    for other in found[1:]:
        assert_same(other, found[0])
    return found[0]


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert one.dtype is found[name].dtype and torch.equal(one, found[name]), name


SPLITS = [[0] * 7, [0, 0, 0, 1, 1, 1, 1], [1, 0, 2, 0, 1, 2, 2], [0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("owners", SPLITS)
@pytest.mark.parametrize("momentum", [None, 0.1, 1.0, 0.0, 1 / 3])
@pytest.mark.parametrize("make, shape", [(images, (4, 3, 6, 6)), (vectors, (5, 6))])
def test_statistics_are_those_of_one_process(
    make: Callable[..., nn.Module], shape: tuple[int, ...], momentum: float | None, owners: list[int]
) -> None:
    model, batches = make(momentum=momentum), inputs(*shape)
    found = buffers_of_ranks(model, batches, owners)
    assert_same(found, buffers_after(model, batches))
    assert model[1].momentum == momentum


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_statistics_in_other_dtypes_are_those_of_one_process(dtype: torch.dtype) -> None:
    model, batches = nn.Sequential(nn.BatchNorm2d(5).to(dtype)), inputs(4, 5, 6, 6, dtype=dtype)
    assert_same(buffers_of_ranks(model, batches, SPLITS[2]), buffers_after(model, batches))


def test_float16_statistics_do_not_depend_on_the_ranks() -> None:
    """The kernel of torch rounds less often than its expressions of float16, so that last bits differ from its own."""
    model, batches = nn.Sequential(nn.BatchNorm2d(5).half()), inputs(4, 5, 6, 6, dtype=torch.float16)
    found = buffers_of_ranks(model, batches, SPLITS[2])
    assert_same(found, buffers_of_ranks(model, batches, SPLITS[0]))
    wanted = buffers_after(model, batches)
    assert all(torch.allclose(found[name], one, rtol=2**-8, atol=0) for name, one in wanted.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_update_float32_statistics(dtype: torch.dtype) -> None:
    model, batches = nn.Sequential(nn.BatchNorm2d(5, momentum=1 / 3)), inputs(4, 5, 6, 6, dtype=dtype)
    assert_same(buffers_of_ranks(model, batches, SPLITS[2]), buffers_after(model, batches))


def test_channels_last_inputs_are_those_of_one_process() -> None:
    model = nn.Sequential(nn.BatchNorm2d(5))
    batches = [one.to(memory_format=torch.channels_last) for one in inputs(4, 5, 6, 6)]
    assert_same(buffers_of_ranks(model, batches, SPLITS[2]), buffers_after(model, batches))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_strided_inputs_do_not_depend_on_the_ranks(dtype: torch.dtype) -> None:
    """In float32, torch's own variance may differ in the last bit: its kernel does not round it to float32."""
    model = nn.Sequential(nn.BatchNorm2d(5)).to(dtype)
    batches = [one.permute(0, 3, 2, 1) for one in inputs(4, 6, 6, 5, dtype=dtype)]
    found = buffers_of_ranks(model, batches, SPLITS[2])
    assert_same(found, buffers_of_ranks(model, batches, SPLITS[0]))
    wanted = buffers_after(model, batches)
    if dtype is torch.float32:
        variance, own = wanted.pop("0.running_var"), found.pop("0.running_var")
        torch.testing.assert_close(own, variance, rtol=2**-22, atol=0)
    assert_same(found, wanted)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("owners", SPLITS)
def test_a_module_may_run_twice_or_not_at_all(owners: list[int], blocks: bool) -> None:
    model, batches = Twice(), inputs(5, 6)
    assert 0 < sum(float(one.sum()) > 0 for one in batches)
    batches[3] = -batches[3].abs()
    wanted = buffers_after(copy.deepcopy(model), batches)
    assert wanted["shared.num_batches_tracked"] == 4 * COUNT > 2 * COUNT > wanted["rare.num_batches_tracked"] > 0
    assert_same(buffers_of_ranks(model, batches, owners, blocks=blocks), wanted)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("how", ["torch", "hpctrain"])
def test_recomputation_counts_once(how: str, blocks: bool) -> None:
    model, batches = Checkpointed(), inputs(5, 6)
    wanted = buffers_after(copy.deepcopy(model), batches)
    model.recomputes = how == "torch"
    undo = recompute([model.inner]) if how == "hpctrain" else lambda: None
    found = buffers_of_ranks(model, batches, SPLITS[1], blocks=blocks)
    undo()
    assert_same(found, wanted)


def test_frozen_norms_and_norms_without_parameters_are_as_in_one_process() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(6, affine=False),
        nn.Linear(6, 6),
        nn.BatchNorm1d(6),
        nn.BatchNorm1d(6, track_running_stats=False),
    )
    model[2](inputs(5, 6)[0])
    model[2].eval()
    before = model[2].running_mean.clone()
    batches = inputs(5, 6)
    found = buffers_of_ranks(model, batches, SPLITS[2])
    assert_same(found, buffers_after(copy.deepcopy(model), batches))
    assert torch.equal(found["2.running_mean"], before) and before.any()


def test_without_batch_norms_nothing_is_sent() -> None:
    statistics = MicrobatchStatistics([nn.Linear(3, 3)])
    with statistics.recording(0):
        pass

    class Refusing:
        size = 2

    statistics.finish(2, Refusing())  # type: ignore[arg-type]


@pytest.mark.parametrize("blocks", [False, True])
def test_an_exception_leaves_statistics_and_momentum(blocks: bool) -> None:
    model, batches = vectors(), inputs(5, 6)
    before = copy.deepcopy(dict(model.named_buffers()))
    statistics = MicrobatchStatistics([model])
    with pytest.raises(ArithmeticError):
        if blocks:
            with statistics.step(None), statistics.recording(0):
                model(batches[0])
                raise ArithmeticError
        else:
            with statistics.recording(0):
                model(batches[0])
                raise ArithmeticError
    assert_same(dict(model.named_buffers()), before)
    assert model[1].momentum == 0.1
    with pytest.raises(RuntimeError), statistics.recording(0):
        model[1](torch.ones(5, 4))
    assert_same(dict(model.named_buffers()), before)
    for index, batch in enumerate(batches):
        with statistics.recording(index):
            model(batch)
    statistics.finish(COUNT, None)
    plain = vectors()
    plain.load_state_dict({**model.state_dict(), **before})
    assert_same(dict(model.named_buffers()), buffers_after(plain, batches, 1))


def test_passes_outside_of_a_recording_are_plain() -> None:
    model, plain = vectors(), vectors()
    statistics = MicrobatchStatistics([model])
    assert_same(buffers_after(model[1], inputs(5, 9)), buffers_after(plain[1], inputs(5, 9)))
    statistics.finish(0, None)
    assert model[1].momentum == 0.1


# Other buffers --------------------------------------------------------------------------------------------------------


class Average(nn.Module):
    """Module that keeps a moving average of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.full((2,), math.nan))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, given: Tensor) -> Tensor:
        if self.training:
            self.average = torch.lerp(self.average.nan_to_num(), given.detach().mean(0)[:2], 0.1)
        return given


def copies(models: list[nn.Module]) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in other_buffers(models).items()}


def test_buffers_that_a_forward_pass_changes_are_named() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Sequential(Average()))
    before = copies([model])
    assert list(before) == ["1.0.average"]
    check_unchanged(before, [model])  # NaN equals itself
    model(inputs(5, 6)[0])
    with pytest.raises(UsageError, match="buffer 1.0.average of Average.*allowed are.*parallel.reproducible = false"):
        check_unchanged(before, [model])
    before = copies([model])
    model.eval()(inputs(5, 6)[0])
    check_unchanged(before, [model])


def test_power_iterations_of_spectral_norm_are_found() -> None:
    torch.manual_seed(1)  # of some weights, the first iterations are exact
    models: list[nn.Module] = [nn.Linear(2, 2), nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))]
    before = copies(models)
    models[1](inputs(5, 6)[0])
    with pytest.raises(UsageError, match="buffer 1.parametrizations.weight.0._[uv] of _SpectralNorm"):
        check_unchanged(before, models)
