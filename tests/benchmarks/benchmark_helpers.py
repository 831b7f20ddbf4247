"""Parts of the benchmarks' tests: options that make passes on, texts of pictures, a fake rank."""

from __future__ import annotations

import re
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TIME = {"median": 0.5, "quartile_1": 0.4, "quartile_3": 0.6, "min": 0.3, "max": 0.7, "repeats": 5}
PROVENANCE = {
    *("commit", "date", "machine", "processor", "cores", "load", "mpi", "torch", "python", "command"),
    *("host", "numa_nodes", "caches", "cpus_of_rank_0", "load_before", "numpy", "mpi4py", "mpi_network"),
}


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """Run make in the folder of the benchmarks."""
    command = ["make", "--no-print-directory", "-C", str(FOLDER), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def jobs_of_make(*words: str) -> list[list[str]]:
    """Return the jobs that a target of the Makefile starts, without starting them: ranks, program and its options."""
    script = re.sub(r"\b(?:exec )?make --no-print-directory -C \.\. (_\w+)", "show", make("-n", *words).stdout)
    show = """show() { for word; do export "$word"; done; eval "printf '%s|' ${NP:-1} $PROGRAM"; echo; }\n"""
    done = subprocess.run(["sh", "-c", show + script], cwd=FOLDER, capture_output=True, text=True)
    return [line[:-1].split("|") for line in done.stdout.splitlines()]


def texts_of(svg: Path) -> str:
    """Return the texts of a picture."""
    root = ElementTree.parse(svg)
    return "\n".join(text for node in root.iter() if node.tag.endswith("text") for text in node.itertext())


class OneRank:
    """Setting, communicator and job of one rank that records its barriers; ``others`` are answers of rank 1."""

    rank, size, node, folder = 0, 1, 0, Path("none")

    def __init__(self) -> None:
        self.log: list[str] = []
        self.others: list[str] = []
        self.comm = self.world = self.transport = self

    def Barrier(self) -> None:
        self.log.append("|")

    def barrier(self) -> None:
        self.Barrier()

    def quiet(self) -> None:
        self.log.append("quiet")

    def Ibarrier(self) -> OneRank:
        self.log.append("rest")
        return self

    def Test(self) -> bool:
        return True

    def wrap(self, model: Any) -> Any:
        return model

    def all_gather_object(self, item: Any) -> list[Any]:
        return [item, self.others.pop(0)] if self.others and isinstance(item, str) else [item]
