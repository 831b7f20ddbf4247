"""Position in a ``DataLoader`` that another library iterates over: batches of the pass, and how to return to them.

The class of the loader is replaced by a subclass, so that the loader remains the object that the
library has made: its sampler, workers and attributes do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hpctrain.checkpoint.content import capture_rng, restore_rng
from hpctrain.checkpoint.states import to_numpy
from hpctrain.data.split_loader import generators_of, skip_over

GENERATOR = "generator"  # name of the states of the loader's own generators, with their number

Rng = dict[str, Any]
Start = Callable[[], Iterator[Any]]


class LoaderPosition:
    """Position of a ``DataLoader``: the batches fetched in this pass, and how the pass began.

    ``before`` contains the generator states from which the order of the samples in this pass
    follows. With workers, they are those before the iterator was made, because it reads indices
    ahead. Otherwise they are those before the first batch.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.batches = 0
        self.before: Rng | None = None
        self._skip: int | None = None  # batches to skip in the next pass, which begins at the states ``before``

    def state_dict(self) -> dict[str, Any]:
        """Return the position; the generator states are in ``before``."""
        return {"batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin after the batches of a saved one; set ``before`` to its states, too."""
        self._skip = int(state["batches"])

    def iterate(self, start: Start) -> Iterator[Any]:
        """Return an iterator over a pass, or over the rest of one; ``start`` returns that of the loader."""
        skip, self._skip = self._skip, None
        if skip is None:
            self.batches, self.before = 0, None
            if self._loader.num_workers:
                self.before = generator_states(self._loader)
            return self._counted(start())
        self.batches = skip
        return self._resumed(start, skip)

    def _resumed(self, start: Start, skip: int) -> Iterator[Any]:
        """Yield the rest of a pass.

        The loader is started with the first batch, because Lightning sets the epoch of a sampler
        only after it has called ``iter``.
        """
        now = capture_rng()
        source = self._rest(start, skip)
        restore_rng(now)
        yield from self._counted(source)

    def _rest(self, start: Start, skip: int) -> Iterator[Any]:
        """Return an iterator over the rest of a pass: without reading the batches before, if they have indices."""
        loader, inside = self._loader, vars(self._loader)
        set_generator_states(loader, self.before or {})
        if isinstance(loader.dataset, IterableDataset):
            source = start()
            skip_over(source, skip, "batches of samples")
            return source
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        rest = _Rest(inside[name], skip)
        inside[name], own = rest, inside[name]
        try:
            source = start()
        finally:
            inside[name] = own
        if not loader.num_workers:
            set_generator_states(loader, self.before or {})
        rest.start()
        return source

    def _counted(self, source: Iterator[Any]) -> Iterator[Any]:
        if self.before is None:
            self.before = generator_states(self._loader)
        for batch in source:
            self.batches += 1
            yield batch


class _Rest:
    """Indices of a sampler without the first ones; they are drawn at ``start``, or with the first index."""

    def __init__(self, sampler: Iterable[Any], skip: int) -> None:
        self._sampler, self._skip = sampler, skip
        self._source: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __iter__(self) -> _Rest:
        return self

    def __next__(self) -> Any:
        return next(self.start())

    def start(self) -> Iterator[Any]:
        if self._source is None:
            self._source = iter(self._sampler)
            skip_over(self._source, self._skip, "batches")
        return self._source


_POSITION = "hpctrain_position"  # attribute of a loader
_CLASSES: dict[type, type] = {}


def count_batches(loader: DataLoader[Any]) -> LoaderPosition:
    """Let a loader count its batches, and resume in the middle of a pass; return its position."""
    own = type(loader)
    if own not in _CLASSES.values():
        _CLASSES.setdefault(own, _counting(own))
        loader.__class__ = _CLASSES[own]
        vars(loader)[_POSITION] = LoaderPosition(loader)
    position: LoaderPosition = vars(loader)[_POSITION]
    return position


def position_of(loader: Any) -> LoaderPosition | None:
    """Return the position of a loader that counts its batches; None for any other object."""
    return getattr(loader, _POSITION, None)


def _counting(own: Any) -> type:
    """Return a subclass of a class of loaders; another base would give it another layout in memory."""

    class Counting(own):  # type: ignore[misc]
        """Loader that has a position."""

        def __iter__(self) -> Iterator[Any]:
            return position_of(self).iterate(super().__iter__)  # type: ignore[union-attr]

        def state_dict(self) -> dict[str, Any]:
            """Return the position, for the library's own checkpoints, too."""
            return position_of(self).state_dict()  # type: ignore[union-attr]

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            """Set the position at which the next pass begins."""
            position_of(self).load_state_dict(state)  # type: ignore[union-attr]

    Counting.__name__, Counting.__qualname__ = own.__name__, own.__qualname__
    return Counting


def generator_states(loader: Any) -> Rng:
    """Return the states of this rank's global generators and of those of a loader."""
    own = {f"{GENERATOR}{number}": to_numpy(one.get_state()).copy() for number, one in enumerate(generators_of(loader))}
    return {**capture_rng(), **own}


def set_generator_states(loader: Any, states: Mapping[str, Any]) -> None:
    """Set the generators to states of ``generator_states``; a generator without a state is not changed."""
    import torch

    restore_rng(states)
    for number, one in enumerate(generators_of(loader)):
        if f"{GENERATOR}{number}" in states:
            one.set_state(torch.from_numpy(states[f"{GENERATOR}{number}"].copy()))
