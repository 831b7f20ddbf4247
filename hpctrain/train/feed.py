"""The batches of a run: what kinds of loaders there are, where a run stands in them, and how it resumes there.

A position is a pass over the loader (``epoch``, from 0) and the batches of it that were trained on. It is written with
the generators' states from the beginning of that pass: to resume, they are set, the loader is started again, and what
was trained on is read over; of a ``DataLoader`` only the indices. So the order of the samples is the same, bit for bit,
also where workers had prefetched other batches. A loader that has a state of its own is asked for that instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from hpctrain.checkpoint import rng
from hpctrain.data.loader import Loader
from hpctrain.data.random_streams import RandomStreams
from hpctrain.data.split_loader import Share, set_epoch, skip_over
from hpctrain.errors import CheckpointError

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

    def close(self) -> None:
        """Let go of what loads: workers end at once, while the garbage collector would wait five seconds for each."""
        self._source = None

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
