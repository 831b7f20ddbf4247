"""Small jobs of several ranks, started by a test and ended in every case."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.limits import Watchdog
from support.pace import scaled

from hpctrain.cluster.launcher import without_launcher

_ROOT = Path(__file__).resolve().parents[2]
_MARK = "HPCTRAIN_TEST_JOB"  # finds the processes of a job after their parent has changed
_SETTLE = 2.0  # processes that the launcher has killed may need a moment to end


@dataclass(frozen=True)
class Finished:
    """Outcome of a job; ``survivors`` are processes that outlived their launcher and were killed."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    ended: float  # by time.time()
    survivors: tuple[int, ...]

    def __str__(self) -> str:
        return f"exit code {self.returncode} after {self.seconds:.1f} s\n{self.stdout}\n{self.stderr}"


def in_small_shm(mebibytes: int) -> list[str]:
    """Return a prefix that runs a command with a /dev/shm of this size; skip if the system does not permit it."""
    mount = f"mount -t tmpfs -o size={mebibytes}m tmpfs /dev/shm"
    command = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"]), "sh", "-ec"]
    if subprocess.run([*command, mount], capture_output=True).returncode:
        pytest.skip("the system refuses to mount a file system in a namespace")
    return [*command, f'{mount}; exec "$@"', "sh"]


def folder_outside_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a temporary folder on a disk, for jobs with another /dev/shm: they do not see the usual one in memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


class JobStarter:
    """Runner of ``mpiexec -n N python ...`` with a hard time limit; provided by the fixture ``launch``."""

    def __init__(self, folder: Path, watchdog: Watchdog, limit: float) -> None:
        self._folder = folder
        self._watchdog = watchdog
        self._limit = limit
        self._count = 0

    def __call__(
        self,
        n: int,
        program: str | Path,
        *args: str | Path,
        timeout: float = 60,
        env: Mapping[str, str | None] | None = None,
        cwd: str | Path | None = None,
        prefix: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> Finished:
        """Run a program on n ranks, or without a launcher if n is 0; fail the test if it outlasts ``timeout`` seconds.

        ``program`` is the path of a script, an option of the interpreter (``"-m"``), or else Python source.
        ``env`` adds variables; None removes one. The outer launcher's variables are never inherited, and each rank
        computes with one thread. ``prefix`` is a command that runs the launcher, ``options`` are the launcher's.
        """
        self._count += 1
        command = [*prefix, *_launcher(n, options), sys.executable, self._script(program), *map(str, args)]
        mark = uuid.uuid4().hex
        self._watchdog.arm(timeout + self._limit)
        try:
            return self._run(command, _environment(env or {}, mark), mark, timeout, cwd or self._folder)
        finally:
            self._watchdog.arm(self._limit)

    def _script(self, program: str | Path) -> str:
        if isinstance(program, Path) or program.startswith("-"):
            return str(program)
        if "\n" not in program and program.endswith(".py"):
            return program
        path = self._folder / f"job{self._count}.py"
        path.write_text(program, encoding="utf-8")
        return str(path)

    def _run(self, command: list[str], env: dict[str, str], mark: str, timeout: float, cwd: str | Path) -> Finished:
        # Files, not pipes: a process that is left over must not delay the end of the output.
        out, err = (self._folder / f"job{self._count}.{name}" for name in ("stdout", "stderr"))
        start = time.monotonic()
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                returncode = process.wait(scaled(timeout))
            except subprocess.TimeoutExpired:
                returncode = None
            seconds, ended = time.monotonic() - start, time.time()
            survivors = _end(mark, settle=0.0 if returncode is None else _SETTLE)
            process.wait()
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in (out, err)]
        if returncode is None:
            pytest.fail(f"not done after {timeout:g} s: {' '.join(command)}\n{texts[0]}\n{texts[1]}", pytrace=False)
        return Finished(returncode, texts[0], texts[1], seconds, ended, survivors)


def _launcher(n: int, options: Sequence[str]) -> list[str]:
    if n == 0:
        return []
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        pytest.skip("no mpiexec beside the interpreter or in PATH")
    return [mpiexec, *options, "-n", str(n)]


def _environment(extra: Mapping[str, str | None], mark: str) -> dict[str, str]:
    env = without_launcher(os.environ)
    env["OMP_NUM_THREADS"] = "1"
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), env.get("PYTHONPATH")]))
    wanted = {**env, **extra, _MARK: mark}
    return {name: value for name, value in wanted.items() if value is not None}


def _end(mark: str, settle: float) -> tuple[int, ...]:
    """Wait a moment for the processes of a job to end, kill the rest, and return the ids of those killed."""
    deadline = time.monotonic() + settle
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return found


def _marked(mark: str) -> tuple[int, ...]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{_MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return tuple(found)
