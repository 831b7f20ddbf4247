"""The agent of launchers: the same command line as that of ssh."""

from __future__ import annotations

import agent
import pytest


def test_agent_accepts_the_arguments_of_ssh() -> None:
    command = agent.remote(["-x", "-q", "h2", "cd /a;", "echo", "'b c'"], {"h1": "11", "h2": "12"})
    assert command[:3] == ["nsenter", "--target", "12"] and command[-3:] == ["sh", "-c", "cd /a; echo 'b c'"]
    for arguments, name in (["-x", "h3", "true"], "h3"), (["-x"], "no host"):
        with pytest.raises(SystemExit, match=f"{name} is not a node: known are h1, h2"):
            agent.remote(arguments, {"h1": "11", "h2": "12"})
