"""Batches of a run from a ``DataLoader``, the selection among the kinds of feeds, and example inputs of a model."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hpctrain.checkpoint import content
from hpctrain.checkpoint.states import Stateful
from hpctrain.comm.communicator import Communicator
from hpctrain.data.own_generators import own_generator
from hpctrain.data.random_streams import OuterState, RandomStreams
from hpctrain.data.split_loader import (
    BatchShare,
    cut,
    generators_of,
    samples_in,
    shares_of,
    skip_over,
    split_loader,
    splits_itself,
)
from hpctrain.errors import UsageError
from hpctrain.log import logger
from hpctrain.parallel.config import ParallelSettings, microbatches_for, shape_of
from hpctrain.train.feed import Feed, StatefulFeed


class LoaderFeed(Feed):
    """Batches of a ``DataLoader``, which is split over the data ranks unless it splits by rank itself."""

    loader: DataLoader[Any]

    def __init__(
        self,
        loader: DataLoader[Any],
        streams: RandomStreams,
        comm: Communicator,
        data: Communicator,
        *,
        splits: bool,
        microbatch: int = 0,
    ) -> None:
        super().__init__(loader, streams)
        self.splits, self._comm, self._microbatch = splits, comm, microbatch
        self._divide(data)
        self._generators = generators_of(loader)
        self._generators_at_begin: list[Tensor] = []
        self._reads_samples = isinstance(loader.dataset, IterableDataset)
        self._started = False
        if splits and _draws_at_once(loader):
            streams.drawn = self._note_draws

    def _divide(self, data: Communicator) -> None:
        self._parts = data.size
        rank, parts, position = (data.rank, data.size, 0) if self.splits else (0, 1, data.rank)
        self._twin = split_loader(self.loader, rank, parts, self.streams, position, self._microbatch)
        self._shares: deque[BatchShare] = shares_of(self._twin)

    @property
    def follows_ranks(self) -> bool:
        return self.splits

    def rejoin(self, data: Communicator) -> None:
        self.drop_iterator()
        self._divide(data)

    @property
    def length(self) -> int | None:
        return None if self._reads_samples else super().length

    def position(self) -> dict[str, Any]:
        now = [one.get_state() for one in self._generators] if self._at_begin is None else self._generators_at_begin
        states = [state.numpy().tobytes().hex() for state in now]
        position = {"parts": self._parts, "batch": self.loader.batch_size or 0, "generators": states}
        position["samples"] = self._samples()
        return {**super().position(), **position}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Continue at a position; on another number of ranks, after the same samples."""
        super().resume(position)
        for generator, state in zip(self._generators, position.get("generators", [])):
            generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
        was, samples = int(position.get("samples", 0)), self._samples()
        if self.batches and was and samples and was != samples and self._comm.rank == 0:
            logger.warning(
                "the loader has %d samples and had %d when the checkpoint was written in the middle of epoch %d: the "
                "rest of this epoch has a different order, in which samples repeat or are missing",
                samples,
                was,
                self.epoch,
            )
        parts, batch = int(position.get("parts", self._parts)), int(position.get("batch", 0))
        own = self.loader.batch_size or 0
        before, now = (batch, own) if self.splits else (parts * batch, self._parts * own)
        if not before or not now or before == now:
            return
        samples = self.batches * before
        self.batches = samples // now
        if samples % now and self._comm.rank == 0:
            logger.warning(
                "resuming with %d samples per step instead of %d: %d samples are trained on again",
                now,
                before,
                samples % now,
            )

    def drop_iterator(self) -> None:
        """End the workers, including persistent ones."""
        super().drop_iterator()
        vars(self._twin)["_iterator"] = None
        self._shares.clear()
        self._started = False

    def _rewind(self) -> None:
        super()._rewind()
        if self._at_begin is not None:
            for generator, state in zip(self._generators, self._generators_at_begin):
                generator.set_state(state)

    def _samples(self) -> int:
        """Return the number of samples per pass over all ranks, 0 if unknown."""
        try:
            return 0 if self._reads_samples else len(self.loader.dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return 0

    def _start(self, skip: int) -> Iterator[Any]:
        sampler: Any = self._twin.batch_sampler
        if not self._reads_samples:
            sampler.epoch, sampler.skip = self.epoch, skip
        source = self._iterator()
        if self._reads_samples and skip:
            skip_over(source, skip, "batches of samples")
            self._shares.clear()
        return source

    def _iterator(self) -> Iterator[Any]:
        """Start the loader as in an uninterrupted run: persistent workers got their seed in an earlier pass."""
        inside, first = vars(self._twin), not self._started
        self._started = True
        if not (self._twin.persistent_workers and first and self.epoch):
            return iter(self._twin)
        own = inside["generator"]
        inside["generator"] = torch.Generator()
        try:
            return iter(self._twin)
        finally:
            inside["generator"] = own

    def _loading(self) -> Any:
        here = not self._reads_samples and not self.loader.num_workers
        return self.streams.loading() if here else nullcontext()

    def _share(self) -> BatchShare | None:
        share = self._shares.popleft() if self._shares else None
        return share if self.splits else None

    def _sync_generators(self) -> None:
        if not self.splits or self._comm.size == 1:
            return
        own = OuterState(), [one.get_state() for one in self._generators]
        outer, states = self.collective(lambda: self._comm.broadcast_object(own))
        if self._comm.rank:
            outer.restore()
            for generator, state in zip(self._generators, states):
                generator.set_state(state)

    def _note_draws(self) -> None:
        self._drawn = content.capture_rng()

    def _record_generators(self) -> None:
        super()._record_generators()
        self._generators_at_begin = [one.get_state() for one in self._generators]


def _draws_at_once(loader: DataLoader[Any]) -> bool:
    """Return whether a loader draws from the program's generators only when a pass begins, so others may draw later.

    A sampler with a generator of its own is taken to draw from that alone.
    """
    sampler = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler:
        return _has_generator(loader.batch_sampler)
    known = type(sampler) in (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
    return _has_generator(sampler) or known and not (isinstance(sampler, RandomSampler) and sampler.replacement)


def _has_generator(sampler: Any) -> bool:
    return any(own_generator(value) is not None for value in getattr(sampler, "__dict__", {}).values())


def feed_for(
    loader: Iterable[Any],
    streams: RandomStreams,
    comm: Communicator,
    data: Communicator,
    split: bool | None,
    *,
    logs: bool = True,
    microbatch: int = 0,
) -> Feed:
    """Return the feed for a loader; with ``split=False``, every rank reads all batches.

    A DataLoader is split into whole microbatches if their size is given.

    Raises ``UsageError`` for an object that is not a loader, and for a ``DataLoader`` that cannot
    be split.
    """
    if isinstance(loader, DataLoader):
        itself = splits_itself(loader)
        splits = split is not False and itself is None
        if logs and splits and data.size > 1 and comm.rank == 0:
            _log_split(loader, data.size)
        if not splits and (loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset)):
            return Feed(loader, streams)
        return LoaderFeed(loader, streams, comm, data, splits=splits, microbatch=microbatch)
    if split is True:
        raise UsageError(
            f"split=True with a loader of type {type(loader).__name__}: only a torch DataLoader can be split; pass "
            "that, or job.loader(dataset, batch=...)",
            everywhere=True,
        )
    if isinstance(loader, Stateful):
        return StatefulFeed(loader, streams)
    if not hasattr(loader, "__iter__"):
        raise UsageError(
            f"the loader is a {type(loader).__name__}, which cannot be iterated over; pass a DataLoader, a list of "
            "batches or a generator",
            everywhere=True,
        )
    return Feed(loader, streams)


def _log_split(loader: DataLoader[Any], parts: int) -> None:
    if isinstance(loader.dataset, IterableDataset):
        logger.info("every one of %d ranks reads all samples of the IterableDataset and keeps its share", parts)
    elif loader.batch_size is None:
        logger.info("the samples of each batch are split over %d ranks", parts)
    else:
        logger.info("the DataLoader's batch of %d samples is split over %d ranks", loader.batch_size, parts)


# Example inputs of a model from the first batch of a ``DataLoader``, without changing the state of the loader ---------

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def example_inputs(example: Any, model: nn.Module, settings: ParallelSettings, size: int) -> Any:
    """Return the model inputs given by ``example``: itself, or a microbatch of a DataLoader's first batch.

    If the batch is a dict, its entries that ``forward`` has as parameters are used. If it is a
    tuple or list, its first items are used, as many as ``forward`` has positional parameters. No
    worker is started, and the generators are restored.
    """
    if not isinstance(example, DataLoader):
        if isinstance(example, (Tensor, tuple, list, Mapping)) or example is None:
            return example
        raise _refused(f"a {type(example).__name__}")
    if isinstance(example, IterableDataset) or isinstance(example.dataset, IterableDataset):
        raise _refused("a DataLoader of an IterableDataset, whose first samples would be lost")
    if settings.pipe == 1:
        return None  # nothing is partitioned
    batch = _first_batch(example)
    samples = samples_in(batch)
    share = max(samples // shape_of(settings, size).data, 1)
    count = settings.microbatches if settings.microbatches and share % settings.microbatches == 0 else 0
    return inputs_of_batch(cut(batch, 0, share // (count or microbatches_for(settings, share))), model)


def inputs_of_batch(batch: Any, model: nn.Module) -> Any:
    """Return the part of a batch that the model's ``forward`` takes, by its parameters."""
    parameters = inspect.signature(model.forward).parameters.values()
    if isinstance(batch, Mapping):
        every = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        names = {each.name for each in parameters}
        found = {name: value for name, value in batch.items() if every or name in names}
        if not found:
            raise UsageError(
                f"job.wrap(model, example=loader): {type(model).__name__}.forward takes none of the names of a batch, "
                f"{', '.join(map(str, batch))}; pass example= what the model is called with",
                everywhere=True,
            )
        return found
    if isinstance(batch, (tuple, list)):
        return tuple(batch[: max(sum(each.kind in _BY_POSITION for each in parameters), 1)])
    return batch


def _first_batch(loader: DataLoader[Any]) -> Any:
    """Return the first batch, loaded in this process, and restore all generators."""
    outer, own = OuterState(), generators_of(loader)
    states = [generator.get_state() for generator in own]
    try:
        if loader.batch_sampler is None:
            index = next(iter(loader.sampler), None)
            return None if index is None else loader.collate_fn(loader.dataset[index])
        indices = next(iter(loader.batch_sampler), None)
        if indices is None:
            raise UsageError("job.wrap(model, example=loader): the loader has no batches", everywhere=True)
        dataset: Any = loader.dataset
        several = getattr(dataset, "__getitems__", None)
        samples = several(list(indices)) if several else [dataset[index] for index in indices]
        return loader.collate_fn(samples)
    finally:
        outer.restore()
        for generator, state in zip(own, states):
            generator.set_state(state)


def _refused(what: str) -> UsageError:
    return UsageError(
        f"job.wrap(model, example=...) is {what}; allowed are what the model is called with (a tensor, a tuple of "
        "positional arguments, a dict of keyword arguments) and a DataLoader whose dataset has __getitem__; pass a "
        "microbatch of inputs",
        everywhere=True,
    )
