"""Export of a checkpoint to other formats: safetensors, NumPy's npz, torch.

A model alone is exported under the names of its ``state_dict``, a whole checkpoint under paths such
as ``model/head.weight`` and ``optimizer/head.weight/exp_avg``. The torch format is one table with a
``state_dict`` of the model and of the optimizer; several models or optimizers are tables by key.
Tensors are copied in pieces and checked as they are read. Only torch, whose own function writes,
needs all of them in memory.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hpctrain.checkpoint.file import layout
from hpctrain.checkpoint.file.keys import group_of, keys_in
from hpctrain.checkpoint.file.layout import Array, Record
from hpctrain.checkpoint.file.reader import Reader
from hpctrain.checkpoint.look import safetensors
from hpctrain.checkpoint.look.curves import widened
from hpctrain.checkpoint.look.output import check_output, put_in_place
from hpctrain.errors import CheckpointError, UsageError

Progress = Callable[[int], object]

SUFFIXES = {"safetensors": ".safetensors", "npz": ".npz", "torch": ".pt"}


def export(
    file: str | Path,
    kind: str,
    output: str | Path,
    *,
    model_only: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write the file ``output`` of a kind in ``SUFFIXES`` and return the number of its tensors.

    Raises ``UsageError`` if the output exists and ``force`` is false, ``CheckpointError`` if the
    checkpoint is damaged or the output cannot be written. After an error no partial output is left.
    """
    if kind not in SUFFIXES:
        raise UsageError(f"cannot export to {kind!r}: allowed are {', '.join(SUFFIXES)}")
    target = Path(output)
    check_output(target, [file], force=force)
    with Reader(file) as reader:
        chosen = reader.below(layout.MODEL) if model_only else reader.below("/")
        if not chosen:
            raise UsageError(f"{file} holds no tensors{' of a model' if model_only else ''}")
        put_in_place(target, lambda out: _WRITERS[kind](reader, chosen, out, model_only, progress))
    return len(chosen)


def _to_safetensors(
    reader: Reader, chosen: dict[str, Record], out: BinaryIO, model_only: bool, progress: Progress | None
) -> None:
    ordered = sorted(chosen.items(), key=lambda item: -item[1].storage.itemsize)  # aligned for mapping
    data = (_pieces(reader, record, progress) for _, record in ordered)
    metadata = {"format": "pt", "step": str(reader.root.get("step")), "creator": str(reader.root.get("creator"))}
    safetensors.write(out, [(name, record.shape, record.dtype) for name, record in ordered], data, metadata)


def _to_npz(
    reader: Reader, chosen: dict[str, Record], out: BinaryIO, model_only: bool, progress: Progress | None
) -> None:
    """Write one array per tensor; bfloat16, which NumPy lacks, becomes float32 with the same values."""
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, record in chosen.items():
            stored = {"bfloat16": np.dtype("<f4"), "bool": np.dtype("?")}.get(record.dtype, record.storage)
            head = {"descr": stored.str, "fortran_order": False, "shape": record.shape}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, head)  # type: ignore[no-untyped-call, unused-ignore]
                for piece in _pieces(reader, record, progress):
                    plain = widened(piece) if record.dtype == "bfloat16" else piece
                    member.write((plain != 0).tobytes() if record.dtype == "bool" else plain.tobytes())


def _to_torch(
    reader: Reader, chosen: dict[str, Record], out: BinaryIO, model_only: bool, progress: Progress | None
) -> None:
    import torch  # only here: the other formats of this module work on a login node

    from hpctrain.checkpoint.states import unpack_states
    from hpctrain.checkpoint.tensors import from_numpy

    def load(record: Record) -> torch.Tensor:
        if progress:
            progress(record.nbytes)
        return from_numpy(reader.read(record.path), record.dtype)

    models = {key: _torch_model(reader, key, load) for key in keys_in(reader, layout.MODEL)}
    model = models[""] if "" in models else models
    if model_only:
        torch.save(model, out)
        return
    everything: dict[str, Any] = {"model": model}
    if layout.OPTIMIZER in reader.groups:
        optimizers = {key: _torch_optimizer(reader, key, load) for key in keys_in(reader, layout.OPTIMIZER)}
        everything["optimizer"] = optimizers[""] if "" in optimizers else optimizers
    everything["train"] = {**reader.values(layout.TRAIN)}
    if "states" in everything["train"]:
        tensor = lambda path, dtype: load(reader.records[path])  # arrays too: torch loads only tensors without pickle
        everything["train"]["states"] = unpack_states(everything["train"]["states"], tensor, reader.path)
    curves = {name: load(record) for name, record in reader.below(layout.TRAIN).items()}
    everything["train"] |= {"curves": curves} if curves else {}
    everything["config"] = reader.values(layout.CONFIG).get("toml")
    torch.save(everything, out)


def _torch_model(reader: Reader, key: str, load: Callable[[Record], Any]) -> dict[str, Any]:
    return {name: load(record) for name, record in reader.below(group_of(layout.MODEL, key)).items()}


def _torch_optimizer(reader: Reader, key: str, load: Callable[[Record], Any]) -> dict[str, Any]:
    """Return the optimizer's ``state_dict``, in which parameters are numbered over all groups."""
    root = group_of(layout.OPTIMIZER, key)
    groups = reader.values(root).get("param_groups")
    try:
        names = [name for group in groups for name in group["params"]]  # type: ignore[union-attr]
        places = {name: number for number, name in enumerate(names)}
        plain = [{**group, "params": [places[name] for name in group["params"]]} for group in groups]  # type: ignore
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{reader.path}: the groups of the optimizer are not as hpctrain writes them") from error
    state: dict[int, dict[str, Any]] = {}
    for name, number in places.items():
        group = f"{root}/{name}"
        found = reader.values(group) | {key: load(record) for key, record in reader.below(group).items()}
        if found:
            state[number] = found
    return {"state": state, "param_groups": plain}


def _pieces(reader: Reader, record: Record, progress: Progress | None) -> Iterator[Array]:
    for piece in reader.pieces(record.path):
        yield piece
        if progress:
            progress(piece.nbytes)


_WRITERS = {"safetensors": _to_safetensors, "npz": _to_npz, "torch": _to_torch}
