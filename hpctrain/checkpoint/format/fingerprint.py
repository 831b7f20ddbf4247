"""Fingerprint of a state: 64 bits over all parameters, buffers and optimizer tensors, whatever ranks have them.

It follows from the CRC-32 of each tensor, which is combined from the CRC-32s of its parts. So ranks
compute it from their shares in memory, and a file has it without its tensors being read. Two states
with the same bits have the same fingerprint under every strategy and number of ranks. It detects
errors and differences; it is no protection against a state that was made to collide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import Record, Written, crc32, shape_text
from hpctrain.checkpoint.format.plan import Offsets, Source, WritePlan, WriteShare, nbytes_of
from hpctrain.shard import Shard

DIGITS = 16  # hexadecimal


def fingerprint(records: Iterable[Record]) -> str:
    """Return the fingerprint of the tensors of models and optimizers; others are left out."""
    groups = (f"{layout.MODEL}/", f"{layout.OPTIMIZER}/")
    lines = (
        f"{record.path}\t{record.dtype}\t{shape_text(record.shape)}\t{record.crc32:08x}\n"
        for record in records
        if record.path.startswith(groups)
    )
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:DIGITS]


def fingerprint_of_ranks(
    plan: WritePlan, sources: Sequence[Source], rank: int, gather: Callable[[Written], Sequence[Written]]
) -> str:
    """Return the fingerprint of a state of which this rank checks its share, as if it wrote that into a file.

    ``gather`` returns the arrays of all ranks. Collective if it is.
    """
    datasets = plan.datasets
    offsets = _virtual_offsets(datasets)
    everyone = gather(_checksums(WriteShare(sources, plan.parts[rank]), offsets))
    return fingerprint(_records(datasets, offsets, np.concatenate(everyone)))


def _checksums(share: WriteShare, offsets: Offsets) -> Written:
    """Return offset, length and CRC-32 of each range of a share."""
    rows = [(offset, len(data), crc32(data)) for offset, data, _ in share.chunks(offsets)]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _virtual_offsets(datasets: Iterable[Shard]) -> dict[str, int | None]:
    """Return places for tensors in a file that is never written; None for a tensor without bytes."""
    offsets: dict[str, int | None] = {}
    end = 0
    for dataset in datasets:
        nbytes = nbytes_of(dataset)
        offsets[dataset.name] = end if nbytes else None
        end += nbytes
    return offsets


def _records(datasets: Sequence[Shard], offsets: Offsets, written: Written) -> list[Record]:
    """Return the tensors with their CRC-32s, from the ranges of all ranks."""
    placed = [(offset, dataset) for dataset in datasets if (offset := offsets[dataset.name]) is not None]
    table = layout.table_of([(offset, nbytes_of(dataset)) for offset, dataset in placed], written)
    crcs = {dataset.name: 0 for dataset in datasets}
    for (_, dataset), extents in zip(placed, layout.by_tensor(table, len(placed)), strict=True):
        crcs[dataset.name] = layout.combined((extent.crc32, extent.nbytes) for extent in extents)
    return [Record(dataset.name, dataset.shape, dataset.dtype, crcs[dataset.name]) for dataset in datasets]
