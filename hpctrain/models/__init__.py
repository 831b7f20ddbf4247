"""Small reference models, and the function that builds the one in the settings.

Importing this package does not load torch; each name below is imported from its module at first
use. ``hpctrain.models.build.build`` has the name of its module, so it is imported from there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.models.convnet import ConvNet as ConvNet
    from hpctrain.models.gpt import GPT as GPT
    from hpctrain.models.mlp import MLP as MLP
    from hpctrain.models.sampling import generate as generate
    from hpctrain.models.settings import ModelSettings as ModelSettings
    from hpctrain.models.shapes import GPTConfig as GPTConfig

_HOMES = {
    "ConvNet": "convnet",
    "GPT": "gpt",
    "GPTConfig": "shapes",
    "MLP": "mlp",
    "ModelSettings": "settings",
    "generate": "sampling",
}

__all__ = ["ConvNet", "GPT", "GPTConfig", "MLP", "ModelSettings", "generate"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first requested (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
