"""Data: corpora packed into files, and batches of samples in an order that is independent of the number of ranks.

Importing this package loads neither torch nor h5py; each name below is imported from its module at
first use. The functions for documents within windows are in ``hpctrain.documents``, because models
use them too. ``hpctrain.data.pack.pack`` and ``hpctrain.data.describe.describe`` have the names of
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
    from hpctrain.documents import cu_seqlens as cu_seqlens
    from hpctrain.documents import document_ids as document_ids
    from hpctrain.documents import document_mask as document_mask
    from hpctrain.documents import document_positions as document_positions

_HOMES = {
    "ArrayDataset": "data.dataset",
    "Batch": "data.loader",
    "Concatenation": "data.ragged.batch",
    "DataSettings": "data.settings",
    "LengthBatches": "data.orders",
    "Loader": "data.loader",
    "MdsDataset": "data.shards.mds",
    "Padding": "data.ragged.batch",
    "RaggedDataset": "data.ragged.dataset",
    "RaggedWriter": "data.ragged.write",
    "SampleOrder": "data.orders",
    "TarDataset": "data.shards.tar",
    "TokenDataset": "data.dataset",
    "cu_seqlens": "documents",
    "document_ids": "documents",
    "document_mask": "documents",
    "document_positions": "documents",
    "evaluation_batches": "data.loader",
    "open_dataset": "data.settings",
    "write_arrays": "data.dataset",
    "write_ragged": "data.ragged.write",
}

__all__ = [
    "ArrayDataset",
    "Batch",
    "Concatenation",
    "DataSettings",
    "LengthBatches",
    "Loader",
    "MdsDataset",
    "Padding",
    "RaggedDataset",
    "RaggedWriter",
    "SampleOrder",
    "TarDataset",
    "TokenDataset",
    "cu_seqlens",
    "document_ids",
    "document_mask",
    "document_positions",
    "evaluation_batches",
    "open_dataset",
    "write_arrays",
    "write_ragged",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def __getattr__(name: str) -> Any:
    """Import a public name when it is first requested (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctrain.{_HOMES[name]}"), name)
