"""Filling of a program's tensors from a file, and the patterns of names to skip."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch

from hpctrain.checkpoint.file.reader import Reader
from hpctrain.checkpoint.tensors import fill, torch_dtype
from hpctrain.shard import Shard


def is_skipped(name: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns (``"head.*"``) matches a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def fill_shard(reader: Reader, path: str, shard: Shard) -> None:
    """Read a shard's box of a stored tensor into the shard's memory; element types are converted."""
    stored = torch_dtype(reader.records[path].dtype)
    read = partial(reader.read_box, path, shard.start, shard.extent)
    if shard.tensor.dtype == stored:
        fill(shard.tensor, read)
        return
    staged = torch.empty(shard.extent, dtype=stored)
    fill(staged, read)
    shard.tensor.copy_(staged)
