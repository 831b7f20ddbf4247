"""Checkpoints: the state of a training run in one HDF5 file that is independent of the number of ranks.

``save`` and ``load`` need torch, which is imported at first use. ``file`` reads and writes one
file, ``together`` writes one file from many ranks, ``look`` contains the operations for a login
node. ``file`` and ``look`` need h5py and NumPy only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.checkpoint.folder import keep_last as keep_last
    from hpctrain.checkpoint.folder import list_checkpoints as list_checkpoints
    from hpctrain.checkpoint.folder import newest_valid as newest_valid
    from hpctrain.checkpoint.rng import capture_rng as capture_rng
    from hpctrain.checkpoint.rng import restore_rng as restore_rng
    from hpctrain.checkpoint.saver import Saver as Saver
    from hpctrain.checkpoint.saver import Storage as Storage
    from hpctrain.checkpoint.state import Loaded as Loaded
    from hpctrain.checkpoint.state import load as load
    from hpctrain.checkpoint.state import save as save
    from hpctrain.checkpoint.tools.inspect import best as best

_HOMES = {
    "Loaded": "state",
    "Saver": "saver",
    "Storage": "saver",
    "best": "tools.inspect",
    "capture_rng": "rng",
    "keep_last": "folder",
    "list_checkpoints": "folder",
    "load": "state",
    "newest_valid": "folder",
    "restore_rng": "rng",
    "save": "state",
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
