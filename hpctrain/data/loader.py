"""Loader that divides global batches over the ranks, in an order that is independent of their number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.data.batch import Batch, take
from hpctrain.data.dataset import Dataset
from hpctrain.data.order import SampleOrder
from hpctrain.errors import DataError, SettingsError


class Loader:
    """Iterator over a rank's shares of the global batches, endless or for a number of epochs.

    Without ``epochs`` the stream crosses the boundaries of epochs and every batch is full. With
    ``epochs`` each epoch is divided into its own batches; the remaining samples at its end are
    dropped, or with ``drop_last=False`` form a smaller batch whose shares may differ by one sample
    (see ``Batch.weight``).

    ``position`` counts samples of the whole run over all ranks; it is the only state.

    Note: batches are read when they are requested, without a thread. A window of a memory map takes
    microseconds, and on a full node a helper thread takes a core from the compute.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch: int,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        position: int = 0,
        microbatches: int = 1,
        epochs: int | None = None,
        drop_last: bool = True,
    ) -> None:
        """Check that ``batch`` samples can be divided evenly over ``size`` ranks x ``microbatches``."""
        check_batch(batch, size, microbatches)
        if not 0 <= rank < size:
            raise SettingsError(f"rank {rank} of {size}: ranks are numbered 0 to {size - 1}")
        if position < 0 or (epochs is not None and epochs < 1):
            raise SettingsError(f"position {position} and epochs {epochs}: allowed are 0 or more, and 1 or more")
        if epochs is not None and drop_last and len(dataset) < batch:
            raise DataError(f"{len(dataset)} samples do not fill a batch of {batch}: take a smaller one or more data")
        self.dataset, self.batch, self.rank, self.size = dataset, batch, rank, size
        self.microbatches, self.epochs, self.drop_last = microbatches, epochs, drop_last
        self.position = position
        self._order = SampleOrder(len(dataset), seed)

    @property
    def epoch(self) -> int:
        """Return the number of complete epochs before the position."""
        return self.position // len(self.dataset)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        """Return this rank's share of the next global batch and advance the position."""
        count = self._advance()
        indices = self._order.indices(self.position, count)
        shared = take(self.dataset, indices, self.rank, self.size)
        self.position += count
        return shared

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data: plain numbers, the same on every rank, for any batch size."""
        return {"position": self.position, "seed": self._order.seed, "samples": len(self.dataset)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position of a run. Raises ``DataError`` if the order or the data differ."""
        mine = self.state_dict()
        missing = sorted(set(mine) - set(state))
        if missing:
            raise DataError(f"the saved position in the data lacks {', '.join(missing)}")
        for key, what in (("seed", "order"), ("samples", "data")):
            if state[key] != mine[key]:
                raise DataError(
                    f"cannot resume with different {what}: the run had {key} = {state[key]}, this one has {mine[key]}"
                )
        if int(state["position"]) < 0:
            raise DataError(f"the saved position in the data is {state['position']}, expected 0 or more")
        self.position = int(state["position"])

    def _advance(self) -> int:
        """Skip dropped samples and return the size of the next global batch."""
        if self.epochs is None:
            return self.batch
        left = len(self.dataset) - self.position % len(self.dataset)
        if self.drop_last and left < self.batch:
            self.position += left
            left = len(self.dataset)
        if self.position >= self.epochs * len(self.dataset):
            raise StopIteration
        return min(self.batch, left)


def check_batch(batch: int, size: int, microbatches: int = 1) -> None:
    """Raise ``SettingsError`` unless all ranks get the same number of samples in each of their microbatches."""
    if batch < 1 or size < 1 or microbatches < 1:
        raise SettingsError(f"batch of {batch} for {size} ranks x {microbatches} microbatches: each must be 1 or more")
    unit = size * microbatches
    if batch % unit:
        below, above = batch // unit * unit, (batch // unit + 1) * unit
        parts = f"{size} ranks" + (f" x {microbatches} microbatches" if microbatches > 1 else "")
        nearest = f"{below} and {above}" if below else f"{above}"
        raise SettingsError(f"a batch of {batch} samples cannot be divided evenly over {parts}: nearest are {nearest}")
