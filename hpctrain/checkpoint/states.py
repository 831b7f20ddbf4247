"""States of objects: captured and restored, as JSON values and tensors of a file, and as tensors or NumPy arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.finite import Allowed
from hpctrain.checkpoint.format.layout import STORAGE, Array, storage_of
from hpctrain.checkpoint.format.plan import Source
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.shard import Shard, dtype_name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch element type for a name in the layout's table."""
    storage_of(name, "a tensor")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def check_storable(tensor: torch.Tensor, name: str) -> None:
    """Raise ``CheckpointError`` unless the tensor is dense, has memory, and has a supported element type."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"{name} is a {tensor.layout} tensor: a checkpoint holds dense ones")
    if tensor.is_meta:
        raise CheckpointError(f"{name} is on the meta device and has no values")
    storage_of(dtype_name(tensor.dtype), name)


def to_numpy(tensor: torch.Tensor) -> Array:
    """Return the elements as a C-contiguous array of the storage type; a view of a tensor contiguous on the host."""
    plain = tensor.detach().to("cpu").contiguous()
    if plain.dtype == torch.bfloat16:
        plain = plain.view(torch.int16)
    return plain.numpy().view(STORAGE[dtype_name(tensor.dtype)])


def flat(tensor: torch.Tensor, begin: int, end: int) -> Array:
    """Return a range of elements in C order, in the storage type; a view of a tensor contiguous on the host."""
    return to_numpy(tensor.detach().contiguous().view(-1)[begin:end])


def fill(tensor: torch.Tensor, read_into: Callable[[Array], None]) -> None:
    """Fill the tensor in place by ``read_into``: directly if it is contiguous on the host, else through a host copy."""
    target = tensor.detach()
    if target.device.type == "cpu" and target.is_contiguous():
        read_into(to_numpy(target))
        return
    staged = torch.empty(target.shape, dtype=target.dtype)
    read_into(to_numpy(staged))
    target.copy_(staged)


def from_numpy(array: Array, dtype: str) -> torch.Tensor:
    """Return a new tensor with the values of a stored array."""
    tensor = torch.empty(array.shape, dtype=torch_dtype(dtype))
    np.copyto(to_numpy(tensor), array)
    return tensor


def shard_source(shard: Shard, allowed: Allowed = Allowed.ANY) -> Source:
    """Return the source of a tensor; the name of the shard is its path in the file."""
    tensor = shard.tensor
    storage_of(shard.dtype, shard.name)
    return Source(shard, lambda begin, end: flat(tensor, begin, end), allowed=allowed)


# Nested states as JSON values and tensors of a file
#
# ``pack_states`` turns a nested state into JSON values and a list of tensors; ``unpack_states`` turns
# them back. Plain values (numbers, text, booleans, ``None``, lists, tables with text as keys) are
# stored as JSON. Any other value is a table with the key ``$``, which names its kind:
#
#     {"$": "tensor", "at": "/states/ema/module.weight"}      a dataset of the file
#     {"$": "array", "at": "/states/noise/key", "dtype": "uint32"}      a NumPy array
#     {"$": "tuple", "items": [...]}
#     {"$": "dict", "items": [[key, value], ...]}      a table with keys other than text, or with the key $
#     {"$": "counter", "items": [[key, count], ...]}      a collections.Counter


ALLOWED = "tensors, NumPy arrays, numbers, text, true and false, None, and lists, tuples and dicts of them"
_KIND, _AT, _ITEMS, _DTYPE = "$", "at", "items", "dtype"
_LONGEST = 200  # bytes in the name of a dataset
# Unsigned integers without a torch type name in the file are stored as signed integers of the same width.
_UNSIGNED = {"uint16": "int16", "uint32": "int32", "uint64": "int64"}

Leaf = torch.Tensor | Array


class Packed:
    """JSON values of a state, and the tensors and arrays to which they refer, by path in the file."""

    def __init__(self) -> None:
        self.tensors: dict[str, Leaf] = {}

    def add(self, value: Any, where: str, trail: tuple[str, ...]) -> Any:
        """Return the JSON value of a state; ``where`` names it in errors, ``trail`` in the file.

        Raises ``UsageError`` for a value that a checkpoint cannot store.
        """
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return self._leaf(value, where, trail)
        if value is None or isinstance(value, (bool, int, float, str)):
            return _plain(value, where)
        if isinstance(value, Mapping):
            return self._table(value, where, trail)
        if isinstance(value, (list, tuple)):
            items = [self.add(item, f"{where}[{n}]", (*trail, str(n))) for n, item in enumerate(value)]
            return items if isinstance(value, list) else {_KIND: "tuple", _ITEMS: items}
        objects = ", and objects with state_dict and load_state_dict" if len(trail) == 1 else ""
        raise UsageError(f"{where} is {_described(value)}; allowed are {ALLOWED}{objects}")

    def _table(self, value: Mapping[Any, Any], where: str, trail: tuple[str, ...]) -> Any:
        items = []
        for key, item in value.items():
            if not isinstance(key, (str, int, float, bool, tuple)) and key is not None:
                kinds = "text, numbers, true and false, None and tuples of them"
                raise UsageError(f"{where} has the key {key!r}, {_described(key)}; allowed are {kinds}")
            name = self.add(key, f"the key {key!r} of {where}", trail)
            items.append([name, self.add(item, f"{where}[{_quoted(key)}]", (*trail, str(key)))])
        if isinstance(value, Counter):
            return {_KIND: "counter", _ITEMS: items}
        if all(isinstance(key, str) for key in value) and _KIND not in value:
            return dict(items)
        return {_KIND: "dict", _ITEMS: items}

    def _leaf(self, value: Leaf, where: str, trail: tuple[str, ...]) -> dict[str, str]:
        if isinstance(value, torch.Tensor):
            try:
                check_storable(value, where)
            except CheckpointError as error:
                raise UsageError(str(error)) from None
            return {_KIND: "tensor", _AT: self._store(value, trail)}
        name = value.dtype.name
        if name in _UNSIGNED:
            return {_KIND: "array", _AT: self._store(_little(value).view(_UNSIGNED[name]), trail), _DTYPE: name}
        if name not in layout.STORAGE:
            known = ", ".join([*layout.STORAGE, *_UNSIGNED])
            raise UsageError(f"{where} is a NumPy array of type {value.dtype}; allowed are {known}")
        return {_KIND: "array", _AT: self._store(_little(value), trail), _DTYPE: name}

    def _store(self, value: Leaf, trail: tuple[str, ...]) -> str:
        first, rest = _safe(trail[0]), _safe(".".join(trail[1:]) or "value")
        path, number = f"{layout.STATES}/{first}/{rest}", 1
        while path in self.tensors:
            path, number = f"{layout.STATES}/{first}/{rest}~{number}", number + 1
        self.tensors[path] = value
        return path


def pack_states(states: Mapping[str, Any], where: Callable[[str], str] | None = None) -> tuple[dict[str, Any], Packed]:
    """Return the JSON values of states by name, and their tensors; ``where`` names a state in errors."""
    packed, named = Packed(), where or (lambda name: f'states["{name}"]')
    return {name: packed.add(state, named(name), (name,)) for name, state in states.items()}, packed


def unpack_states(values: Any, read: Callable[[str, str | None], Any], file: object) -> Any:
    """Return the argument of ``pack_states``; ``read(path, dtype)`` returns a tensor, or with a dtype an array.

    Raises ``CheckpointError`` for a kind that this version does not support.
    """
    if isinstance(values, list):
        return [unpack_states(item, read, file) for item in values]
    if not isinstance(values, dict):
        return values
    if _KIND not in values:
        return {key: unpack_states(item, read, file) for key, item in values.items()}
    kind, items = values[_KIND], values.get(_ITEMS)
    if kind in ("tensor", "array") and isinstance(values.get(_AT), str):
        return read(values[_AT], values.get(_DTYPE, "") if kind == "array" else None)
    if kind == "tuple" and isinstance(items, list):
        return tuple(unpack_states(item, read, file) for item in items)
    if kind in ("dict", "counter") and isinstance(items, list) and all(isinstance(pair, list) for pair in items):
        table = {unpack_states(key, read, file): unpack_states(item, read, file) for key, item in items}
        return Counter(table) if kind == "counter" else table
    raise CheckpointError(f"{file}: a state has the kind {kind!r}, which this hpctrain does not know; update it")


def as_unsigned(array: Array, dtype: str) -> Array:
    """Return a stored array with its original element type."""
    if dtype == "bool":
        return array.astype(np.bool_)
    return array.view(dtype) if dtype in _UNSIGNED else array


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return str(value)  # an instance of a subclass would need its package when it is unpickled
    if value is None or isinstance(value, bool):
        return value
    return int(value) if isinstance(value, int) else float(value)


def _little(array: Array) -> Array:
    """Return a contiguous array in little-endian byte order, that of the file."""
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(array.shape)


def _safe(text: str) -> str:
    """Return a valid name for a dataset or group that resembles the text."""
    text = "".join(c if c.isprintable() and c != "/" else "_" for c in text)
    text = text.encode()[:_LONGEST].decode(errors="ignore")
    return text if text.strip(".") else f"_{text}"


def _quoted(key: Any) -> str:
    return f'"{key}"' if isinstance(key, str) else repr(key)


def _described(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value)
    name = kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


class StoredTensor(Protocol):
    """Description of a stored tensor, of which only the element type is needed."""

    @property
    def dtype(self) -> str:
        """Return the torch name of the element type."""


class BoxReader(Protocol):
    """File, or files, of which boxes of tensors can be read."""

    @property
    def records(self) -> Mapping[str, StoredTensor]:
        """Return the tensors by name."""

    def read_box(self, path: str, start: tuple[int, ...], extent: tuple[int, ...], out: Array, /) -> None:
        """Read the box of a tensor that begins at ``start`` into a C-contiguous array of the shape ``extent``."""


def fill_shard(reader: BoxReader, path: str, shard: Shard) -> None:
    """Read a shard's box of a stored tensor into the shard's memory; element types are converted."""
    stored = torch_dtype(reader.records[path].dtype)
    read = partial(reader.read_box, path, shard.start, shard.extent)
    if shard.tensor.dtype == stored:
        fill(shard.tensor, read)
        return
    staged = torch.empty(shard.extent, dtype=stored)
    fill(staged, read)
    shard.tensor.copy_(staged)


# Capture and restore --------------------------------------------------------------------------------------------------
#
# The state of an object with ``state_dict`` and ``load_state_dict`` is what these methods exchange. A
# tensor, a NumPy array, and a torch or NumPy generator is its own state and is filled in place.
# Lists, tuples and dicts may contain any of these.


@runtime_checkable
class Stateful(Protocol):
    """Object that returns and restores its state: a loader, a scheduler, an averaged model."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore a state."""


def state_of(thing: Any) -> Any:
    """Return the state of an object; plain values are their own state."""
    if isinstance(thing, (torch.Tensor, np.ndarray)):
        return thing.detach() if isinstance(thing, torch.Tensor) else thing
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, np.random.Generator):
        return thing.bit_generator.state
    if isinstance(thing, np.random.RandomState):
        return thing.get_state(legacy=False)
    if isinstance(thing, Stateful) and not isinstance(thing, type):
        return dict(thing.state_dict())
    if isinstance(thing, dict):
        return {key: state_of(item) for key, item in thing.items()}
    if isinstance(thing, (list, tuple)):
        items = [state_of(item) for item in thing]
        return items if isinstance(thing, list) else tuple(items)
    return thing


def restore_state(thing: Any, state: Any, where: str) -> Any:
    """Restore the state of an object; return the object, or the new value if it is a plain value.

    Raises ``CheckpointError``, which names ``where``, if the state does not fit.
    """
    if isinstance(thing, (torch.Tensor, np.ndarray)):
        _fill_in_place(thing, state, where)
        return thing
    try:
        if isinstance(thing, torch.Generator):
            thing.set_state(state.cpu())
        elif isinstance(thing, np.random.Generator):
            thing.bit_generator.state = state
        elif isinstance(thing, np.random.RandomState):
            thing.set_state(state)
        elif isinstance(thing, Stateful):
            thing.load_state_dict(match_structure(state, thing.state_dict()))
        else:
            return _restore_items(thing, state, where)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{where} cannot load its state: {type(error).__name__}: {error}") from error
    return thing


def _restore_items(thing: Any, state: Any, where: str) -> Any:
    """Restore the items of a list, tuple or dict; for a plain value, return the state itself."""
    if isinstance(thing, dict):
        lost = [key for key, item in thing.items() if key not in state and not is_plain(item)]
        if lost:
            raise CheckpointError(f"{where}: the checkpoint has no state of {', '.join(map(repr, lost))}")
        new = {key: _item(thing, key, state[key], where) if key in thing else state[key] for key in state}
        thing.clear()
        thing.update(new)
    elif isinstance(thing, list):
        if len(state) < len(thing) and not all(map(is_plain, thing[len(state) :])):
            raise CheckpointError(f"{where} has {len(thing)} items and {len(state)} in the checkpoint")
        common = min(len(thing), len(state))
        thing[:] = [*(_item(thing, number, state[number], where) for number in range(common)), *state[common:]]
    elif isinstance(thing, tuple):
        if len(state) != len(thing):
            raise CheckpointError(f"{where} has {len(thing)} items and {len(state)} in the checkpoint")
        for number, item in enumerate(thing):
            found = _item(thing, number, state[number], where)
            if found is not item and found != item:
                raise CheckpointError(f"{where}[{number}] is {found!r} in the checkpoint: a tuple cannot change it")
    else:
        return state
    return thing


def _item(thing: Any, key: Any, state: Any, where: str) -> Any:
    return restore_state(thing[key], state, f"{where}[{key!r}]")


def _fill_in_place(thing: Leaf, state: Any, where: str) -> None:
    same_kind = isinstance(state, torch.Tensor if isinstance(thing, torch.Tensor) else np.ndarray)
    if not same_kind or state.shape != thing.shape:
        found = f"shape {tuple(state.shape)}" if hasattr(state, "shape") else f"of type {type(state).__name__}"
        raise CheckpointError(f"{where} is {found} in the checkpoint and has shape {tuple(thing.shape)} in the program")
    if isinstance(thing, torch.Tensor):
        with torch.no_grad():
            thing.copy_(state)
    else:
        thing[...] = state


def is_plain(item: Any) -> bool:
    """Return whether an item is a value that cannot be filled in place."""
    return item is None or isinstance(item, (bool, int, float, str))


def match_structure(saved: Any, present: Any) -> Any:
    """Convert a saved state to the structure of the present one: its devices, tuples, keys and Counters.

    Files of format 1.2 store tuples as lists, and all keys as text.
    """
    if isinstance(saved, torch.Tensor):
        return saved.to(present.device) if isinstance(present, torch.Tensor) else saved
    if isinstance(saved, dict):
        known = present if isinstance(present, Mapping) else {}
        names = {str(key): key for key in known if not isinstance(key, str)}
        keys = {key: key if key in known else names.get(key, key) for key in saved}
        table = {keys[key]: match_structure(item, known.get(keys[key])) for key, item in saved.items()}
        return Counter(table) if isinstance(saved, Counter) or isinstance(present, Counter) else table
    if isinstance(saved, (list, tuple)):
        others = list(present) if isinstance(present, (list, tuple)) else []
        others += [None] * (len(saved) - len(others))
        items = [match_structure(item, other) for item, other in zip(saved, others)]
        return tuple(items) if isinstance(saved, tuple) or isinstance(present, tuple) else items
    return saved
