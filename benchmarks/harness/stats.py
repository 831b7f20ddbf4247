"""Statistics of repeated timings: medians and spread, the slowest rank, ratios and differences of candidates."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

Seconds = Mapping[str, Sequence[float]]  # of each repeat, by candidate
Times = Mapping[str, Mapping[str, float]]  # summaries, by candidate

LOW, HIGH = ("quartile_1", "min"), ("quartile_3", "p95", "max")  # ends of the spread, the first that a result has


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, mean, quartiles and range of repeated timings, in seconds."""
    ordered = sorted(seconds)
    low, _, high = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else ordered * 3
    return {
        "median": statistics.median(ordered),
        "mean": statistics.fmean(ordered),
        "quartile_1": low,
        "quartile_3": high,
        "min": ordered[0],
        "max": ordered[-1],
        "repeats": len(ordered),
    }


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return the time of the slowest rank, per repeat."""
    return [max(times) for times in zip(*per_rank)]


def summaries(per_rank: Sequence[Seconds]) -> dict[str, dict[str, float]]:
    """Return the summary of each candidate on the slowest rank; candidates without a repeat are left out."""
    times = {name: slowest([rank[name] for rank in per_rank]) for name in per_rank[0]}
    return {name: summary(each) for name, each in times.items() if each}


def ratio(times: Times, name: str, against: str) -> float | None:
    """Return the median of a candidate relative to another; None if one of them is missing."""
    return times[name]["median"] / times[against]["median"] if name in times and against in times else None


def differences(losses: Sequence[Seconds], against: str, without: Collection[str] = ()) -> dict[str, float]:
    """Return the largest relative difference of each candidate's losses from another's, over all ranks and steps."""
    if not losses[0].get(against):
        return {}
    return {
        name: max(abs(a - b) / abs(b) for rank in losses for a, b in zip(rank[name], rank[against]))
        for name in losses[0]
        if name != against and name not in without and losses[0][name]
    }


def spreads(content: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield group, candidate, size, median, low, high, repeats, min and mean of every summary in a result.

    Values that a summary lacks are empty.
    """
    if isinstance(content, Mapping):
        if isinstance(content.get("median"), (int, float)):
            low, high = (next((content[key] for key in keys if key in content), "") for keys in (LOW, HIGH))
            candidate, size = content.get("candidate", path[-1]), content.get("size", "")
            more = (content.get(key, "") for key in ("repeats", "min", "mean"))
            yield "/".join(path[:-1]), candidate, size, content["median"], low, high, *more
            return
        for key, value in content.items():
            yield from spreads(value, (*path, key))
    elif isinstance(content, list):
        for item in content:
            if isinstance(item, Mapping):
                words = (
                    [item["candidate"]]
                    if "candidate" in item
                    else [each for each in item.values() if type(each) in (str, int)]
                )
                yield from spreads(item, (*path, " ".join(map(str, words))))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans, each a begin and an end."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
