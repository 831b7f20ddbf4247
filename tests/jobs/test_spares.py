"""Spare nodes: the script starts the run again within its allocation, on nodes that answer."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.schedulers import Batch, Call
from support.job_requests import ASKED

from hpctrain.cli.main import main
from hpctrain.errors import UsageError
from hpctrain.jobs.profile import Profile
from hpctrain.jobs.render import render
from hpctrain.jobs.request import Request

SLURM = Profile(scheduler="slurm", mpi="pmi2")
PBS = Profile(scheduler="pbs", launcher="hydra", gpus="none")
SPARED = replace(ASKED, spares=1, retries=2)
# A step on a node that answers prints its name; the steps of the watch end at once; "first" is done by the first start.
STEPS = """\
for word in "$@"; do case $word in --nodelist=*) node=${word#*=} ;; esac; done
case "$*" in
    *printenv*) case " $DEAD " in *" $node "*) exit 1 ;; esac; echo "$node" ;;
    *USR1*) ;;
    *) if [ ! -e begun ]; then touch begun; FIRST; fi; THEN ;;
esac
"""


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    batch = Batch(tmp_path)
    batch.does("scontrol", "if [ \"$2\" = hostnames ]; then printf '%s\\n' a1 a2 a3; fi")
    return batch


def run(
    batch: Batch, first: str, then: str = "exit 0", dead: str = "", **asked: Any
) -> subprocess.CompletedProcess[str]:
    """Run the script of a job with two nodes and one spare node, as Slurm does: from a file."""
    steps = STEPS.replace("FIRST", first).replace("THEN", then)
    for launcher in ("srun", "mpirun", "mpiexec"):
        batch.does(launcher, steps)
    (batch.folder / "slurm_script").write_text(render(replace(SPARED, **asked), SLURM))
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-3]", "SLURMD_NODENAME": "a1", "DEAD": dead}
    return batch.run("exec bash slurm_script", **job)


def starts(batch: Batch) -> list[Call]:
    """Return the starts of the run."""
    return [call for call in batch.calls("srun") if "hpctrain" in call.words]


def requeued(batch: Batch) -> int:
    return sum(call.words[0] == "requeue" for call in batch.calls("scontrol"))


def test_a_failed_start_is_repeated_on_the_nodes_that_answer(batch: Batch) -> None:
    batch.does("squeue", "case $* in *--steps*) printf '%s\\n' '7.0 ranks' '7.1 watch' '7.batch batch' ;; esac")
    done = run(batch, "exit 137", dead="a2")
    assert done.returncode == 0 and not requeued(batch), done
    assert [call.words for call in batch.calls("scancel")] == [["7.0"]], "ranks that live on"
    assert "job 7 starts again on a1 a3 (exit code 137)" in done.stdout
    first, second = starts(batch)
    for call, hosts, spares in ((first, "a1,a2", "1"), (second, "a1,a3", "0")):
        assert {f"--nodelist={hosts}", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--overlap"} <= {*call.words}
        assert call.environment["HPCTRAIN_SPARES"] == spares
    assert first.environment["HPCTRAIN_START"] != second.environment["HPCTRAIN_START"]
    assert (batch.folder / "runs/a/starts.txt").read_text() == "7 nothing\n7 nothing\n"


@pytest.mark.parametrize(
    "first, dead, code, requeues",
    [
        ("exit 137", "a1 a2", 137, 1),  # too few nodes
        ("exit 75", "", 75, 1),  # saved before the time limit
        ("exit 2", "", 2, 0),  # bad input
        ("exit 0", "", 0, 0),
        ("touch runs/a/STOP; exit 1", "", 1, 0),
    ],
)
def test_other_ends_are_those_of_a_job_without_spare_nodes(
    batch: Batch, first: str, dead: str, code: int, requeues: int
) -> None:
    done = run(batch, first, dead=dead)
    assert (done.returncode, requeued(batch), len(starts(batch))) == (code, requeues, 1), done
    assert ("1 nodes answer, 2 are needed: Slurm requeues the job" in done.stdout) is (dead == "a1 a2")


def test_a_crash_loop_ends(batch: Batch) -> None:
    done = run(batch, "exit 1", then="exit 1", retries=1)
    assert (done.returncode, requeued(batch), len(starts(batch))) == (1, 0, 2), done
    assert "has started 2 times from nothing and got no further (exit code 1): giving up" in done.stderr


def test_another_node_watches_that_of_the_script(batch: Batch) -> None:
    run(batch, "/bin/sleep 0.3; exit 0")
    watch = next(call for call in batch.calls("srun") if "bash" in call.words)
    assert "--nodelist=a3" in watch.words and watch.words[-2:] == ["a1", "7"]
    body = watch.words[watch.words.index("-c") + 1]
    batch.does("sleep", "if [ -e over ]; then kill $PPID; fi")
    batch.does("scontrol", 'if [ "$1" = requeue ]; then touch over; else echo State=DOWN+DRAIN; fi')
    subprocess.run(["bash", "-c", body, "a1", "7"], cwd=batch.folder, env=batch.environment(), timeout=20)
    assert [call.words for call in batch.calls("scontrol")][-2:] == [["show", "node", "a1"], ["requeue", "7"]]


@pytest.mark.parametrize(
    "launcher, words",
    [("openmpi", ["mpirun", "-n", "8", "--host", "a1:4,a2:4"]), ("hydra", ["mpiexec", "-n", "8", "-ppn", "4"])],
)
def test_every_launcher_gets_the_nodes(batch: Batch, launcher: Any, words: list[str]) -> None:
    script = render(SPARED, replace(SLURM, launcher=launcher, mpi=""))
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-3]", "SLURMD_NODENAME": "a1"}
    batch.run(script, **job)
    (call,) = batch.calls(words[0])
    assert [call.name, *call.words][: len(words)] == words
    assert launcher == "openmpi" or call.words[4:6] == ["-hosts", "a1,a2"]


def test_a_job_without_spare_nodes_has_none_of_it() -> None:
    script = render(ASKED, SLURM)
    assert not any(word in script for word in ("no-kill", "HPCTRAIN_SPARES", "HPCTRAIN_LIVING", "watch", "overlap"))
    assert "#SBATCH --nodes=2\n" in script
    spared = render(SPARED, SLURM)
    assert "#SBATCH --nodes=3\n" in spared and "#SBATCH --no-kill\n" in spared


@pytest.mark.parametrize(
    "asked, named",
    [
        ({"spares": 3}, "spares = 3: at most as many as nodes = 2 are allowed"),
        ({"most_nodes": 4}, "spares = 1 with nodes = 2-4: "),
        ({"template": "benchmark"}, "spares = 1 with template = 'benchmark'"),
        ({"spares": -1}, "spares = -1: must be a whole number"),
    ],
)
def test_wrong_spares_are_refused(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Request(**{**vars(SPARED), **asked})


@pytest.mark.parametrize("profile, allowed", [(SLURM, "srun, openmpi, hydra"), (PBS, "openmpi, hydra")])
def test_launchers_without_a_choice_of_nodes_are_refused(profile: Profile, allowed: str) -> None:
    with pytest.raises(UsageError, match=f"spares = 1: with the launcher pals; allowed are {allowed}"):
        render(SPARED, replace(profile, launcher="pals"))


def test_the_option_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["jobs/gpt-tiny.toml", "--nodes", "2", "--spares", "1", "--time", "01:00:00"]
    assert main(["job", "slurm", *words]) == 0
    assert "#SBATCH --no-kill" in capsys.readouterr().out
    assert main(["job", "pbs", *words]) == 0
    told = capsys.readouterr().out
    assert "#PBS -W tolerate_node_failures=all\n" in told and "#PBS -l select=3:" in told


# PBS ------------------------------------------------------------------------------------------------------------------


def run_pbs(
    batch: Batch, first: str, then: str = "exit 0", dead: str = "", launcher: Any = "hydra"
) -> subprocess.CompletedProcess[str]:
    """Run the script of a job with two nodes and one spare node; ``pbs_tmrsh`` finds its node among all of them."""
    for name in ("mpirun", "mpiexec"):
        batch.does(
            name, f'cp "$PBS_NODEFILE" used; if [ ! -e begun ]; then touch begun; mv used first; {first}; fi; {then}'
        )
    tmrsh = batch.bin / "pbs_tmrsh"
    tmrsh.write_text('#!/bin/bash\ngrep -qx "$1" "$PBS_NODEFILE" && case " $DEAD " in *" $1 "*) exit 1 ;; esac\n')
    tmrsh.chmod(0o755)
    folder = batch.folder / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "job.pbs").write_text(render(SPARED, replace(PBS, launcher=launcher)))
    (batch.folder / "all").write_text("".join(f"{node}\n" * 4 for node in ("a1", "a2", "a3")))
    job = {"PBS_JOBID": "7.head", "PBS_O_WORKDIR": str(batch.folder), "PBS_NODEFILE": "all", "DEAD": dead}
    return batch.run("exec bash runs/a/job.pbs", **job)


@pytest.mark.parametrize("launcher, program", [("hydra", "mpiexec"), ("openmpi", "mpirun")])
def test_under_pbs_a_failed_start_is_repeated_on_the_nodes_that_answer(
    batch: Batch, launcher: str, program: str
) -> None:
    done = run_pbs(batch, "exit 137", dead="a2", launcher=launcher)
    output = (batch.folder / "runs/a/output.txt").read_text()
    assert done.returncode == 0 and not batch.calls("qsub"), output
    assert "job 7.head starts again on a1 a3 (exit code 137)" in output
    first, second = batch.calls(program)
    files = [(batch.folder / name).read_text().split() for name in ("first", "used")]
    assert files == [["a1"] * 4 + ["a2"] * 4, ["a1"] * 4 + ["a3"] * 4]
    names = ("HPCTRAIN_SPARES", "HPCTRAIN_DEADLINE")
    (spares, ends), (fewer, same) = [[call.environment[name] for name in names] for call in (first, second)]
    assert (spares, fewer) == ("1", "0") and ends == same, "the job ends when it would have ended"
    assert first.environment["HPCTRAIN_START"] != second.environment["HPCTRAIN_START"]


@pytest.mark.parametrize("first, dead, code, again", [("exit 137", "a1 a2", 137, 1), ("exit 75", "", 75, 1)])
def test_other_pbs_jobs_are_submitted_again(batch: Batch, first: str, dead: str, code: int, again: int) -> None:
    done = run_pbs(batch, first, dead=dead)
    assert (done.returncode, len(batch.calls("qsub")), len(batch.calls("mpiexec"))) == (code, again, 1)
    assert not {"HPCTRAIN_LIVING", "HPCTRAIN_NODEFILE"} & {*batch.calls("qsub")[0].environment}
    output = (batch.folder / "runs/a/output.txt").read_text()
    assert ("1 nodes answer, 2 are needed: the job is submitted again" in output) is bool(dead)


def test_a_pbs_job_without_spare_nodes_has_none_of_it() -> None:
    script = render(ASKED, PBS)
    assert not any(word in script for word in ("tolerate", "HPCTRAIN_SPARES", "HPCTRAIN_LIVING", "NODEFILE"))
    assert "ends=$(($(date +%s) + " in script and "#PBS -l select=2:" in script
