"""Detection of rates that are too low to be noise."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from statistics import median_high, median_low
from typing import TypeVar

LEAST = 0.25  # minimum shortfall from the usual rate; noise of 10 % up and down gives 0.18
DEVIATIONS = 3.0  # minimum shortfall in usual deviations
_NORMAL = 1.4826  # standard deviation of normal noise, in median absolute deviations (Hampel 1974)

Key = TypeVar("Key", bound=Hashable)


def slow(rates: Mapping[Key, float], least: float = LEAST) -> dict[Key, float]:
    """Return the slow entries with their share of the usual rate; no entries if there is no other to compare with.

    The usual rate is the upper median; its deviation is the lower median of the distances from it.
    Therefore the slower of two entries can be reported; if half of all entries are slow, that half
    is reported.
    """
    if len(rates) < 2:
        return {}
    usual = median_high(rates.values())
    spread = _NORMAL * median_low(abs(rate - usual) for rate in rates.values())
    return {
        key: rate / usual
        for key, rate in rates.items()
        if rate < usual * (1 - least) and usual - rate > DEVIATIONS * spread
    }
