"""Peak memory of the ranks of a job, from Linux's accounting of their processes.

A rank records its memory just before its model is built, and resets the kernel's peak. From then
on, the process that started the job reads the ranks' peaks until they end. A peak is that of
resident memory (VmHWM), which the kernel maintains itself, so that no peak between two readings is
missed. Mapped files (libraries) are excluded. Of shared memory, each rank counts its proportional
share (Pss), so that ranks add up to the node.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "HPCTRAIN_FORECAST_PEAKS"  # the folder in which ranks record their initial memory
PAUSE = 0.02  # seconds between two readings
_KB = 1024


@dataclass
class Rank:
    """Memory of a rank, in bytes."""

    program: int  # private memory just before the model was built
    private: int = 0  # peak of private memory since then
    shared: int = 0  # its proportional share of shared memory, at the peak of all ranks' shared memory

    @property
    def total(self) -> int:
        """Return the sum of private and shared memory."""
        return self.private + self.shared


def begin() -> None:
    """Record the memory of this rank if a measurement is in progress."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    fields = _fields("/proc/self/smaps_rollup")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak (proc(5))
    note = {"program": fields["Pss_Anon"]}
    part = Path(folder, f".{os.getpid()}")
    part.write_text(json.dumps(note))
    part.rename(Path(folder, str(os.getpid())))


def run(command: Sequence[str], environ: Mapping[str, str], folder: Path, limit: float) -> list[Rank]:
    """Run a job; return the memory of its ranks. Raises ``OSError`` if the job fails."""
    folder.mkdir(parents=True)
    ranks: dict[str, Rank] = {}
    printed = folder.with_suffix(".log")
    end = time.monotonic() + limit
    with printed.open("w") as log:
        environ = {**environ, VARIABLE: str(folder)}
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environ)
        while job.poll() is None:
            if time.monotonic() > end:
                job.kill()
            _look(folder, ranks)
            time.sleep(PAUSE)
    if job.returncode:
        raise OSError(f"exit code {job.returncode}: {printed.read_text().strip()[-600:]}")
    return list(ranks.values())


def _look(folder: Path, ranks: dict[str, Rank]) -> None:
    shared: dict[str, int] = {}
    for note in folder.glob("[0-9]*"):
        if note.name not in ranks:
            ranks[note.name] = Rank(**json.loads(note.read_text()))
        try:
            status, rollup = _fields(f"/proc/{note.name}/status"), _fields(f"/proc/{note.name}/smaps_rollup")
        except (OSError, KeyError):
            continue  # it has ended
        if "VmHWM" in status and "Pss_Shmem" in rollup:
            rank = ranks[note.name]
            most = status["VmHWM"] - status["RssFile"] - status["RssShmem"]
            rank.private = max(rank.private, most, rollup["Pss_Anon"])
            shared[note.name] = rollup["Pss_Shmem"]
    # A page that a single rank has mapped counts fully for it, and by halves later: peaks of ranks
    # do not add up.
    if sum(shared.values()) > sum(rank.shared for rank in ranks.values()):
        for name, rank in ranks.items():
            rank.shared = shared.get(name, 0)


def _fields(path: str) -> dict[str, int]:
    """Return the fields of a proc file that are numbers of kB, in bytes."""
    words = (line.split() for line in Path(path).read_text().splitlines())
    return {one[0].rstrip(":"): int(one[1]) * _KB for one in words if len(one) == 3 and one[2] == "kB"}
