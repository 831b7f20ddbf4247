"""Modules that are never called: detection, and the modules to name instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hpctrain.parallel.fsdp.units import has_forward, uncalled


class Attending(nn.Module):
    """Model with attention, linear layers and containers, some of which are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ModuleDict({"one": nn.Linear(4, 4)})])
        self.scales = nn.ParameterList([torch.ones(4)])
        self.holder = nn.Module()
        self.holder.linear = nn.Linear(4, 4)
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Any) -> Any:
        """Map ``[length, 4]`` to the same shape."""
        x = self.attention(x, x, x)[0]
        return self.holder.linear(self.normed(self.layers[1]["one"](self.layers[0](x)))) * self.scales[0]


def test_modules_that_are_never_called_are_named() -> None:
    model = Attending()
    others = uncalled(model)
    assert {name: others[module] for name, module in model.named_modules() if module in others} == {
        "attention.out_proj": "is read by the MultiheadAttention around it and never called: name that, 'attention'",
        "layers": "never runs, being a ModuleList: name its members, 'layers.*'",
        "layers.1": "never runs, being a ModuleDict: name its members, 'layers.1.*'",
        "scales": "never runs, being a ParameterList: name its members, 'scales.*'",
        "holder": "never runs, being a Module: name its members, 'holder.*'",
        "normed.parametrizations": "is read by the ParametrizedLinear around it and never called: "
        "name that, 'normed'",
        "normed.parametrizations.weight": "is read by the ParametrizedLinear around it and never called: "
        "name that, 'normed'",
        "normed.parametrizations.weight.0": "is read by the ParametrizedLinear around it and never called: "
        "name that, 'normed'",
    }


def test_all_other_modules_are_called() -> None:
    model = Attending()
    called: list[nn.Module] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: called.append(module))
    model(torch.randn(3, 4))
    silent = {module for module in uncalled(model) if module not in model.normed.parametrizations.modules()}
    assert silent == set(model.modules()) - set(called) - {model.normed.parametrizations}


@pytest.mark.parametrize("make", [nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Module])
def test_containers_have_no_forward(make: Any) -> None:
    assert not has_forward(make())


def test_an_instance_may_have_its_own_forward() -> None:
    holder = nn.ModuleList([nn.Linear(2, 2)])
    holder.forward = holder[0].forward  # type: ignore[method-assign]
    assert has_forward(holder) and has_forward(nn.Linear(2, 2)) and has_forward(nn.Sequential())
