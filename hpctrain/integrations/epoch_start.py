"""Generator states at the beginning of an epoch: a resumed run draws the same order of samples from them.

A sampler draws the order of an epoch when the loader is started. A run that resumes within the
epoch sets these states, starts the loader, skips batches, and sets the states of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hpctrain.checkpoint.content import capture_rng, restore_rng
from hpctrain.checkpoint.states import from_numpy, to_numpy

_GLOBAL, _OWN, _NOW = "epoch_", "epoch_generator_", "generator_"


class EpochStart:
    """Generator states of this rank at the beginning of the current epoch: the global ones, and those of a loader."""

    def __init__(self) -> None:
        self._at_start: dict[str, Any] = {}

    def record(self, loader: Any) -> None:
        """Record the states; call this before the loader is started."""
        rng = {_GLOBAL + name: value for name, value in capture_rng().items()}
        self._at_start = {**rng, **_states(_OWN, loader)}

    def state(self, loader: Any) -> Mapping[str, Any]:
        """Return the recorded states, and the present ones of the loader, for ``rank_state`` of a ``ProgramRun``."""
        return {**self._at_start, **_states(_NOW, loader)}

    def restore(self, saved: Mapping[str, Any], loader: Any, *, within: bool) -> None:
        """Set the generators to those of ``saved``, which ``state`` has returned, ``within`` an epoch or after it.

        Generators without a saved state do not change. After an epoch, the global ones are already those of the
        checkpoint.
        """
        for number, generator in enumerate(generators_of(loader)):
            state = saved.get(f"{_OWN if within else _NOW}{number}")
            if isinstance(state, np.ndarray):
                generator.set_state(from_numpy(state, "uint8"))
        if within:
            self._at_start = {name: value for name, value in saved.items() if name.startswith(_GLOBAL)}
            rng = {name.removeprefix(_GLOBAL): value for name, value in self._at_start.items()}
            restore_rng({name: value for name, value in rng.items() if not name.startswith("generator")})


def _states(prefix: str, loader: Any) -> dict[str, Any]:
    return {f"{prefix}{number}": to_numpy(one.get_state()).copy() for number, one in enumerate(generators_of(loader))}


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators of a loader, its sampler and its dataset; Accelerate synchronizes one of them."""
    sampler = getattr(loader, "sampler", None)
    batches = getattr(loader, "batch_sampler", None)
    inner = getattr(batches, "batch_sampler", batches)
    places = [
        (loader, "synchronized_generator"),
        (loader, "generator"),
        (sampler, "generator"),
        (getattr(inner, "sampler", None), "generator"),
        (getattr(loader, "dataset", None), "generator"),
    ]
    found = {id(one): one for place, name in places if isinstance(one := getattr(place, name, None), torch.Generator)}
    return list(found.values())
