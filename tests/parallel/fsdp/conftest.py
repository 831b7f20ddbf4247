"""Forms of sharding, each with a communicator on simulated nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from support.shards import FEW, VARIANTS, Variant, communicator, fits

CommAndVariant = tuple[Any, Variant]


def params(names: Iterable[str]) -> list[Any]:
    """Return parameters for the variants, each with the numbers of ranks that support it."""
    sizes = {name: [size for size in (2, 3, 4) if fits(name, size)] for name in names}
    marks = {name: pytest.mark.ranks(*found) if found != [2, 3, 4] else () for name, found in sizes.items()}
    return [pytest.param(name, marks=marks[name]) for name in names]


@pytest.fixture(params=params(VARIANTS))
def comm_and_variant(comm: Any, request: pytest.FixtureRequest) -> Iterator[CommAndVariant]:
    """Return a communicator and a variant: all of them."""
    with communicator(comm, VARIANTS[request.param]) as own:
        yield own, VARIANTS[request.param]


@pytest.fixture(params=params(FEW))
def comm_and_some_variant(comm: Any, request: pytest.FixtureRequest) -> Iterator[CommAndVariant]:
    """Return a communicator and a variant: one of each kind."""
    with communicator(comm, VARIANTS[request.param]) as own:
        yield own, VARIANTS[request.param]
