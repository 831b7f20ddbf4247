"""Batches of a run: the kinds of loaders, the position in a loader, and how a run resumes at it.

A position is a pass over the loader (``epoch``, from 0) and the number of its batches that were
trained on. It is saved with the generator states from the beginning of that pass. On resume, these
states are set, the loader is started again, and the batches that were trained on are skipped. For a
``DataLoader`` only their indices are read. The order of the samples is therefore the same, bit for
bit, even if workers had prefetched other batches. A loader with a state of its own resumes from
that state instead. If evaluations within the pass draw from the same generators, the states after the
last one are saved, too, and set when the loader has been started again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from hpctrain.checkpoint import content
from hpctrain.comm.communicator import Communicator
from hpctrain.data.loader import Loader
from hpctrain.data.random_streams import RandomStreams
from hpctrain.data.split_loader import BatchShare, set_epoch, skip_over
from hpctrain.errors import CheckpointError

Rng = Mapping[str, Any]


@dataclass(frozen=True)
class Item:
    """Batch for the loop; ``share`` is its part of the global batch, if known."""

    batch: Any
    share: BatchShare | None = None


class Feed:
    """Batches of a loader that every rank reads by itself: a list, a generator, or a loader that splits by rank."""

    splits = False  # whether the batches of this loader are split over the ranks
    looks_ahead = True  # whether a batch is fetched before the previous iteration has ended

    def __init__(self, loader: Iterable[Any], streams: RandomStreams) -> None:
        self.loader, self.streams = loader, streams
        self.epoch = 0
        self.batches = 0  # batches of this pass that the loop has consumed
        self.total = 0  # batches of all passes
        self._source: Iterator[Any] | None = None
        self._at_begin: Rng | None = None  # the generator states at the beginning of this pass
        self._drawn: Rng | None = None  # the generator states after evaluations within this pass
        self._draws_again = False  # whether the loader has been started again since then
        self._legacy: tuple[Rng, Rng] | None = None  # from an older file, which does not record where passes begin
        # Makes a collective call; a run that survives the death of ranks repeats it then.
        self.collective: Callable[[Callable[[], Any]], Any] = lambda call: call()

    # Pass -------------------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Start the loader after the batches that the loop has already consumed."""
        set_epoch(self.loader, self.epoch)
        old, self._legacy = self._legacy, None
        if old is not None:
            content.restore_rng(old[0])
        self._sync_generators()
        self._record_generators()
        self._source = self._start(self.batches)
        if old is not None:
            content.restore_rng(old[1])
        self._draws_again = self._drawn is not None

    def fetch(self) -> Item | None:
        """Return the next batch; ``None`` at the end of the pass."""
        assert self._source is not None, "begin_pass comes first"
        try:
            with self._loading():
                return Item(next(self._source), self._share())
        except StopIteration:
            return None
        finally:
            if self._draws_again and self._drawn is not None:  # a loader may draw its order with the first batch
                content.restore_rng(self._drawn)
                self._draws_again = False

    def consumed(self) -> None:
        self.batches += 1
        self.total += 1

    def end_pass(self) -> None:
        self.epoch, self.batches = self.epoch + 1, 0
        self._source = self._at_begin = self._drawn = None

    def restart(self) -> None:
        """Start the loader again at the present position of the pass."""
        self.drop_iterator()
        self._rewind()
        self.begin_pass()

    def _rewind(self) -> None:
        """Set the generators as at the beginning of the pass, unless they are set so already."""
        if self._at_begin is not None:
            content.restore_rng(self._at_begin)

    def close(self) -> None:
        """End the use of the loader."""
        self.drop_iterator()

    def drop_iterator(self) -> None:
        """Release the loader's iterator: its workers end now; the garbage collector would wait 5 seconds for each."""
        self._source = None

    @property
    def follows_ranks(self) -> bool:
        """Whether the batches can be divided over another number of ranks."""
        return False

    def rejoin(self, data: Communicator) -> None:
        """Divide the batches over the data ranks that are left; the loader must then be started again."""

    @property
    def is_one_shot(self) -> bool:
        """Whether the loader is an iterator, which allows no second pass."""
        return isinstance(self.loader, Iterator)

    @property
    def is_endless(self) -> bool:
        """Whether the loader is known to be endless."""
        return isinstance(self.loader, (itertools.cycle, itertools.count, itertools.repeat))

    @property
    def length(self) -> int | None:
        """Number of batches per pass; None if the loader does not report it."""
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    @property
    def passes(self) -> int | None:
        """Number of passes that the loader itself requests."""
        count = getattr(self.loader, "epochs", None)
        return count if isinstance(count, int) else None

    def _start(self, skip: int) -> Iterator[Any]:
        source = iter(self.loader)
        skip_over(source, skip, "batches")
        return source

    def _loading(self) -> Any:
        return nullcontext()

    def _share(self) -> BatchShare | None:
        return None

    def _sync_generators(self) -> None:
        """Synchronize the generators of all ranks; not needed if every rank loads by itself."""

    def _record_generators(self) -> None:
        self._at_begin = content.capture_rng()

    # Position ---------------------------------------------------------------------------------------------------------

    @property
    def generators(self) -> Rng:
        """Generator states to save: those from the beginning of the current pass."""
        return self._at_begin if self._at_begin is not None else content.capture_rng()

    def position(self) -> dict[str, Any]:
        """Return the position of the run as plain values."""
        counts = {"epoch": self.epoch, "batches": self.batches, "total": self.total, "seed": self.streams.seed}
        return counts if self._drawn is None else {**counts, "drawn": content.text_of_rng(self._drawn)}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Continue at a position; the caller sets the generators of torch, NumPy and Python."""
        try:
            self.epoch, self.batches = int(position["epoch"]), int(position["batches"])
            self.total, self.streams.seed = int(position["total"]), int(position["seed"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's position in the data is incomplete: {error}") from error
        drawn = position.get("drawn")
        self._drawn = None if drawn is None else content.rng_of_text(drawn)
        self._source = self._at_begin = None

    def resume_old(self, batches: int, fresh: Rng, saved: Rng | None) -> None:
        """Continue at the batch count of an older file without positions."""
        self.epoch, self.batches, self.total = 0, batches, batches
        self._source = self._at_begin = None
        if batches and saved is not None:
            self._legacy = fresh, saved


class StatefulFeed(Feed):
    """Batches of a loader with ``state_dict`` and ``load_state_dict``, which resumes by itself."""

    loader: Any
    is_one_shot = True  # a second pass continues where the first ended

    def __init__(self, loader: Any, streams: RandomStreams) -> None:
        super().__init__(loader, streams)
        self.looks_ahead = not isinstance(loader, Loader)  # a Loader ends at the same batch on all ranks
        # The states before the last fetched batch; a Loader draws no numbers from the generators.
        self._before: tuple[Mapping[str, Any], Rng | None] | None = None
        self._fetched = 0  # fetched batches; total counts the consumed ones
        self._all_consumed = True  # whether the loop has consumed all of them

    @property
    def follows_ranks(self) -> bool:
        return isinstance(self.loader, Loader)

    def rejoin(self, data: Communicator) -> None:
        self.drop_iterator()
        self.loader.rank, self.loader.size = data.rank, data.size

    def fetch(self) -> Item | None:
        """Return the next batch; keep the state before it, to be saved until the loop consumes the batch."""
        generators = content.capture_rng() if self.looks_ahead else None
        self._before, self._all_consumed = (dict(self.loader.state_dict()), generators), False
        item = super().fetch()
        self._fetched += item is not None
        return item

    def consumed(self) -> None:
        """Count a batch that the loop has consumed; it is the last fetched one unless another was fetched since."""
        super().consumed()
        self._all_consumed = self._fetched == self.total

    @property
    def is_endless(self) -> bool:
        return isinstance(self.loader, Loader) and self.loader.epochs is None

    def _start(self, skip: int) -> Iterator[Any]:
        return iter(self.loader)

    def _record_generators(self) -> None:
        """Store no state: the loader keeps its own."""

    @property
    def generators(self) -> Rng:
        before = None if self._before is None or self._all_consumed else self._before[1]
        return content.capture_rng() if before is None else before

    def state_dict(self) -> Mapping[str, Any]:
        """Return the loader's state after the batches that the loop has consumed."""
        state: Mapping[str, Any] = (
            self.loader.state_dict() if self._before is None or self._all_consumed else self._before[0]
        )
        return state

    def load_state_dict(self, state: Any) -> None:
        self._before = None
        self.loader.load_state_dict(state)

    def _rewind(self) -> None:
        self.load_state_dict(self.state_dict())

    def begin_pass(self) -> None:
        """Start the loader at its current position."""
        self._fetched = self.total
        super().begin_pass()


class FeedPosition:
    """Position of a feed as an item of a checkpoint."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._saved: dict[str, Any] | None = None

    @property
    def has_moved(self) -> bool:
        """Whether the position differs from the last one saved or loaded."""
        return self._saved is not None and self._saved != self._feed.position()

    def state_dict(self) -> Mapping[str, Any]:
        self._saved = self._feed.position()
        return self._saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._feed.resume(state)
        self._saved = self._feed.position()
