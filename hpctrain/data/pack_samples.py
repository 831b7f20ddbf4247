"""Packing of samples from many files into one ragged file, with a held-out split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hpctrain.data.corpus import Kind, is_held_out, name_sources
from hpctrain.data.ragged.dataset import RaggedDataset
from hpctrain.data.ragged.write import RaggedWriter
from hpctrain.data.sample_sources import SampleSource, open_source
from hpctrain.errors import DataError, SettingsError


@dataclass(frozen=True)
class SampleReport:
    """Contents of a packed file: the number of samples in each split, their fields, and the names of classes."""

    path: Path
    kind: Kind
    train: int
    validation: int
    fields: tuple[str, ...]
    classes: tuple[str, ...]
    left_out: int = 0  # files of other kinds
    stray: str = ""  # a file outside of class folders, because of which there are no classes


def pack_samples(
    sources: Sequence[str | Path],
    out: str | Path,
    kind: Kind,
    *,
    validation_fraction: float = 0.05,
    seed: int = 0,
    force: bool = False,
    grey: bool = False,
) -> SampleReport:
    """Pack samples into ``out``. Without ``force`` an existing file is not replaced; an error leaves none."""
    out = Path(out)
    if not 0 <= validation_fraction < 1:
        raise SettingsError(f"validation fraction {validation_fraction}: allowed is 0 or more and less than 1")
    if out.exists() and not force:
        raise DataError(f"{out} exists: --force replaces it")
    source = open_source(kind, sources, grey=grey)
    held = _held_out(source, validation_fraction, seed)
    attributes: dict[str, Any] = {"source_kind": kind, "seed": seed, "validation_fraction": validation_fraction}
    attributes |= {"sources": json.dumps(name_sources(sources))}
    attributes |= {"classes": json.dumps(source.classes)} if source.classes else {}
    with RaggedWriter(out, attributes=attributes) as writer:
        samples = tqdm(source.samples(), total=len(held), unit="samples", desc="pack", leave=False, disable=None)
        for name, sample, is_held in zip(source.names(), samples, held, strict=True):
            try:
                writer.append(sample, "validation" if is_held else "train")
            except DataError as error:
                raise DataError(f"{name}: {error}") from error
    written = RaggedDataset(out)  # what was written can be read
    return SampleReport(
        out, kind, len(written), sum(held), written.fields, source.classes, source.left_out, source.stray
    )


def _held_out(source: SampleSource, fraction: float, seed: int) -> list[bool]:
    """Return whether each sample is held out; a split that would be empty gets the last sample."""
    held = [is_held_out(name, fraction, seed) for name in source.names()] if fraction else [False] * _count(source)
    if not held:
        raise DataError("the sources have no samples")
    if fraction and len(held) < 2:
        raise DataError("one sample cannot be divided: add samples, or hold none out by --validation-fraction 0")
    if fraction and len(set(held)) == 1:
        held[-1] = not held[-1]
    return held


def _count(source: SampleSource) -> int:
    return sum(1 for _ in source.names())
