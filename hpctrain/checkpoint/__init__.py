"""Checkpoints: the state of a training run in one HDF5 file that is independent of the number of ranks.

``save`` and ``load`` need torch, which is imported at first use. ``format`` reads and writes one
file, ``saver`` writes one file from many ranks, ``tools`` contains the operations for a login node.
``format`` and ``tools`` need h5py and NumPy only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.checkpoint.content import capture_rng, restore_rng
    from hpctrain.checkpoint.restore import Loaded, load
    from hpctrain.checkpoint.retention import keep_last, list_checkpoints, newest_valid
    from hpctrain.checkpoint.saver import Saver, save
    from hpctrain.checkpoint.storage import Storage
    from hpctrain.checkpoint.tools.inspect import best

_HOMES = {
    "Loaded": "restore",
    "Saver": "saver",
    "Storage": "storage",
    "best": "tools.inspect",
    "capture_rng": "content",
    "keep_last": "retention",
    "list_checkpoints": "retention",
    "load": "restore",
    "newest_valid": "retention",
    "restore_rng": "content",
    "save": "saver",
}
__all__ = [
    "Loaded",
    "Saver",
    "Storage",
    "best",
    "capture_rng",
    "keep_last",
    "list_checkpoints",
    "load",
    "newest_valid",
    "restore_rng",
    "save",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first requested (PEP 562)."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
