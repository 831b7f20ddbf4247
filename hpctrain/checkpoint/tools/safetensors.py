"""Reader and writer of the safetensors format: a JSON header, then the bytes of the tensors.

The format is described at https://github.com/huggingface/safetensors#format: eight bytes with the
length of the header (little endian), the header (name to dtype, shape and offsets; text under
``__metadata__``), the data without gaps. It has no checksums. The format's own library is not used: it reads headers up
to 100 MB, maps files, so that a truncated one ends the process, and writes from memory only.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hpctrain.checkpoint.format.layout import STORAGE, Array
from hpctrain.errors import CheckpointError
from hpctrain.util.reading import open_regular
from hpctrain.util.text import short_repr

NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPES = {word: name for name, word in NAMES.items()}
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
LONGEST = 16 << 20  # bytes of a header, enough for 100,000 tensors; the format's limit of 100 MB takes 1 GB as JSON


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file; ``dtype`` is the torch name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int  # from the start of the file

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return math.prod(self.shape) * STORAGE[self.dtype].itemsize


def write(
    file: BinaryIO,
    tensors: Sequence[tuple[str, tuple[int, ...], str]],
    data: Iterable[Iterable[Array]],
    metadata: Mapping[str, str],
) -> None:
    """Write tensors (name, shape, torch dtype); ``data`` contains the pieces of each, in the same order."""
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name, shape, dtype in tensors:
        if name in header:
            raise CheckpointError(f"safetensors cannot hold a tensor of the name {name!r}")
        start, end = end, end + math.prod(shape) * STORAGE[dtype].itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align the data to 8 bytes
    file.write(_LENGTH.pack(len(text)) + text)
    for pieces in data:
        for piece in pieces:
            file.write(piece.tobytes())


def read_header(path: str | Path) -> tuple[list[Tensor], dict[str, str]]:
    """Return the tensors in a file and its metadata. Raises ``CheckpointError`` if the file violates the format."""
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size, b"\xff"))[0]
            if length > size - _LENGTH.size:
                raise CheckpointError(f"{path} is not a safetensors file, or is cut off: its header would not fit")
            if length > LONGEST:
                raise CheckpointError(f"{path} has a header of {length} bytes; allowed are {LONGEST}")
            text = file.read(length)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
        metadata = {str(key): str(value) for key, value in header.pop(_METADATA, {}).items()}
        tensors = [_tensor(name, entry, _LENGTH.size + length) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the header of {path} is not as safetensors writes it: {error}") from error
    _check_places(tensors, _LENGTH.size + length, size, path)
    return tensors, metadata


def load(path: str | Path, tensor: Tensor, begin: int, end: int) -> Array:
    """Return a range of a tensor's elements, in C order and in the storage type.

    Raises ``CheckpointError`` if the file has become shorter since its header was read.
    """
    found: Array = np.empty(end - begin, dtype=STORAGE[tensor.dtype])
    rest = memoryview(found.view(np.uint8).data)
    try:
        with open(open_regular(path), "rb", buffering=0) as file:
            file.seek(tensor.offset + begin * found.itemsize)
            while rest and (count := file.readinto(rest)):
                rest = rest[count:]
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if rest:
        name = short_repr(tensor.name)
        raise CheckpointError(f"{path} was truncated meanwhile: {name} ends {len(rest)} bytes too early")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate names, which JSON allows and readers interpret differently."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _tensor(name: str, entry: Mapping[str, Any], begin: int) -> Tensor:
    word, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if word not in _DTYPES:
        raise ValueError(f"{name!r} has the dtype {word!r}: a checkpoint holds {', '.join(_DTYPES)}")
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in [*shape, start, end]):
        raise ValueError(f"{name!r} has the shape {shape} at {start} to {end}")
    tensor = Tensor(name, tuple(shape), _DTYPES[word], begin + start)
    if tensor.nbytes != end - start:
        raise ValueError(f"{name!r} of shape {shape} has {end - start} bytes: expected {tensor.nbytes}")
    return tensor


def _check_places(tensors: Sequence[Tensor], begin: int, size: int, path: str | Path) -> None:
    """Raise ``CheckpointError`` unless the tensors are contiguous and fill the file."""
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != begin:
            raise CheckpointError(f"{path}: {tensor.name!r} does not begin where the tensor before it ends")
        begin += tensor.nbytes
    if begin != size:
        raise CheckpointError(f"{path} has {size} bytes, its tensors end at {begin}: it is cut off or altered")
