#!/usr/bin/env python3
"""Replacement of ssh between simulated nodes: a launcher calls ``agent.py [options] HOST COMMAND...``."""

from __future__ import annotations

import os
import sys

from namespaces import HOLDERS, entering


def remote(arguments: list[str], holders: dict[str, str]) -> list[str]:
    """Return the command for a launcher's call; options of ssh precede the host, and have no values."""
    words = iter(arguments)
    host = next((word for word in words if not word.startswith("-")), "")
    if host not in holders:
        raise SystemExit(f"{host or 'no host'} is not a node: known are {', '.join(holders)}")
    # As ssh does: the arguments are joined to one line for a shell.
    return entering(holders[host], ["sh", "-c", " ".join(words)])


if __name__ == "__main__":
    command = remote(sys.argv[1:], dict(pair.split("=") for pair in os.environ[HOLDERS].split(",")))
    os.execvp(command[0], command)
