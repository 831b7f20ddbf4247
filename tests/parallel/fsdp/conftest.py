"""Forms of sharding, each with a communicator on simulated nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from support.shards import FEW, FORMS, Form, communicator, fits

Place = tuple[Any, Form]


def params(names: Iterable[str]) -> list[Any]:
    """Return parameters for the forms, each with the numbers of ranks that support it."""
    sizes = {name: [size for size in (2, 3, 4) if fits(name, size)] for name in names}
    marks = {name: pytest.mark.ranks(*found) if found != [2, 3, 4] else () for name, found in sizes.items()}
    return [pytest.param(name, marks=marks[name]) for name in names]


@pytest.fixture(params=params(FORMS))
def place(comm: Any, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Return a communicator and a form: all of them."""
    with communicator(comm, FORMS[request.param]) as own:
        yield own, FORMS[request.param]


@pytest.fixture(params=params(FEW))
def some_place(comm: Any, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Return a communicator and a form: one of each kind."""
    with communicator(comm, FORMS[request.param]) as own:
        yield own, FORMS[request.param]
