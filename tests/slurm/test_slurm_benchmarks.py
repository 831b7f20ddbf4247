"""Benchmarks from a loaded module, in an allocation of two nodes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from batch_jobs import Submitter
from private_slurm import PrivateSlurm
from slurm_needs import VENVS
from support.modules import ModuleSystem, environment_modules, lmod

pytestmark = pytest.mark.slurm

# As a user writes it. The last lines measure each node by itself.
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=5 --output={folder}/output
{start}
module load hpctrain/1.0 || exit 3
cd {folder} || exit 3
srun --mpi=pmi2 hpctrain bench all_reduce --sizes 4,64K --rounds 3 --without gloo --out both
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


def install(submitter: Submitter) -> Path:
    """Make a module whose program is that of the environment; return its folder of module files."""
    root, modules = submitter.folder / "apps/1.0", submitter.folder / "modules"
    (root / "bin").mkdir(parents=True)
    program = root / "bin/hpctrain"
    program.write_text(f'#!/bin/sh\nexec {VENVS["mpich"]}/bin/hpctrain "$@"\n')
    program.chmod(0o755)
    for language, ending in (("lua", ".lua"), ("tcl", "")):
        words = ["modulefile", language, "--root", str(root), "--version", "1.0"]
        submitter.hpctrain(*words, "-o", str(modules / "hpctrain" / f"1.0{ending}"))
    return modules


@pytest.mark.limit(160)
def test_benchmarks_run_from_a_module_and_nodes_are_compared(slurm: PrivateSlurm, submitter: Submitter) -> None:
    folder, modules = submitter.folder, install(submitter)
    script = folder / "benchmarks.sbatch"
    start = f"{module_system().start}\nmodule use {modules}"
    script.write_text(SCRIPT.format(folder=folder, start=start))
    number = slurm.command("sbatch", "--parsable", str(script)).strip()
    try:
        slurm.until(lambda: slurm.job(number)["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT"), "its end", 120)
    finally:
        slurm.command("scancel", number, check=False)
    told = (folder / "output").read_text()
    assert "exit code 0" in told, told
    (path,) = (folder / "both").glob("all-reduce-np2-nodes2-*.json")
    result = json.loads(path.read_text())
    assert result["nodes"] == 2 and result["complete"]
    assert {row["size"] for row in result["rows"] if row["candidate"] == "hpctrain"} == {4, 65536}
    nodes = sorted(each.name for each in folder.iterdir() if (each / "offload.json").exists())
    assert len(nodes) == 2, told
    rows = list(csv.DictReader((folder / "compared.csv").read_text().splitlines()))
    assert rows and all(node in (folder / "compared.csv").read_text() for node in nodes)
