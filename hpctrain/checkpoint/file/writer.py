"""Writer of a checkpoint file from one process: HDF5 makes the layout, the bytes go from memory to their offsets.

Note: layout first, bytes second. A ``Draft`` returns the offset of each dataset. Then structure and
bytes are written with ``pwrite``, at the speed of the disk and without HDF5's global lock. The
result is a plain HDF5 file. ``together.saving`` does the same from many processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hpctrain.checkpoint.file import layout
from hpctrain.checkpoint.file.attributes import Value
from hpctrain.checkpoint.file.draft import Draft
from hpctrain.checkpoint.file.extents import Written
from hpctrain.checkpoint.file.pour import Stretch, pour, written
from hpctrain.checkpoint.file.source import Source, described
from hpctrain.checkpoint.together.plan import Part, plan
from hpctrain.errors import CheckpointError
from hpctrain.util import atomic


def write_file(
    path: Path,
    sources: Iterable[Source],
    groups: Mapping[str, Mapping[str, Value]],
    alignment: int = layout.ALIGNMENT,
) -> None:
    """Write a new file of tensors and of groups with their attributes (``"/"`` is the root), flushed to the disk.

    The groups above a dataset are created implicitly. A file at ``path`` is not overwritten. The
    bytes of the tensors must not change during the call.
    """
    sources = list(sources)
    deal = plan([[described(source) for source in sources]], alignment)
    draft = Draft(deal.datasets, {source.path: source.attributes for source in sources}, groups, alignment)
    try:
        handle = atomic.create(path)
        try:
            places = dict(zip((dataset.name for dataset in deal.datasets), draft.places))
            rows = pour(handle, stretches(sources, deal.parts[0], places))
            put(handle, draft, written(rows))
            os.fsync(handle)  # by the descriptor that wrote: only that one reports failures
        finally:
            os.close(handle)
    finally:
        draft.close()


def stretches(
    sources: Sequence[Source], parts: Iterable[Part], places: Mapping[str, int | None]
) -> Iterator[Stretch]:
    """Yield offset in the file and bytes of each part of the sources; ``places`` are the datasets' offsets."""
    for part in parts:
        source = sources[part.box]
        place, data = places[source.path], source.bytes(part.begin, part.end)
        if place is None:
            raise CheckpointError(f"HDF5 allocated no space for {source.path} in the file")
        for to, at, length in source.stretches(part.begin, part.end):
            yield Stretch(place + to, data[at : at + length], source.path)


def put(handle: int, draft: Draft, rows: Written) -> None:
    """Write the structure of a file whose tensors are written, and set the final size of the file."""
    parts = draft.finish(rows)
    os.ftruncate(handle, draft.size)
    pour(handle, (Stretch(offset, memoryview(part), "the structure of the file") for offset, part in parts))
