"""Description of the contents of a data file, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py

from hpctrain.data import pack
from hpctrain.data.corpus import SPLITS
from hpctrain.data.dataset import ARRAY_FORMAT
from hpctrain.data.hdf5 import attribute, checksum, dataset_of, find_dataset, open_file
from hpctrain.data.ragged.layout import FORMAT as RAGGED
from hpctrain.data.ragged.layout import ragged_datasets
from hpctrain.errors import DataError
from hpctrain.util.text import columns

_ROOT = (
    "format",
    "format_version",
    "creator",
    "created",
    "tokenizer",
    "vocab_size",
    "separator",
    "validation_fraction",
    "seed",
    "source_kind",
)
_LISTS = ("sources", "classes")  # attributes of ragged files, as JSON
_MOST_SOURCES = 100_000
_COLUMNS = ("dataset", "shape", "dtype", "documents", "bytes", "crc32")


def describe(path: str | Path) -> dict[str, Any]:
    """Return a data file's attributes and, for every dataset, shape, dtype, size and whether its checksum is correct.

    All values are plain (JSON). The whole file is read, in blocks. Raises ``DataError`` if it is
    not a data file.
    """
    with open_file(path) as file:
        found: dict[str, Any] = {"path": str(path)}
        found.update({key: attribute(file, key) for key in _ROOT if key in file.attrs})
        if attribute(file, "format") == RAGGED or "format" not in file.attrs and not _has_arrays(file):
            found.update({key: _list(file, key) for key in _LISTS if key in file.attrs})
            found["datasets"] = [_describe_dataset(file, name, samples) for name, samples in ragged_datasets(file)]
            return found
        names = _dataset_names(file)
        sources = find_dataset(file, "sources")
        if sources is not None and sources.ndim == 1 and len(sources) <= _MOST_SOURCES:
            found["sources"] = _texts(sources, path)
        found["datasets"] = [_describe_dataset(file, f"{split}/{name}") for split in SPLITS for name in names]
        return found


def render(found: dict[str, Any]) -> str:
    """Return a description as text: one line per fact, then a table."""
    lines = [f"{key + ':':21}{value}" for key, value in found.items() if key not in (*_LISTS, "datasets")]
    sources = found.get("sources", [])
    lines += [f"{'sources:' if not number else '':21}{source}" for number, source in enumerate(sources[:8])]
    if len(sources) > 8:
        lines.append(f"{'':21}and {len(sources) - 8} more")
    if classes := found.get("classes"):
        shown = ", ".join(f"{number} {name}" for number, name in enumerate(classes[:16]))
        lines.append(f"{'classes:':21}{shown}{' ...' if len(classes) > 16 else ''}")
    head = tuple("samples" if found.get("format") == RAGGED and name == "documents" else name for name in _COLUMNS)
    rows = [head, *(tuple(_cell(dataset[column]) for column in head) for dataset in found["datasets"])]
    return "\n".join([*lines, "", *columns(rows)])


def _texts(sources: h5py.Dataset, path: str | Path) -> list[str]:
    try:
        return [str(source) for source in sources.asstr()[()]]
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"{path}: /sources is damaged: expected texts") from error


def _has_arrays(file: h5py.File) -> bool:
    """Return whether a file without a format has array data: inputs and targets as datasets."""
    return any(find_dataset(file, f"{split}/inputs") is not None for split in SPLITS)


def _list(file: h5py.File, name: str) -> list[str]:
    try:
        return [str(each) for each in json.loads(attribute(file, name))]
    except (TypeError, ValueError) as error:
        raise DataError(f"{file.filename}: the attribute {name} is damaged") from error


def _dataset_names(file: h5py.File) -> tuple[str, ...]:
    kind = attribute(file, "format", ARRAY_FORMAT)
    if kind == pack.FORMAT:
        return ("tokens",)
    if kind == ARRAY_FORMAT:
        return ("inputs", "targets")
    raise DataError(f"{file.filename} has format {kind!r}, expected {pack.FORMAT!r}, {ARRAY_FORMAT!r} or {RAGGED!r}")


def _describe_dataset(file: h5py.File, name: str, samples: int | None = None) -> dict[str, Any]:
    dataset = dataset_of(file, name)
    crc32 = attribute(dataset, "crc32")
    offsets = find_dataset(file, f"{name.rpartition('/')[0]}/offsets") if samples is None else None
    documents = len(offsets) - 1 if offsets is not None and offsets.ndim == 1 else None
    return {
        "dataset": f"/{name}",
        "shape": [int(size) for size in dataset.shape],
        "dtype": str(dataset.dtype),
        **({"documents": documents} if samples is None else {"samples": samples}),
        "bytes": int(dataset.nbytes),
        "crc32": "none" if crc32 is None else "ok" if checksum(dataset) == crc32 else "damaged",
    }


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " x ".join(f"{size:,}" for size in value)
    return f"{value:,}" if isinstance(value, int) else str(value)
