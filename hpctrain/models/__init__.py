"""Small reference models, and the function that builds the one in the settings.

Importing this package does not load torch; each name below is imported from its module at first
use. ``hpctrain.models.build.build`` has the name of its module, so it is imported from there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.models.build import MLP as MLP
    from hpctrain.models.build import ConvNet as ConvNet
    from hpctrain.models.gpt import GPT as GPT
    from hpctrain.models.gpt import generate as generate
    from hpctrain.models.settings import GPTConfig as GPTConfig
    from hpctrain.models.settings import ModelSettings as ModelSettings

_HOMES = {
    "ConvNet": "build",
    "GPT": "gpt",
    "GPTConfig": "settings",
    "MLP": "build",
    "ModelSettings": "settings",
    "generate": "gpt",
}

__all__ = ["ConvNet", "GPT", "GPTConfig", "MLP", "ModelSettings", "generate"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first requested (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
