"""Import of a model that another program saved: safetensors, or a ``state_dict`` that torch saved.

No code of the file is executed: safetensors are a header and bytes, torch's files are read with
``weights_only``.
"""

from __future__ import annotations

import os
import socket
import zipfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from hpctrain._version import __version__
from hpctrain.checkpoint.file import layout
from hpctrain.checkpoint.file.attributes import Value
from hpctrain.checkpoint.file.commit import commit
from hpctrain.checkpoint.file.layout import Array
from hpctrain.checkpoint.file.source import Source, box_of, nbytes_of
from hpctrain.checkpoint.file.writer import write_file
from hpctrain.checkpoint.look import safetensors
from hpctrain.checkpoint.look.output import check_output
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.util.reading import open_regular
from hpctrain.util.text import shorten, shown

if TYPE_CHECKING:
    import torch

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_MOST_NAMES = 64  # names that may share the bytes of a tensor, as tied and repeated layers do
_SMALL = 1 << 20  # bytes
_INSIDE = ("model", "state_dict", "model_state_dict", "module")  # keys under which training programs store the model

# Name, shape and torch dtype of each tensor, and a function that returns a range of its elements in C order.
Found = Iterable[tuple[str, tuple[int, ...], str, Callable[[int, int], Array]]]


def ingest(
    file: str | Path, output: str | Path, *, step: int = 0, strip: str = "", force: bool = False
) -> list[str]:
    """Write a checkpoint of the model in a file, and return the names of the stored tensors.

    ``strip`` is removed from the front of every name. If the file is a whole export (``model/``,
    ``optimizer/``, ...), only its model is imported. Raises ``UsageError`` for an unknown suffix or
    an existing output, ``CheckpointError`` for a damaged file.
    """
    path, target = Path(file), Path(output)
    if path.suffix not in SUFFIXES:
        raise UsageError(f"cannot import {path}: its name must end in {', '.join(SUFFIXES)}")
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
    needed = sum(nbytes_of(source.box) for source in sources)
    commit(target, lambda private: write_file(private, sources, _groups(path, step)), needed)
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
    from hpctrain.checkpoint.tensors import check_storable, dtype_name, to_numpy

    found, total = _state_dict(path), 0
    allowed = _MOST_NAMES * path.stat().st_size + _SMALL
    for name, tensor in found.items():
        check_storable(tensor, name)
        total += tensor.nbytes
        if tensor.nbytes > tensor.untyped_storage().nbytes() or total > allowed:
            raise CheckpointError(
                f"{path}: {shown(name)} of shape {shorten(str(tuple(tensor.shape)))} repeats the same elements "
                f"(expanded): the tensors would take {total} bytes or more, the file has {path.stat().st_size}"
            )
    for name, tensor in found.items():
        read = lambda begin, end, tensor=tensor: to_numpy(tensor.contiguous()).reshape(-1)[begin:end]
        yield name, tuple(tensor.shape), dtype_name(tensor), read


def _state_dict(path: Path) -> Mapping[str, torch.Tensor]:
    """Return the model's tensors in a file that torch saved, at the top level or under one of the usual keys."""
    content = _load(path)
    for name in ("", *_INSIDE):
        found = content.get(name) if name and isinstance(content, dict) else content
        if isinstance(found, dict) and found and all(map(_is_tensor, found.values())):
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


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)
