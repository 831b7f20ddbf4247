"""Behaviour of job scripts in a real shell, with fake programs that record their calls."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.schedulers import SAVES, WAITS, Batch, wait_for
from support.job_requests import ASKED

from hpctrain.errors import UsageError
from hpctrain.jobs.profile import Profile
from hpctrain.jobs.render import render
from hpctrain.jobs.request import Request, combine
from hpctrain.jobs.submit import history, record
from hpctrain.train.lock import process_started

SLURM = Profile(scheduler="slurm", mpi="pmi2", interface="hsn0", purge=True)
PBS = Profile(scheduler="pbs", launcher="hydra", gpus="ngpus")
SWEEP = Request(config="a.toml", folder="runs/a", time="00:10:00", template="array", sweep=combine(["train.seed=1,2"]))


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


def run(batch: Batch, script: str, job: str = "7", **more: str) -> subprocess.CompletedProcess[str]:
    return batch.run(script, SLURM_JOB_ID=job, **more)


def test_without_a_known_end_there_is_no_deadline(batch: Batch) -> None:
    batch.does("squeue", "echo N/A")
    run(batch, render(ASKED, SLURM))
    assert "HPCTRAIN_DEADLINE" not in batch.calls("srun")[0].environment


def pbs(batch: Batch, script: str, job: str = "7.server", **more: str) -> subprocess.CompletedProcess[str]:
    (batch.folder / "runs/a").mkdir(parents=True, exist_ok=True)
    (batch.folder / "runs/a/job.pbs").write_text(script)
    return batch.run(script, PBS_JOBID=job, PBS_O_WORKDIR=str(batch.folder), **more)


def test_a_pbs_job_submits_its_successor(batch: Batch) -> None:
    batch.does("mpiexec", f"echo said; echo and complained >&2; {SAVES} exit 75")
    before = time.time()
    assert pbs(batch, render(ASKED, PBS)).returncode == 75
    (call,) = batch.calls("mpiexec")
    binding = ["-bind-to", "core:3"] if len(os.sched_getaffinity(0)) <= 12 else ["-bind-to", "none"]
    assert call.words[:6] == ["-n", "8", "-ppn", "4", *binding] and call.words[6] == "hpctrain"
    assert call.environment["HPCTRAIN_CHAIN"] == "7.server"
    assert 0 <= int(call.environment["HPCTRAIN_DEADLINE"]) - int(before) - 600 < 20
    assert [call.words for call in batch.calls("qsub")] == [["-v", "HPCTRAIN_CHAIN=7.server", "runs/a/job.pbs"]]
    assert (batch.folder / "runs/a/output.txt").read_text() == "said\nand complained\n"


def test_a_missing_script_is_reported_under_pbs(batch: Batch) -> None:
    batch.does("mpiexec", "exit 75")
    done = batch.run(render(ASKED, PBS), PBS_JOBID="7", PBS_O_WORKDIR=str(batch.folder))
    assert done.returncode == 75 and not batch.calls("qsub")
    assert "runs/a/job.pbs is not there: save this script" in (batch.folder / "runs/a/output.txt").read_text()


def test_the_pbs_script_sends_the_early_signal(batch: Batch) -> None:
    batch.does("mpiexec", f"{WAITS} exit 75")
    script = render(ASKED, PBS)
    assert "early=$((ends - 300 - $(date +%s)))" in script
    assert pbs(batch, script.replace("ends - 300 -", "ends - 598 -")).returncode == 75
    assert (batch.folder / "runs/a/checkpoints/step_00.h5").exists() and batch.calls("qsub")


def test_preflight_does_not_delay_the_early_signal(batch: Batch) -> None:
    waits = f'case "$*" in *doctor*) /bin/sleep 2; date +%s.%N >measured ;; *) {WAITS} exit 75 ;; esac'
    batch.does("mpiexec", waits)
    script = render(replace(ASKED, preflight=10), PBS)
    assert pbs(batch, script.replace("ends - 300 -", "ends - 595 -")).returncode == 75
    begun, told = float((batch.folder / "measured").read_text()), (batch.folder / "told").stat().st_mtime
    assert told - begun < 4, "5 s from the start of the job, of which 2 went into measuring"


def test_a_failed_submission_is_reported_with_the_command(batch: Batch) -> None:
    batch.does("mpiexec", f"{SAVES} exit 75")
    batch.does("qsub", "echo 'qsub: Bad UID for job execution' >&2; exit 1")
    assert pbs(batch, render(ASKED, PBS)).returncode == 75
    said = (batch.folder / "runs/a/output.txt").read_text()
    assert "qsub failed: qsub: Bad UID for job execution; jobs may submit jobs only where PBS has flatuid" in said
    assert f"cd {batch.folder} && qsub -v 'HPCTRAIN_CHAIN=7.server' runs/a/job.pbs" in said
    assert not (batch.folder / "runs/a/jobs.json").exists()


def test_every_job_of_a_pbs_chain_is_recorded(batch: Batch) -> None:
    batch.does("mpiexec", f"{SAVES} exit 75")
    script = render(ASKED, PBS)
    first = {"job_id": "7.server", "scheduler": "pbs", "command": ["qsub"]}
    (batch.folder / "runs/a").mkdir(parents=True)
    record(batch.folder / "runs/a", first)
    for job, again in (("7.server", "8.server"), ("8.server", "9.server")):
        batch.does("qsub", f"echo 'Welcome to the site'; echo {again}")
        pbs(batch, script, job=job, HPCTRAIN_CHAIN="7.server")
    assert len({call.environment["HPCTRAIN_START"] for call in batch.calls("mpiexec")}) == 2
    noted = history(batch.folder / "runs/a")
    assert [entry["job_id"] for entry in noted] == ["7.server", "8.server", "9.server"]
    assert [entry.get("chain") for entry in noted] == [None, "7.server", "7.server"]
    assert noted[0].items() > first.items()
    record(batch.folder / "runs/a", first)
    assert len(history(batch.folder / "runs/a")) == 4


def test_waiting_jobs_depend_on_the_successor(batch: Batch) -> None:
    batch.does("mpiexec", f"{SAVES} exit 75")
    batch.does("qsub", "echo 8.server")
    depend = "    depend = beforeany:11.server@server:12.ser", "\tver@server,beforeok:13.server@server"
    lines = ["Job Id: 7.server", *depend]
    batch.does("qstat", f"printf '%s\\n' {' '.join(map(shlex.quote, lines))}")
    assert pbs(batch, render(ASKED, PBS)).returncode == 75
    assert [call.words for call in batch.calls("qalter")] == [
        ["-W", "depend=afterany:8.server", "11.server"],
        ["-W", "depend=afterany:8.server", "12.server"],
    ]


@pytest.mark.parametrize("mode, umask", [(0o755, "0022"), (0o700, "0077"), (0o2770, "0007"), (0o1777, "0002")])
def test_files_get_the_permissions_of_the_folder(batch: Batch, mode: int, umask: str) -> None:
    batch.does("mpiexec", "umask >umask.txt")
    (batch.folder / "runs/a").mkdir(parents=True)
    (batch.folder / "runs/a").chmod(mode)
    pbs(batch, "umask 077\n" + render(ASKED, PBS))
    assert (batch.folder / "umask.txt").read_text().strip() == umask


def test_killing_the_script_ends_all_ranks(batch: Batch) -> None:
    """PBS kills only the script; the ranks have a session of their own."""
    # The launcher itself ignores SIGTERM, as a hanging one does.
    hangs = "trap : TERM; trap '' USR1; echo $$ >pid; touch begun; while :; do /bin/sleep 0.05; done"
    batch.does("mpiexec", hangs)
    (batch.folder / "runs/a").mkdir(parents=True)
    job = batch.start(render(ASKED, PBS), PBS_JOBID="7", PBS_O_WORKDIR=str(batch.folder))
    wait_for(batch.folder / "begun")
    launcher = int((batch.folder / "pid").read_text())
    deadline = time.monotonic() + 20
    while len(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()) < 2:
        assert time.monotonic() < deadline, "the script has not got to what waits for its own end"
    with job:
        job.kill()
    deadline = time.monotonic() + 40
    while process_started(launcher) is not None:
        assert time.monotonic() < deadline, "the launcher lives on"
        time.sleep(0.01)


def test_files_of_a_program_are_its_progress(batch: Batch) -> None:
    """Without hpctrain's checkpoints, the newest file of a model in the folder counts; other files do not."""
    script = render(replace(ASKED, config="train.py", settings=(), runner=("run",), retries=1), SLURM)
    batch.does("srun", "mkdir -p runs/a/x; date >'runs/a/x/my model.pt'; touch runs/a/log.txt; exit 75")
    for _ in range(5):
        assert run(batch, script).returncode == 75
    starts = (batch.folder / "runs/a/starts.txt").read_text().splitlines()
    assert starts[0] == "7 nothing" and all(line.startswith("7 my_model.pt@20") for line in starts[1:])
    assert len(set(starts)) == 5
    batch.does("srun", "touch runs/a/log.txt; exit 1")
    assert run(batch, script).returncode == 1
    last = run(batch, script)
    assert "and got no further (exit code 1): giving up" in last.stderr and last.returncode == 1


def test_a_task_of_a_slurm_array_restarts_alone(batch: Batch) -> None:
    batch.does("srun", "exit 75")
    assert run(batch, render(SWEEP, SLURM), job="9", SLURM_ARRAY_JOB_ID="9", SLURM_ARRAY_TASK_ID="1").returncode == 75
    assert (batch.folder / "runs/a/1/starts.txt").read_text() == "9_1 nothing\n"
    # The job id of a task may be that of the array, and commands on that id act on all tasks.
    assert batch.calls("scontrol")[0].words == ["requeue", "9_1"]
    assert "--jobs=9_1" in batch.calls("squeue")[0].words


def test_a_task_of_a_pbs_array_restarts_alone(batch: Batch) -> None:
    batch.does("mpiexec", "mkdir -p runs/a/1/checkpoints; touch runs/a/1/checkpoints/step_1.h5; exit 75")
    batch.does("qsub", "cat >submitted")
    script = render(SWEEP, PBS)
    assert pbs(batch, script, job="7[1].server", PBS_ARRAY_INDEX="1").returncode == 75
    assert [call.words for call in batch.calls("qsub")] == [["-v", "HPCTRAIN_CHAIN=7[1].server,HPCTRAIN_TASK=1"]]
    again = (batch.folder / "submitted").read_text()
    assert again == script.replace("#PBS -J 0-1\n", "") != script
    assert pbs(batch, again, job="8", HPCTRAIN_CHAIN="7[1].server", HPCTRAIN_TASK="1").returncode == 75
    assert batch.calls("mpiexec")[1].words[-1] == "run.folder=runs/a/1"
    noted = (batch.folder / "runs/a/1/starts.txt").read_text()
    assert noted == "7[1].server nothing 7[1].server\n7[1].server step_1.h5 8\n"


@pytest.mark.parametrize(
    "settings, asked, runs",
    [
        ({"container_options": ("--nv",)}, "torch.sif", ["apptainer", "exec", "--nv", "torch.sif", "hpctrain"]),
        ({"container": "site.sif", "container_program": "/opt/x"}, "", ["/opt/x", "exec", "site.sif", "hpctrain"]),
        ({"container": "site.sif"}, "none", ["hpctrain"]),
    ],
)
def test_the_launcher_starts_the_container(settings: dict[str, Any], asked: str, runs: list[str], batch: Batch) -> None:
    """The container of a site is the default."""
    profile = Profile(scheduler="slurm", **settings)
    run(batch, render(Request(config="a.toml", folder="r", time="00:10:00", container=asked), profile))
    assert batch.calls("srun")[0].words[2 : 2 + len(runs)] == runs


@pytest.mark.parametrize(
    "settings, more, options",
    [
        ({}, (), ["--nv"]),
        ({"gpu_vendor": "amd"}, (), ["--rocm"]),
        ({"container_program": "/usr/bin/singularity"}, ("--bind /a",), ["--nv", "--bind", "/a"]),
        ({"container_options": ("--bind /a", "--rocm")}, (), ["--bind", "/a", "--rocm"]),
        ({"container_options": ("--cleanenv",)}, ("--nvccli",), ["--cleanenv", "--nvccli"]),
        ({"container_program": "ch", "container_gpu_options": ("--gpu all",)}, (), ["--gpu", "all"]),
        ({"container_gpu_options": ("--nv",), "container_options": ("--nv",)}, (), ["--nv"]),
    ],
)
def test_a_container_gets_the_gpus_of_the_job(
    settings: dict[str, Any], more: tuple[str, ...], options: list[str], batch: Batch
) -> None:
    """The program, the measurement of the nodes, and a variable by which ranks know that they should see GPUs."""
    profile = Profile(scheduler="slurm", **settings)
    request = Request(config="a.toml", folder="r", time="00:10:00", container="a.sif", gpus_per_node=2, preflight=30)
    run(batch, render(replace(request, container_options=more), profile))
    measured, trained = batch.calls("srun")
    for call in (measured, trained):
        begin = call.words.index(profile.container_program)
        assert call.words[begin : begin + 4 + len(options)] == [
            *(profile.container_program, "exec", *options, "a.sif", "hpctrain")
        ]
        assert call.environment["HPCTRAIN_GPUS_PER_NODE"] == "2"
    script = render(replace(request, gpus_per_node=0), profile)
    assert "HPCTRAIN_GPUS_PER_NODE" not in script and ("--nv " in script) is ("--nv" in profile.container_options)


def test_an_unknown_container_program_with_gpus_is_refused() -> None:
    request = Request(config="a.toml", folder="r", time="00:10:00", container="a.sif", gpus_per_node=1)
    profile = Profile(scheduler="slurm", container_program="podman")
    with pytest.raises(UsageError, match=r"'podman' in a job with GPUs: .* container_gpu_options = \[\"--nv\"\]"):
        render(request, profile)
    assert "podman exec a.sif" in render(replace(request, gpus_per_node=0), profile)
