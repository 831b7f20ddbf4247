"""Conversion of Python values to HDF5 attributes and back: numbers and text directly, all other values as JSON text.

An attribute is an int64, a float64, a uint32, a text of fixed length (UTF-8, padded with NUL) or a
list of such texts. Texts of variable length would be stored in a heap that HDF5 does not checksum.
Other values (booleans, ``None``, lists, tables, huge integers) are JSON under the name with the
suffix ``.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpctrain.checkpoint.format.layout import Array, check_name
from hpctrain.errors import CheckpointError, UsageError

Value = int | float | str | np.uint32 | tuple[str, ...]

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
