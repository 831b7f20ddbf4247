"""Weights of a Hugging Face folder: safetensors files, of which every rank reads its own part.

A folder has ``model.safetensors``, or several files and their index ``model.safetensors.index.json``
(``{"weight_map": {tensor: file}}``). Names are those of the model's ``state_dict``. A tensor with
several names in the model (tied weights) may have only one of them in the folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hpctrain.checkpoint.differences import Difference, described, is_skipped, table
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import Array
from hpctrain.checkpoint.local_state import Models, StateDescription, exchange, plain_name
from hpctrain.checkpoint.states import fill_shard
from hpctrain.checkpoint.tools import safetensors
from hpctrain.comm.agreement import agreed
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.plain_tensors import on_shards
from hpctrain.shard import Shard, Split
from hpctrain.util.reading import fill, open_regular, read_json, reason
from hpctrain.util.text import short_repr

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightsFolder:
    """Open safetensors files of a folder; boxes of their tensors are read into memory.

    ``records`` are the tensors by name. ``bytes_read`` counts the bytes of tensors that this object
    has read. Raises ``CheckpointError`` if the folder has no weights, or if a file is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path, self.bytes_read = Path(folder), 0
        self.records: dict[str, safetensors.Tensor] = {}
        self._handles: dict[str, int] = {}  # of the file, by tensor
        with ExitStack() as opened:
            promised = _files_of(self.path)
            for name in promised:
                self._add(self.path / name, opened, promised[name])
            self._opened = opened.pop_all()

    def _add(self, path: Path, opened: ExitStack, promised: Sequence[str]) -> None:
        tensors, _ = safetensors.read_header(path)
        lacking = sorted(set(promised) - {tensor.name for tensor in tensors})
        if lacking:
            raise CheckpointError(f"{self.path / INDEX} names {lacking[0]}, which its file lacks: {path}")
        try:
            handle = open_regular(path)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        opened.callback(os.close, handle)
        for tensor in tensors:
            if tensor.name in self.records:
                raise CheckpointError(f"{self.path} holds {tensor.name} twice, once in {path.name}")
            self.records[tensor.name], self._handles[tensor.name] = tensor, handle

    def __enter__(self) -> WeightsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def read_box(self, name: str, start: tuple[int, ...], extent: tuple[int, ...], out: Array) -> None:
        """Read the box of a tensor that begins at ``start`` into a C-contiguous array of the shape ``extent``."""
        tensor = self.records[name]
        data, size = out.reshape(-1).view(np.uint8).data, out.itemsize
        for offset, at, count in Shard(name, tensor.shape, tensor.dtype, start, extent, None).runs():
            piece = data[at * size : (at + count) * size]
            self._read(name, piece, tensor.offset + offset * size)
            self.bytes_read += len(piece)

    def _read(self, name: str, piece: memoryview, offset: int) -> None:
        try:
            missing = fill(self._handles[name], piece, offset)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot read {name}: {error.strerror}") from error
        if missing:
            raise CheckpointError(f"{self.path} was truncated meanwhile: {name} ends {missing} bytes early")


def _files_of(folder: Path) -> dict[str, list[str]]:
    """Return the names of a folder's safetensors files, with the tensors that the index promises in each.

    Raises ``CheckpointError`` if the folder has none.
    """
    if (folder / ONE_FILE).exists():
        return {ONE_FILE: []}
    index = folder / INDEX
    if not index.exists():
        raise CheckpointError(
            f"no weights in {folder}: expected {ONE_FILE}, or {INDEX} and its files; convert other formats with "
            "model.save_pretrained of transformers"
        )
    try:
        places = dict(read_json(index, safetensors.LONGEST)["weight_map"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = reason(error) if isinstance(error, (OSError, ValueError)) else "it has no weight_map of names and files"
        raise CheckpointError(f"cannot read {index}: {why}") from error
    found: dict[str, list[str]] = {}
    for tensor, name in places.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names the file {short_repr(name)}: allowed are files of the same folder")
        found.setdefault(name, []).append(tensor)
    return found


@dataclass(frozen=True)
class LoadedWeights:
    """Result of ``load_weights`` on this rank: number of the folder's tensors, and bytes that this rank has read."""

    tensors: int
    bytes_read: int


@on_shards
def load_weights(
    folder: str | Path,
    model: nn.Module,
    *,
    comm: Communicator | None = None,
    split: Split | None = None,
    skip: Sequence[str] = (),
) -> LoadedWeights:
    """Fill a model in place from the safetensors files of a folder; values are converted to the model's dtypes.

    With ``comm`` the call is collective: every rank reads its own part as ``split`` describes it, and
    all ranks succeed or raise the same error. First, all names and shapes are compared. If any
    differ, one ``CheckpointError`` with a table of all differences is raised, and nothing has been
    changed. Names that match a pattern in ``skip`` (``"score.*"``) are neither compared nor filled.

    Names with and without the prefix of a Transformers model (``transformer.wte.weight``) are the
    same, and tensors that its class ignores need not exist, as in ``from_pretrained``.
    """
    models = agreed(comm, lambda: Models.of(model, split, ranks=1 if comm is None else comm.size))
    weights = agreed(comm, lambda: WeightsFolder(folder))
    with weights:
        shards = agreed(comm, models.shards)
        boxes = [Shard(one.name, one.shape, one.dtype, one.start, one.extent, None) for one in shards]
        local = StateDescription(boxes, {})
        everyone = [local] if comm is None or not models.is_split else exchange(comm, local, *skip)[1]
        expected = {_short(box.name): box for each in everyone for box in each.boxes}
        names = agreed(comm, lambda: _Names(weights, models.modules[""], expected, skip))
        agreed(comm, names.check)
        agreed(comm, lambda: _fill(weights, shards, names))
        return LoadedWeights(len(weights.records), weights.bytes_read)


def _short(path: str) -> str:
    return path.removeprefix(f"{layout.MODEL}/")


class _Names:
    """Mapping of a model's tensors to those of a folder; ``sources`` has the folder's names of each, equal tensors."""

    def __init__(
        self, weights: WeightsFolder, model: nn.Module, expected: Mapping[str, Shard], skip: Sequence[str]
    ) -> None:
        self._weights, self._model, self._skip = weights, model, skip
        self._expected = {name: box for name, box in expected.items() if not is_skipped(name, skip)}
        prefix = str(getattr(model, "base_model_prefix", "") or "")
        stored = {_renamed(name, prefix, expected): name for name in weights.records}
        if len(stored) != len(weights.records):
            raise CheckpointError(f"{weights.path} holds tensors with and without the prefix {prefix}.")
        for pattern in skip:
            if not any(is_skipped(name, [pattern]) for name in {**stored, **expected}):
                raise UsageError(f"nothing in {weights.path} or in the model is called {pattern!r}, to be skipped")
        self._stored = {name: old for name, old in stored.items() if not is_skipped(name, skip)}
        tied = _tied(model)
        self.sources = {
            name: [self._stored[each] for each in tied.get(name, [name]) if each in self._stored]
            for name in self._expected
        }

    def check(self) -> None:
        """Raise ``CheckpointError`` with a table if names or shapes differ."""
        found: list[Difference] = []
        missing = _patterns(self._model, "_keys_to_ignore_on_load_missing")
        for name, box in self._expected.items():
            if not self.sources[name] and not any(re.search(pattern, name) for pattern in missing):
                found.append(Difference(name, "missing", "-", described(box)))
            for source in self.sources[name]:
                record = self._weights.records[source]
                if record.shape != box.shape:
                    found.append(Difference(name, "shape", described(record), described(box)))
                elif _is_floating(record.dtype) != _is_floating(box.dtype):
                    found.append(Difference(name, "dtype", described(record), described(box)))
        unexpected = _patterns(self._model, "_keys_to_ignore_on_load_unexpected")
        used = {source for sources in self.sources.values() for source in sources}
        for name, old in self._stored.items():
            if old not in used and not any(re.search(pattern, name) for pattern in unexpected):
                found.append(Difference(name, "unexpected", described(self._weights.records[old]), "-"))
        if found:
            count = f"{len(found)} difference{'s' if len(found) > 1 else ''}"
            raise CheckpointError(
                f"{self._weights.path} does not fit this model, {count}:\n{table(found)}\n"
                "if transformers converts these names when it loads, take from_pretrained before job.wrap"
            )


def _renamed(name: str, prefix: str, expected: Mapping[str, Any]) -> str:
    """Return the model's name of a stored tensor: with or without the prefix of the model's base."""
    if prefix and name not in expected:
        if f"{prefix}.{name}" in expected:
            return f"{prefix}.{name}"
        if name.startswith(f"{prefix}.") and name.removeprefix(f"{prefix}.") in expected:
            return name.removeprefix(f"{prefix}.")
    return name


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """Return for each name of a tied parameter all of its names.

    A stage of a pipeline has only one of them. Models of Transformers know the others.
    """
    groups: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(plain_name(name))
    found = {name: names for names in groups.values() for name in names if len(names) > 1}
    known = getattr(model, "all_tied_weights_keys", None)
    for target, source in known.items() if isinstance(known, Mapping) else ():
        names = list(dict.fromkeys([source, *found.get(source, []), *found.get(target, []), target]))
        found |= {name: names for name in names}
    return found


def _patterns(model: nn.Module, attribute: str) -> list[str]:
    return [str(pattern) for pattern in getattr(model, attribute, None) or ()]


def _is_floating(dtype: str) -> bool:
    return bool(getattr(torch, dtype).is_floating_point)


@torch.no_grad()
def _fill(weights: WeightsFolder, shards: Sequence[Shard], names: _Names) -> None:
    """Fill this rank's boxes; memory that has several names is read once."""
    filled: set[tuple[Any, ...]] = set()
    for shard in shards:
        sources = names.sources.get(_short(shard.name), [])
        memory = shard.tensor.data_ptr(), shard.start, shard.extent, *sources
        if not sources or 0 in shard.extent or memory in filled:
            continue
        filled.add(memory)
        fill_shard(weights, sources[0], shard)
        for other in sources[1:]:
            again = torch.empty_like(shard.tensor)
            fill_shard(weights, other, replace(shard, tensor=again))
            if not torch.equal(again, shard.tensor):
                raise CheckpointError(
                    f"{weights.path}: {sources[0]} and {other} differ, and the model ties them; set "
                    "tie_word_embeddings = false in config.json if they are two tensors"
                )
