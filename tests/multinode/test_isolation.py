"""Missing requirements of simulated nodes: one line that names them."""

from __future__ import annotations

import os

import isolation
import pytest


def test_missing_requirements_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(isolation, "TOOLS", {"no-such-ip": "iproute2", "sh": "dash"})
    assert isolation.obstacle() == "missing programs: no-such-ip (iproute2)"
    monkeypatch.setattr(isolation, "TOOLS", {})
    monkeypatch.setattr(isolation, "MACHINE", ["sh", "-c", "echo 'unshare failed: not permitted' >&2; exit 1"])
    assert isolation.obstacle() == (
        "the system refuses namespaces, a veth pair or a tbf queue: unshare failed: not permitted"
    )
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert isolation.obstacle() == "network namespaces need root"
