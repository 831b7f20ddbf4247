"""Conformance suite of schedulers: what users rely on, whichever batch system their site has.

A scheduler is a row of the table. Its commands are fakes on PATH (``fakes/schedulers.py``), and job scripts run in a
real shell; ``tests/slurm`` and ``tests/pbs`` submit some of the same jobs to real schedulers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fakes.schedulers import SAVES, WAITS, FakePbs, FakeScheduler, FakeSlurm, wait_for
from support.commands import call
from support.job_requests import ASKED, MOST

from hpctrain.cluster import accounting, deadline
from hpctrain.cluster.accounting import JobAccount
from hpctrain.doctor.findings import Finding
from hpctrain.doctor.login.schedulers import check_pbs, check_slurm, query_pbs, query_slurm
from hpctrain.errors import HpctrainError, LaunchError, UsageError
from hpctrain.jobs.check import problems
from hpctrain.jobs.profile import Profile
from hpctrain.jobs.render import render
from hpctrain.jobs.request import Request, combine
from hpctrain.jobs.submit import history, submit


@dataclass(frozen=True)
class Row:
    """A scheduler in the table."""

    name: str  # in commands and settings
    fake: type[FakeScheduler]
    profile: Profile
    marker: str  # of directives
    directives: tuple[str, ...]  # of MOST
    array: str  # directive of an array of two tasks, one at a time
    early: str  # line that signals the run 600 s before the end
    wrong: Mapping[str, str]  # directives that job check reports, and words of the report
    job_id: str
    printed: Mapping[str, str]  # outputs of the submission, and the job ids in them
    after: tuple[str, ...]  # options of the submission that wait for job 12
    of_array: tuple[str, ...]  # ids of an array and of its tasks
    overriding: tuple[str, ...]  # variables that would change the script's meaning
    locating: str  # variable by which the commands find their server
    accounts: Callable[[list[str]], dict[str, JobAccount]]
    findings: Callable[[], list[Finding]]
    in_job: Callable[[str], dict[str, str]]  # variables of a running job, by which it finds its end


SLURM = Row(
    name="slurm",
    fake=FakeSlurm,
    profile=Profile(scheduler="slurm", mpi="pmi2", interface="hsn0", purge=True),
    marker="SBATCH",
    directives=(
        *("--nodes=3", "--ntasks-per-node=8", "--cpus-per-task=6", "--gpus-per-node=8", "--mem=200G"),
        *("--time=36:00:00", "--account=m1234_g", "--partition=p1", "--job-name=a.b-c", "--requeue"),
    ),
    array="--array=0-1%1",
    early="#SBATCH --signal=USR1@600",
    wrong={"--nodez=2": "sbatch knows no --nodez", "--nodes=9": "--nodes is already in line "},
    job_id="1234",
    printed={"1234": "1234", "1234;cluster": "1234", "a warning\n7\n99\n": "99"},
    after=("--dependency=afterany:12",),
    of_array=("12_3",),
    overriding=("SBATCH_PARTITION", "SLURM_MEM_PER_CPU"),
    locating="SLURM_CONF",
    accounts=accounting.ask_slurm,
    findings=lambda: list(check_slurm(query_slurm(), {})),
    in_job=lambda job: {"SLURM_JOB_ID": job},
)
PBS = Row(
    name="pbs",
    fake=FakePbs,
    profile=Profile(scheduler="pbs", launcher="hydra", gpus="ngpus", interface="hsn0", purge=True),
    marker="PBS",
    directives=(
        *("-l select=3:ncpus=48:mpiprocs=8:ompthreads=6:ngpus=8:mem=200gb", "-l walltime=36:00:00"),
        *("-A m1234_g", "-q p1", "-N a.b-c", "-l place=scatter"),
    ),
    array="-J 0-1%1",
    early="early=$((ends - 600 - $(date +%s)))",
    wrong={"-Z a": "'-Z' is not an option of qsub", "-N other": "-N is already in line "},
    job_id="77.server",
    printed={"77.server": "77.server", "1234[].server": "1234[].server", "Welcome to the site\n7\n12": "12"},
    after=("-W", "depend=afterany:12"),
    of_array=("12[]", "12[].server", "12[2].server"),
    overriding=("PBS_DPREFIX", "PBS_JOBID", "PBS_NODEFILE"),
    locating="PBS_SERVER",
    accounts=accounting.ask_pbs,
    findings=lambda: list(check_pbs(query_pbs(), {}, slurm=False)),
    in_job=lambda job: {"PBS_JOBID": job},
)
ROWS = {"slurm": SLURM, "pbs": PBS}

SWEEP = replace(ASKED, template="array", sweep=combine(["train.seed=1,2"]))
PROGRAM = ["hpctrain", "train", "a.toml", "--set", "run.resume=auto", "--set", "train.prompt=a b"]
WORDS = ["a.toml", "--time", "01:00:00", "--venv", "none"]


class SchedulerSuite:
    """Tests that every scheduler must pass."""

    @pytest.fixture(params=ROWS.values(), ids=list(ROWS))
    def row(self, request: pytest.FixtureRequest) -> Row:
        found: Row = request.param
        return found

    @pytest.fixture
    def fake(self, row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
        """Return the fake scheduler, whose commands come first in PATH; the folder has a config."""
        fake = row.fake(tmp_path)
        for name, value in fake.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "a.toml").write_text("[run]\nfolder = 'runs/b'\n")
        fake.accepts(row.job_id)
        return fake

    # Rendering --------------------------------------------------------------------------------------------------------

    def test_directives_state_the_request(self, row: Row) -> None:
        lines = render(MOST, row.profile).splitlines()
        assert {f"#{row.marker} {directive}" for directive in row.directives} <= set(lines)
        assert row.early in lines

    def test_an_array_has_one_task_per_value(self, row: Row) -> None:
        lines = render(replace(SWEEP, at_once=1, restarts=0), row.profile).splitlines()
        assert f"#{row.marker} {row.array}" in lines

    def test_job_check_reports_what_the_scheduler_would_misread(
        self, row: Row, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        script, path = render(ASKED, row.profile), tmp_path / "job"
        path.write_text(script)
        assert problems(script) == [] and call("job", "check", path) == 0
        assert capsys.readouterr().out == f"{path}: its directives are valid\n"
        shell, rest = script.split("\n", 1)
        late = f"{script}#{row.marker} {row.directives[0]}\n"
        for text, words in [
            *((f"{shell}\n#{row.marker} {line}\n{rest}", words) for line, words in row.wrong.items()),
            (late, "a directive after the first command"),
            (f"{shell}\n #{row.marker} {row.directives[0]}\n{rest}", "not a directive, which begins with #"),
            (rest, "the first line must name the shell"),
        ]:
            path.write_text(text)
            assert call("job", "check", path) == 1
            assert words in capsys.readouterr().out

    def test_a_directive_that_makes_the_script_invalid_is_refused(self, row: Row) -> None:
        for directive, words in row.wrong.items():
            with pytest.raises(UsageError, match=f"would be invalid: line .*{re.escape(words)}"):
                render(replace(ASKED, directives=(directive,)), row.profile)

    # Submission -------------------------------------------------------------------------------------------------------

    def test_a_script_is_written_submitted_and_recorded(self, row: Row, fake: FakeScheduler) -> None:
        folder = fake.folder / "runs/a b"
        unwanted = {"HPCTRAIN_CHAIN": "3", "HPCTRAIN_TASK": "1", "HPCTRAIN_DEADLINE": "9", "OMPI_COMM_WORLD_SIZE": "2"}
        unwanted |= dict.fromkeys(row.overriding, "x")
        wanted = {row.locating: "/x", "TEST_A": "1", "HPCTRAIN_TIMEOUT": "60"}
        environ = fake.environment(**unwanted, **wanted)
        done = submit(row.name, "#!/bin/bash\n", folder, environ=environ)
        assert (done.job_id, done.script.parent) == (row.job_id, folder)
        assert done.script.read_text() == "#!/bin/bash\n" and os.access(done.script, os.X_OK)
        (made,) = fake.calls(fake.submitter)
        assert made.words[-1] == str(done.script) and set(done.removed) == set(unwanted)
        assert not set(unwanted) & made.environment.keys() and wanted.items() <= made.environment.items()
        (entry,) = history(folder)
        assert (entry["job_id"], entry["scheduler"]) == (row.job_id, row.name)
        assert entry["environment_removed"] == list(done.removed) and entry["submitted"]
        submit(row.name, "#!/bin/sh\n", folder, after="12", environ=environ)
        assert fake.calls(fake.submitter)[1].words == [*made.words[:-1], *row.after, str(done.script)]
        assert len(history(folder)) == 2 and history(folder)[0] == entry
        assert sorted(path.name for path in folder.iterdir()) == [done.script.name, "jobs.json"]

    def test_job_ids_are_parsed(self, row: Row, fake: FakeScheduler) -> None:
        for printed, job_id in row.printed.items():
            fake.accepts(printed)
            assert submit(row.name, "x", fake.folder, environ=fake.environment()).job_id == job_id

    def test_errors_of_the_scheduler_are_quoted(self, row: Row, fake: FakeScheduler) -> None:
        fake.refuses("Invalid account")
        with pytest.raises(LaunchError, match=rf"^{fake.submitter} .* failed \(exit code 1\): Invalid account$"):
            submit(row.name, "x", fake.folder / "run", environ=fake.environment())
        for printed, told in {"": "it printed nothing", "all well": "all well"}.items():
            fake.accepts(printed)
            with pytest.raises(LaunchError, match=f"{fake.submitter} printed no job id: {told}"):
                submit(row.name, "x", fake.folder / "run", environ=fake.environment())
        fake.does(fake.submitter, "exec /bin/sleep 20")
        with pytest.raises(LaunchError, match=f"{fake.submitter} has not answered for 0.2 s"):
            submit(row.name, "x", fake.folder / "run", environ=fake.environment(), timeout=0.2)
        with pytest.raises(LaunchError, match=f"there is no {fake.submitter} here: submit from a login node"):
            submit(row.name, "x", fake.folder / "run", environ={"PATH": str(fake.folder)})
        assert not (fake.folder / "run/jobs.json").exists()

    @pytest.mark.parametrize("after", ["1;canary", "-1", "$(canary)", "1\n", "x", "1 2"])
    def test_after_must_be_a_job_id(self, row: Row, fake: FakeScheduler, after: str) -> None:
        with pytest.raises(UsageError, match="is not the id of a job; allowed is one such as 1234 or 1234[._]"):
            submit(row.name, "x", fake.folder / "run", after=after, environ=fake.environment())
        assert not fake.calls() and not (fake.folder / "run").exists()

    def test_after_a_task_of_an_array_waits_for_it_or_is_refused(self, row: Row, fake: FakeScheduler) -> None:
        if row.name == "pbs":  # a task that restarts is a job of its own, for which PBS cannot wait
            for job_id in row.of_array:
                with pytest.raises(UsageError, match="tasks of a PBS array restart as jobs of their own"):
                    submit(row.name, "x", fake.folder, after=job_id, environ=fake.environment())
            assert not fake.calls()
        else:
            (job_id,) = row.of_array
            submit(row.name, "x", fake.folder, after=job_id, environ=fake.environment())
            (made,) = fake.calls()
            assert row.after[-1].replace("12", job_id) in made.words

    def test_a_folder_that_cannot_be_written_is_refused_before_submission(self, row: Row, fake: FakeScheduler) -> None:
        with pytest.raises(UsageError, match="cannot write .*/job[.]"):
            submit(row.name, "x", fake.folder / "a.toml", environ=fake.environment())
        assert not fake.calls()

    def test_the_job_id_is_reported_if_recording_fails(self, row: Row, fake: FakeScheduler) -> None:
        told: list[str] = []
        folder = fake.folder / "run"

        def submitted(done: Any) -> None:
            told.append(done.job_id)
            shutil.rmtree(folder)

        with pytest.raises(
            HpctrainError, match=f"job {row.job_id} is submitted, but cannot be recorded in .*: "
        ) as found:
            submit(row.name, "x", folder, environ=fake.environment(), on_submitted=submitted)
        assert told == [row.job_id] and found.value.exit_code == 1

    def test_submit_sends_the_script_that_job_prints(
        self, row: Row, fake: FakeScheduler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(row.overriding[0], "#X")
        assert call("submit", row.name, *WORDS) == 0
        printed = capsys.readouterr()
        (made,) = fake.calls(fake.submitter)
        path = made.words[-1]
        assert printed.out == f"job {row.job_id} runs {path}; runs/b/jobs.json records it\n"
        assert f"not passed to the scheduler: {row.overriding[0]}" in printed.err
        assert call("job", row.name, *WORDS) == 0
        assert (fake.folder / path).read_text() == capsys.readouterr().out
        assert call("submit", row.name, *WORDS, "--json", "--after", "12") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["job_id"], found["script"]) == (row.job_id, path)
        assert row.after[-1] in fake.calls(fake.submitter)[1].words

    @pytest.mark.parametrize(
        "words, message",
        [
            (["--name", "a\ncanary"], "name holds the character U\\+000A"),
            (["--set", "optimizer.lr=1"], "unknown setting optimizer.lr: "),
        ],
    )
    def test_a_job_that_cannot_work_is_not_submitted(
        self, row: Row, fake: FakeScheduler, words: list[str], message: str
    ) -> None:
        with pytest.raises(UsageError, match=message):
            call("submit", row.name, *WORDS, *words)
        assert not fake.calls() and not (fake.folder / "runs").exists()

    # Queries ----------------------------------------------------------------------------------------------------------

    def test_states_of_running_ended_and_unknown_jobs(self, row: Row, fake: FakeScheduler) -> None:
        assert row.accounts(["12", "13"]) == {}, "no answer"
        fake.knows(running="12", ended="13")
        found = row.accounts(["12", "13", "99", "-x", "1;canary"])
        assert {job: account.has_ended for job, account in found.items() if job != "99"} == {"12": False, "13": True}
        assert "99" not in found or found["99"].has_ended
        assert not fake.calls("canary")

    def test_a_job_knows_its_end(self, row: Row, fake: FakeScheduler) -> None:
        assert deadline.find(row.in_job("12")) is None, "no answer"
        fake.ends("12", 1_795_315_000)
        found = deadline.find(row.in_job("12"))
        assert found is not None and found.time == 1_795_315_000

    def test_missing_commands_give_no_answer(self, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        assert row.accounts(["12"]) == {} and deadline.find(row.in_job("12")) is None and row.findings() == []

    def test_doctor_reports_whether_jobs_can_restart(self, row: Row, fake: FakeScheduler) -> None:
        fake.is_configured(restarts=True)
        assert {finding.level for finding in row.findings()} <= {"ok", "note"}
        fake.is_configured(restarts=False)
        (found,) = (one for one in row.findings() if re.match("JobRequeue = 0|jobs may not submit jobs", one.found))
        assert found.level != "ok" and found.why and found.advice

    # Life of a job ----------------------------------------------------------------------------------------------------

    def test_a_finished_job_does_not_restart(self, row: Row, fake: FakeScheduler) -> None:
        end = int(time.time()) + 600
        fake.ends("7", end)
        done = fake.run_job(render(ASKED, row.profile), OMP_NUM_THREADS="999")
        assert (done.returncode, fake.output(done)) == (0, "")
        assert [made.words for made in fake.calls("module")] == [["purge"], ["load", "m/1"]]
        (made,) = fake.calls(fake.launcher)
        assert made.words[-len(PROGRAM) :] == PROGRAM
        found = made.environment
        assert (found["OMP_NUM_THREADS"], found["TEST_A"], found["NCCL_SOCKET_IFNAME"]) == ("3", "b  c", "hsn0")
        assert 0 <= int(found["HPCTRAIN_DEADLINE"]) - end < 20
        assert fake.restarts() == 0

    @pytest.mark.parametrize("code", [75, 1, 137])
    def test_a_job_with_progress_restarts_in_the_same_chain(self, row: Row, fake: FakeScheduler, code: int) -> None:
        fake.does(fake.launcher, f"{SAVES} exit {code}")
        script = render(ASKED, row.profile)
        for start in range(4):
            assert fake.run_job(script, start).returncode == code
            assert fake.restarts() == start + 1
        assert len({made.environment["HPCTRAIN_CHAIN"] for made in fake.calls(fake.launcher)}) == 1
        starts = [line.split()[:2] for line in (fake.folder / "runs/a/starts.txt").read_text().splitlines()]
        assert [at for _, at in starts] == ["nothing", "step_00.h5", "step_01.h5", "step_02.h5"]
        assert len({chain for chain, _ in starts}) == 1

    @pytest.mark.parametrize("ends, code", [("exit 2", 2), (f"{SAVES} touch runs/a/STOP; exit 75", 75)])
    def test_bad_input_and_a_stop_file_prevent_a_restart(
        self, row: Row, fake: FakeScheduler, ends: str, code: int
    ) -> None:
        fake.does(fake.launcher, ends)
        assert fake.run_job(render(ASKED, row.profile)).returncode == code and fake.restarts() == 0

    @pytest.mark.parametrize("code", [75, 139])
    def test_a_crash_loop_is_stopped(self, row: Row, fake: FakeScheduler, code: int) -> None:
        fake.does(fake.launcher, f"exit {code}")
        script = render(ASKED, row.profile)
        assert [fake.run_job(script, start).returncode for start in range(2)] == [code, code]
        last = fake.run_job(script, 2)
        assert last.returncode == 1 and fake.restarts() == 2
        assert f"has started 3 times from nothing and got no further (exit code {code})" in fake.output(last)
        # The scheduler itself may restart the job after a node failure: then the script starts no ranks.
        again = fake.run_job(script, 3)
        assert again.returncode == 1 and len(fake.calls(fake.launcher)) == 3 and "giving up" in fake.output(again)
        # Another job in the same folder, after the cause was repaired, starts a new count.
        fake.does(fake.launcher, "exit 0")
        assert fake.run_job(script, **row.in_job("8")).returncode == 0

    def test_the_number_of_restarts_is_limited(self, row: Row, fake: FakeScheduler) -> None:
        fake.does(fake.launcher, f"{SAVES} exit 75")
        script = render(replace(ASKED, restarts=1), row.profile)
        assert fake.run_job(script).returncode == 75
        last = fake.run_job(script, 1)
        assert last.returncode == 75 and "come back 1 times: submit it again" in fake.output(last)
        assert fake.restarts() == 1

    @pytest.mark.parametrize(
        "number, back",
        [(signal.SIGUSR1, True), (signal.SIGTERM, False)],
        ids=["limit is near", "somebody ends the job"],
    )
    def test_a_signal_reaches_the_ranks(
        self, row: Row, fake: FakeScheduler, number: signal.Signals, back: bool
    ) -> None:
        fake.does(fake.launcher, f"{WAITS} exit 75")
        script = render(ASKED, row.profile)
        job = fake.start(script, **fake.job(script))
        wait_for(fake.folder / "begun")
        job.send_signal(number)
        time.sleep(0.05)
        job.send_signal(number)
        job.communicate(timeout=20)
        assert job.returncode == 75 and (fake.folder / "runs/a/checkpoints/step_00.h5").exists()
        assert bool(fake.restarts()) is back

    def test_the_script_waits_for_a_rank_that_ignores_signals(self, row: Row, fake: FakeScheduler) -> None:
        # A signal interrupts bash's wait, which must not be mistaken for the end of the ranks.
        fake.does(fake.launcher, "trap '' USR1; touch begun; /bin/sleep 0.6; exit 0")
        script = render(ASKED, row.profile)
        job = fake.start(script, **fake.job(script))
        wait_for(fake.folder / "begun")
        for _ in range(4):
            job.send_signal(signal.SIGUSR1)
            time.sleep(0.05)
        job.communicate(timeout=20)
        assert job.returncode == 0 and fake.restarts() == 0

    @pytest.mark.parametrize("asked", [ASKED, SWEEP], ids=["train", "array"])
    def test_outside_of_a_job_no_rank_is_started(self, row: Row, fake: FakeScheduler, asked: Request) -> None:
        done = fake.run(render(asked, row.profile))
        assert done.returncode != 0 and f"submit this script with {fake.submitter}" in done.stderr
        assert not fake.calls() and not (fake.folder / "runs").exists()

    def test_a_task_has_its_settings_and_folder(self, row: Row, fake: FakeScheduler) -> None:
        script = render(SWEEP, row.profile)
        for task in (0, 1):
            assert fake.run(script, **fake.job(script, task=task)).returncode == 0
            words = fake.calls(fake.launcher)[task].words
            assert words[-4:] == ["--set", f"train.seed={task + 1}", "--set", f"run.folder=runs/a/{task}"]
        outside = fake.run(script, **fake.job(script, task=2))
        said = outside.stderr + "".join(path.read_text() for path in fake.folder.glob("runs/a/2/output.txt"))
        assert outside.returncode == 2 and "task 2 of the array has no settings" in said
        assert len(fake.calls(fake.launcher)) == 2 and fake.restarts() == 0

    def test_a_benchmark_runs_once(self, row: Row, fake: FakeScheduler) -> None:
        script = render(Request(config="a.toml", folder="runs/a", time="00:08:00", template="benchmark"), row.profile)
        done = fake.run_job(script)
        assert done.returncode == 0 and "HPCTRAIN_CALIBRATION=runs/a/calibration.json" in fake.output(done)
        (made,) = fake.calls(fake.launcher)
        assert made.words[-4:] == ["--seconds", "240", "--output", "runs/a/calibration.json"]
        fake.does(fake.launcher, "exit 3")
        assert fake.run_job(script).returncode == 3 and fake.restarts() == 0

    def test_a_program_is_started_and_restarted_as_a_config_is(self, row: Row, fake: FakeScheduler) -> None:
        words = ("--rate", "1e-3", "", "a  b", "$(canary)", "--", "@folder@")
        fake.does(fake.launcher, f"{SAVES} exit 75")
        script = render(replace(ASKED, config="train.py", settings=(), words=words), row.profile)
        assert fake.run_job(script).returncode == 75 and fake.restarts() == 1
        (made,) = fake.calls(fake.launcher)
        assert made.words[-len(words) - 2 :] == ["python", "train.py", *words] and not fake.calls("canary")
        assert made.environment["HPCTRAIN_FOLDER"] == "runs/a"
