from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.batch import Batch

from hpctrain.cli.main import main
from hpctrain.jobs.check import problems

WORDS = ["a.toml", "--time", "01:00:00", "--venv", "none"]


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batch:
    batch = Batch(tmp_path)
    (tmp_path / "a.toml").write_text("[run]\nfolder = 'runs/b'\n")
    monkeypatch.chdir(tmp_path)
    for name, value in batch.environment(SBATCH_ACCOUNT="other", PBS_DPREFIX="#X").items():
        monkeypatch.setenv(name, value)
    batch.does("sbatch", "echo 1234")
    batch.does("qsub", "echo 77.server")
    return batch


@pytest.mark.parametrize(
    "scheduler, program, job_id, ending", [("slurm", "sbatch", "1234", "sbatch"), ("pbs", "qsub", "77.server", "pbs")]
)
def test_a_job_is_submitted(
    scheduler: str, program: str, job_id: str, ending: str, batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", scheduler, *WORDS]) == 0
    (call,) = batch.calls(program)
    assert call.words[-1] == f"runs/b/job.{ending}"
    assert not {"SBATCH_ACCOUNT", "PBS_DPREFIX"} & call.environment.keys()
    printed = capsys.readouterr()
    assert printed.out == f"job {job_id} runs runs/b/job.{ending}; runs/b/jobs.json records it\n"
    assert "not passed to the scheduler: " in printed.err and "SBATCH_ACCOUNT" in printed.err
    assert main(["job", scheduler, *WORDS]) == 0
    script = capsys.readouterr().out
    assert (batch.folder / call.words[-1]).read_text() == script and problems(script) == []


def test_submit_does_not_explain_profiles(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "slurm", *WORDS, "--show-profile"]) == 2
    assert "unrecognized arguments: --show-profile" in capsys.readouterr().err and not batch.calls()


def test_json_output(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "slurm", *WORDS, "--json", "--after", "12"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["job_id"], found["script"]) == ("1234", "runs/b/job.sbatch")
    assert "--dependency=afterany:12" in batch.calls("sbatch")[0].words


def test_an_invalid_job_is_not_submitted(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "slurm", *WORDS, "--name", "a\ncanary"]) == 2
    assert "name holds the character U+000A" in capsys.readouterr().err
    assert not batch.calls() and not (batch.folder / "runs").exists()


def test_a_refusal_of_sbatch_is_reported(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    batch.does("sbatch", "echo 'Invalid partition' >&2; exit 1")
    assert main(["submit", "slurm", *WORDS]) == 2
    assert capsys.readouterr().err.endswith("failed (exit code 1): Invalid partition\n")


def test_a_setting_that_the_run_would_refuse_is_not_submitted(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "slurm", *WORDS, "--set", "optimizer.lr=1"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("hpctrain: error: unknown setting optimizer.lr: ")
    assert not batch.calls() and not (batch.folder / "runs").exists()
