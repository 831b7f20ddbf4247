"""The Trainer of Transformers in a job of Slurm: its ranks are killed, the job is requeued and resumes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from batch_jobs import Submitter
from support.jobs import JobStarter

pytestmark = [pytest.mark.slurm, pytest.mark.ecosystem, pytest.mark.long]
PROGRAM = Path(__file__).resolve().parents[1] / "ecosystem" / "programs" / "transformers_job.py"
ARGUMENTS = {"max_steps": 300, "save_steps": 20, "eval_steps": 150}
STEPS = 300


@pytest.mark.limit(400)
def test_a_killed_trainer_is_requeued_and_resumes(submitter: Submitter, launch: JobStarter, tmp_path: Path) -> None:
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.origin is not None
    environ = {"PYTHONPATH": str(Path(found.origin).parents[1]), "HF_HUB_OFFLINE": "1"}
    environ |= {"ARGUMENTS": json.dumps(ARGUMENTS)}
    job = submitter.submit(program=[str(PROGRAM), "run"], **environ)
    job.until_step(50, 150)
    submitter.slurm.command("scancel", "--signal=KILL", f"{job.id}.0")
    assert job.until_over(200) == "COMPLETED"
    assert job.restarts == 1 and job.steps == list(range(1, STEPS + 1))
    assert (job.attempts[1]["first_step"] - 1) % 20 == 0 and job.attempts[1]["first_step"] > 40

    whole = launch(2, "-m", "hpctrain", "run", PROGRAM, tmp_path / "whole", timeout=150, env=environ)
    assert facts(job.output) == facts(whole.stdout)
    assert losses(job.folder) == losses(tmp_path / "whole")


def facts(output: str) -> Any:
    (line,) = [line for line in output.splitlines() if line.startswith("FACTS ")]
    return json.loads(line.removeprefix("FACTS "))


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
