"""Export to other formats (safetensors, npz, torch), and import of a model that another program saved.

A model alone is exported under the names of its ``state_dict``, a whole checkpoint under paths such
as ``model/head.weight`` and ``optimizer/head.weight/exp_avg``. The torch format is one table with a
``state_dict`` of the model and of the optimizer; several models or optimizers are tables by key.
Tensors are copied in pieces and checked as they are read. Only torch, whose own function writes,
needs all of them in memory.
"""

from __future__ import annotations

import os
import socket
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from hpctrain._version import __version__
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import Array, Record, Value, group_of, keys_in
from hpctrain.checkpoint.format.plan import Source, box_of
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.checkpoint.tools import safetensors
from hpctrain.checkpoint.tools.curves import widened
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.shard import dtype_name
from hpctrain.util import atomic
from hpctrain.util.reading import open_regular
from hpctrain.util.text import short_repr, shorten

if TYPE_CHECKING:
    import torch

Progress = Callable[[int], object]
Chosen = Mapping[str, Record]  # the tensors to export, by name

EXPORT_SUFFIXES = {"safetensors": ".safetensors", "npz": ".npz", "torch": ".pt"}


def export(
    file: str | Path,
    kind: str,
    output: str | Path,
    *,
    model_only: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write the file ``output`` of a kind in ``EXPORT_SUFFIXES`` and return the number of its tensors.

    Raises ``UsageError`` if the output exists and ``force`` is false, ``CheckpointError`` if the
    checkpoint is damaged or the output cannot be written. After an error no partial output is left.
    """
    if kind not in EXPORT_SUFFIXES:
        raise UsageError(f"cannot export to {kind!r}: allowed are {', '.join(EXPORT_SUFFIXES)}")
    target = Path(output)
    check_output(target, [file], force=force)
    with Reader(file) as reader:
        chosen = reader.below(layout.MODEL) if model_only else reader.below("/")
        if not chosen:
            raise UsageError(f"{file} holds no tensors{' of a model' if model_only else ''}")
        try:
            with atomic.replacing(target) as out:
                _WRITERS[kind](reader, chosen, out, model_only, progress)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error
    return len(chosen)


def _to_safetensors(reader: Reader, chosen: Chosen, out: BinaryIO, model_only: bool, progress: Progress | None) -> None:
    ordered = sorted(chosen.items(), key=lambda item: -item[1].storage.itemsize)  # aligned for mapping
    data = (_pieces(reader, record, progress) for _, record in ordered)
    metadata = {"format": "pt", "step": str(reader.root.get("step")), "creator": str(reader.root.get("creator"))}
    safetensors.write(out, [(name, record.shape, record.dtype) for name, record in ordered], data, metadata)


def _to_npz(reader: Reader, chosen: Chosen, out: BinaryIO, model_only: bool, progress: Progress | None) -> None:
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


def _to_torch(reader: Reader, chosen: Chosen, out: BinaryIO, model_only: bool, progress: Progress | None) -> None:
    import torch  # only here: the other formats of this module work on a login node

    from hpctrain.checkpoint.states import from_numpy, unpack_states

    def load(record: Record) -> torch.Tensor:
        if progress:
            progress(record.nbytes)
        return from_numpy(reader.read(record.path), record.dtype)

    models = {
        key: {name: load(record) for name, record in reader.below(group_of(layout.MODEL, key)).items()}
        for key in keys_in(reader, layout.MODEL)
    }
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


# Import of a model that another program saved: safetensors, or a ``state_dict`` that torch saved ----------------------
#
# No code of the file is executed: safetensors are a header and bytes, torch's files are read with
# ``weights_only``.


IMPORT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_MOST_NAMES = 64  # names that may share the bytes of a tensor, as tied and repeated layers do
_SMALL = 1 << 20  # bytes
_INSIDE = ("model", "state_dict", "model_state_dict", "module")  # keys under which training programs store the model

# Name, shape and torch dtype of each tensor, and a function that returns a range of its elements in C order.
Found = Iterable[tuple[str, tuple[int, ...], str, Callable[[int, int], Array]]]


def ingest(file: str | Path, output: str | Path, *, step: int = 0, strip: str = "", force: bool = False) -> list[str]:
    """Write a checkpoint of the model in a file, and return the names of the stored tensors.

    ``strip`` is removed from the front of every name. If the file is a whole export (``model/``,
    ``optimizer/``, ...), only its model is imported. Raises ``UsageError`` for an unknown suffix or
    an existing output, ``CheckpointError`` for a damaged file.
    """
    path, target = Path(file), Path(output)
    if path.suffix not in IMPORT_SUFFIXES:
        raise UsageError(f"cannot import {path}: its name must end in {', '.join(IMPORT_SUFFIXES)}")
    check_output(target, [path], force=force)
    tensors = _from_safetensors(path) if path.suffix == ".safetensors" else _from_torch(path)
    sources = [
        Source(box_of(layout.child(layout.MODEL, name.removeprefix(strip)), shape, dtype), read)
        for name, shape, dtype, read in tensors
    ]
    if not sources:
        raise UsageError(f"{path} holds no tensors")
    names = [source.path.removeprefix(f"{layout.MODEL}/") for source in sources]
    if len(set(names)) != len(names):
        raise UsageError(f"without {strip!r}, two tensors of {path} have the same name")
    write_file(target, sources, _groups(path, step))
    return names


def _groups(path: Path, step: int) -> Mapping[str, Mapping[str, Value]]:
    if step < 0:
        raise UsageError(f"step is {step}: expected a whole number from 0")
    provenance = {"imported_from": path.name, "host": socket.gethostname(), "hpctrain": __version__}
    root: dict[str, Value] = {"step": step, "world_size": 1, "NX_class": "NXroot"}
    return {"/": root, layout.MODEL: {}, layout.PROVENANCE: provenance}


def _from_safetensors(path: Path) -> Found:
    tensors, _ = safetensors.read_header(path)
    groups = {tensor.name.partition("/")[0] for tensor in tensors}
    whole = all("/" in tensor.name for tensor in tensors) and layout.MODEL.strip("/") in groups
    for tensor in tensors:
        group, _, rest = tensor.name.partition("/")
        if not whole or f"/{group}" == layout.MODEL:
            read = partial(safetensors.load, path, tensor)
            yield rest if whole else tensor.name, tensor.shape, tensor.dtype, read


def _from_torch(path: Path) -> Found:
    from hpctrain.checkpoint.states import check_storable, to_numpy

    found, total = _state_dict(path), 0
    allowed = _MOST_NAMES * path.stat().st_size + _SMALL
    for name, tensor in found.items():
        check_storable(tensor, name)
        total += tensor.nbytes
        if tensor.nbytes > tensor.untyped_storage().nbytes() or total > allowed:
            raise CheckpointError(
                f"{path}: {short_repr(name)} of shape {shorten(str(tuple(tensor.shape)))} repeats the same elements "
                f"(expanded): the tensors would take {total} bytes or more, the file has {path.stat().st_size}"
            )
    for name, tensor in found.items():
        read = lambda begin, end, tensor=tensor: to_numpy(tensor.contiguous()).reshape(-1)[begin:end]
        yield name, tuple(tensor.shape), dtype_name(tensor.dtype), read


def _state_dict(path: Path) -> Mapping[str, torch.Tensor]:
    """Return the model's tensors in a file that torch saved, at the top level or under one of the usual keys."""
    import torch

    content = _load(path)
    for name in ("", *_INSIDE):
        found = content.get(name) if name and isinstance(content, dict) else content
        if isinstance(found, dict) and found and all(isinstance(one, torch.Tensor) for one in found.values()):
            return found
    held = sorted(map(str, content))[:8] if isinstance(content, dict) else type(content).__name__
    raise UsageError(
        f"{path} holds no model that can be imported: expected a dict of tensors, itself or under "
        f"{', '.join(_INSIDE)}, found {held}"
    )


def _load(path: Path) -> Any:
    import pickle  # for the name of its error only: torch reads the file, and with weights_only it builds only tensors

    import torch

    try:
        with open(open_regular(path), "rb") as file:
            _check_archive(file, path)
            return torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path} holds more than tensors, or is damaged, and was not run: {reason}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # torch raises many types of errors for malformed files
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is not a file that torch wrote, or is damaged: {reason}") from error


def _check_archive(file: BinaryIO, path: Path) -> None:
    """Refuse a ZIP archive with compressed members, which torch never writes; the file position is reset to 0."""
    size = os.fstat(file.fileno()).st_size
    if zipfile.is_zipfile(file):
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if any(one.compress_type for one in members) or sum(one.file_size for one in members) > size:
                raise CheckpointError(f"{path} is compressed: torch writes no such file; save it again with torch.save")
    file.seek(0)


def check_output(target: Path, inputs: Iterable[str | Path], *, force: bool) -> None:
    """Raise ``UsageError`` if the output exists and must not be replaced; an input is never replaced."""
    if not target.name:
        raise UsageError("the name of the output is empty: give the file to write")
    if not target.exists():
        return
    # A link is replaced; its target is not changed.
    if not target.is_symlink() and any(Path(each).exists() and target.samefile(each) for each in inputs):
        raise UsageError(f"{target} is the input file: choose another name to write")
    if not force:
        raise UsageError(f"{target} exists: choose another name, or --force to replace it")
