"""Division of a sequence of layers into stages; imports no torch, so that planning works without it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from hpctrain.errors import UsageError


def partition(costs: Sequence[float], parts: int) -> list[range]:
    """Cut a sequence into contiguous parts of at least one layer each, and minimise the largest sum of costs.

    Among the optimal partitions, choose the one with the most equal parts (smallest sum of
    squares). Among those, choose the one with the latest cuts, so that layers of cost zero stay
    with the layers before them. The result is exact, by dynamic programming in ``parts *
    len(costs)**2`` steps. Raises ``UsageError`` if there are more parts than layers.
    """
    check_parts(len(costs), parts)
    if any(not 0 <= cost < float("inf") for cost in costs):
        raise UsageError(f"layers that cost {list(costs)}: costs must be finite and not negative", everywhere=True)
    cumulative = [0.0, *accumulate(costs)]
    limit = _smallest_largest(cumulative, parts)
    count = len(costs)
    # squares[end]: smallest sum of squares for cutting the layers before `end` into the parts so far
    squares = [0.0] + [float("inf")] * count
    starts: list[list[int]] = []  # index at which the last of those parts begins
    for _ in range(parts):
        best, start_of = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            for start in range(end - 1, -1, -1):
                size = cumulative[end] - cumulative[start]
                if size > limit:
                    break
                if squares[start] + size**2 < best[end]:
                    best[end], start_of[end] = squares[start] + size**2, start
        squares = best
        starts.append(start_of)
    cuts = [count]
    for start_of in reversed(starts):
        cuts.append(start_of[cuts[-1]])
    return [range(start, end) for start, end in pairwise(reversed(cuts))]


def _smallest_largest(cumulative: Sequence[float], parts: int) -> float:
    """Return the smallest possible cost of the most expensive part; ``cumulative`` are cumulative costs."""
    count = len(cumulative) - 1
    largest = [0.0] + [float("inf")] * count  # [end]: for the layers before `end`, in the parts so far
    for _ in range(parts):
        best = [float("inf")] * (count + 1)
        for end in range(1, count + 1):
            for start in range(end - 1, -1, -1):
                size = cumulative[end] - cumulative[start]
                if size >= best[end]:
                    break
                best[end] = min(best[end], max(largest[start], size))
        largest = best
    return largest[count]


def explicit_partition(names: Sequence[str], parts: int, chosen: Sequence[int | str]) -> list[range]:
    """Cut a sequence of named layers as the user specifies: by numbers of layers, or by the names at which parts begin.

    The names are those of the layers at which the second and later parts begin. The first layer may
    be named too.
    """
    check_parts(len(names), parts)
    if all(isinstance(one, str) for one in chosen) and chosen:
        starts = _starts(names, parts, [str(one) for one in chosen])
    elif chosen and all(isinstance(one, int) and not isinstance(one, bool) for one in chosen):
        starts = _sums(names, parts, [int(one) for one in chosen])
    else:
        raise _error(chosen, "must be numbers of layers, or names of layers at which stages begin")
    return [range(start, end) for start, end in pairwise([*starts, len(names)])]


def _starts(names: Sequence[str], parts: int, chosen: list[str]) -> list[int]:
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise _error(chosen, f"there is no layer {unknown[0]}, layers are {_listed(names)}")
    starts = sorted({0, *(names.index(name) for name in chosen)})
    indices = [names.index(name) for name in chosen]
    if indices != sorted(set(indices)):
        raise _error(chosen, "layers must be named in the order of the model, each once")
    if len(starts) != parts:
        raise _error(chosen, f"makes {len(starts)} stages of the {parts} that are needed")
    return starts


def _sums(names: Sequence[str], parts: int, chosen: list[int]) -> list[int]:
    if len(chosen) != parts or min(chosen) < 1 or sum(chosen) != len(names):
        raise _error(chosen, f"must be {parts} numbers above 0 with the sum {len(names)}, the model's layers")
    return [0, *accumulate(chosen)][:-1]


def check_parts(layers: int, parts: int) -> None:
    """Raise ``UsageError`` if there are fewer layers than parts."""
    if parts < 1:
        raise UsageError(f"a model in {parts} stages: must be at least 1", everywhere=True)
    if layers < parts:
        raise UsageError(
            f"{layers} layers cannot make {parts} stages: use at most {layers} (parallel.pipe times the chunks that "
            "each rank holds), or a model with more layers",
            everywhere=True,
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:6])}, ... {', '.join(names[-5:])}"


def _error(chosen: Sequence[int | str], reason: str) -> UsageError:
    return UsageError(f"setting parallel.partition = {list(chosen)}: {reason}", everywhere=True)
