"""Operations of scripts on a wrapped model (compile, convert, load, save, copy): right numbers or an error."""

from __future__ import annotations

import copy
import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from hpctrain.errors import UsageError

pytestmark = pytest.mark.ranks(2)
SPLIT = ("zero1", "zero2", "fsdp")
SAMPLES = 12


def make_model(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), *blocks, nn.Linear(9, 3))


def _batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randn(SAMPLES, 6).to(dtype), torch.randn(SAMPLES, 3).to(dtype)


def _share(job: Any, tensor: Tensor) -> Tensor:
    return tensor[job.rank * SAMPLES // job.size : (job.rank + 1) * SAMPLES // job.size]


def _train(model: nn.Module, called: nn.Module, x: Tensor, y: Tensor, steps: int = 3) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        F.mse_loss(called(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _expect(job: Any, model: nn.Module, plain: nn.Module, tolerance: float = 1e-6) -> None:
    found = job.state_dict(model)
    assert list(found) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}")


# torch.compile --------------------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["ddp", *SPLIT])
@pytest.mark.parametrize("form", ["after", "before", "in place"])
def test_compiled_models_train_like_plain_ones(job: Any, strategy: str, form: str) -> None:
    torch.compiler.reset()
    plain, model, (x, y) = make_model(), make_model(), _batch()
    _train(plain, plain, x, y)
    called: Any = model
    settings = {"data": strategy, "units": ["2", "3"]} if strategy == "fsdp" else strategy
    if form == "before":
        called = torch.compile(model, backend="aot_eager")
        assert job.wrap(called, settings) is called
    else:
        job.wrap(model, settings)
        if form == "after":
            called = torch.compile(model, backend="aot_eager")
        else:
            model.compile(backend="aot_eager")
    _train(model, called, _share(job, x), _share(job, y))
    _expect(job, called, plain)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_accepts_a_compiled_model_and_saves_plain_names(job: Any, tmp_path: Path, strategy: str) -> None:
    import hpctrain

    torch.compiler.reset()
    folder = Path(job.comm.broadcast_object(str(tmp_path)))
    model, (x, y) = make_model(), _batch()
    plain = make_model()
    _train(plain, plain, x, y, steps=1)
    job.wrap(model, strategy)
    compiled: Any = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    with job.run(compiled, optimizer, [(_share(job, x), _share(job, y))], checkpoints=str(folder)) as run:
        for _, (inputs, targets) in run:
            F.mse_loss(compiled(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    _expect(job, compiled, plain)
    fresh = make_model(seed=9)
    hpctrain.checkpoint.load(folder / "checkpoints" / "step_00000001.h5", model=fresh)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(fresh.state_dict()[name], value, rtol=0, atol=1e-6)


def test_synchronised_batch_norms_stay_out_of_compiled_graphs(job: Any) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9, bias=False), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3))
    plain, (x, y) = copy.deepcopy(model), _batch()
    _train(plain, plain, x, y)
    job.wrap(model, "ddp")
    _train(model, torch.compile(model, backend="aot_eager"), _share(job, x), _share(job, y))  # type: ignore[arg-type]
    _expect(job, model, plain)


# Conversions ----------------------------------------------------------------------------------------------------------


def test_ddp_reduces_in_the_dtype_that_a_model_was_converted_to(job: Any) -> None:
    model, plain, (x, y) = make_model(), make_model().double(), _batch(torch.float64)
    job.wrap(model, "ddp")
    _train(model, model, _share(job, x).float(), _share(job, y).float(), steps=2)
    model.double()
    model.load_state_dict(plain.state_dict())
    _train(plain, plain, x, y)
    _train(model, model, _share(job, x), _share(job, y))
    _expect(job, model, plain, 1e-14)


@pytest.mark.parametrize("strategy", SPLIT)
def test_shards_refuse_another_dtype_and_stay_unchanged(job: Any, strategy: str) -> None:
    model, plain, (x, y) = make_model(), make_model(), _batch()
    job.wrap(model, strategy)
    for convert in (lambda: model.double(), lambda: model.to(torch.bfloat16), lambda: model.half()):
        with pytest.raises(UsageError, match=r"conversion of .* shard of parameter 0.weight .*before job\.wrap"):
            convert()
    assert model.to("cpu").float() is model  # which is a no-op
    _train(plain, plain, x, y)
    _train(model, model, _share(job, x), _share(job, y))
    _expect(job, model, plain)


# Whole tensors in -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("strategy", ["ddp", *SPLIT])
def test_whole_tensors_are_loaded_after_wrapping(job: Any, strategy: str) -> None:
    model, plain, (x, y) = make_model(), make_model(seed=8), _batch()
    job.wrap(model, strategy)
    _train(model, model, _share(job, x), _share(job, y))
    assert not any(model.load_state_dict(plain.state_dict()))
    _expect(job, model, plain, 0.0)
    _train(plain, plain, x, y)
    _train(model, model, _share(job, x), _share(job, y))
    _expect(job, model, plain)
    parts = {name: value.clone() for name, value in model.state_dict().items()}
    model[2].load_state_dict(make_model(seed=5)[2].state_dict())  # a submodule, such as a backbone
    plain[2].load_state_dict(make_model(seed=5)[2].state_dict())
    _expect(job, model, plain)
    model.load_state_dict(parts)  # the result of state_dict(): this rank's shards
    with pytest.raises(RuntimeError, match="Missing key.*0.weight"):
        model.load_state_dict({name: value for name, value in plain.state_dict().items() if name != "0.weight"})
    with pytest.raises(RuntimeError, match="size mismatch for 0.weight"):
        model.load_state_dict({**plain.state_dict(), "0.weight": torch.zeros(9, 7)})


def test_assigning_tensors_to_a_sharded_model_is_refused(job: Any) -> None:
    model = make_model()
    job.wrap(model, "fsdp")
    with pytest.raises(UsageError, match="assign=True.*load without assign"):
        model.load_state_dict(make_model().state_dict(), assign=True)


# Files and copies -----------------------------------------------------------------------------------------------------


def _saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_replicas_are_saved_and_copied_like_plain_models(job: Any) -> None:
    model, plain, (x, y) = make_model(), make_model(), _batch()
    job.wrap(model, "ddp")
    for twin in (_saved(model), copy.deepcopy(model)):
        if job.rank == 0:  # a copy does not communicate
            _train(twin, twin, x, y)
    _train(plain, plain, x, y)
    optimizer = _train(model, model, _share(job, x), _share(job, y))
    _expect(job, model, plain)
    assert _saved(optimizer.state_dict())["state"][0]["exp_avg"].shape == (9, 6)


@pytest.mark.parametrize("strategy", SPLIT)
def test_shards_refuse_to_be_saved(job: Any, strategy: str) -> None:
    model, (x, y) = make_model(), _batch()
    job.wrap(model, strategy)
    optimizer = _train(model, model, _share(job, x), _share(job, y))
    for thing in (model, model.state_dict(), {"epoch": 1, "model": model.state_dict()}):
        with pytest.raises(UsageError, match=r"writing this rank's shard .* write job\.state_dict\(model\)"):
            _saved(thing)
    with pytest.raises(UsageError, match=r"writing the optimizer's state of this rank's shard .*run\.save"):
        _saved(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())  # to the same ranks
    assert all(type(value) is Tensor for state in optimizer.state.values() for value in state.values())
    assert _saved(job.state_dict(model))["0.weight"].shape == (9, 6)


@pytest.mark.parametrize("strategy", ["ddp", *SPLIT])
def test_a_weight_of_two_layers_is_saved_once(job: Any, strategy: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    job.wrap(model, strategy)
    found = job.state_dict(model)
    assert list(found) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert len({tensor.data_ptr() for tensor in found.values()}) == 3
    assert found["0.weight"].data_ptr() == found["2.weight"].data_ptr() != model[0].weight.data_ptr()


# LBFGS ----------------------------------------------------------------------------------------------------------------


def test_lbfgs_under_ddp_equals_one_process_and_resumes(job: Any, tmp_path: Path) -> None:
    folder = Path(job.comm.broadcast_object(str(tmp_path)))
    x, y = _batch(torch.float64)

    def train(model: nn.Module, x: Tensor, y: Tensor, run: Any, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return float(loss.detach() if len(x) == SAMPLES else job.comm.all_reduce(loss.detach(), "average"))

        for _ in run:
            optimizer.step(closure)

    def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3)

    plain = make_model().double()
    train(plain, x, y, range(4), lbfgs(plain))
    for steps in (2, 4):  # the second one resumes
        model = job.wrap(make_model(seed=steps).double() if steps == 4 else make_model().double(), "ddp")
        optimizer = lbfgs(model)
        loader = [0] * 4
        with job.run(model, optimizer, loader, checkpoints=str(folder), steps=steps) as run:
            train(model, _share(job, x), _share(job, y), run, optimizer)
    _expect(job, model, plain, 1e-12)


def test_lbfgs_line_search_is_the_same_on_all_ranks(job: Any) -> None:
    x, y = _batch(torch.float64)

    def train(model: nn.Module, x: Tensor, y: Tensor) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss.detach()

        for _ in range(3):
            optimizer.step(closure)

    model, plain, other = make_model().double(), make_model().double(), make_model()
    job.wrap(other, "ddp")
    job.wrap(model, "ddp")
    if job.rank == 0:  # an optimizer without a wrapped model does not communicate
        train(make_model().double(), x, y)
    train(plain, x, y)
    train(model, _share(job, x), _share(job, y))
    _expect(job, model, plain, 1e-8)


# Replaced parameters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ddp", *SPLIT])
def test_functional_calls_give_the_numbers_of_one_process_or_an_error(job: Any, strategy: str) -> None:
    plain, model, (x, _) = make_model(), job.wrap(make_model(), strategy), _batch()
    other = {"0.weight": torch.randn(9, 6)}
    with torch.no_grad():
        wanted = functional_call(plain, other, (x,))
        with job.unshard(model):
            torch.testing.assert_close(functional_call(model, other, (x,)), wanted)
        if strategy == "ddp":
            torch.testing.assert_close(functional_call(model, other, (x,)), wanted)
        else:
            with pytest.raises(UsageError, match="0.weight: another tensor is in its place .*functional_call") as error:
                functional_call(model, other, (x,))
            assert error.value.everywhere
        torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("strategy", SPLIT)
def test_parameters_replaced_after_wrap_are_refused(job: Any, strategy: str) -> None:
    model, (x, _) = job.wrap(make_model(), strategy), _batch()
    model[0].weight = nn.Parameter(torch.zeros(9, 6))
    with pytest.raises(UsageError, match="0.weight: another tensor is in its place .*before job.wrap"):
        model(x)


# Indexing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", SPLIT)
def test_indices_into_a_shard_are_not_those_of_the_whole_tensor(job: Any, strategy: str) -> None:
    model, plain, (x, y) = make_model(), make_model(), _batch()
    job.wrap(model, strategy)
    for one, (a, b) in ((plain, (x, y)), (model, (_share(job, x), _share(job, y)))):
        F.mse_loss(one(a), b).backward()
    weight = model[0].weight

    def fill(tensor: Tensor, index: Any) -> None:
        tensor[index] = 0

    for call in (
        lambda: weight[0],
        lambda: fill(weight.data, 0),
        lambda: fill(weight.grad, slice(5)),
        lambda: fill(weight.grad, (slice(None), 0)),
        lambda: weight.data[:2].zero_(),
        lambda: weight.data.view(-1)[:3],
        lambda: weight.data.t()[0],
        lambda: weight.select(0, 0),
        lambda: weight.data.narrow(0, 0, 0),
        lambda: weight.data.chunk(2),
        lambda: weight.data.unbind(0),
        lambda: weight.grad.index_fill_(0, torch.tensor([0]), 0.0),
        lambda: fill(weight.grad, torch.tensor([1])),
        lambda: len(weight),
    ):
        with pytest.raises(UsageError, match="of this rank's shard of parameter 0.weight: places in it .*unshard"):
            call()
    for parameter in (*model.parameters(), *plain.parameters()):  # by values, not indices
        assert parameter.grad is not None
        parameter.grad[parameter.grad.abs() < 0.01] = 0
        parameter.grad[:].mul_(2)
    for one in (model, plain):
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    _expect(job, model, plain)
    with job.unshard(model, write=True), torch.no_grad():
        model[0].weight[0] = 0
    with torch.no_grad():
        plain[0].weight[0] = 0
    _expect(job, model, plain)


@pytest.mark.parametrize("strategy", ["ddp", *SPLIT])
def test_no_rank_reads_later_writes_of_another(job: Any, strategy: str) -> None:
    model = job.wrap(make_model(), strategy)
    with job.unshard(model):
        before, deadline = model[0].weight.detach().clone(), time.monotonic() + 0.3
        while job.rank == 1 and time.monotonic() < deadline:  # rank 0 does not wait for rank 1
            assert torch.equal(model[0].weight, before)
    with job.unshard(model, write=True), torch.no_grad():
        model[0].weight.zero_()
    assert not job.state_dict(model)["0.weight"].any()


# Recomputing ----------------------------------------------------------------------------------------------------------


class Cache:
    """Keys of each layer, as decoders of language models store them."""

    def __init__(self) -> None:
        self.keys: list[Tensor | None] = [None] * 2


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.keys, self.out = number, nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x: Tensor, cache: Cache | None = None, *, seen: list[int]) -> Tensor:
        seen.append(self.number)
        keys = cache.keys[self.number] if cache is not None else None
        if keys is None:
            keys = self.keys(x)
            if cache is not None:
                cache.keys[self.number] = keys
        return torch.tanh(self.out(x * keys) * len(seen))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 3)
        self.layers = nn.ModuleList(Layer(number) for number in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, cache, seen = self.first(x), Cache(), list[int]()
        for layer in self.layers:
            x = layer(x, cache, seen=seen)
        result: Tensor = self.last(x)
        return result


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_recomputed_layers_find_the_caches_of_the_first_pass(job: Any, strategy: str) -> None:
    torch.manual_seed(2)
    model, (x, y) = Decoder(), _batch()
    plain = copy.deepcopy(model)
    _train(plain, plain, x, y)
    job.wrap(model, {"data": strategy, "recompute": True, "units": ["layers.*"]})
    _train(model, model, _share(job, x), _share(job, y))
    _expect(job, model, plain)


# Batch norm -----------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, given: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(given, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.short = nn.Sequential(nn.Conv2d(given, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_resnet_with_synchronised_norms_equals_the_whole_batch(job: Any, strategy: str) -> None:
    """The model is float64: in float32, rounding decides the sign of a ReLU's input, and training amplifies that."""
    torch.manual_seed(0)
    widths = [8, 8, 16, 32, 64]
    blocks = [Residual(a, b, 2 if b > 8 else 1) for a, b in zip(widths, widths[1:])]
    stem = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    plain = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3)).double()
    model, x, y = copy.deepcopy(plain), torch.randn(SAMPLES, 3, 16, 16, dtype=torch.float64), _batch(torch.float64)[1]
    job.wrap(model, strategy)

    def train(model: nn.Module, x: Tensor, y: Tensor) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(5):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(plain, x, y)
    train(model, _share(job, x), _share(job, y))
    _expect(job, model, plain, 1e-12)
