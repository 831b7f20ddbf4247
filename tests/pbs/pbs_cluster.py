"""OpenPBS cluster of a login node and three nodes on this machine, started by the script in the folder ``OPENPBS``.

A machine has one such cluster, so all workers of a session share it. Tests that kill a node or a daemon use it
exclusively (``alone``); the others share it (``together``).
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pbs_needs
from support.pace import Deadline

FOLDER = Path(tempfile.gettempdir()) / "hpctrain-pbs"
USER = "pbsuser"
NODES = ("n1", "n2", "n3")
REQUEUE = 20  # seconds that a job's first node may be silent; PBS's default is 310
_PAUSE = 0.3
_FREE = "free"


class PbsCluster:
    """Running cluster; ``ssh`` is true if its nodes reach each other by ssh."""

    played = True  # its nodes are namespaces of this machine, without ssh between them unless requested

    def __init__(self, *, ssh: bool = False) -> None:
        script = pbs_needs.script()
        assert script is not None
        self._script, self.ssh, self.folder = script, ssh, FOLDER

    @property
    def venvs(self) -> dict[str, Path]:
        """Return the environments of the cluster's user, made by user_environments.py."""
        return {mpi: self.folder / "tree" / venv.name for mpi, venv in pbs_needs.VENVS.items()}

    def start(self) -> None:
        """Start all nodes, after ending the remains of an earlier session."""
        FOLDER.mkdir(exist_ok=True)
        FOLDER.chmod(0o755)
        self._call("clean", seconds=60)
        self._call("start", seconds=180)
        self.root(f"qmgr -c 'set server node_fail_requeue = {REQUEUE}'")

    def stop(self) -> None:
        """Stop all nodes and remove their files."""
        self._call("clean", seconds=60, check=False)

    # Commands ---------------------------------------------------------------------------------------------------------

    def login(self, command: str, *, check: bool = True, seconds: float = 60) -> str:
        """Run a command as the user on the login node and return its output."""
        return self._call("login", command, check=check, seconds=seconds)

    def root(self, command: str, *, check: bool = True) -> str:
        """Run a command as root on the login node."""
        return self._call("root", command, check=check)

    def on(self, node: str, command: str, *, check: bool = False) -> str:
        """Run a command as root on a node."""
        return self._call("on", node, command, check=check)

    def kill_mom(self, node: str) -> None:
        """Kill a node's pbs_mom by SIGKILL; the processes of its jobs survive."""
        self._call("kill-mom", node)

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node, as a loss of power does."""
        self._call("kill-node", node)

    def start_mom(self, node: str) -> None:
        """Start a node, or its pbs_mom, again."""
        self._call("start-mom", node)

    # Queries of PBS ---------------------------------------------------------------------------------------------------

    def job(self, job_id: str) -> dict[str, Any]:
        """Return PBS's record of a job, which may have ended: job_state, Exit_status, exec_vnode..."""
        told = json.loads(self.login(f"qstat -x -f -F json {shlex.quote(job_id)}", check=False) or "{}")
        found: dict[str, Any] = next(iter(told.get("Jobs", {}).values()), {})
        return found

    def processes(self, node: str, job_id: str, name: str = ".*") -> list[int]:
        """Return the processes of a job on a node whose program name matches ``name``."""
        found = f"grep -qzxF 'PBS_JOBID={job_id}' /proc/$one/environ 2>/dev/null && echo $one"
        told = self.on(node, f"for one in $(pgrep -u {USER} -x '{name}'); do {found}; done")
        return [int(word) for word in told.split()]

    def free_nodes(self) -> set[str]:
        """Return the nodes that are up and accept jobs."""
        told = json.loads(self.root("pbsnodes -a -F json", check=False) or "{}")
        return {name for name, facts in told.get("nodes", {}).items() if facts["state"] in (_FREE, "job-busy")}

    def until(self, condition: Callable[[], object], what: str, seconds: float) -> None:
        """Wait for a condition; raises ``TimeoutError`` after a timeout."""
        deadline = Deadline(seconds)
        while not condition():
            if deadline.is_over:
                raise TimeoutError(f"waiting for {what}: not after {seconds:g} s\n{self.log()}")
            time.sleep(_PAUSE)

    def restore(self) -> None:
        """End all jobs and restart all nodes that are down."""
        self.root("qselect | xargs -r qdel -W force", check=False)
        for node in NODES:
            self.root(f"pbsnodes -r {node}", check=False)
        for node in set(NODES) - self.free_nodes():
            self._call("start-mom", node, check=False)
        self.until(lambda: len(self.free_nodes()) == len(NODES), "all nodes free", 60)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Use the cluster exclusively: wait until no other test uses it, and block others."""
        with self._lock(fcntl.LOCK_EX):
            try:
                yield
            finally:
                self.restore()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Share the cluster with other tests."""
        with self._lock(fcntl.LOCK_SH):
            yield

    def log(self, lines: int = 15) -> str:
        """Return the state of nodes and jobs, and the end of every daemon's log."""
        texts = [self.root("pbsnodes -aSj; qstat -x -w", check=False)]
        for path in sorted((FOLDER / "cluster").glob("*/spool/*_logs/2*")):
            texts += [f"--- {path}", *path.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(texts)

    @contextmanager
    def _lock(self, kind: int) -> Iterator[None]:
        with open(self.folder / "in-use.lock", "a") as lock:
            fcntl.flock(lock, kind)
            yield

    def _call(self, *words: str, check: bool = True, seconds: float = 60) -> str:
        environment = {**os.environ, "ROOT": str(FOLDER), "SSH": "yes" if self.ssh else "none"}
        # A daemon that the script starts keeps its output streams open: they are files, not pipes.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            command = [str(self._script), *words]
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=seconds
            )
            out.seek(0), err.seek(0)
            told, complaint = out.read(), err.read()
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}: {complaint}{told}")
        return told

    def work_folder(self, name: str) -> Path:
        """Return a new folder of the user's that all nodes can access."""
        folder = self.folder / "work" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        give(folder)
        return folder


def give(folder: Path) -> None:
    """Give the user a folder and its content, if root runs the cluster."""
    if os.geteuid():
        return
    user = pwd.getpwnam(USER)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)
