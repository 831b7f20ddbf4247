"""Store of torch.distributed over MPI: rank 0 keeps the keys; no port is opened, and no server process started.

``key_server`` has the messages, their counts and the thread of rank 0.
"""

from __future__ import annotations

import atexit
import math
import operator
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import Store

from hpctrain.torch_backend.key_server import (
    LEAVE_SECONDS,
    MESSAGE_BYTES,
    NAMED,
    OK,
    REFUSED,
    SERVER,
    TIMED_OUT,
    KeyClient,
    KeyServer,
)


class _Connection:
    """Connection of this process to the keys of rank 0."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        own = comm.Dup()
        self._end: KeyServer | KeyClient = KeyServer(own) if own.Get_rank() == SERVER else KeyClient(own)
        self._process = os.getpid()
        self._closed = False
        self.stores: list[MpiStore] = []  # C++ objects that refer to a store do not keep its Python object alive
        atexit.register(self.leave)

    def leave(self, seconds: float | None = None) -> None:
        """End the requests of this rank, once; on rank 0, those of all ranks, after ``seconds`` at the latest.

        The default is ``LEAVE_SECONDS``.
        """
        if os.getpid() == self._process and not self._closed and not MPI.Is_finalized():
            self._closed = True
            self._end.leave(LEAVE_SECONDS if seconds is None else seconds)
        atexit.unregister(self.leave)

    def ask(self, operation: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        """Return the result of a request, or raise its error."""
        if os.getpid() != self._process:
            raise dist.DistStoreError(
                f"{_named(operation, arguments)}: the store belongs to process {self._process}, and MPI does not work "
                "in a forked one; ask the store before the fork, and pass the values to the child"
            )
        if self._closed:
            raise dist.DistStoreError(f"{_named(operation, arguments)}: this rank has closed the store; make a new one")
        status, value = self._end.ask(operation, arguments, seconds if seconds >= 0 else math.inf)
        if status == OK:
            return value
        if status == TIMED_OUT:
            raise dist.DistStoreError(f"{operation}: wait timeout after {seconds:g} s, keys: {_listed(value)}")
        if status == REFUSED:
            raise dist.DistStoreError(f"{_named(operation, arguments)}: {value}")
        raise dist.DistNetworkError(
            f"{_named(operation, arguments)}: rank {SERVER}, which keeps the store, has closed it or ended; "
            f"let rank {SERVER} end last"
        )


class MpiStore(Store):
    """Store of the ranks of an mpi4py communicator. Construction is collective; a new store is empty.

    Each has a communicator and a thread of rank 0, so make one per process and use ``PrefixStore``. Methods have the
    names under which torch's C++ classes look for them, and those of ``Store``. The timeout is that of the base class,
    because ``PrefixStore`` reads and sets it there. torch's C++ classes find no queues and no ``list_keys`` in a store
    written in Python, so ``PrefixStore`` has them not.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: timedelta) -> None:
        self._join(_Connection(comm), timeout)

    def _join(self, connection: _Connection, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._connection = connection
        connection.stores.append(self)

    def clone(self) -> MpiStore:
        """Return another object for the same keys, with its own timeout. Both may be used from several threads."""
        twin = MpiStore.__new__(MpiStore)
        twin._join(self._connection, _timeout(self))
        return twin

    def leave(self) -> None:
        """Make no more requests; on rank 0, which keeps the keys, answer the other ranks until they leave, too."""
        self._connection.leave()

    def close(self) -> None:
        """Make no more requests; on rank 0, which keeps the keys, end the store for all ranks at once."""
        self._connection.leave(0.0)

    def _ask(self, operation: str, *arguments: Any, timeout: timedelta | float | None = None) -> Any:
        limit = _timeout(self) if timeout is None else timeout
        return self._connection.ask(
            operation, arguments, limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
        )

    # Methods of torch's stores ----------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask("set", [_key(key)], _values(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys at once."""
        names, contents = _keys(keys), _values(*values)
        if len(names) != len(contents):
            raise dist.DistStoreError(f"multi_set: {len(names)} keys, but {len(contents)} values; give one per key")
        self._ask("set", names, contents)

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until it exists."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys; wait until all exist."""
        values: list[bytes] = self._ask("multi_get", _keys(keys))
        return values

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        """Wait until all keys exist; without limit if ``timeout`` is negative."""
        self._ask("wait", _keys(keys), timeout=timeout)

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Wait until ``world_size`` calls with this key have been made."""
        self._ask("barrier", _key(key), _integer(world_size), timeout=timeout)

    def add(self, key: str, value: int) -> int:
        """Add to the number of a key, which begins at 0; return the sum."""
        return int(self._ask("add", _key(key), _integer(value)))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._ask("append", _key(key), *_values(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value, or does not exist and nothing is expected; return its value."""
        value: bytes = self._ask("compare_set", _key(key), *_values(expected, desired))
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist; a queue exists while it is not empty."""
        return bool(self._ask("check", _keys(keys)))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(self._ask("delete_key", _key(key)))

    def num_keys(self) -> int:
        """Return the number of keys, without queues."""
        return int(self._ask("num_keys"))

    def list_keys(self) -> list[str]:
        """Return all keys, without queues."""
        keys: list[str] = self._ask("list_keys")
        return keys

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append a value to a queue."""
        self._ask("queue_push", _key(key), *_values(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove the first value of a queue and return it; wait for one if ``block``."""
        value: bytes | None = self._ask("queue_pop", _key(key), bool(block))
        if value is None:
            raise dist.QueueEmptyError(f"queue {key!r} is empty")
        return value

    def queue_len(self, key: str) -> int:
        """Return the number of values in a queue."""
        return int(self._ask("queue_len", _key(key)))

    def has_extended_api(self) -> bool:
        """Return True: ``append``, ``multi_get`` and ``multi_set`` exist."""
        return True

    # Names that torch's C++ classes call.
    deleteKey = delete_key
    getNumKeys = num_keys


def _timeout(store: Store) -> timedelta:
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # not in torch's stub
    return timeout


def _key(key: str | bytes) -> str:
    try:
        return str(key, "utf-8") if isinstance(key, bytes) else str.encode(key).decode()
    except (TypeError, UnicodeError) as error:
        raise TypeError(f"key of a store: {key!r}; it must be str without surrogates") from error


def _keys(keys: Iterable[str]) -> list[str]:
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"keys of a store: {keys!r}; they must be a list of str")
    return [_key(key) for key in keys]


def _values(*values: str | bytes) -> list[bytes]:
    for value in values:
        if not isinstance(value, (str, bytes, bytearray)):
            raise TypeError(f"value of a store: {type(value).__name__}; it must be str or bytes")
    contents = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
    if (size := sum(map(len, contents))) > MESSAGE_BYTES:
        raise ValueError(f"value of a store: {size:,} bytes; at most {MESSAGE_BYTES:,} are possible; send a tensor")
    return contents


def _integer(value: int) -> int:
    number = operator.index(value)
    if not -(2**63) <= number < 2**63:
        raise TypeError(f"number of a store: {number}; it must have at most 64 bits")
    return number


def _named(operation: str, arguments: tuple[Any, ...]) -> str:
    keys = arguments[0] if arguments else []
    return f"{operation} {_listed(keys if isinstance(keys, list) else [keys])}".strip()


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(repr(key) for key in keys[:NAMED]) + (" and others" if len(keys) > NAMED else "")
