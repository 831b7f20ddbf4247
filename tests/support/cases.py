"""Selection of test cases: a few that cover each value of each parameter, or the rest."""

from __future__ import annotations

from collections import defaultdict

import pytest


def split_cases(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return a few cases of each test, and the others. Cases marked ``long`` or ``slow`` are among the others.

    A test marked ``few(n)`` keeps n cases, evenly spread. Any other test with several parameters keeps the cases that
    show a value of a parameter for the first time. A test with one parameter keeps all its cases.
    """
    tests: dict[tuple[str, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("long") or item.get_closest_marker("slow"):
            continue
        ranks = sorted(map(str, item.iter_markers("ranks")))  # cases for each number of ranks are selected separately
        tests[item.nodeid.partition("[")[0], *ranks].append(item)
    kept = {item for cases in tests.values() for item in _few(cases)}
    return [item for item in items if item in kept], [item for item in items if item not in kept]


def _few(cases: list[pytest.Item]) -> list[pytest.Item]:
    marker = cases[0].get_closest_marker("few")
    if marker is not None:
        wanted: int = min(marker.args[0], len(cases))
        return [cases[number * len(cases) // wanted] for number in range(wanted)]
    kept = []
    shown: set[tuple[int, str]] = set()
    for item in cases:
        values = set(enumerate(getattr(getattr(item, "callspec", None), "_idlist", ())))
        if not values or not values <= shown:
            kept.append(item)
        shown |= values
    return kept
