"""Data files in the memory of all nodes (``data.cache = "memory"``), read once per job; samples travel by MPI.

The bytes of all datasets are one sequence, of which each node holds a part. Its ranks read the part directly, and the
parts of other nodes on demand. Over a network without hardware support, a rank serves the others only while it waits
(``comm/rma/remote_memory.py``). Therefore all ranks fetch their samples of a batch together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpctrain.comm.agreement import agreed
from hpctrain.data.shards.files import Descriptor
from hpctrain.errors import DataError
from hpctrain.log import logger
from hpctrain.util.text import counted, format_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from hpctrain.comm.communicator import Communicator
    from hpctrain.comm.rma.remote_memory import RemoteMemory
    from hpctrain.data.dataset import FileDataset, Indices

Array = npt.NDArray[Any]
WORD = 8  # bytes of an element of the memory


class HeldBytes:
    """Bytes of arrays in files, in the memory of all nodes. Construction is collective.

    ``arrays`` are memory maps, the same on all ranks. Raises ``CommunicationError`` on all ranks if a node has too
    little memory.
    """

    def __init__(self, comm: Communicator, arrays: Sequence[np.memmap[Any, Any]]) -> None:
        from hpctrain.comm.rma.select import expose

        words = [-(-array.nbytes // WORD) for array in arrays]
        self._arrays, self._begins = list(arrays), [WORD * sum(words[:number]) for number in range(len(words))]
        self.nbytes = sum(array.nbytes for array in arrays)
        total = sum(words)
        everyone: list[tuple[int, int]] = comm.all_gather_object((comm.node, comm.local_rank))
        self._owners = [everyone.index((node, 0)) for node in range(comm.nodes)]
        self._ends = [total * (node + 1) // comm.nodes for node in range(comm.nodes)]  # in words
        first, last = total * comm.node // comm.nodes, self._ends[comm.node]
        import torch

        own = last - first if comm.local_rank == 0 else 0
        self.memory: RemoteMemory = expose(comm.transport, own, torch.int64)
        part = self.memory.view(self._owners[comm.node])
        assert part is not None, "the memory of a rank of this node"
        held = part.numpy().view(np.uint8)
        begin, end = (
            WORD * (first + (last - first) * each // comm.local_size) for each in (comm.local_rank, comm.local_rank + 1)
        )
        mine = held[begin - WORD * first : end - WORD * first]
        try:
            self.bytes_read = agreed(comm, lambda: self._load(mine, begin))
        except DataError:
            self.free()
            raise
        self.memory.barrier()
        if comm.rank == 0:
            text = "data.cache: %s are in the memory of %s, read once"
            logger.info(text, format_bytes(self.nbytes), counted(comm.nodes, "node"))

    def _load(self, held: Array, begin: int) -> int:
        """Fill memory with the bytes from ``begin`` on; return how many have been read from files."""
        done = 0
        for array, start in zip(self._arrays, self._begins):
            first, last = max(start, begin), min(start + array.nbytes, begin + len(held))
            if first < last:
                where = array.offset + first - start
                Descriptor(str(array.filename)).fill(held[first - begin : last - begin], where)
                done += last - first
        return done

    def free(self) -> None:
        """Free the memory; the arrays must not be used afterwards. Collective."""
        self.memory.free()

    def array(self, number: int) -> HeldArray:
        """Return the array of this number."""
        array = self._arrays[number]
        return HeldArray(self, self._begins[number], array.shape, array.dtype)

    def read(self, begin: int, nbytes: int) -> Array:
        """Return bytes, of this node's memory without a copy."""
        first, last = begin // WORD, -(-(begin + nbytes) // WORD)
        pieces = [piece.view(np.uint8) for piece in self._pieces(first, last)]
        found = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        wanted: Array = found[begin - WORD * first : begin - WORD * first + nbytes]
        return wanted

    def _pieces(self, first: int, last: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield words, by the node that holds them."""
        import torch

        begin = 0
        for owner, end in zip(self._owners, self._ends):
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                part = self.memory.view(owner)
                if part is None:
                    fetched = torch.empty(stop - start, dtype=torch.int64)
                    self.memory.get(owner, fetched, start - begin)
                    yield fetched.numpy()
                else:
                    yield part[start - begin : stop - begin].numpy()
            begin = end
        if first >= last:
            yield np.empty(0, np.int64)


class HeldArray:
    """Array whose bytes are in the memory of all nodes; it is read by ranges and by numbers of rows."""

    def __init__(self, held: HeldBytes, begin: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._held, self._begin, self.shape, self.dtype = held, begin, shape, dtype
        self.ndim = len(shape)
        self._width = dtype.itemsize * math.prod(shape[1:])  # bytes of a row

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Array:
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            found = self._rows(start, max(stop, start))
            return found if step == 1 else found[::step]
        if isinstance(rows, (int, np.integer)):
            one: Array = self._rows(int(rows), int(rows) + 1)[0]
            return one
        wanted = np.asarray(rows, np.int64)
        found = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        for place, row in enumerate(wanted.tolist()):
            found[place] = self._rows(row, row + 1)[0]
        return found

    def _rows(self, start: int, stop: int) -> Array:
        content = self._held.read(self._begin + start * self._width, (stop - start) * self._width)
        found: Array = content.view(self.dtype).reshape(stop - start, *self.shape[1:])
        return found


class HeldDataset:
    """Dataset whose arrays are in the memory of all nodes. All ranks read their samples of a batch together."""

    def __init__(self, dataset: FileDataset, held: HeldBytes) -> None:
        self._dataset, self.held = dataset, held
        self.path, self.facts = dataset.path, dataset.facts

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of samples. Collective."""
        found = self._dataset.batch(indices)
        self.held.memory.barrier()  # the others may still read this rank's memory
        return found


@contextmanager
def held(comm: Communicator, *datasets: FileDataset) -> Iterator[list[HeldDataset]]:
    """Provide datasets as ``hold`` does, and free their memory at the end, also if all ranks stop. Collective."""
    found = hold(comm, *datasets)
    try:
        yield found
    except SystemExit:
        found[0].held.free()
        raise
    found[0].held.free()


def hold(comm: Communicator, *datasets: FileDataset) -> list[HeldDataset]:
    """Bring the arrays of datasets to the memory of all nodes; return datasets that read them there. Collective.

    Raises ``DataError`` if an array is chunked or compressed, or the dataset is of another kind.
    """
    arrays: list[Any] = []

    def note(array: Any) -> Any:
        if not isinstance(array, np.memmap):
            raise DataError(
                'data.cache = "memory" with data that are chunked or compressed: write them contiguously, or remove it',
                everywhere=True,
            )
        arrays.append(array)
        return array

    for dataset in datasets:
        holder: Any = dataset
        if not hasattr(holder, "hold"):
            text = f'data.cache = "memory" with {type(dataset).__name__}: allowed are token and array files'
            raise DataError(text, everywhere=True)
        holder.hold(note)
    memory, number = HeldBytes(comm, arrays), iter(range(len(arrays)))
    for dataset in datasets:
        holder = dataset
        holder.hold(lambda _: memory.array(next(number)))
    return [HeldDataset(dataset, memory) for dataset in datasets]
