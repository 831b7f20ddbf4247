"""Tell which of several rates are too low to be noise."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from statistics import median_high, median_low
from typing import TypeVar

LEAST = 0.25  # share of the usual rate that must be missing: with 10 % noise up and down, 0.18 are
DEVIATIONS = 3.0  # times the usual deviation that it must be
_NORMAL = 1.4826  # median absolute deviations in a standard deviation, of normal noise (Hampel 1974)

Key = TypeVar("Key", bound=Hashable)


def slow(rates: Mapping[Key, float], least: float = LEAST) -> dict[Key, float]:
    """Return those that are slow, each with its share of the usual rate; nobody, where there is nobody to compare with.

    Usual is the upper median, and its deviation the lower median of the distances to it: so of two the slower one can
    be named, and where half of all are slow, that half.
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
