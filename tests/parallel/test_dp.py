"""One process with several GPUs: torch's DataParallel if possible, refused otherwise."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.replicas import Branches, assert_same, gradients, learn, make_gpt, make_mlp, vectors, weights
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.dp import ThreadedDataParallel, devices_of
from hpctrain.parallel.recompute import recompute

ALONE: Any = SimpleNamespace(size=1, rank=0)
Call = tuple[Any, list[int]]


def split(module: nn.Module, inputs: Any, device_ids: list[int], *, module_kwargs: Any) -> Any:
    """Emulate torch's ``data_parallel`` on the CPU: copy all modules, run each copy on a part of the batch."""
    count = len(device_ids)
    parts = [tuple(one.chunk(count)[n] if torch.is_tensor(one) else one for one in inputs) for n in range(count)]
    return torch.cat([replicate(module)(*part, **module_kwargs) for part in parts])


def replicate(module: nn.Module) -> Any:
    """Return a copy with the same parameters, like torch's ``replicate`` on one device."""
    replica = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        setattr(replica, name, replicate(child))
    for name, parameter in vars(module)["_parameters"].items():
        setattr(replica, name, parameter.view_as(parameter) if parameter is not None else None)
    return replica


class Calls(list[Call]):
    """Recorded calls of ``data_parallel`` on three simulated GPUs."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __call__(self, module: nn.Module, inputs: Any, device_ids: list[int], *, module_kwargs: Any) -> Any:
        """Record a call, and compute."""
        self.append((inputs, device_ids))
        return split(module, inputs, device_ids, module_kwargs=module_kwargs)

    def wrap(self, model: nn.Module, comm: Any = ALONE) -> ThreadedDataParallel:
        """Attach the strategy to a model."""
        return ThreadedDataParallel(model, comm, 3, self)


@pytest.fixture
def calls() -> Calls:
    """Simulate three GPUs, and record the calls."""
    return Calls()


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_gpus_are_refused(count: int) -> None:
    model = make_mlp()
    with pytest.raises(UsageError, match=f"needs at least two GPUs, and this process sees {count}: use ddp") as error:
        ThreadedDataParallel(model, ALONE, count)
    assert error.value.everywhere and "forward" not in vars(model)


def test_several_ranks_are_refused(calls: Calls) -> None:
    with pytest.raises(UsageError, match="in one process, but there are 4 ranks: start one, or use ddp$") as error:
        calls.wrap(make_mlp(), SimpleNamespace(size=4, rank=2))
    assert error.value.everywhere


def test_a_forward_on_the_instance_is_refused(calls: Calls) -> None:
    model = make_mlp()
    model.forward = model.forward  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="define it in the class$"):
        calls.wrap(model)


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
def test_training_equals_that_of_the_plain_model(calls: Calls, kind: str) -> None:
    make = {"mlp": make_mlp, "gpt": make_gpt}[kind]
    plain, ours = make(), make()
    strategy = calls.wrap(ours)
    assert learn(ours, kind, 4) == pytest.approx(learn(plain, kind, 4), rel=1e-6)
    assert_same(weights(ours), weights(plain))
    assert [devices for _, devices in calls] == [[0, 1, 2]] * 4 and strategy.model is ours


def test_names_are_unchanged_and_detaching_restores_the_model(calls: Calls) -> None:
    model = make_gpt()
    names = list(model.state_dict()), [name for name, _ in model.named_modules()]
    strategy = calls.wrap(model)
    assert names == (list(model.state_dict()), [name for name, _ in model.named_modules()])
    strategy.detach()
    strategy.detach()
    assert "forward" not in vars(model)
    model(torch.zeros(3, 4, dtype=torch.long))
    assert not calls


def test_hooks_of_the_model_see_whole_batches_and_inner_hooks_see_parts(calls: Calls) -> None:
    model = make_mlp()
    seen: list[tuple[str, int]] = []
    model.register_forward_hook(lambda module, args, result: seen.append(("model", len(result))))
    model[1].register_forward_hook(lambda module, args, result: seen.append(("inside", len(result))))
    calls.wrap(model)
    model(vectors()[0])
    assert seen == [("inside", 4)] * 3 + [("model", 12)]


def test_arguments_are_passed_to_the_model(calls: Calls) -> None:
    model, plain = Branches(), Branches()
    calls.wrap(model)
    inputs = vectors()[0]
    torch.testing.assert_close(model(inputs, use="ba"), plain(inputs, "ba"))
    torch.testing.assert_close(model(inputs, "c"), plain(inputs, "c"))


def test_a_copied_model_computes_with_its_own_parameters(calls: Calls) -> None:
    model = make_mlp()
    calls.wrap(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(twin(vectors()[0]), make_mlp()(vectors()[0]))
    assert len(calls) == 1


def test_recomputing_is_supported(calls: Calls) -> None:
    plain, ours = make_gpt(), make_gpt()
    recompute([ours, *ours.blocks])
    calls.wrap(ours)
    assert learn(ours, "gpt", 3) == pytest.approx(learn(plain, "gpt", 3), rel=1e-6)


def test_other_methods_behave_as_on_one_rank(calls: Calls) -> None:
    model, plain = make_mlp(), make_mlp()
    strategy = calls.wrap(model)
    strategy.join_empty()
    with strategy.no_sync():
        for each in (model, plain):
            each(vectors()[0]).square().sum().backward()
    assert_same(gradients(model), gradients(plain))
    norm = strategy.clip_grad_norm(0.1)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    assert_same(gradients(model), gradients(plain))
    assert strategy.split is None


def test_the_models_own_gpu_comes_first() -> None:
    def model(device: str) -> Any:
        return SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device(device))]))

    assert devices_of(model("cuda:2"), 4) == [2, 0, 1, 3]
    assert devices_of(model("cuda:0"), 4) == devices_of(model("cpu"), 4) == devices_of(nn.Flatten(), 4) == [0, 1, 2, 3]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("again", [False, True])
def test_training_on_several_gpus_equals_that_on_one(again: bool) -> None:
    inputs, targets = (tensor.cuda() for tensor in vectors())

    def trained(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        return list(model.parameters())

    alone, ours = make_mlp().cuda(), make_mlp().cuda()
    if again:
        recompute([ours])
    ThreadedDataParallel(ours, ALONE)
    for one, other in zip(trained(ours), trained(alone)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
