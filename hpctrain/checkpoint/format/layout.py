"""Names of a checkpoint file: format, groups, attributes, element types, rules for names.

Everything here is pure: tables and functions over text and NumPy types.
``docs/checkpoint-format.md`` describes the same in words.

An attribute is an int64, a float64, a uint32, a text of fixed length (UTF-8, padded with NUL) or a
list of such texts. Texts of variable length would be stored in a heap that HDF5 does not checksum.
Other values (booleans, ``None``, lists, tables, huge integers) are JSON under the name with the
suffix ``.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpctrain.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from hpctrain.checkpoint.format.reader import Reader

Array = npt.NDArray[np.generic]

FORMAT = "hpctrain-checkpoint"
VERSION = (1, 3)  # (major, minor): a reader refuses a newer major version and ignores additions of a newer minor one
COMMON = (1, 2)  # version of a file without newer features: keys of models or optimizers, tensors of states

MODEL, OPTIMIZER, WORKERS, TRAIN, RNG = "/model", "/optimizer", "/workers", "/train", "/rng"
STATES = "/states"
CONFIG, PROVENANCE, MANIFEST, EXTENTS, SEAL = "/config", "/provenance", "/manifest", "/extents", "/seal"
SEALED_SINCE, EXTENTS_SINCE = (1, 1), (1, 2)  # files of older versions have no seal or no table of extents
CRC32, TORCH_DTYPE, DIGEST = "crc32", "torch_dtype", "manifest_sha256"

PIECE = 16 << 20  # bytes per I/O: large enough for any filesystem, and a small, bounded buffer
EXTENT = 4 << 20  # bytes of a tensor with a CRC-32 of their own: to read a slice, at most this much is read around it
ALIGNMENT = 1 << 20  # bytes: tensors of at least this size start at multiples of it, unless the settings differ

# Storage type in HDF5 per torch type. HDF5 has no bfloat16: its 16 bits are stored as an unsigned integer.
STORAGE: dict[str, np.dtype[np.generic]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("|i1"),
    "uint8": np.dtype("|u1"),
    "bool": np.dtype("|u1"),
}

_LONGEST_NAME = 1024


@dataclass(frozen=True)
class Record:
    """A stored tensor; ``dtype`` is the torch name, ``crc32`` covers its bytes in C order, little endian.

    ``attributes`` are all attributes of the dataset, as the file stores them.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    crc32: int
    attributes: Mapping[str, Array] = field(default_factory=dict, compare=False)

    @property
    def storage(self) -> np.dtype[np.generic]:
        """Return the element type in the file."""
        return STORAGE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return math.prod(self.shape) * self.storage.itemsize


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as text: ``2x3``, ``scalar``."""
    return "x".join(map(str, shape)) or "scalar"


def storage_of(dtype: str, what: str) -> np.dtype[np.generic]:
    """Return the element type in the file for a torch name; raises ``CheckpointError`` with the allowed names."""
    if dtype not in STORAGE:
        raise CheckpointError(f"{what} has the dtype {dtype}: a checkpoint holds {', '.join(STORAGE)}")
    return STORAGE[dtype]


def child(group: str, name: str) -> str:
    """Return the path of ``name`` in a group; dots stay, names that HDF5 would read as a path are refused."""
    check_name(name, f"in {group}")
    return f"{group.rstrip('/')}/{name}"


def check_name(name: str, where: str) -> None:
    """Raise ``CheckpointError`` unless the name is valid as one component of a path."""
    if name in ("", ".", ".."):
        reason = "be empty, '.' or '..'"
    elif "/" in name:
        reason = "contain '/'"
    elif not name.isprintable():  # also covers lone surrogates, which UTF-8 cannot encode
        reason = "contain control characters"
    elif len(name.encode()) > _LONGEST_NAME:
        reason = f"be longer than {_LONGEST_NAME} bytes"
    else:
        return
    shown = name if len(name) <= 80 else name[:80] + "..."
    raise CheckpointError(f"the name {shown!r} {where} cannot be stored: it must not {reason}")


def version_for(groups: Mapping[str, Mapping[str, object]], paths: Iterable[str]) -> tuple[int, int]:
    """Return the format version that a file needs, given its groups with attributes and its datasets."""
    keyed = any("keys" in groups.get(group, {}) for group in (MODEL, OPTIMIZER))
    return VERSION if keyed or any(path.startswith(f"{STATES}/") for path in paths) else COMMON


def format_version(text: str) -> tuple[int, int]:
    """Return ``"1.0"`` as two numbers; raises ``ValueError`` if the text is not two numbers."""
    major, minor = text.split(".")
    return int(major), int(minor)


# Keys of several models or optimizers in one file: one group each below ``/model`` or ``/optimizer`` ------------------
#
# A single model or optimizer has no key (``""``) and is stored in the common group itself.


KEYS = "keys"  # the attribute of /model and of /optimizer that lists the keys


def group_of(group: str, key: str) -> str:
    """Return the group of a model or optimizer: the common group if there is no key."""
    return child(group, key) if key else group


def keys_in(reader: Reader, group: str) -> list[str]:
    """Return the keys of the models or optimizers in a file: ``[""]`` for a single one, ``[]`` for none."""
    if group not in reader.groups:
        return []
    keys = reader.values(group).get(KEYS, ("",))
    return [keys] if isinstance(keys, str) else [str(key) for key in keys]


def key_groups(group: str, keys: Sequence[str]) -> dict[str, dict[str, Value]]:
    """Return the groups of several models or optimizers with their attributes; empty for a single one."""
    if not keys or list(keys) == [""]:
        return {}
    return {group: {KEYS: tuple(keys)}, **{child(group, key): {} for key in keys}}


# Conversion of Python values to HDF5 attributes and back


Value = int | float | str | np.uint32 | tuple[str, ...]
Groups = Mapping[str, Mapping[str, Value]]  # attributes of groups by path

JSON_SUFFIX = ".json"
_INT64 = range(-(1 << 63), 1 << 63)


def to_array(value: Value) -> Array:
    """Return the value exactly as the file stores it."""
    if isinstance(value, np.uint32):
        return np.array(value, dtype="<u4")
    if isinstance(value, int):
        return np.array(value, dtype="<i8")
    if isinstance(value, float):
        return np.array(value, dtype="<f8")
    texts = [_encode(value)] if isinstance(value, str) else [_encode(text) for text in value]
    length = max([1, *map(len, texts)])  # HDF5 has no text of length 0
    return np.array(texts[0] if isinstance(value, str) else texts, dtype=f"S{length}")


def from_array(array: Array) -> Value:
    """Return the argument of ``to_array``."""
    if array.dtype.kind != "S":
        value: Value = np.uint32(array.item()) if array.dtype == np.uint32 else array.item()
        return value
    if array.ndim == 0:
        return bytes(array[()]).decode()
    return tuple(bytes(text).decode() for text in array)


def pack(values: Mapping[str, Any], what: str) -> dict[str, Value]:
    """Return the attributes that store a mapping; ``what`` names it in the error for an unsupported value."""
    attributes: dict[str, Value] = {}
    for name, value in values.items():
        check_name(name, f"of {what}")
        if name.endswith(JSON_SUFFIX):
            raise UsageError(f"the name {name!r} of {what} must not end in {JSON_SUFFIX}: that marks JSON text")
        plain = value.item() if isinstance(value, np.generic) else value
        if isinstance(plain, str):
            plain = str(plain)  # to unpickle a subclass, such as torch's version, would import its package
        if _is_plain(plain):
            attributes[name] = plain
        else:
            attributes[name + JSON_SUFFIX] = _to_json(plain, f"{name} of {what}")
    return attributes


def unpack(attributes: Mapping[str, Array], file: object) -> dict[str, Any]:
    """Return the argument of ``pack``; tuples become lists."""
    values: dict[str, Any] = {}
    for name, array in attributes.items():
        value = from_array(array)
        if name.endswith(JSON_SUFFIX):
            values[name.removesuffix(JSON_SUFFIX)] = _from_json(value, f"{file}: attribute {name}")
        else:
            values[name] = value
    return values


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" not in value
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and value in _INT64)


def _encode(text: str) -> bytes:
    if "\0" in text:
        raise UsageError(f"the text {text[:40]!r} holds a NUL: an attribute cannot store it")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the text {text[:40]!r} is not valid Unicode: {error.reason}") from error


def _to_json(value: Any, what: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{what} is of type {type(value).__name__} and cannot be stored ({error}): allowed are numbers, text, "
            "true and false, None, and lists and dicts of them"
        ) from error


def _from_json(text: Value, where: str) -> Any:
    try:
        return json.loads(str(text))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from error
