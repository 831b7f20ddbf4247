"""A world of one rank: the suite, and nobody to talk to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from suites.transports import TransportSuite

from hpctrain.errors import CommunicationError
from hpctrain.transport.single import SingleTransport


@pytest.fixture
def transport() -> SingleTransport:
    return SingleTransport()


class TestSingleTransport(TransportSuite):
    pass


def test_there_is_nobody_to_send_to_or_receive_from(transport: SingleTransport) -> None:
    with pytest.raises(CommunicationError, match="nobody to send to"):
        transport.send(torch.zeros(1), 0)
    with pytest.raises(CommunicationError, match="nobody to receive from"):
        transport.recv(torch.zeros(1), 0)


def test_abort_ends_the_process_at_once_with_the_code(launch: Any) -> None:
    program = """
from hpctrain.transport.single import SingleTransport
try:
    print("said before")
    SingleTransport().abort(7)
finally:
    print("unwound")
"""
    result = launch(0, program)
    assert (result.returncode, result.stdout) == (7, "said before\n")
