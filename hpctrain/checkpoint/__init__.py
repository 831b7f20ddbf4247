"""Keep a training run in one HDF5 file: the model, not the ranks.

``save`` and ``load`` need torch and come at first use. ``file`` is one file, ``together`` how many ranks write it,
``look`` what a login node does with it: ``file`` and ``look`` run with h5py and NumPy alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.checkpoint.folder import keep_last as keep_last
    from hpctrain.checkpoint.folder import list_checkpoints as list_checkpoints
    from hpctrain.checkpoint.folder import newest_valid as newest_valid
    from hpctrain.checkpoint.look.place import best as best
    from hpctrain.checkpoint.rng import capture_rng as capture_rng
    from hpctrain.checkpoint.rng import restore_rng as restore_rng
    from hpctrain.checkpoint.saver import Saver as Saver
    from hpctrain.checkpoint.saver import Storage as Storage
    from hpctrain.checkpoint.state import Loaded as Loaded
    from hpctrain.checkpoint.state import load as load
    from hpctrain.checkpoint.state import save as save

_HOMES = {
    "Loaded": "state",
    "Saver": "saver",
    "Storage": "saver",
    "best": "look.place",
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
    """Import a public name when it is first asked for (PEP 562)."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
