"""Private Slurm cluster of three nodes on this machine, which runs for the length of a ``with`` block.

Note: nodes and cleanup. Each node is a PID namespace with a process 1, a host name, a /dev/shm and mounts of its own.
Its slurmd and all processes that this slurmd starts run there. When the slurmd dies, process 1 ends and the kernel
kills the others: SIGKILL of a slurmd simulates a node that loses its power. Every process 1 is killed when the process
that runs this cluster dies, for whatever reason, so no process is left over. The files of a killed cluster are removed
by the next one. Only ports and the network are shared.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from slurm_conf import CONTROLLER, NODES, hosts, slurm_conf
from support.pace import Deadline, scaled

from hpctrain.cluster.launcher import without_launcher

_PREFIX = "hpctrain-slurm"
_SECONDS = 20.0  # that Slurm may take to start
_PAUSE = 0.05
_MACHINE = [
    *("setpriv", "--pdeathsig", "KILL", "unshare", "--kill-child", "--fork"),
    *("--pid", "--mount", "--mount-proc", "--uts", "--ipc", "sh", "-ec"),
]
# As process 1 the shell reaps orphaned processes, which Slurm's daemons do not.
_SETUP = """
mount -t tmpfs -o mode=1777 none /dev/shm
mount --bind "$FOLDER/hosts" /etc/hosts
printf '%s' "$NAME" >/proc/sys/kernel/hostname
"$@" & wait $!
"""


class PrivateSlurm:
    """Running munged, slurmctld and one slurmd per node; several such clusters may run on one machine at once."""

    def __init__(self, plugins: Sequence[str] = ()) -> None:
        """Configure a cluster with ``plugins`` of Slurm such as ``spank_pbs.so``, which sets PBS variables in jobs."""
        self._plugins = plugins
        self.folder = Path()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> PrivateSlurm:
        _remove_leftovers()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getpid()}-"))
        with ExitStack() as undo:
            undo.callback(self._end)
            self._write()
            self._start_munge()
            self._start(CONTROLLER, ["slurmctld", "-D", "-f", str(self._conf)])
            for name in NODES:
                self.start_node(name)
            self.until(lambda: self.idle() == set(NODES), "all nodes idle", _SECONDS)
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end()

    # Interface for tests ----------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Return an environment in which Slurm's commands use this cluster."""
        kept = without_launcher({name: text for name, text in os.environ.items() if not name.startswith("SBATCH_")})
        return {**kept, "SLURM_CONF": str(self._conf)}

    def command(self, *words: str, check: bool = True, seconds: float = 30) -> str:
        """Run a Slurm command and return its output."""
        done = subprocess.run(words, env=self.environment(), capture_output=True, text=True, timeout=scaled(seconds))
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr}\n{self.log()}")
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """Return Slurm's record of a job: JobState, ExitCode, Restarts, NodeList..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.command("scontrol", "--oneliner", "show", "job", job_id)))

    def idle(self) -> set[str]:
        """Return the nodes that can accept a job."""
        return set(self.command("sinfo", "--noheader", "--states=idle", "--Node", "--format=%N", check=False).split())

    def kill_node(self, name: str) -> None:
        """Kill a node's slurmd by SIGKILL, which ends all processes of the node."""
        (first,) = _children(self._daemons[name].pid)
        (slurmd,) = [pid for pid in _children(first) if Path(f"/proc/{pid}/comm").read_text() == "slurmd\n"]
        os.kill(slurmd, signal.SIGKILL)
        self._daemons.pop(name).wait()

    def start_node(self, name: str) -> None:
        """Start a node, which then registers with the controller."""
        for folder in ("tmp", "spool"):
            (self.folder / name / folder).mkdir(parents=True, exist_ok=True)
        self._start(name, ["slurmd", "-D", "-f", str(self._conf), "-N", name])

    def restore(self) -> None:
        """End all jobs and restart all nodes that are down."""
        self.command("scancel", "--user=root", check=False)
        self.command("scancel", "--user=root", "--signal=KILL", check=False)
        for name in set(NODES) - set(self._daemons):
            self.start_node(name)
        self.until(lambda: self.idle() == set(NODES), "all nodes idle again", _SECONDS)

    def until(self, condition: Callable[[], object], what: str, seconds: float, pause: float = _PAUSE) -> None:
        """Wait for a condition; raises an error with Slurm's log after a timeout, or if a daemon has died."""
        deadline = Deadline(seconds)
        while not condition():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or deadline.is_over:
                why = f"{', '.join(dead)} died" if dead else f"not after {seconds:g} s"
                raise TimeoutError(f"waiting for {what}: {why}\n{self.log()}")
            time.sleep(pause)

    def log(self, lines: int = 25) -> str:
        """Return the end of every daemon's log."""
        texts = []
        for path in sorted(self.folder.glob("*.log")):
            said = path.read_text(errors="replace").splitlines()
            texts += [f"--- {path.name}", *said[-lines:]]
        return "\n".join(texts)

    # Daemons ----------------------------------------------------------------------------------------------------------

    @property
    def _conf(self) -> Path:
        return self.folder / "slurm.conf"

    def _write(self) -> None:
        self.folder.chmod(0o755)  # munged requires that only its user can write there and that all can reach its socket
        (self.folder / "state").mkdir()
        (self.folder / "hosts").write_text(hosts())
        (self.folder / "plugstack.conf").write_text("".join(f"required {plugin}\n" for plugin in self._plugins))
        self._conf.write_text(slurm_conf(self.folder, _free_ports(1 + len(NODES))))

    def _start_munge(self) -> None:
        key, sock = self.folder / "munge.key", self.folder / "munge.sock"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {"key-file": key, "socket": sock}
        files |= {f"{name}-file": self.folder / f"munge.{name}" for name in ("pid", "log", "seed")}
        # --force: munged refuses to run as root otherwise.
        self._start("munged", ["munged", "--foreground", "--force", *(f"--{n}={path}" for n, path in files.items())])
        self.until(sock.exists, "munged", _SECONDS)

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [*_MACHINE, _SETUP, "sh", *command],
                env={**self.environment(), "NAME": name, "FOLDER": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _end(self) -> None:
        first = [pid for daemon in self._daemons.values() for pid in _children(daemon.pid)]
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        self._daemons.clear()
        # Process 1 of a node ends last: after it no process writes into the folder.
        deadline = time.monotonic() + _SECONDS
        while any(map(_lives, first)) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_ports(number: int) -> list[int]:
    """Return free ports; all are held open until the last one is found, so that they differ."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _lives(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _remove_leftovers() -> None:
    """Remove the folders of clusters that were killed before they could clean up."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-*-*"):
        owner = folder.name.removeprefix(f"{_PREFIX}-").partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)
