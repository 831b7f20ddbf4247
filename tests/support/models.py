"""The small models that can be initialised module by module, built from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hpctrain.models.build import ConvNet, MultiLayerPerceptron
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig

SHAPE = {"heads": 2, "width": 16, "context": 8, "vocab_size": 31}
MAKERS: dict[str, Callable[[], Any]] = {
    "gpt": lambda: GPT(GPTConfig(layers=2, tied=False, **SHAPE)),
    "tied gpt": lambda: GPT(GPTConfig(layers=2, tied=True, **SHAPE)),
    "mlp": lambda: MultiLayerPerceptron((4, 5), 3, hidden=(6, 6)),
    "convnet": lambda: ConvNet((2, 8, 8), 3, channels=(4, 4)),
}
EACH_MODEL = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def made(make: Callable[[], Any], device: str = "cpu", seed: int = 5) -> Any:
    """Return a model on a device."""
    torch.manual_seed(seed)
    with torch.device(device):
        return make()
