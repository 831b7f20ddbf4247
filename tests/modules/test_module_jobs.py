"""Jobs that load the module: the script runs in a shell of its own, as Slurm runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.modules import ModuleSystem, root_of

from hpctrain.jobs.profile import Profile
from hpctrain.jobs.render import render
from hpctrain.jobs.request import Request

# Runs the command after its own options, and prints how it was called.
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do options+=" $1"; shift; done
echo "srun$options" && exec "$@"
"""


@pytest.mark.parametrize("name", ["hpctrain/1.0", "hpctrain"])
def test_a_job_runs_the_command_of_its_module(
    system: ModuleSystem, modulepath: Path, name: str, tmp_path: Path
) -> None:
    request = Request(config="a.toml", folder=str(tmp_path / "run"), time="00:10:00", modules=(name,))
    (tmp_path / "job.sbatch").write_text(render(request, Profile(scheduler="slurm", mpi="pmi2", purge=True)))
    for program, text in (("srun", SRUN), ("squeue", "#!/bin/bash\nexit 1\n")):
        (tmp_path / program).write_text(text)
        (tmp_path / program).chmod(0o755)
    # The submitting shell defines the function module, and sbatch exports it to the job.
    script = f"export PATH={tmp_path}:$PATH SLURM_JOB_ID=7; exec bash {tmp_path}/job.sbatch"
    done = system.type(script, modulepath)
    version = "1.0" if name.endswith("1.0") else "2.0"
    called = "srun --mpi=pmi2 --kill-on-bad-exit=1 --cpus-per-task=1"
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [called, f"hpctrain of {root_of(modulepath, version)}"]
