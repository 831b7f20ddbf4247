"""Isolation of a program as process 1 of a PID namespace: its processes and mounts end when it ends.

Note: the kernel cleans up. The program is process 1 of a PID namespace, with private mounts, and the nodes that it
makes are namespaces without a name. When process 1 ends, by itself or by SIGKILL, the kernel kills all its processes;
with the last one it removes the namespaces, their mounts and their network devices. Process 1 is killed when its parent
dies, so a killed run leaves nothing that disturbs the next one, and two runs cannot collide.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

MACHINE = [
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
]
TOOLS = {"setpriv": "util-linux", "unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}
# Minimal version of the nodes' requirements: a node, a cable, a slow link.
_TRIAL = """
unshare --net --uts --ipc --mount sh -ec '
    mount -t tmpfs none /dev/shm
    mount -t sysfs none /sys
    ip link add wire type veth peer name other
    tc qdisc add dev wire root tbf rate 1gbit burst 128kb latency 50ms'
"""


def obstacle(user: int | None = None, tools: Mapping[str, str] = TOOLS, machine: Sequence[str] = MACHINE) -> str | None:
    """Return why this machine cannot simulate several nodes, None if it can."""
    if (os.geteuid() if user is None else user) != 0:
        return "network namespaces need root"
    missing = [f"{tool} ({package})" for tool, package in tools.items() if shutil.which(tool) is None]
    if missing:
        return f"missing programs: {', '.join(missing)}"
    trial = subprocess.run([*machine, "sh", "-c", _TRIAL], capture_output=True, text=True)
    if trial.returncode:
        said = trial.stderr.strip().splitlines() or [f"exit code {trial.returncode}"]
        return f"the system refuses namespaces, a veth pair or a tbf queue: {said[0]}"
    return None


def run_isolated(command: Sequence[str]) -> int:
    """Run a program in isolation and return its exit code; a signal that ends this process ends all of them."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _leave)
    machine = subprocess.Popen([*MACHINE, *command])
    try:
        return machine.wait()
    finally:
        machine.kill()
        machine.wait()


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)
