"""Behaviour of job scripts in a real shell, with fake programs that record their calls."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.batch import Batch

from hpctrain.jobs.profile import Profile
from hpctrain.jobs.render import render
from hpctrain.jobs.request import Request, combine
from hpctrain.jobs.submit import history, record
from hpctrain.train.lock import process_started

SLURM = Profile(scheduler="slurm", mpi="pmi2", interface="hsn0", purge=True)
PBS = Profile(scheduler="pbs", launcher="hydra", gpus="ngpus")
ASKED = Request(
    config="a.toml",
    folder="runs/a",
    time="00:10:00",
    nodes=2,
    ranks_per_node=4,
    cpus_per_rank=3,
    modules=("m/1",),
    environment={"TEST_A": "b  c"},
    settings=("train.prompt=a b",),
)
SWEEP = Request(config="a.toml", folder="runs/a", time="00:10:00", template="array", sweep=combine(["train.seed=1,2"]))
# A program that writes a checkpoint and exits as after a request to save.
SAVES = "d=runs/a/checkpoints; mkdir -p $d; n=$(ls $d | wc -l); touch $d/step_0$n.h5; "
# A program that waits for its signal; signals may arrive more than once.
WAITS = "trap 'touch told' USR1; touch begun; until [ -e told ]; do /bin/sleep 0.02; done; /bin/sleep 0.1; " + SAVES


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


def run(batch: Batch, script: str, job: str = "7", **more: str) -> subprocess.CompletedProcess[str]:
    return batch.run(script, SLURM_JOB_ID=job, **more)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never came"
        time.sleep(0.01)


def test_a_finished_run_is_not_requeued(batch: Batch) -> None:
    batch.does("squeue", "echo 2030-01-01T00:00:00")
    done = run(batch, render(ASKED, SLURM), TZ="UTC", OMP_NUM_THREADS="999")
    assert (done.returncode, done.stderr) == (0, "")
    calls = batch.calls()
    assert [call.name for call in calls] == ["module", "module", "squeue", "srun"]
    assert [call.words for call in calls[:2]] == [["purge"], ["load", "m/1"]]
    program = ["hpctrain", "train", "a.toml", "--set", "run.resume=auto", "--set", "train.prompt=a b"]
    assert calls[3].words == ["--mpi=pmi2", "--kill-on-bad-exit=1", "--cpus-per-task=3", *program]
    found = calls[3].environment
    assert (found["OMP_NUM_THREADS"], found["TEST_A"], found["NCCL_SOCKET_IFNAME"]) == ("3", "b  c", "hsn0")
    assert found["HPCTRAIN_DEADLINE"] == "1893456000"
    assert (batch.folder / "runs/a/starts.txt").read_text() == "7 nothing\n"


def test_a_program_is_started_and_requeued_as_a_config_is(batch: Batch) -> None:
    words = ("--rate", "1e-3", "", "a  b", "$(canary)", "--", "@folder@")
    script = render(replace(ASKED, config="train.py", settings=(), words=words), SLURM)
    batch.does("squeue", "echo 2030-01-01T00:00:00")
    batch.does("srun", f"{SAVES} exit 75")
    assert run(batch, script, TZ="UTC").returncode == 75
    (call,) = batch.calls("srun")
    assert call.words[3:] == ["python", "train.py", *words] and not batch.calls("canary")
    assert call.environment["HPCTRAIN_DEADLINE"] == "1893456000" and call.environment["HPCTRAIN_FOLDER"] == "runs/a"
    assert [call.words for call in batch.calls("scontrol")] == [["requeue", "7"]]
    batch.does("srun", "exit 1")
    assert [run(batch, script).returncode for _ in range(3)] == [1, 1, 1], "a crash loop"
    assert len(batch.calls("scontrol")) == 3
    assert (batch.folder / "runs/a/starts.txt").read_text().count("7 step_00.h5") == 3


def test_without_a_known_end_there_is_no_deadline(batch: Batch) -> None:
    batch.does("squeue", "echo N/A")
    run(batch, render(ASKED, SLURM))
    assert "HPCTRAIN_DEADLINE" not in batch.calls("srun")[0].environment


@pytest.mark.parametrize("code", [75, 1, 137])
def test_a_run_with_progress_is_requeued(batch: Batch, code: int) -> None:
    batch.does("srun", f"{SAVES} exit {code}")
    script = render(ASKED, SLURM)
    for start in (1, 2, 3, 4):
        assert run(batch, script).returncode == code
        assert [call.words for call in batch.calls("scontrol")] == [["requeue", "7"]] * start
    assert (batch.folder / "runs/a/starts.txt").read_text().split() == [
        *("7", "nothing", "7", "step_00.h5", "7", "step_01.h5", "7", "step_02.h5")
    ]


def test_bad_input_is_not_requeued(batch: Batch) -> None:
    batch.does("srun", "exit 2")
    assert run(batch, render(ASKED, SLURM)).returncode == 2
    assert not batch.calls("scontrol")


def test_a_stop_file_prevents_requeueing(batch: Batch) -> None:
    batch.does("srun", f"{SAVES} touch runs/a/STOP; exit 75")
    assert run(batch, render(ASKED, SLURM)).returncode == 75
    assert not batch.calls("scontrol")


@pytest.mark.parametrize("code", [75, 139])
def test_a_crash_loop_is_stopped(batch: Batch, code: int) -> None:
    batch.does("srun", f"exit {code}")
    script = render(ASKED, SLURM)
    assert [run(batch, script).returncode for _ in range(2)] == [code, code]
    last = run(batch, script)
    assert last.returncode == 1 and len(batch.calls("scontrol")) == 2
    assert f"job 7 has started 3 times from nothing and got no further (exit code {code})" in last.stderr
    # Slurm itself may restart the job after a node failure: then the script starts no ranks.
    again = run(batch, script)
    assert again.returncode == 1 and len(batch.calls("srun")) == 3 and "giving up" in again.stderr
    # Another job in the same folder, after the cause was repaired, starts a new count.
    batch.does("srun", "exit 0")
    assert run(batch, script, job="8").returncode == 0


def test_the_number_of_restarts_is_limited(batch: Batch) -> None:
    batch.does("srun", f"{SAVES} exit 75")
    script = render(Request(config="a.toml", folder="runs/a", time="00:10:00", restarts=1), SLURM)
    assert run(batch, script).returncode == 75
    last = run(batch, script)
    assert last.returncode == 75 and "come back 1 times: submit it again" in last.stderr
    assert len(batch.calls("scontrol")) == 1


@pytest.mark.parametrize(
    "number, back", [(signal.SIGUSR1, True), (signal.SIGTERM, False)], ids=["limit is near", "somebody ends the job"]
)
def test_a_signal_to_the_script_reaches_the_ranks(batch: Batch, number: signal.Signals, back: bool) -> None:
    batch.does("srun", f"{WAITS} exit 75")
    job = batch.start(render(ASKED, SLURM), SLURM_JOB_ID="7")
    wait_for(batch.folder / "begun")
    job.send_signal(number)
    time.sleep(0.05)
    job.send_signal(number)
    output, _ = job.communicate(timeout=20)
    assert (job.returncode, output) == (75, "")
    assert (batch.folder / "runs/a/checkpoints/step_00.h5").exists()
    assert bool(batch.calls("scontrol")) is back


def test_the_script_waits_for_a_rank_that_ignores_signals(batch: Batch) -> None:
    # A signal interrupts bash's wait, which must not be mistaken for the end of the ranks.
    batch.does("srun", "trap '' USR1; touch begun; /bin/sleep 0.6; exit 0")
    job = batch.start(render(ASKED, SLURM), SLURM_JOB_ID="7")
    wait_for(batch.folder / "begun")
    for _ in range(4):
        job.send_signal(signal.SIGUSR1)
        time.sleep(0.05)
    job.communicate(timeout=20)
    assert job.returncode == 0 and not batch.calls("scontrol")


@pytest.mark.parametrize("profile, word", [(SLURM, "sbatch"), (PBS, "qsub")], ids=["slurm", "pbs"])
@pytest.mark.parametrize("request_", [ASKED, SWEEP], ids=["train", "array"])
def test_outside_of_a_job_no_rank_is_started(batch: Batch, profile: Profile, word: str, request_: Request) -> None:
    done = batch.run(render(request_, profile))
    assert done.returncode != 0 and f"submit this script with {word}" in done.stderr
    assert not batch.calls() and not (batch.folder / "runs").exists()


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


def test_pbs_starts_are_counted_over_the_chain(batch: Batch) -> None:
    batch.does("mpiexec", "exit 1")
    script = render(ASKED, PBS)
    codes = [pbs(batch, script).returncode]
    codes += [pbs(batch, script, job=f"{number}.server", HPCTRAIN_CHAIN="7.server").returncode for number in (8, 9)]
    assert codes == [1, 1, 1] and len(batch.calls("qsub")) == 2
    assert len({call.environment["HPCTRAIN_START"] for call in batch.calls("mpiexec")}) == 3
    assert "7.server has started 3 times" in (batch.folder / "runs/a/output.txt").read_text()


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


@pytest.mark.parametrize("number, back", [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_passes_through_timeout(batch: Batch, number: signal.Signals, back: bool) -> None:
    batch.does("mpiexec", f"{WAITS} exit 75")
    script = render(ASKED, PBS)
    (batch.folder / "runs/a").mkdir(parents=True)
    (batch.folder / "runs/a/job.pbs").write_text(script)
    job = batch.start(script, PBS_JOBID="7", PBS_O_WORKDIR=str(batch.folder))
    wait_for(batch.folder / "begun")
    job.send_signal(number)
    job.communicate(timeout=20)
    assert job.returncode == 75 and bool(batch.calls("qsub")) is back


@pytest.mark.parametrize("task", ["0", "1"])
def test_every_task_of_an_array_has_its_settings_and_folder(batch: Batch, task: str) -> None:
    batch.does("srun", "exit 75")
    assert run(batch, render(SWEEP, SLURM), job="9", SLURM_ARRAY_JOB_ID="9", SLURM_ARRAY_TASK_ID=task).returncode == 75
    (call,) = batch.calls("srun")
    assert call.words[-4:] == ["--set", f"train.seed={int(task) + 1}", "--set", f"run.folder=runs/a/{task}"]
    assert (batch.folder / f"runs/a/{task}/starts.txt").read_text() == f"9_{task} nothing\n"
    # The job id of a task may be that of the array, and commands on that id act on all tasks.
    assert batch.calls("scontrol")[0].words == ["requeue", f"9_{task}"]
    assert f"--jobs=9_{task}" in batch.calls("squeue")[0].words


def test_a_task_outside_of_the_sweep_is_bad_input(batch: Batch) -> None:
    done = run(batch, render(SWEEP, SLURM), SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2")
    assert done.returncode == 2 and "task 2 of the array has no settings" in done.stderr and not batch.calls("srun")


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


def test_a_benchmark_runs_once(batch: Batch) -> None:
    asked = Request(config="a.toml", folder="runs/a", time="00:08:00", template="benchmark")
    done = run(batch, render(asked, SLURM))
    assert done.returncode == 0 and "HPCTRAIN_CALIBRATION=runs/a/calibration.json" in done.stdout
    (call,) = batch.calls("srun")
    assert call.words[-4:] == ["--seconds", "240", "--output", "runs/a/calibration.json"]
    batch.does("srun", "exit 3")
    assert run(batch, render(asked, SLURM)).returncode == 3 and not batch.calls("scontrol")


def test_the_launcher_starts_the_container(batch: Batch) -> None:
    profile = Profile(scheduler="slurm", container_options=("--nv",))
    run(batch, render(Request(config="a.toml", folder="r", time="00:10:00", container="torch.sif"), profile))
    assert batch.calls("srun")[0].words[2:8] == ["apptainer", "exec", "--nv", "torch.sif", "hpctrain", "train"]


@pytest.mark.parametrize("asked, runs", [("", ["podman", "exec", "site.sif", "hpctrain"]), ("none", ["hpctrain"])])
def test_the_container_of_a_site_is_the_default(asked: str, runs: list[str], batch: Batch) -> None:
    profile = Profile(scheduler="slurm", container="site.sif", container_program="podman")
    run(batch, render(Request(config="a.toml", folder="r", time="00:10:00", container=asked), profile))
    assert batch.calls("srun")[0].words[2 : 2 + len(runs)] == runs
