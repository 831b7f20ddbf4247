"""Benchmarks of an installed module, in an allocation of two nodes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from batch_jobs import Submitter
from private_slurm import PrivateSlurm
from slurm_needs import VENVS
from support.modules import ModuleSystem, environment_modules, lmod
from support.torch_wheels import torch_wheel

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).resolve().parents[2]

# As a user writes it. The last lines measure each node by itself.
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=5 --output={folder}/output
{start}
module load hpctrain/1.0 || exit 3
cd {folder} || exit 3
echo "installed in $(hpctrain-python -c 'import hpctrain; print(hpctrain.__file__)')"
srun --mpi=pmi2 hpctrain bench all_reduce --sizes 4,64K --rounds 3 --without gloo --out both || exit 4
for node in $(scontrol show hostnames); do
    srun --mpi=pmi2 -N 1 -n 1 -w "$node" hpctrain bench offload --quick --rounds 3 --out "$node"
done
hpctrain bench report both
hpctrain bench report $(scontrol show hostnames) --all --csv > compared.csv
echo "exit code $?"
"""


def module_system() -> ModuleSystem:
    """Return a module system of this machine, Environment Modules if there is no Lmod."""
    try:
        return lmod()
    except pytest.skip.Exception:
        return environment_modules()


def install(folder: Path) -> None:
    """Run ``make install`` with MPICH, as an administrator; then PyTorch becomes that of the environment."""
    torch = torch_wheel(folder, version("torch").partition("+")[0], "torch_is_elsewhere.txt", "")
    words = [f"PREFIX={folder}/apps/1.0", f"MODULES={folder}/modules", "VERSION=1.0", "MPI=mpich", "EXTRAS="]
    command = [
        "make",
        "--no-print-directory",
        "install",
        *words,
        f"TORCH={torch}",
        f"PYTHON={os.path.realpath(sys.executable)}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    own, others = (next(venv.glob("lib/python*/site-packages")) for venv in (folder / "apps/1.0/venv", VENVS["mpich"]))
    (own / "torch_is_elsewhere.pth").write_text(f"{others}\n")


@pytest.mark.limit(320)
def test_benchmarks_run_from_a_module_and_nodes_are_compared(slurm: PrivateSlurm, submitter: Submitter) -> None:
    folder = submitter.folder
    install(folder)
    script = folder / "benchmarks.sbatch"
    start = f"{module_system().start}\nmodule use {folder}/modules"
    script.write_text(SCRIPT.format(folder=folder, start=start))
    number = slurm.command("sbatch", "--parsable", str(script)).strip()
    try:
        slurm.until(lambda: slurm.job(number)["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT"), "its end", 120)
    finally:
        slurm.command("scancel", number, check=False)
    told = (folder / "output").read_text()
    assert "exit code 0" in told and f"installed in {folder}/apps/1.0/venv/" in told, told
    (path,) = (folder / "both").glob("all-reduce-np2-nodes2-*.json")
    result = json.loads(path.read_text())
    assert result["nodes"] == 2 and result["complete"]
    assert {row["size"] for row in result["rows"] if row["candidate"] == "hpctrain"} == {4, 65536}
    nodes = sorted(each.name for each in folder.iterdir() if (each / "offload.json").exists())
    assert len(nodes) == 2, told
    rows = list(csv.DictReader((folder / "compared.csv").read_text().splitlines()))
    assert rows and all(node in (folder / "compared.csv").read_text() for node in nodes)
