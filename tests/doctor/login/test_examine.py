"""The examination of a login node: facts are gathered concurrently, and each topic yields findings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.doctoring import MISSING, OPENMPI, facts, mpi, only, slurm, told

from hpctrain.doctor.login import resources
from hpctrain.doctor.login.environment import Interpreter
from hpctrain.doctor.login.examine import LoginFacts, check, check_script, read_script, starts
from hpctrain.doctor.login.libraries import Gpus
from hpctrain.doctor.login.resources import ProcessLimits
from hpctrain.doctor.login.schedulers import Pbs, Slurm
from hpctrain.errors import UsageError
from hpctrain.util.probe import Answer

ROOM = facts(there=True, writable=True, size=2**40, free=2**38, files=0, files_free=0)
FINE = LoginFacts(
    environ={},
    host="login1",
    interpreter=Interpreter((3, 12, 1), "/venv", True, "/venv/lib", ""),
    torch=facts(version="2.13.0+cpu", seconds=2.0, cuda=None),
    gpus=Gpus(MISSING, Answer(error="No module named 'cupy'")),
    mpi=mpi(),
    hdf5=facts(h5py="3.16.0", hdf5="2.0.0", mpi=False),
    slurm=slurm(),
    pbs=Pbs(MISSING),
    limits=ProcessLimits(8, tuple(range(8)), 65536, None, None, 0, None, 2**36, rdma=False),
    storage=[resources.FolderFacts("shm", "/dev/shm", ROOM)],
)


def test_a_good_environment_has_one_finding_per_topic() -> None:
    found = check(FINE)
    assert told(found) == []
    topics = ["node", "Python", "hpctrain", "torch", "GPUs", "MPI", "mpiexec", "dead ranks", "HDF5", "modules", "Slurm"]
    assert [finding.topic for finding in found] == [*topics, "srun", "cores", "memory", "node memory"]


def test_running_as_one_rank_of_several_is_noted() -> None:
    task = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    found = check(replace(FINE, environ=task))
    assert found[0].found == "login1, in job 7 of Slurm" and told(found) == [("note", "node")]


def test_contradicting_variables_are_a_finding() -> None:
    found = check(replace(FINE, environ={"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "2"}))
    assert told(found) == [("note", "node")] and "contradict each other" in found[0].found


def test_a_given_script_is_checked() -> None:
    assert ("error", "script") in told(check(FINE, "#SBATCH --nodes=2\n#SBATCH --bad\nsrun a\n"))


def test_json_facts_contain_no_environment_variables() -> None:
    told_facts = json.dumps(replace(FINE, environ={"SECRET": "swordfish"}).to_json())
    assert "swordfish" not in told_facts
    assert {"host": "login1", "srun_mpi": "pmi2"}.items() <= json.loads(told_facts).items()


# Checks of a job script: its lines that start ranks are compared with the installed MPI and Slurm ---------------------


HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n#SBATCH --cpus-per-task=8\n#SBATCH --time=60\n"
GOOD = "srun --mpi=pmi2 --kill-on-bad-exit=1 --cpus-per-task=8 hpctrain train a.toml"
OLD, NEW = slurm(kill=0), slurm(kill=0, version="slurm 24.05.1")
ROOT = Path(__file__).resolve().parents[3]


def test_a_good_script_is_no_finding() -> None:
    assert told(check_script(f"{HEAD}{GOOD}\n", mpi(), OLD, {})) == []


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "golden").glob("*.sbatch")), ids=lambda path: path.stem)
def test_scripts_of_hpctrain_submit_are_no_finding(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    own = mpi(OPENMPI) if "--mpi=pmix" in text else mpi()
    assert [finding for finding in check_script(text, own, OLD, {}) if finding.level in ("warning", "error")] == []


@pytest.mark.parametrize(
    "line, level, words",
    [
        (GOOD.replace(" --kill-on-bad-exit=1", ""), "warning", "without --kill-on-bad-exit=1"),
        (GOOD.replace("exit=1", "exit=0"), "warning", "without --kill-on-bad-exit=1"),
        (GOOD.replace("pmi2", "pmix"), "error", "with --mpi=pmix"),
        (GOOD.replace(" --mpi=pmi2", ""), "note", "without --mpi="),
        (GOOD.replace(" --cpus-per-task=8", ""), "warning", "without --cpus-per-task"),
    ],
)
def test_missing_options_of_srun_are_findings(line: str, level: str, words: str) -> None:
    found = only(check_script(f"{HEAD}\n{line}\n", mpi(), slurm(kill=0, default=""), {}))
    assert (found.level, found.topic) == (level, "script") and found.found.startswith("line 7: srun ")
    assert words in found.found


BARE = "srun hpctrain train a.toml"
FEW = HEAD.replace("#SBATCH --cpus-per-task=8\n", "")
NO_CPUS = GOOD.replace(" --cpus-per-task=8", "")


@pytest.mark.parametrize(
    "text, own, environ, wrong",
    [
        # Options that Slurm sets by default, or the script's environment, may be omitted.
        (f"{FEW}{BARE}", slurm(kill=1, default="pmi2"), {}, []),
        (f"{FEW}export SLURM_KILL_BAD_EXIT=1\n{BARE}", slurm(kill=0), {}, []),
        (f"{FEW}{BARE}", slurm(default="none"), {"SLURM_MPI_TYPE": "pmi2"}, []),
        (f"{FEW}{BARE}", slurm(default="none"), {}, [("error", "script")]),
        (f"{HEAD}{NO_CPUS}", NEW, {}, []),
        (f"{HEAD}export SRUN_CPUS_PER_TASK=8\n{NO_CPUS}", OLD, {}, []),
        (f"{HEAD}srun -K1 -c 8 --mpi pmi2 -n 8 hpctrain train a.toml", OLD, {}, []),  # short options
    ],
)
def test_options_of_srun_may_be_omitted_or_short(
    text: str, own: Slurm, environ: dict[str, str], wrong: list[tuple[str, str]]
) -> None:
    assert told(check_script(f"{text}\n", mpi(), own, environ)) == wrong


@pytest.mark.parametrize("launcher", [GOOD, "mpirun -n 8 hpctrain train a.toml"])
def test_a_trap_is_delayed_by_a_foreground_launcher(launcher: str) -> None:
    text = f"{HEAD}trap 'echo saved' USR1\n{launcher}"
    assert only(check_script(f"{text}\n", mpi(), OLD, {})).found.endswith("the script has a trap for USR1")
    assert told(check_script(f"{text} &\nwait\n", mpi(), OLD, {})) == []
    assert told(check_script(f"{HEAD}trap - USR1\n{launcher}\n", mpi(), OLD, {})) == []
    assert (
        told(check_script(f"{HEAD}{launcher}\ntrap 'echo saved' USR1\n", mpi(), OLD, {})) == []
    )  # set after the launch


def test_misspelt_directives_are_an_error() -> None:
    text = f"{HEAD}#SBATCH --gpus-per-nod=4\n{GOOD}\n"
    found = only(check_script(text, mpi(), OLD, {}))
    assert found.level == "error" and "--gpus-per-node" in found.found


def test_a_script_without_a_launcher_is_a_note() -> None:
    assert told(check_script(f"{HEAD}hpctrain train a.toml\n", mpi(), OLD, {})) == [("note", "script")]


def test_launchers_are_found_anywhere_in_a_line() -> None:
    text = """\
# srun in a comment
echo "srun in a text"
FOO=1 srun -n 2 \\
    --mpi=pmi2 a && mpirun b &
if ! /usr/bin/mpiexec -n 2 c; then exec srun d; fi
x="a text
of two lines"
"""
    found = [(start.line, start.launcher, start.in_background) for start in starts(text)]
    assert found == [(3, "srun", False), (3, "mpirun", True), (5, "mpiexec", False), (5, "srun", False)]
    first = starts(text)[0]
    assert (first.value("--mpi"), first.value("--ntasks", "-n"), first.value("-K")) == ("pmi2", "2", None)


def test_an_unreadable_script_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the script .*: No such file"):
        read_script(tmp_path / "lost.sbatch")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="it is not UTF-8 text"):
        read_script(tmp_path / "binary")
