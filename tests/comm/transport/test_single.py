"""Transport of a single rank: the suite, and errors for point-to-point messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from suites.transports import TransportSuite

from hpctrain.comm.transport.base import SingleTransport
from hpctrain.errors import CommunicationError


@pytest.fixture
def transport() -> SingleTransport:
    return SingleTransport()


class TestSingleTransport(TransportSuite):
    pass


def test_send_and_recv_are_refused(transport: SingleTransport) -> None:
    with pytest.raises(CommunicationError, match="no rank to send to"):
        transport.send(torch.zeros(1), 0)
    with pytest.raises(CommunicationError, match="no rank to receive from"):
        transport.recv(torch.zeros(1), 0)


def test_abort_ends_the_process_at_once_with_the_code(launch: Any) -> None:
    program = """
from hpctrain.comm.transport.base import SingleTransport
try:
    print("said before")
    SingleTransport().abort(7)
finally:
    print("unwound")
"""
    result = launch(0, program)
    assert (result.returncode, result.stdout) == (7, "said before\n")
