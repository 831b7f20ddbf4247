"""Optimizer states that are tensors made of other tensors, as torchao's: stored and loaded bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from torch import Tensor, nn

from hpctrain import checkpoint
from hpctrain.checkpoint.dtensor import from_inner_tensors, inner_tensors
from hpctrain.errors import CheckpointError


class Quantised(Tensor):
    """Tensor as bytes and a scale per row, with an apparent dtype."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, signed: bool, dtype: torch.dtype) -> Quantised:
        return cls._make_wrapper_subclass(cls, codes.shape, dtype=dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: Tensor, scale: Tensor, signed: bool, dtype: torch.dtype) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], [self.signed, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: list[Any], size: Any, stride: Any) -> Quantised:
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func}: only the optimizer knows the values")


class Small(torch.optim.Optimizer):
    """Optimizer with momentum in 8 bits."""

    def __init__(self, parameters: Any, signed: Any = True) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.1)})
        self.signed = signed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            old = self.state[parameter].get("momentum")
            momentum = 0.9 * old.codes.to(torch.int8) * old.scale if old is not None else torch.zeros_like(parameter)
            momentum += parameter.grad
            scale = momentum.abs().amax(-1, keepdim=True) / 127
            codes = (momentum / scale).round().to(torch.int8).view(torch.uint8)
            self.state[parameter]["momentum"] = Quantised(codes, scale, self.signed, torch.float32)
            parameter.sub_(momentum, alpha=0.1)


def trained(steps: int, path: Path | None = None, **options: Any) -> tuple[nn.Module, Small]:
    """Train; if a path is given, continue from the checkpoint there."""
    torch.manual_seed(1)
    model = nn.Linear(4, 3, bias=False)
    optimizer = Small(model.parameters(), **options)
    start = 0 if path is None else checkpoint.load(path, model=model, optimizer=optimizer).step
    for step in range(start, steps):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_training_continues_bit_for_bit(tmp_path: Path) -> None:
    straight, _ = trained(4)
    model, optimizer = trained(2)
    path = tmp_path / "quantised.h5"
    checkpoint.save(path, model=model, optimizer=optimizer, train={"step": 2})
    with h5py.File(path) as file:
        assert file["optimizer/weight/momentum.codes"].dtype == "uint8"
        assert file["optimizer/weight/momentum.scale"].shape == (3, 1)
    resumed, optimizer = trained(4, path)
    state = optimizer.state[resumed.get_parameter("weight")]["momentum"]
    assert type(state) is Quantised and state.dtype is torch.float32 and state.signed is True
    assert torch.equal(resumed.get_parameter("weight"), straight.get_parameter("weight"))


def test_a_description_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(1, signed=object())
    with pytest.raises(CheckpointError, match="the optimizer's state momentum is described by a value of type object"):
        checkpoint.save(tmp_path / "refused.h5", model=model, optimizer=optimizer)
    assert not list(tmp_path.iterdir())


def test_an_unknown_class_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    path = tmp_path / "quantised.h5"
    name = Quantised.__qualname__
    try:
        Quantised.__qualname__ = "Elsewhere"
        checkpoint.save(path, model=model, optimizer=optimizer)
    finally:
        Quantised.__qualname__ = name
    with pytest.raises(CheckpointError, match="class Elsewhere of .*test_checkpoint_quantised, which is not imported"):
        checkpoint.load(path, model=model, optimizer=optimizer)


def test_an_unknown_dtype_is_refused() -> None:
    _, optimizer = trained(1)
    (state,) = [one["momentum"] for one in optimizer.state.values() if "momentum" in one]
    found = inner_tensors(state, "momentum")
    assert found is not None
    plain, tensors = found
    assert isinstance(from_inner_tensors(plain, tensors), Quantised)
    for name in ("float33", "nn", "Tensor"):
        described = [{**item, "dtype": name} if isinstance(item, dict) else item for item in plain["context"]]
        with pytest.raises(CheckpointError, match=f"has the dtype '{name}', which torch does not know"):
            from_inner_tensors({**plain, "context": described}, tensors)
