"""Training job for the kill test: roles of its processes, and phases from the contents of its folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from harness.ranks import mpiexec
from harness.turns import stop

from hpctrain.checkpoint.retention import list_checkpoints

RANKS = 2
NAME = "kill.toml"
CONFIG = """
[run]
device = "cpu"
strict = true  # a resume that would have to fall back to an older checkpoint is an error
[data]
files = ["corpus.h5"]
[model]
name = "gpt-tiny"
layers = 2
width = 192
heads = 4
context = 32
dropout = 0.1
[train]
batch = 4
seed = 5
evaluate_every = 0
[optimizer]
schedule = "constant"  # so that the end of the run may be chosen later
[checkpoint]
every = 2
"""

_VARIABLE = "HPCTRAIN_KILL_JOB"  # identifies the processes of a job, even after a change of their parent
_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
_LOOK = 0.002  # seconds between two polls of a folder


def make_project(folder: Path) -> None:
    """Pack a small corpus and write the settings of a GPT of a million parameters: a checkpoint of 12 MB."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for number in range(1, 9):
        (texts / f"{number}.txt").write_text("".join(f"{n}\n" for n in range(number, 4000, 3)))
    subprocess.run([_hpctrain(), "data", "pack", texts, "-o", folder / "corpus.h5"], check=True, capture_output=True)
    (folder / NAME).write_text(CONFIG)


class Job:
    """One start of the job: ``mpiexec -n 2 hpctrain train``, in the project's folder; ``program`` replaces hpctrain."""

    def __init__(self, folder: Path, words: Iterable[str], program: str = "") -> None:
        self._token = uuid.uuid4().hex
        self._log = folder / "job.log"  # of the present start only
        settings = [part for word in words for part in ("--set", word)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*mpiexec(RANKS), program or _hpctrain(), "train", NAME, *settings],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", _VARIABLE: self._token},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def said(self, lines: int = 12) -> str:
        """Return the last lines of the job's output."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def alive(self) -> dict[int, str]:
        """Return the running processes, each with its role: launcher, rank 0, rank 1, writer, helper."""
        found = _processes_with(f"{_VARIABLE}={self._token}")
        ranks = {pid: rank for pid, (_, rank) in found.items() if rank and not _below_a_rank(pid, found)}
        roles = {pid: "helper" for pid in found} | {pid: f"rank {rank}" for pid, rank in ranks.items()}
        roles |= {pid: "writer" for pid in found if _below_a_rank(pid, found) and not _is_tracker(pid)}
        if self._process.pid in roles:
            roles[self._process.pid] = "launcher"
        return roles

    def kill(self, role: str) -> list[int]:
        """Send SIGKILL to the processes of a role, or to ``all``; return their ids."""
        targets = [pid for pid, its in self.alive().items() if role in (its, "all")]
        for pid in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return targets

    def wait(self, limit: float, going_on: Callable[[], bool] = lambda: False) -> float | None:
        """Return the seconds until no process was left; ``None`` at the limit, or if the job continues."""
        started = time.monotonic()
        while (seconds := time.monotonic() - started) < limit:
            if self.returncode is not None and not self.alive():
                return seconds
            if going_on():
                return None
            stop.check()
            time.sleep(0.01)
        return None

    def close(self) -> None:
        """Kill all remaining processes."""
        while self.kill("all"):
            time.sleep(0.02)
        self._process.wait()


class RunObserver:
    """Observer of a run's folder, created just before a job is started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._before = {name: _identity(folder / name) for name in ("lock.json", "run.json")}
        self._left_over = set(self._private())

    def phase(self) -> str:
        """Return the phase of the job: start, resume, step, or save, which may overlap with steps."""
        if set(self._private()) - self._left_over:
            return "save"
        if self._is_new("run.json"):
            return "step"
        return "resume" if self._is_new("lock.json") else "start"

    def begun(self) -> int | None:
        """Return the first step of the job; ``None`` if it has not reached a step."""
        if not self._is_new("run.json"):
            return None
        return int(json.loads((self.folder / "run.json").read_text())["attempts"][-1]["first_step"])

    def committed(self) -> list[Path]:
        """Return the files with a checkpoint's name, oldest first."""
        return list_checkpoints(self.folder / "checkpoints")

    def until(self, seen: Callable[[str], bool], job: Job, limit: float) -> bool:
        """Wait for a phase; return whether it occurred before the end of the job and within the limit."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and job.returncode is None:
            if seen(self.phase()):
                return True
            stop.check()
            time.sleep(_LOOK)
        return False

    def _private(self) -> Sequence[str]:
        try:
            return [name for name in os.listdir(self.folder / "checkpoints") if name.startswith(".step_")]
        except FileNotFoundError:
            return []

    def _is_new(self, name: str) -> bool:
        return _identity(self.folder / name) not in (None, self._before[name])


def _hpctrain() -> str:
    return str(Path(sys.executable).parent / "hpctrain")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _processes_with(variable: str) -> dict[int, tuple[int, str]]:
    """Return the processes with a variable, each with its parent and rank.

    The rank is empty if neither the process nor its parent is a rank.
    """
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().decode(errors="replace").split("\0")  # a zombie's environment is empty
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if variable in variables:
            values = dict(variable.partition("=")[::2] for variable in variables)
            found[int(path.parent.name)] = parent, next((values[name] for name in _RANK if name in values), "")
    return found


def _below_a_rank(pid: int, found: dict[int, tuple[int, str]]) -> bool:
    parent = found[pid][0]
    return parent in found and (bool(found[parent][1]) or _below_a_rank(parent, found))


def _is_tracker(pid: int) -> bool:
    """Return whether a process is Python's resource tracker of shared memory."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
