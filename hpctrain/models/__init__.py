"""Hold small reference models and build the one that the settings ask for.

Importing this package does not load torch; each name below comes from its own file at first use.
``hpctrain.models.build.build`` has its file's name, so it is imported from there.
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
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
