"""Samples in files that ``hpctrain data pack`` reads: arrays, images, tables, and shards of other formats."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.corpus import Document, Kind, find_documents
from hpctrain.errors import DataError, UsageError
from hpctrain.util.text import listed

IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".webp", ".tif", ".tiff")
_SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "npy": (".npy",),
    "npz": (".npz",),
    "images": IMAGES,
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
    "tar": (".tar",),
    "mds": (".mds",),
}
ROWS = 4096  # of a table that are in memory at a time
Sample = Mapping[str, Any]


@dataclass(frozen=True)
class SampleSource:
    """Samples of a kind: their names, from which those that are held out are chosen, and the samples in that order."""

    kind: Kind
    names: Callable[[], Iterator[str]]
    samples: Callable[[], Iterator[Sample]]
    classes: tuple[str, ...] = ()  # names of the classes, if targets are the folders of the files
    left_out: int = 0  # files of other kinds
    stray: str = ""  # a file outside of class folders, because of which there are no classes


def kind_of(sources: Sequence[str | Path]) -> Kind:
    """Return the kind of at least half of the files in folders, without texts; else they are text."""
    documents, found = find_documents(sources), Counter[Kind]()
    for document in documents:
        suffix = document.path.suffix.lower()
        found.update(kind for kind, suffixes in _SUFFIXES.items() if suffix in suffixes)
    most = [kind for kind, count in found.items() if 2 * count >= len(documents)]
    if len(most) > 1:
        told = listed([f"{count} of {kind}" for kind, count in sorted(found.items())])
        raise UsageError(f"the sources have files of several kinds: {told}; name one by --from")
    return most[0] if most else "text"


def open_source(kind: Kind, sources: Sequence[str | Path], *, grey: bool = False) -> SampleSource:
    """Return the samples of a kind in files and folders. Raises ``DataError`` if there are none."""
    if kind == "mds":
        return _mds(sources)
    everything = find_documents(sources)
    documents = [each for each in everything if each.path.suffix.lower() in _SUFFIXES[kind]]
    left_out = len(everything) - len(documents)
    if not documents:
        raise DataError(f"no {kind} file in {listed([str(source) for source in sources])}: {_SUFFIXES[kind]} are read")
    named = {Path(os.path.abspath(source)) for source in sources if Path(source).is_file()}
    taken = {Path(os.path.abspath(each.path)) for each in documents}
    if lost := sorted(str(path) for path in named - taken):
        raise DataError(
            f"{listed(lost[:4])}: not of the kind {kind} ({_SUFFIXES[kind]}); pack each kind into its own file"
        )
    if kind == "tar":
        return replace(_tar([str(document.path) for document in documents]), left_out=left_out)
    if kind in ("parquet", "arrow"):
        return replace(_table(kind, documents), left_out=left_out)
    classes, stray = _classes(documents) if kind in ("npy", "images") else ((), "")
    read: dict[str, Callable[[Document], Sample]] = {
        "npy": lambda document: {"inputs": _load(document)},
        "npz": lambda document: _load(document),
        "images": lambda document: {"inputs": _pixels(document, grey)},
    }

    def samples() -> Iterator[Sample]:
        for document in documents:
            target = {"targets": classes.index(document.name.split("/")[1])} if classes else {}
            name = {} if kind == "npz" else {"name": document.name}
            yield {**read[kind](document), **target, **name}

    return SampleSource(kind, lambda: (each.name for each in documents), samples, classes, left_out, stray)


def _classes(documents: Sequence[Document]) -> tuple[tuple[str, ...], str]:
    """Return the folders of the files, if all are right below their source; else none, and a file that is not."""
    parts = [document.name.split("/") for document in documents]
    found = tuple(sorted({each[1] for each in parts if len(each) == 3}))
    stray = next((document.name for document, each in zip(documents, parts) if len(each) != 3), "")
    if len(found) < 2:
        return (), ""
    return ((), stray) if stray else (found, "")


def _load(document: Document) -> Any:
    from hpctrain.data.shards.decode import decode

    try:
        data = document.path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {document.path}: {error.strerror}") from error
    return decode(document.path.suffix[1:].lower(), data, str(document.path))


def _pixels(document: Document, grey: bool) -> Any:
    """Return an image as ``[channels, height, width]``, or with ``grey`` as ``[height, width]``."""
    pixels = _load(document)
    if pixels.ndim == 3 and pixels.shape[2] == 4:
        pixels = pixels[:, :, :3]
    if grey:
        weights = np.array([299, 587, 114]) / 1000  # of ITU-R BT.601, as in Pillow
        return pixels if pixels.ndim == 2 else np.rint(pixels[:, :, :3] @ weights).astype(np.uint8)
    whole = np.repeat(pixels[:, :, None], 3, axis=2) if pixels.ndim == 2 else pixels
    return np.ascontiguousarray(whole.transpose(2, 0, 1))


# Shards of other formats ----------------------------------------------------------------------------------------------


def _tar(paths: Sequence[str]) -> SampleSource:
    from hpctrain.data.shards.tar import TarDataset

    dataset = TarDataset(paths)
    numbers = range(len(dataset))
    return SampleSource(
        "tar",
        lambda: (dataset.keys(number) for number in numbers),
        lambda: (_plain(dataset[number]) for number in numbers),
    )


def _mds(sources: Sequence[str | Path]) -> SampleSource:
    from hpctrain.data.shards.mds import MdsDataset

    dataset = MdsDataset([str(source) for source in sources])
    numbers = range(len(dataset))
    return SampleSource(
        "mds",
        lambda: (f"sample {number}" for number in numbers),
        lambda: (_plain(dataset[number]) for number in numbers),
    )


def _plain(sample: Sample) -> Sample:
    """Return a sample with names that a file may have, and with nested values as JSON."""
    import json

    return {
        "key" if name == "__key__" else name: json.dumps(value) if isinstance(value, (dict, list)) else value
        for name, value in sample.items()
    }


# Tables ---------------------------------------------------------------------------------------------------------------


def _table(kind: str, documents: Sequence[Document]) -> SampleSource:
    parts = _parquet if kind == "parquet" else _arrow

    def names() -> Iterator[str]:
        for document in documents:
            rows = sum(len(part) for part in parts(document))
            yield from (f"{document.name} row {row}" for row in range(rows))

    def samples() -> Iterator[Sample]:
        for document in documents:
            for part in parts(document):
                columns = {name: _values(part.column(name), name, document) for name in part.schema.names}
                for row in range(len(part)):
                    yield {name: values[row] for name, values in columns.items()}

    return SampleSource("parquet" if kind == "parquet" else "arrow", names, samples)


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError("tables need the package pyarrow: pip install pyarrow") from None


def _parquet(document: Document) -> Iterator[Any]:
    parquet, invalid = _pyarrow("pyarrow.parquet"), _pyarrow("pyarrow.lib").ArrowInvalid
    try:
        with parquet.ParquetFile(document.path) as file:
            yield from file.iter_batches(batch_size=ROWS)
    except (OSError, invalid) as error:
        raise DataError(f"cannot read {document.path}: {error}") from error


def _arrow(document: Document) -> Iterator[Any]:
    arrow, invalid = _pyarrow("pyarrow"), _pyarrow("pyarrow.lib").ArrowInvalid
    ipc = _pyarrow("pyarrow.ipc")
    try:
        with arrow.memory_map(str(document.path)) as source:
            try:
                file = ipc.open_file(source)
                yield from (file.get_batch(number) for number in range(file.num_record_batches))
            except invalid:  # a stream, as the package datasets writes
                source.seek(0)
                yield from ipc.open_stream(source)
    except (OSError, invalid) as error:
        raise DataError(f"cannot read {document.path}: {error}") from error


def _values(column: Any, name: str, document: Document) -> Sequence[Any]:
    """Return the values of a column of a table."""
    types = _pyarrow("pyarrow").types
    kind = column.type
    if column.null_count:
        raise DataError(f"{document.path}: the column {name} has missing values (null): fill or remove them")
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = column.flatten()
        if inner.null_count or not _is_number(types, inner.type):
            raise DataError(f"{document.path}: the column {name} is {kind}, allowed are lists of numbers")
        numbers = inner.to_numpy(zero_copy_only=False)
        lengths = column.value_lengths().to_numpy(zero_copy_only=False) if not types.is_fixed_size_list(kind) else None
        sizes = np.full(len(column), kind.list_size) if lengths is None else lengths
        return np.split(numbers, np.cumsum(sizes)[:-1])
    if _is_number(types, kind):
        found: Sequence[Any] = column.to_numpy(zero_copy_only=False)
        return found
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        texts: list[Any] = column.to_pylist()
        return texts
    raise DataError(
        f"{document.path}: the column {name} is {kind}, allowed are numbers, lists of numbers, texts and bytes"
    )


def _is_number(types: Any, kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))
