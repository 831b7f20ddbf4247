"""Requirements of simulated nodes."""

from __future__ import annotations

import isolation


def test_missing_requirements_are_named() -> None:
    tools = {"no-such-ip": "iproute2", "sh": "dash"}
    assert isolation.obstacle(0, tools) == "missing programs: no-such-ip (iproute2)"
    refuses = ["sh", "-c", "echo 'unshare failed: not permitted' >&2; exit 1"]
    assert isolation.obstacle(0, {}, refuses) == (
        "the system refuses namespaces, a veth pair or a tbf queue: unshare failed: not permitted"
    )
    assert isolation.obstacle(1000) == "network namespaces need root"
