"""Two simulated nodes on one machine: namespaces with network, name, shared memory and mounts, joined by one cable."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

NAMES = ("h1", "h2")
WIRE = "wire"  # the network device on each node
HOLDERS = "MULTINODE_HOLDERS"  # for the launcher's agent: the process that holds each node, as in "h1=5,h2=6"
QUEUE = ("burst", "128kb", "latency", "50ms")  # with a smaller bucket the throughput stays below the rate
KINDS = ("--net", "--uts", "--ipc", "--mount")

# MPI libraries look for devices in /sys, and treat files in /dev/shm as memory of their own node.
_SETUP = """
mount -t tmpfs -o mode=1777 none /dev/shm
mount -t sysfs none /sys
printf '%s\\n' "$HOSTS" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
printf '%s' "$NAME" > /proc/sys/kernel/hostname
ip link set lo up
echo ready
exec cat > /dev/null
"""


def address(node: int) -> str:
    """Return the address of a node's end of the cable."""
    return f"10.77.0.{node + 1}"


def hosts() -> str:
    """Return the content of /etc/hosts on the nodes."""
    return "\n".join(["127.0.0.1 localhost", *(f"{address(node)} {name}" for node, name in enumerate(NAMES))])


class Nodes:
    """Two nodes for the length of a ``with`` block; ``rate`` is that of the cable, in the syntax of ``tc``."""

    def __init__(self, rate: str) -> None:
        self._rate = rate
        self._holders: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Nodes:
        try:
            self._holders = [_hold(name) for name in NAMES]
            for holder, name in zip(self._holders, NAMES):
                assert holder.stdout is not None
                if holder.stdout.readline() != "ready\n":
                    raise SystemExit(f"cannot make node {name}: its setup ended with exit code {holder.wait()}")
            self._lay_cable()
        except BaseException:
            self._let_go()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._let_go()

    def run(self, node: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
        """Run a program on a node, in this folder; return its exit code."""
        return subprocess.run(self.on(node, command), env=self.environment(env)).returncode

    def on(self, node: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs another on a node."""
        return entering(str(self._holders[node].pid), command)

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a program that starts others on the nodes."""
        holders = ",".join(f"{name}={holder.pid}" for name, holder in zip(NAMES, self._holders))
        return {**os.environ, **(extra or {}), HOLDERS: holders}

    def wire_bytes(self) -> list[int]:
        """Return the number of bytes that each node has sent over the cable so far."""
        path = f"/sys/class/net/{WIRE}/statistics/tx_bytes"
        return [int(subprocess.check_output(self.on(node, ["cat", path]))) for node in range(len(NAMES))]

    def _lay_cable(self) -> None:
        first, second = (str(holder.pid) for holder in self._holders)
        _do("ip", "link", "add", WIRE, "netns", first, "type", "veth", "peer", "name", WIRE, "netns", second)
        for node in range(len(NAMES)):
            _do(*self.on(node, ["ip", "address", "add", f"{address(node)}/24", "dev", WIRE]))
            _do(*self.on(node, ["ip", "link", "set", WIRE, "up"]))
            _do(*self.on(node, ["tc", "qdisc", "add", "dev", WIRE, "root", "tbf", "rate", self._rate, *QUEUE]))

    def _let_go(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()


def entering(holder: str, command: Sequence[str], folder: str | Path | None = None) -> list[str]:
    """Return the command that runs another on the node of a holder, in a folder (this one if none is given)."""
    return ["nsenter", "--target", holder, *KINDS, "env", f"--chdir={folder or os.getcwd()}", *command]


def _hold(name: str) -> subprocess.Popen[str]:
    """Start the process that keeps a node's namespaces alive until it is killed, or until this process ends."""
    return subprocess.Popen(
        ["unshare", *KINDS, "sh", "-ec", _SETUP],
        env={**os.environ, "NAME": name, "HOSTS": hosts()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"cannot make the nodes: {' '.join(command)}: {done.stderr.strip()}")
