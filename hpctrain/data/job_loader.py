"""The loader of ``job.loader``: a DataLoader whose sample order is a function of seed and position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from hpctrain.data.orders import BatchOrder, LengthBatches
from hpctrain.data.ragged.batch import equal_sizes
from hpctrain.data.random_streams import RandomStreams
from hpctrain.data.split_loader import shares_of, split_loader
from hpctrain.errors import DataError, UsageError


class JobLoader(DataLoader[Any]):
    """A ``DataLoader`` of batches of all ranks: a run splits them; without a run, iteration returns this rank's shares.

    ``epochs`` is the number of epochs of a run that is given neither ``steps`` nor ``run.epochs``.
    """

    is_split = False

    def __init__(self, dataset: Any, rank: int, parts: int, epochs: int | None, seed: int, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.epochs, self.seed = epochs, seed
        self._rank, self._parts = rank, parts

    def __iter__(self) -> Any:
        if self._parts == 1 or self.is_split:
            return super().__iter__()
        return self._shares()

    def _shares(self) -> Iterator[Any]:
        """Yield this rank's shares; if a batch has fewer samples than ranks, some ranks get none."""
        split_copy = split_loader(self, self._rank, self._parts, RandomStreams(self.seed))
        drawn = shares_of(split_copy)
        for batch in split_copy:
            if drawn.popleft().samples:
                yield batch


class SampleDataset:
    """Map-style dataset over one that returns several samples at once, as hpctrain's files do."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.dataset.batch(np.asarray([index], np.int64))
        return inputs[0], targets[0]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.dataset.batch(np.asarray(list(indices), np.int64))


def job_loader(
    dataset: Any,
    *,
    rank: int,
    parts: int,
    batch: int,
    shuffle: bool = True,
    epochs: int | None = None,
    workers: int = 0,
    seed: int = 0,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    lengths: Any = None,
    most: int | None = None,
    **options: Any,
) -> JobLoader:
    """Return a loader over a dataset; see ``Job.loader``."""
    _check(dataset, batch, epochs, workers)
    if most is not None and lengths is None:
        raise UsageError(f"job.loader(most={most}): needs lengths, the size of each sample", everywhere=True)
    if isinstance(dataset, IterableDataset):
        if lengths is not None:
            raise UsageError("job.loader(lengths=...) of an IterableDataset: its order is its own", everywhere=True)
        if shuffle:
            raise UsageError(
                "job.loader(shuffle=True) of an IterableDataset: its order is its own; pass shuffle=False",
                everywhere=True,
            )
        more = {"batch_size": batch, "drop_last": drop_last, "num_workers": workers, "collate_fn": collate_fn}
        return JobLoader(dataset, rank, parts, epochs, seed, **more, **options)
    if drop_last and len(dataset) < batch:
        raise DataError(f"{len(dataset)} samples do not fill a batch of {batch}: take a smaller one or drop_last=False")
    order: BatchOrder | LengthBatches = BatchOrder(len(dataset), batch, shuffle=shuffle, seed=seed, drop_last=drop_last)
    if lengths is not None:
        order = LengthBatches(lengths, batch, most=most, shuffle=shuffle, seed=seed, drop_last=drop_last)
        if order.samples != len(dataset):
            raise DataError(
                f"job.loader(lengths=...) has {order.samples} lengths for {len(dataset)} samples", everywhere=True
            )
    if getattr(dataset, "varies", False):
        collate_fn = collate_fn or equal_sizes
    if not hasattr(type(dataset), "__getitem__") and hasattr(dataset, "batch"):
        dataset, collate_fn = SampleDataset(dataset), collate_fn or _as_it_is
    if workers:
        options = {"persistent_workers": True, **options}
    return JobLoader(
        dataset, rank, parts, epochs, seed, batch_sampler=order, num_workers=workers, collate_fn=collate_fn, **options
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _check(dataset: Any, batch: int, epochs: int | None, workers: int) -> None:
    for name, value, least in (("batch", batch, 1), ("epochs", epochs, 1), ("workers", workers, 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            text = f"job.loader({name}={value!r}): must be a whole number of at least {least}"
            raise UsageError(text, everywhere=True)
    if isinstance(dataset, IterableDataset):
        return
    if not hasattr(dataset, "__len__") or not (hasattr(dataset, "__getitem__") or hasattr(dataset, "batch")):
        raise UsageError(
            f"job.loader of a {type(dataset).__name__}: allowed are a Dataset with __len__ and __getitem__, an "
            "IterableDataset, and what hpctrain.data opens",
            everywhere=True,
        )
    if not len(dataset):
        raise DataError("job.loader: the dataset is empty", everywhere=True)
