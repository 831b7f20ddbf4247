"""The batches of a run: what kinds of loaders there are, where a run stands in them, and how it resumes there.

A position is a pass over the loader (``epoch``, from 0) and the batches of it that were trained on. It is written with
the generators' states from the beginning of that pass: to resume, they are set, the loader is started again, and what
was trained on is read over; of a ``DataLoader`` only the indices. So the order of the samples is the same, bit for bit,
also where workers had prefetched other batches. A loader that has a state of its own is asked for that instead.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from hpctrain.checkpoint import rng
from hpctrain.collectives.communicator import Communicator
from hpctrain.data.loader import Loader
from hpctrain.data.random_streams import OuterState, RandomStreams
from hpctrain.data.split_loader import (
    Share,
    generators_of,
    set_epoch,
    shares_of,
    skip_over,
    split_loader,
    splits_itself,
)
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.log import logger
from hpctrain.train.state import Stateful

Rng = Mapping[str, Any]


@dataclass(frozen=True)
class Item:
    """A batch as the loop gets it; ``share`` says how it relates to the batch of all ranks, where that is known."""

    batch: Any
    share: Share | None = None


class Feed:
    """Batches of a loader that every rank reads for itself: lists, generators, and what deals out samples by rank."""

    splits = False  # whether the batches of this loader are shared out to the ranks
    looks_ahead = True  # whether a batch is fetched before the iteration before it has ended

    def __init__(self, loader: Iterable[Any], streams: RandomStreams) -> None:
        self.loader, self.streams = loader, streams
        self.epoch = 0
        self.batches = 0  # of this pass, that the loop has had
        self.total = 0  # of all passes
        self._source: Iterator[Any] | None = None
        self._at_begin: Rng | None = None  # the generators' states when this pass began
        self._old: tuple[Rng, Rng] | None = None  # of a file that does not know where passes begin

    # A pass -----------------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Start the loader, behind the batches that the loop has had already."""
        set_epoch(self.loader, self.epoch)
        old, self._old = self._old, None
        if old is not None:
            rng.restore_rng(old[0])
        self._agree()
        self._remember()
        self._source = self._start(self.batches)
        if old is not None:
            rng.restore_rng(old[1])

    def fetch(self) -> Item | None:
        """Return the next batch; ``None`` at the end of the pass."""
        assert self._source is not None, "begin_pass comes first"
        try:
            with self._loading():
                return Item(next(self._source), self._share())
        except StopIteration:
            return None

    def took(self) -> None:
        """Count a batch that the loop has had."""
        self.batches += 1
        self.total += 1

    def end_pass(self) -> None:
        """Go on to the next pass."""
        self.epoch, self.batches = self.epoch + 1, 0
        self._source = self._at_begin = None

    @property
    def is_one_shot(self) -> bool:
        """Whether there is no second pass over the loader: it is an iterator."""
        return isinstance(self.loader, Iterator)

    @property
    def is_endless(self) -> bool:
        """Whether the loader is known to have no end."""
        return isinstance(self.loader, (itertools.cycle, itertools.count, itertools.repeat))

    @property
    def length(self) -> int | None:
        """The batches of a pass, where the loader tells."""
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    @property
    def passes(self) -> int | None:
        """How many passes the loader itself asks for."""
        count = getattr(self.loader, "epochs", None)
        return count if isinstance(count, int) else None

    def _start(self, skip: int) -> Iterator[Any]:
        source = iter(self.loader)
        skip_over(source, skip, "batches")
        return source

    def _loading(self) -> Any:
        return nullcontext()

    def _share(self) -> Share | None:
        return None

    def _agree(self) -> None:
        """Let all ranks draw alike from here on; ranks that load for themselves may draw what they like."""

    def _remember(self) -> None:
        self._at_begin = rng.capture_rng()

    # Position ---------------------------------------------------------------------------------------------------------

    @property
    def generators(self) -> Rng:
        """The states of the generators to be saved: those of the beginning of a pass that is under way."""
        return self._at_begin if self._at_begin is not None else rng.capture_rng()

    def position(self) -> dict[str, Any]:
        """Return where the run stands, in plain values."""
        return {"epoch": self.epoch, "batches": self.batches, "total": self.total, "seed": self.streams.seed}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on where a run stood; torch's, NumPy's and Python's generators are set by the caller."""
        try:
            self.epoch, self.batches = int(position["epoch"]), int(position["batches"])
            self.total, self.streams.seed = int(position["total"]), int(position["seed"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's position in the data is incomplete: {error}") from error
        self._source = self._at_begin = None

    def resume_old(self, batches: int, fresh: Rng, saved: Rng | None) -> None:
        """Go on by the count of batches of a file from before positions were kept."""
        self.epoch, self.batches, self.total = 0, batches, batches
        self._source = self._at_begin = None
        if batches and saved is not None:
            self._old = fresh, saved


class StatefulFeed(Feed):
    """Batches of a loader with ``state_dict`` and ``load_state_dict``, which resumes by itself."""

    loader: Any
    is_one_shot = True  # a second pass goes on where the first has ended

    def __init__(self, loader: Any, streams: RandomStreams) -> None:
        super().__init__(loader, streams)
        self.looks_ahead = not isinstance(loader, Loader)  # which ends alike on all ranks
        self._before: tuple[Mapping[str, Any], Rng] | None = None  # the states before the batch that was fetched last
        self._fetched = 0  # batches, as total counts those that the loop has had
        self._had = True  # whether the loop has had all of them

    def fetch(self) -> Item | None:
        """Return the next batch, and keep what is to be saved as long as the loop has not come to it."""
        if self.looks_ahead:
            self._before, self._had = (dict(self.loader.state_dict()), rng.capture_rng()), False
        item = super().fetch()
        self._fetched += item is not None
        return item

    def took(self) -> None:
        """Count a batch that the loop has had; unless another one was fetched meanwhile, it is the last one."""
        super().took()
        self._had = self._fetched == self.total

    @property
    def is_endless(self) -> bool:
        """Whether the loader is known to have no end."""
        return isinstance(self.loader, Loader) and self.loader.epochs is None

    def _start(self, skip: int) -> Iterator[Any]:
        return iter(self.loader)

    def _remember(self) -> None:
        """Keep nothing: the loader does."""

    @property
    def generators(self) -> Rng:
        """The states of the generators to be saved."""
        return rng.capture_rng() if self._before is None or self._had else self._before[1]

    def state_dict(self) -> Mapping[str, Any]:
        """Return the loader's state behind the batches that the loop has had."""
        state: Mapping[str, Any] = (
            self.loader.state_dict() if self._before is None or self._had else self._before[0]
        )
        return state

    def load_state_dict(self, state: Any) -> None:
        """Set the loader to a saved state."""
        self._before = None
        self.loader.load_state_dict(state)

    def begin_pass(self) -> None:
        """Start the loader where it is."""
        self._fetched = self.total
        super().begin_pass()


class LoaderFeed(Feed):
    """Batches of a ``DataLoader``, shared out to the data ranks, or of one that deals out samples by rank itself."""

    loader: DataLoader[Any]

    def __init__(
        self, loader: DataLoader[Any], streams: RandomStreams, comm: Communicator, data: Communicator, *, splits: bool
    ) -> None:
        super().__init__(loader, streams)
        self.splits, self._comm, self._parts = splits, comm, data.size
        rank, parts, place = (data.rank, data.size, 0) if splits else (0, 1, data.rank)
        self._twin = split_loader(loader, rank, parts, streams, place)
        self._shares: deque[Share] = shares_of(self._twin)
        self._generators = generators_of(loader)
        self._generators_at_begin: list[Tensor] = []
        self._reads_samples = isinstance(loader.dataset, IterableDataset)
        self._started = False

    @property
    def length(self) -> int | None:
        """The batches of a pass, where the loader tells."""
        return None if self._reads_samples else super().length

    def position(self) -> dict[str, Any]:
        """Return where the run stands, in plain values."""
        now = [one.get_state() for one in self._generators] if self._at_begin is None else self._generators_at_begin
        states = [state.numpy().tobytes().hex() for state in now]
        mine = {"parts": self._parts, "batch": self.loader.batch_size or 0, "generators": states}
        return {**super().position(), **mine}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on where a run stood; on another number of ranks, behind the same samples."""
        super().resume(position)
        for generator, state in zip(self._generators, position.get("generators", [])):
            generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
        parts, batch = int(position.get("parts", self._parts)), int(position.get("batch", 0))
        mine = self.loader.batch_size or 0
        before, now = (batch, mine) if self.splits else (parts * batch, self._parts * mine)
        if not before or not now or before == now:
            return
        samples = self.batches * before
        self.batches = samples // now
        if samples % now:
            logger.warning(
                "resuming with %d samples per step instead of %d: %d samples are trained on again",
                now,
                before,
                samples % now,
            )

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
        """Start the loader as in a run without an interruption: workers that persist have got their seed before."""
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

    def _share(self) -> Share | None:
        share = self._shares.popleft() if self._shares else None
        return share if self.splits else None

    def _agree(self) -> None:
        if not self.splits or self._comm.size == 1:
            return
        mine = OuterState.capture(), [one.get_state() for one in self._generators]
        outer, states = self._comm.broadcast_object(mine)
        if self._comm.rank:
            outer.restore()
            for generator, state in zip(self._generators, states):
                generator.set_state(state)

    def _remember(self) -> None:
        super()._remember()
        self._generators_at_begin = [one.get_state() for one in self._generators]


def feed_for(
    loader: Iterable[Any],
    streams: RandomStreams,
    comm: Communicator,
    data: Communicator,
    split: bool | None,
    *,
    tells: bool = True,
) -> Feed:
    """Return the batches of a loader; ``split=False`` lets every rank read all of it.

    Raises ``UsageError`` for what is no loader, and for ``DataLoader``s that cannot be shared out.
    """
    if isinstance(loader, DataLoader):
        itself = splits_itself(loader)
        splits = split is not False and itself is None
        if tells and splits and data.size > 1 and comm.rank == 0:
            _tell(loader, data.size)
        if not splits and (loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset)):
            return Feed(loader, streams)
        return LoaderFeed(loader, streams, comm, data, splits=splits)
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


def _tell(loader: DataLoader[Any], parts: int) -> None:
    if isinstance(loader.dataset, IterableDataset):
        logger.info("every one of %d ranks reads all samples of the IterableDataset and keeps its share", parts)
    elif loader.batch_size is None:
        logger.info("the batches of the batch sampler are split over %d ranks", parts)
    else:
        logger.info("the DataLoader's batch of %d samples is split over %d ranks", loader.batch_size, parts)


class FeedPart:
    """The position of a feed as a part of a checkpoint."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._saved: dict[str, Any] | None = None

    @property
    def has_moved(self) -> bool:
        """Whether the position is another one than was saved or loaded last."""
        return self._saved is not None and self._saved != self._feed.position()

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position."""
        self._saved = self._feed.position()
        return self._saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        self._feed.resume(state)
        self._saved = self._feed.position()
