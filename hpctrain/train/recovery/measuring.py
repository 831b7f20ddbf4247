"""Measurements between two steps, such as ``run.evaluate`` after an epoch, in a run that continues without dead ranks.

A measurement changes no weights, so it is repeated with the ranks that are left. Until it has ended, passes of the
model continue without communication, as in a step: an error within a pass could leave parts of a sharded
model in memory, or messages of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from hpctrain.data.own_generators import Generator
from hpctrain.data.random_streams import OuterState
from hpctrain.data.split_loader import generators_of
from hpctrain.errors import CommunicationError, RankFailedError
from hpctrain.train.recovery.sections import Recovery

T = TypeVar("T")


class _Generators:
    """States of the program's generators, and of those of the loader that is measured."""

    def __init__(self, own: Sequence[Generator]) -> None:
        self._outer, self._own = OuterState(), [one.get_state() for one in own]

    def restore(self, own: Sequence[Generator]) -> None:
        self._outer.restore()
        for generator, state in zip(own, self._own):
            generator.set_state(state)


def measured(recovery: Recovery, call: Callable[[], T], what: Any) -> T:
    """Return what a call returns that measures ``what``; repeat it with fewer ranks if others have died meanwhile.

    Collective. All ranks then draw the numbers that they would have drawn without the repetition, also from the
    generators of the loader. Raises ``CommunicationError`` instead of a repetition if ``what`` is an iterator.
    """
    own = generators_of(what) if isinstance(what, DataLoader) else []
    before, attempts = _Generators(own), 0

    def attempt() -> tuple[T, _Generators]:
        nonlocal attempts
        attempts += 1
        if attempts > 1:
            if isinstance(what, Iterator):
                raise CommunicationError("another rank has died while an iterator was measured; pass the loader itself")
            before.restore(own)
        return _without_errors(recovery, call), _Generators(own)

    recovery.renew_copies()
    result, after = recovery.section(attempt)
    after.restore(own)  # another rank may have completed the measurement
    return result


def _without_errors(recovery: Recovery, call: Callable[[], T]) -> T:
    """Return what a call returns; raise ``RankFailedError`` at its end if another rank has died."""
    for comm in recovery.comms:
        comm.tolerates = True
    try:
        result = call()
    except Exception as error:
        if not recovery.failed:
            raise
        raise RankFailedError("another rank has died") from error
    finally:
        for comm in recovery.comms:
            comm.tolerates = False
    if recovery.failed:
        raise RankFailedError("another rank has died")
    return result
