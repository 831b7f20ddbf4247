"""Give the forms in which parameters can be split, each with a communicator that believes in its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.shards import FEW, FORMS, Form, communicator, fits

Place = tuple[Any, Form]


def _place(comm: Any, request: pytest.FixtureRequest) -> Iterator[Place]:
    if not fits(request.param, comm.size):
        pytest.skip("replicas want nodes of equally many ranks")
    with communicator(comm, FORMS[request.param]) as own:
        yield own, FORMS[request.param]


@pytest.fixture(params=FORMS)
def place(comm: Any, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Return a communicator and a form: all of them."""
    yield from _place(comm, request)


@pytest.fixture(params=FEW)
def some_place(comm: Any, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Return a communicator and a form: one of each kind."""
    yield from _place(comm, request)
