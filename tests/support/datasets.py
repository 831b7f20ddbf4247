"""Contents of a checkpoint, read by h5py alone, without torch."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of every dataset of a checkpoint, by h5py alone.

    Datasets that describe the file are left out: they depend on the attributes, and thus on the time of writing.
    """
    found: dict[str, bytes] = {}
    with h5py.File(path, "r") as file:
        file.visititems(
            lambda name, item: found.update({name: np.asarray(item[()]).tobytes()})
            if isinstance(item, h5py.Dataset) and not name.startswith(("extents", "manifest", "seal"))
            else None
        )
    return found
