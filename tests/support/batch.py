"""Fake batch system: job scripts run among stub programs that only record how they were called."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from support.pace import scaled

# Records its arguments and environment, then runs the file of its name. In bash, because it is called often.
_PROGRAM = """\
#!/bin/bash
name=${0##*/} call=$PLAY/calls/$EPOCHREALTIME
printf '%s\\0' "$name" "$@" >"$call.words"
env -0 >"$call.environment"
if [ -e "$PLAY/$name" ]; then . "$PLAY/$name"; fi
exit 0
"""
NAMES = (
    *("canary", "srun", "mpirun", "mpiexec", "scontrol", "squeue", "sbatch", "qsub", "qstat", "qalter", "qselect"),
    *("module", "sleep"),
)


@dataclass(frozen=True)
class Call:
    """Recorded call of a stub program."""

    name: str
    words: list[str]
    environment: dict[str, str]


class Batch:
    """Folder in which job scripts run among stub programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin, self._play = folder / "bin", folder / "play"
        self.bin.mkdir()
        (self._play / "calls").mkdir(parents=True)
        for name in NAMES:
            (self.bin / name).write_text(_PROGRAM)
            (self.bin / name).chmod(0o755)

    def does(self, name: str, script: str) -> None:
        """Set the bash script that a program runs; without one it exits with 0."""
        (self._play / name).write_text(script + "\n")

    def environment(self, **more: str) -> dict[str, str]:
        """Return an environment that finds these programs first."""
        return {"PATH": f"{self.bin}:{os.defpath}", "PLAY": str(self._play), "HOME": str(self.folder), **more}

    def run(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a script and wait for its end."""
        return subprocess.run(
            ["/bin/bash", "-c", script],
            cwd=self.folder,
            env=self.environment(**environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled(30),
        )

    def start(self, script: str, **environment: str) -> subprocess.Popen[str]:
        """Start a script, to send it signals."""
        return subprocess.Popen(
            ["/bin/bash", "-c", script],
            cwd=self.folder,
            env=self.environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def calls(self, *names: str) -> list[Call]:
        """Return the calls so far, oldest first: of these programs, or of all."""
        found = []
        for path in sorted((self._play / "calls").glob("*.words")):
            name, *words = path.read_bytes().decode().split("\0")[:-1]
            pairs = path.with_suffix(".environment").read_bytes().decode().split("\0")[:-1]
            found.append(Call(name, words, dict(pair.split("=", 1) for pair in pairs)))
        return [call for call in found if not names or call.name in names]

    def forget(self) -> None:
        """Forget the calls so far."""
        for path in (self._play / "calls").iterdir():
            path.unlink()
