"""Data: corpora packed into files, and batches of samples in an order that is independent of the number of ranks.

Importing this package loads neither torch nor h5py; each name below is imported from its module at
first use. ``hpctrain.data.pack.pack`` and ``hpctrain.data.describe.describe`` have the names of
their modules, so they are imported from there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.data.dataset import ArrayDataset as ArrayDataset
    from hpctrain.data.dataset import TokenDataset as TokenDataset
    from hpctrain.data.dataset import write_arrays as write_arrays
    from hpctrain.data.loader import Batch as Batch
    from hpctrain.data.loader import Loader as Loader
    from hpctrain.data.loader import evaluation_batches as evaluation_batches
    from hpctrain.data.orders import LengthBatches as LengthBatches
    from hpctrain.data.orders import SampleOrder as SampleOrder
    from hpctrain.data.ragged.batch import Concatenation as Concatenation
    from hpctrain.data.ragged.batch import Padding as Padding
    from hpctrain.data.ragged.dataset import RaggedDataset as RaggedDataset
    from hpctrain.data.ragged.write import RaggedWriter as RaggedWriter
    from hpctrain.data.ragged.write import write_ragged as write_ragged
    from hpctrain.data.settings import DataSettings as DataSettings
    from hpctrain.data.settings import open_dataset as open_dataset
    from hpctrain.data.shards.mds import MdsDataset as MdsDataset
    from hpctrain.data.shards.tar import TarDataset as TarDataset

_HOMES = {
    "ArrayDataset": "dataset",
    "Batch": "loader",
    "Concatenation": "ragged.batch",
    "DataSettings": "settings",
    "evaluation_batches": "loader",
    "LengthBatches": "orders",
    "Loader": "loader",
    "MdsDataset": "shards.mds",
    "open_dataset": "settings",
    "Padding": "ragged.batch",
    "RaggedDataset": "ragged.dataset",
    "RaggedWriter": "ragged.write",
    "SampleOrder": "orders",
    "TarDataset": "shards.tar",
    "TokenDataset": "dataset",
    "write_arrays": "dataset",
    "write_ragged": "ragged.write",
}

__all__ = [
    "ArrayDataset",
    "Batch",
    "Concatenation",
    "DataSettings",
    "evaluation_batches",
    "LengthBatches",
    "Loader",
    "MdsDataset",
    "open_dataset",
    "Padding",
    "RaggedDataset",
    "RaggedWriter",
    "SampleOrder",
    "TarDataset",
    "TokenDataset",
    "write_arrays",
    "write_ragged",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first requested (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
