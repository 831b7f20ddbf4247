"""Trainings of libraries as runs: they stop with exit code 75, and resumed they equal uninterrupted ones."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Finished, JobStarter

from hpctrain.train.receipt.write import read_receipt

PROGRAMS = Path(__file__).resolve().parent / "programs"
OFFLINE = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": None, "MASTER_PORT": None}
NAMES = ["transformers_job", "accelerate_job"]
pytestmark = [pytest.mark.ecosystem, pytest.mark.limit(600)]


def run(launch: JobStarter, name: str, *words: str | Path, code: int = 0, ranks: int = 2, **environ: str) -> Any:
    """Run a program on ranks; return the facts that it has printed, None if it has printed none."""
    program = PROGRAMS / f"{name}.py"
    job: Finished = launch(ranks, "-m", "hpctrain", "run", program, *words, timeout=150, env={**OFFLINE, **environ})
    assert job.returncode == code, str(job)
    lines = [line for line in job.stdout.splitlines() if line.startswith("FACTS ")]
    return json.loads(lines[0].removeprefix("FACTS ")) if lines else None


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(each.stem.removeprefix("step_")) for each in (folder / "checkpoints").iterdir())


def equal(whole: Any, last: Any) -> bool:
    """Return whether the last part has the facts of the whole training; its losses and epochs are its own."""
    if "losses" in whole:
        losses = {step: loss for step, loss in whole["losses"].items() if step in last["losses"]}
        whole = {**whole, "losses": losses, "ended": whole["ended"][-len(last["ended"]) :]}
    return bool(whole == last)


@pytest.mark.parametrize("name", NAMES)
def test_training_in_parts_equals_the_whole(launch: JobStarter, tmp_path: Path, name: str) -> None:
    facts = run(launch, name, tmp_path, "--parts")
    assert equal(facts["whole"], facts["parts"])
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert [row["step"] for row in parts] == list(range(1, 11))
    assert [row["loss"] for row in parts] == [row["loss"] for row in whole]
    attempts = read_receipt(tmp_path / "parts")["attempts"]
    assert {one["status"] for one in attempts[:-1]} == {"stopped"} and attempts[-1]["status"] == "finished"
    assert not list((tmp_path / "parts").glob("**/*.safetensors")) + list((tmp_path / "parts").glob("**/*.pt"))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stop_at", [4, 5, 7])
def test_killed_processes_resume_as_if_uninterrupted(
    launch: JobStarter, tmp_path: Path, name: str, stop_at: int
) -> None:
    environ = {"ARGUMENTS": '{"logging_steps": 3, "eval_strategy": "epoch"}'}
    whole = run(launch, name, tmp_path / "whole", **environ)
    assert run(launch, name, tmp_path / "parts", code=75, STOP_AT=str(stop_at), **environ) is None
    assert checkpoints(tmp_path / "parts") == [stop_at]
    assert equal(whole, run(launch, name, tmp_path / "parts", **environ))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_walltime_and_stop_file_end_a_training(launch: JobStarter, tmp_path: Path, name: str) -> None:
    run(launch, name, tmp_path / "a", code=75, OPTIONS='{"walltime": "10m", "margin": 601}')
    assert [row["step"] for row in rows(tmp_path / "a")] == [1]
    run(launch, name, tmp_path / "b", code=75, TOUCH="STOP")
    assert "STOP" in read_receipt(tmp_path / "b")["attempts"][0]["reason"]
    run(launch, name, tmp_path / "b")
    assert [row["step"] for row in rows(tmp_path / "b")] == list(range(1, 11))


@pytest.mark.long
def test_fsdp2_of_accelerate_resumes(launch: JobStarter, tmp_path: Path) -> None:
    facts = run(launch, "accelerate_job", tmp_path, "--parts", FSDP="1")
    assert equal(facts["whole"], facts["parts"])


@pytest.mark.long
def test_trainer_saves_at_its_save_steps_and_a_finished_training_trains_no_further(
    launch: JobStarter, tmp_path: Path
) -> None:
    arguments = '{"save_steps": 3, "max_steps": 7}'
    whole = run(launch, "transformers_job", tmp_path, ARGUMENTS=arguments)
    assert checkpoints(tmp_path) == [6, 7]  # save_total_limit is 2
    again = run(launch, "transformers_job", tmp_path, ARGUMENTS=arguments)
    assert again["weights"] == whole["weights"] and len(rows(tmp_path)) == 7
    assert os.listdir(tmp_path / "checkpoints") and not (tmp_path / "trainer" / "checkpoint-6").exists()


@pytest.mark.long
def test_folder_of_another_program_is_refused(launch: JobStarter, tmp_path: Path) -> None:
    run(launch, "accelerate_job", tmp_path / "a")
    program = PROGRAMS / "transformers_job.py"
    job = launch(2, "-m", "hpctrain", "run", program, tmp_path / "a", timeout=150, env=OFFLINE)
    assert job.returncode == 2 and "was not written by a Trainer of Transformers: take another folder" in job.stderr


@pytest.mark.long
def test_wrong_uses_of_the_trainer_have_one_clear_error(launch: JobStarter, tmp_path: Path) -> None:
    facts = run(launch, "transformers_errors", tmp_path, ranks=0)
    expected = {
        "two": "a training is one run in one folder; remove one of them",
        "every": "TransformersCallback(every=...): set save_steps or save_strategy in TrainingArguments",
        "unknown": "did you mean every",
        "best": 'TransformersCallback(keep_best="eval_loss") keeps the best checkpoint; remove it',
        "path": "resume_from_checkpoint='elsewhere', and TransformersCallback: the run resumes from its folder by",
        "added": "call TransformersCallback(...).attach(trainer)",
        "must": "holds no checkpoint to resume from, and resume is 'must'",
    }
    assert set(expected) == set(facts["errors"])
    assert [(name, text) for name, text in facts["errors"].items() if expected[name] not in text] == []
    assert not facts["written"] and facts["steps"] == 2
    assert facts["files"] == ["checkpoints", "metrics.jsonl", "run.json"]


@pytest.mark.long
@pytest.mark.parametrize("name, steps", [("transformers", 8), ("accelerate", 12)])
def test_example_of_the_page_runs(launch: JobStarter, tmp_path: Path, name: str, steps: int) -> None:
    page = (PROGRAMS.parents[2] / "docs" / "integrations.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    example = tmp_path / "example.py"
    example.write_text(next(each for each in blocks if f"hpctrain.integrations.{name}" in each))
    job = launch(2, "-m", "hpctrain", "run", example, timeout=150, env=OFFLINE, cwd=tmp_path)
    assert job.returncode == 0, str(job)
    (folder,) = (each.parent for each in (tmp_path / "runs").glob("*/run.json"))
    assert read_receipt(folder)["status"] == "finished" and len(rows(folder)) == steps
    assert len(checkpoints(folder)) == 2
