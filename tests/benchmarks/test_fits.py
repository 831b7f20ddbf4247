"""Benchmark of a model that fits into memory only with FSDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fits
import pytest
from benchmark_helpers import FOLDER
from fits import Outcome, fell, reason_of
from support.jobs import JobStarter

PROGRAM = FOLDER / "fits.py"


@pytest.mark.benchmark
@pytest.mark.limit(400)
def test_ddp_does_not_fit_and_fsdp_does(launch: JobStarter, tmp_path: Path) -> None:
    done = launch(0, PROGRAM, "--quick", "--out", tmp_path, timeout=300)
    assert done.returncode == 0, done
    found = json.loads((tmp_path / "fits-np4.json").read_text())
    free, ddp, fsdp = (found["runs"][name] for name in ("DDP, no limit", "DDP", "FSDP"))
    assert found["shown"] and ddp["trained"] is None and ddp["code"] != 0 and ddp["error"] in done.stdout
    assert fsdp["trained"]["address_space"] < found["budget_bytes"] < free["trained"]["address_space"]
    assert fsdp["trained"]["losses"][0] == pytest.approx(free["trained"]["losses"][0], rel=1e-5)
    assert len(fsdp["trained"]["losses"]) == 5 and fsdp["trained"]["losses"][-1] < fsdp["trained"]["losses"][0]
    assert "its loss falls in every step: yes" in done.stdout


@pytest.mark.parametrize("fitting, code, verdict", [((), 1, "no"), (("ddp", "fsdp"), 1, "no"), (("fsdp",), 0, "yes")])
def test_a_limit_is_a_proof_only_if_ddp_fails_and_fsdp_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fitting: tuple[str, ...], code: int, verdict: str
) -> None:
    trained = Outcome({"losses": [3.0, 2.0], "address_space": 10**7, "resident": 10**7}, 0, "")

    def play(args: Any, data: str, budget: int | None) -> Outcome:
        return trained if budget is None or data in fitting else Outcome(None, 1, "cannot allocate memory")

    args = fits.parse(["--quick", "--ranks", "2", "--budget", "40MiB", "--out", str(tmp_path)])
    assert fits.compare(args, play) == code
    said = capsys.readouterr().out
    assert f"its loss falls in every step: {verdict}" in said
    assert said.count("ended with exit code 1: cannot allocate memory") == 2 - len(fitting)
    found = json.loads((tmp_path / "fits-np2.json").read_text())
    assert found["shown"] is (code == 0) and found["budget_bytes"] == 40 * 2**20


@pytest.mark.parametrize(
    "losses, code, expected",
    [([3.0, 2.0, 1.0], 0, True), ([3.0, 2.0, 2.5], 0, False), ([3.0, 2.0], 1, False), ([3.0], 0, False)],
)
def test_a_loss_falls_in_every_step_of_a_run_that_ended_well(losses: list[float], code: int, expected: bool) -> None:
    assert fell(Outcome({"losses": losses}, code, "")) is expected
    assert not fell(Outcome(None, code, ""))


def test_the_reason_of_an_end_is_hpctrains_last_message() -> None:
    error = "Traceback\n  File x\nhpctrain: rank 1 of 4 ends the job: Exception: many\nlines\nAbort(1) on node 1\n"
    assert reason_of(error) == "hpctrain: rank 1 of 4 ends the job: Exception: many lines"
    assert reason_of("first\nkilled by signal 9\n\n") == "killed by signal 9"
    assert reason_of("") == "no output"
