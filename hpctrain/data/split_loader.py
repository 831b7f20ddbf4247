"""A DataLoader whose batches are divided over the data ranks: each rank loads only its part of every batch.

The batch of the loader is the batch of all ranks. Every rank draws the indices of all batches, in
the same order, and loads a contiguous share of each; shares differ by at most one sample. Workers,
``collate_fn``, transforms, pinned memory and prefetching are unchanged: the loader is copied, and
the copy gets another ``batch_sampler``. For an ``IterableDataset``, of which every rank reads all
samples, it gets another ``collate_fn``.

If a rank's share of a small last batch is empty, the rank loads one sample of another rank's share
with weight 0. So the body of the loop runs on every rank: schedulers, averages of weights and
counters stay equal.
"""

from __future__ import annotations

import copy
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from hpctrain.data.own_generators import Generator, own_generator
from hpctrain.data.random_streams import RandomStreams, mix_seed, seed_sample
from hpctrain.errors import UsageError
from hpctrain.log import logger


def leaves(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from leaves(value)


def samples_in(batch: Any) -> int:
    """Return the number of samples, the first dimension of all tensors.

    Raises ``UsageError`` if the tensors differ in it, or if no tensor has one.
    """
    sizes = {leaf.shape[0] for leaf in leaves(batch) if leaf.dim()}
    if len(sizes) != 1:
        found = "no tensor with a first dim" if not sizes else f"tensors of first dims {sorted(sizes)}"
        raise UsageError(
            f"cannot count the samples of a batch of type {type(batch).__name__}: it has {found}; allowed are tensors, "
            "and tuples, lists and dicts of tensors with one first dim"
        )
    return sizes.pop()


def cut(batch: Any, begin: int, end: int) -> Any:
    """Return the samples from ``begin`` to ``end`` of a batch, as a batch of the same structure."""
    return _selected(batch, slice(begin, end), samples_in(batch))


def rows_of(batch: Any, rows: Tensor) -> Any:
    return _selected(batch, rows, samples_in(batch))


def _selected(batch: Any, which: slice | Tensor, count: int) -> Any:
    """Return some of the ``count`` samples of a batch."""
    if isinstance(batch, Tensor):
        index = which.to(batch.device) if isinstance(which, Tensor) else which
        return batch[index] if batch.dim() else batch
    if isinstance(batch, Mapping):
        values = {key: _selected(value, which, count) for key, value in batch.items()}
        return values if type(batch) is dict else _remade(batch, values)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_selected(value, which, count) for value in batch))
    if isinstance(batch, (tuple, list)):
        if any(True for _ in leaves(batch)):
            return type(batch)(_selected(value, which, count) for value in batch)
        if len(batch) == count:  # one value per sample, such as names
            return batch[which] if isinstance(which, slice) else type(batch)(batch[number] for number in which.tolist())
    return batch


def _remade(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    kind: Any = type(batch)
    try:
        return kind(values)
    except TypeError:
        return values


_LOG_AFTER = 1.0  # seconds of skipping after which progress is logged
_RANK_NAMES = (("rank", "num_replicas"), ("rank", "world_size"), ("rank", "num_shards"), ("dp_rank", "dp_size"))


@dataclass(frozen=True)
class BatchShare:
    """A rank's part of a batch: samples ``begin`` to ``end`` of ``total``; ``checksum`` is that of all indices."""

    total: int
    begin: int
    end: int
    parts: int
    checksum: int = 0

    @property
    def samples(self) -> int:
        return self.end - self.begin

    @property
    def weight(self) -> float:
        """Return the weight of the mean over this share relative to those of other ranks; the weights' mean is 1."""
        return self.samples * self.parts / self.total

    @property
    def loaded(self) -> slice:
        """Return the range of loaded samples: one sample with weight 0 if the share is empty."""
        first = min(self.begin, self.total - 1)
        return slice(first, max(self.end, first + 1))


def share_of(total: int, rank: int, parts: int, checksum: int = 0, microbatch: int = 1) -> BatchShare:
    """Return the contiguous share of a rank in a batch: whole microbatches; the last of the batch may be smaller."""
    count = -(-total // microbatch)
    begin, end = (min(count * each // parts * microbatch, total) for each in (rank, rank + 1))
    return BatchShare(total, begin, end, parts, checksum)


class SeededIndices(list[Any]):
    """Indices of samples that seed the generators before each sample is loaded, by its position in the run.

    ``DataLoader`` iterates over them where the sample is loaded: in this process or in a worker.
    Datasets that load several samples at once (``__getitems__``) usually iterate too; one that does
    not is seeded for its first sample.
    """

    def __init__(self, indices: Sequence[Any], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        for position, index in enumerate(super().__iter__()):
            seed_sample(self.seed + position)
            yield index

    def __reduce__(self) -> Any:
        return SeededIndices, (list(super().__iter__()), self.seed)


class SharedBatches:
    """Batch sampler that returns a rank's shares of the batches of another one.

    ``stream`` distinguishes ranks that load samples by a sampler of their own; it is 0 if batches
    are divided.
    """

    def __init__(
        self, batches: Any, rank: int, parts: int, streams: RandomStreams, stream: int = 0, microbatch: int = 1
    ) -> None:
        self.batches, self.rank, self.parts, self.streams, self.stream = batches, rank, parts, streams, stream
        self.microbatch = microbatch
        self.epoch = 0
        self.skip = 0  # batches to skip at the beginning of the next epoch
        self.drawn: deque[BatchShare] = deque()  # shares that were drawn and are not yet returned by the loader

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Sequence[Any]]:
        self.drawn.clear()
        return self._shares()

    def _shares(self) -> Iterator[Sequence[Any]]:
        # Nothing happens before the first batch is requested: a loader with workers makes two
        # iterators, uses one of them, and draws the seed of its workers in between.
        number, self.skip = self.skip, 0
        with self.streams.outer():
            if number and hasattr(self.batches, "start_at"):
                source = iter(self.batches.start_at(number))
            else:
                source = iter(self.batches)
                skip_over(source, number, "batches of indices")
        while True:
            with self.streams.outer():
                batch = next(source, None)
            if batch is None:
                return
            indices = batch if isinstance(batch, (list, tuple, np.ndarray)) else list(batch)
            if not len(indices):
                raise UsageError("the batch sampler returned an empty batch; omit such batches")
            share = share_of(len(indices), self.rank, self.parts, checksum_of(indices), self.microbatch)
            self.drawn.append(share)
            seed = mix_seed(self.streams.seed, self.epoch, number, self.stream) + share.loaded.start
            yield SeededIndices(list(indices[share.loaded]), seed)
            number += 1


class CheckedCollate:
    """A ``collate_fn`` that raises ``UsageError`` if its result for a sample depends on the other samples of a share.

    In the first batches of a process, the microbatches of ``size`` samples are collated again, each
    by itself: padding to the longest sample, or random numbers per batch, give other results.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], size: int) -> None:
        self.collate, self.size, self._checks = collate, size, 4

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate(samples)
        if self._checks and isinstance(samples, list) and len(samples) > self.size:
            self._checks -= 1
            for begin in range(0, len(samples), self.size):
                alone = self.collate(samples[begin : begin + self.size])
                within = cut(batch, begin, min(begin + self.size, len(samples)))
                if not all(map(_equal, leaves(alone), leaves(within))):
                    raise UsageError(
                        "the collate_fn of the DataLoader under parallel.reproducible = true: a microbatch by itself "
                        "is collated otherwise than within the share of a rank, whose size depends on the number of "
                        "ranks; allowed is what treats each sample by itself; pad to a fixed length, and draw random "
                        "numbers in __getitem__ or in compute(part)"
                    )
        return batch


def _equal(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.dtype is other.dtype
    return same and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


class ShareOfSamples:
    """A ``collate_fn`` that selects a rank's share of the samples of a batch and passes it to another one."""

    def __init__(self, collate: Callable[[list[Any]], Any], rank: int, parts: int, microbatch: int = 1) -> None:
        self.collate, self.rank, self.parts, self.microbatch = collate, rank, parts, microbatch
        self.drawn: deque[BatchShare] = deque()

    def __call__(self, samples: list[Any]) -> Any:
        share = share_of(len(samples), self.rank, self.parts, microbatch=self.microbatch)
        self.drawn.append(share)
        return self.collate(samples[share.loaded])


def split_loader(
    loader: DataLoader[Any], rank: int, parts: int, streams: RandomStreams, stream: int = 0, microbatch: int = 0
) -> DataLoader[Any]:
    """Return a copy of a DataLoader that gives each rank its share of every batch.

    If ``microbatch`` is given, shares are whole microbatches of this size, and ``collate_fn`` must
    treat samples alike whatever the size of the share is. With one part it is a copy that resumes by its indices alone.
    Raises ``UsageError`` for loaders whose batches cannot be divided.
    """
    if loader.batch_sampler is None:
        raise UsageError(
            "the DataLoader has batch_size=None: its batches cannot be divided over the ranks; give it a batch_size, "
            "or pass split=False to job.run if every rank loads samples of its own",
            everywhere=True,
        )
    split_copy = copy.copy(loader)
    inside = vars(split_copy)  # DataLoader refuses to set these attributes
    inside["_iterator"] = None
    inside["is_split"] = True  # for hpctrain's own loaders, which would otherwise split again
    collate = CheckedCollate(loader.collate_fn, microbatch) if microbatch else loader.collate_fn
    inside["in_order"] = True  # shares of one batch must arrive in the same step on all ranks
    if isinstance(loader.dataset, IterableDataset):
        if loader.num_workers and parts > 1:
            raise UsageError(
                f"the DataLoader of an IterableDataset has num_workers={loader.num_workers}: its samples cannot be "
                "divided over the ranks; use num_workers=0, or a dataset that shards itself by job.rank and job.size "
                "and split=False in job.run",
                everywhere=True,
            )
        inside["collate_fn"] = ShareOfSamples(collate, rank, parts, microbatch or 1)
    else:
        inside["collate_fn"] = collate
        inside["batch_sampler"] = SharedBatches(loader.batch_sampler, rank, parts, streams, stream, microbatch or 1)
    return split_copy


def shares_of(split_copy: DataLoader[Any]) -> deque[BatchShare]:
    """Return the shares that a split loader has drawn, oldest first."""
    drawing: Any = (
        split_copy.collate_fn if isinstance(split_copy.collate_fn, ShareOfSamples) else split_copy.batch_sampler
    )
    drawn: deque[BatchShare] = drawing.drawn
    return drawn


def splits_itself(loader: DataLoader[Any]) -> str | None:
    """Return the type of a part that already divides samples by rank (``DistributedSampler`` or similar), if any."""
    parts = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    parts += [loader.dataset, getattr(loader.dataset, "pipeline", None)]
    for part in parts:
        for rank, count in _RANK_NAMES:
            if isinstance(getattr(part, rank, None), int) and isinstance(getattr(part, count, None), int):
                return type(part).__name__
        if getattr(part, "_distributed", None) is not None and getattr(part, "info", None) is not None:
            return type(part).__name__  # a Hugging Face dataset after split_dataset_by_node
        if type(part).__module__.partition(".")[0] == "webdataset" and _splits_by_node(part):
            return type(part).__name__
    return None


def _splits_by_node(part: Any) -> bool:
    """Return whether a WebDataset pipeline divides its shards over the nodes."""
    stages = getattr(part, "pipeline", None) or []
    names = [getattr(getattr(stage, "f", stage), "__name__", type(stage).__name__) for stage in stages]
    return any("split_by_node" in name or "nodesplitter" in name for name in names)


def generators_of(loader: DataLoader[Any]) -> list[Generator]:
    """Return the generators that belong to a loader and its samplers, without duplicates.

    Those of samplers may be attributes of any name, and generators of NumPy and Python.
    """
    inner = getattr(loader.batch_sampler, "batches", loader.batch_sampler)
    samplers = [loader.sampler, inner, getattr(inner, "sampler", None)]
    named = [getattr(owner, "generator", None) for owner in (loader, *samplers)]
    others = [value for owner in samplers for value in getattr(owner, "__dict__", {}).values()]
    found = {id(one): own_generator(one) for one in (*named, *others)}
    return [one for one in found.values() if one is not None]


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader and of its parts that support it."""
    inner = getattr(loader, "batch_sampler", None)
    inner = getattr(inner, "batches", inner)
    parts = [loader, getattr(loader, "sampler", None), inner, getattr(inner, "sampler", None)]
    parts.append(getattr(loader, "dataset", None))
    for part in {id(one): one for one in parts if one is not None}.values():
        call = getattr(part, "set_epoch", None)
        if callable(call):
            call(epoch)


def checksum_of(indices: Any) -> int:
    try:
        return zlib.crc32(np.asarray(indices, np.int64).tobytes())
    except (TypeError, ValueError, OverflowError):
        return zlib.crc32(repr(list(indices)).encode())


def skip_over(source: Iterator[Any], count: int, what: str) -> None:
    """Take ``count`` items from an iterator; log the progress if that takes long."""
    began = logged = time.monotonic()
    for done in range(count):
        try:
            next(source)
        except StopIteration:
            return
        now = time.monotonic()
        if now - logged > _LOG_AFTER:
            logged = now
            logger.info("resuming: skipping %s of %s %s, %.0f s", f"{done + 1:,}", f"{count:,}", what, now - began)
