"""Trainings of Lightning that stop or are killed, and start again, equal whole ones: losses, weights and rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import h5py
import pytest
from support.jobs import JobStarter

from hpctrain.errors import UsageError
from hpctrain.train.metrics import read
from hpctrain.train.receipt.write import read_receipt

PROGRAM = Path(__file__).resolve().parent / "programs" / "lightning_job.py"
ENVIRONMENT = {"MASTER_ADDR": None, "MASTER_PORT": None}
pytestmark = [pytest.mark.ecosystem, pytest.mark.limit(400)]


def fits(launch: JobStarter, folder: Path, *cases: str, code: int = 0) -> dict[str, Any]:
    """Run the cases of the program on two ranks, and return what it has found."""
    job = launch(2, "-m", "hpctrain", "run", str(PROGRAM), str(folder), *cases, timeout=300, env=ENVIRONMENT)
    assert job.returncode == code, str(job)
    found = [line.removeprefix("FOUND ") for line in job.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(found[0]) if found else {}  # type: ignore[no-any-return]


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run without those that depend on the time."""
    found = read(folder / "run" / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in ("step_seconds", "unix_time")} for row in found]


def test_stopped_fits_equal_whole_ones(launch: JobStarter, tmp_path: Path) -> None:
    # Batch 8 is followed by a validation, batch 11 is the last of an epoch, 18 is within the second.
    signals = "SIGUSR1@8,SIGTERM@11,SIGUSR1@18"
    found = fits(launch, tmp_path, "plain:plain:0:", "whole:ddp:0:", f"stopped:ddp:0:{signals}")
    assert (found["whole"]["codes"], found["stopped"]["codes"]) == ([0], [75, 75, 75, 0])
    assert len(found["plain"]["losses"]) == 33
    for name in ("whole", "stopped"):
        assert found[name]["losses"] == found["plain"]["losses"], name
        assert found[name]["weights"] == found["plain"]["weights"], name
    expected = rows(tmp_path / "whole")
    assert [row["step"] for row in expected] == list(range(1, 19))
    assert sum("validation.loss" in row for row in expected) == 6
    # The rows of steps 4 and 10 are written before their validations, which the next attempts make.
    for number in (4, 10):
        del expected[number - 1]["validation.loss"]
    assert rows(tmp_path / "stopped") == expected
    receipt = read_receipt(tmp_path / "stopped" / "run")
    assert [attempt["status"] for attempt in receipt["attempts"]] == ["stopped", "stopped", "stopped", "finished"]
    with h5py.File(tmp_path / "stopped" / "run" / "checkpoints" / "step_00000018.h5") as file:
        assert file["model/up.weight"].shape == (16, 8)
        assert "exp_avg" in file["optimizer/down.weight"]


@pytest.mark.long
def test_fits_with_workers_and_with_fsdp2_continue_exactly(launch: JobStarter, tmp_path: Path) -> None:
    found = fits(launch, tmp_path, "a:ddp:1:", "b:ddp:1:SIGUSR1@13,SIGTERM@17", "c:fsdp2:0:", "d:fsdp2:0:SIGUSR1@5")
    assert found["b"] == {**found["a"], "codes": [75, 75, 0]}
    assert found["d"] == {**found["c"], "codes": [75, 0]}


@pytest.mark.long
def test_a_killed_fit_continues_from_its_last_checkpoint(launch: JobStarter, tmp_path: Path) -> None:
    launch(2, "-m", "hpctrain", "run", str(PROGRAM), str(tmp_path), "killed:ddp:0:SIGKILL@15", timeout=300)
    found = fits(launch, tmp_path, "killed:ddp:0:", "whole:ddp:0:")
    assert found["killed"]["weights"] == found["whole"]["weights"]
    assert found["killed"]["losses"] == found["whole"]["losses"][-len(found["killed"]["losses"]) :]
    assert len(found["killed"]["losses"]) < 33
    assert rows(tmp_path / "killed")[6:] == rows(tmp_path / "whole")[6:]


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from hpctrain.integrations.lightning import LightningCallback

    class Lists(BoringModel):
        """Model with training data that is no DataLoader."""

        def train_dataloader(self) -> Any:
            """Return a list of batches."""
            import torch

            return [torch.randn(2, 32)] * 4

    def fit(model: Any, *callbacks: Any, **options: Any) -> None:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_steps": 2}
        trainer = Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path, callbacks=[*callbacks], **quiet)
        trainer.fit(model, **options)

    with pytest.raises(UsageError, match="position cannot be restored; pass a torch DataLoader"):
        fit(Lists(), LightningCallback(tmp_path / "a"))
    with pytest.raises(UsageError, match=r"a training is one run in one folder"):
        fit(BoringModel(), LightningCallback(tmp_path / "a"), LightningCallback(tmp_path / "b"))
    with pytest.raises(UsageError, match="unknown option 'evry' of this run"):
        fit(BoringModel(), LightningCallback(tmp_path / "c", evry=3))
    fit(BoringModel(), LightningCallback(tmp_path / "d"))
    (saved,) = (tmp_path / "checkpoints").glob("*.ckpt")
    with pytest.raises(UsageError, match="resumes from its folder by itself"):
        fit(BoringModel(), LightningCallback(tmp_path / "e"), ckpt_path=saved)


def example(name: str) -> str:
    """Return the example of docs/integrations.md that contains a text."""
    page = (PROGRAM.parents[3] / "docs" / "integrations.md").read_text()
    return next(each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if name in each)


@pytest.mark.long
def test_example_of_the_page_for_the_trainer_runs(launch: JobStarter, tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(example("integrations.lightning"))
    job = launch(2, "-m", "hpctrain", "run", str(program), timeout=200, env=ENVIRONMENT, cwd=tmp_path)
    assert job.returncode == 0, str(job)
    assert len(read(tmp_path / "runs" / "lightning" / "metrics.jsonl")) == 16


@pytest.mark.long
def test_example_of_the_page_for_fabric_resumes_exactly(launch: JobStarter, tmp_path: Path) -> None:
    text = example("lightning.fabric")
    harm = 'run.end_step(loss=loss)\n            if run.step == 10 and "HARM" in os.environ:\n'
    harm += (
        "                os.kill(os.getpid(), 10 + 2 * (fabric.global_rank == 0))  # SIGUSR1, and SIGUSR2 to rank 0\n"
    )
    text = text.replace("run.end_step(loss=loss)\n", harm).replace(
        "import os\n", "import os, signal\nsignal.signal(12, signal.SIG_IGN)\n", 1
    )
    program = tmp_path / "example.py"
    program.write_text(text)
    found = {}
    for folder, attempts in {"whole": ({},), "parts": ({"HARM": "1"}, {})}.items():
        (tmp_path / folder).mkdir()
        for environ in attempts:
            where = {"cwd": tmp_path / folder, "env": {**ENVIRONMENT, **environ}, "timeout": 200}
            job = launch(2, "-m", "hpctrain", "run", str(program), **where)
            assert job.returncode == (75 if environ else 0), str(job)
        rows_of = read(tmp_path / folder / "runs" / "fabric" / "metrics.jsonl")
        found[folder] = [(row["step"], row["loss"]) for row in rows_of]
    assert found["parts"] == found["whole"] and len(found["whole"]) == 24
