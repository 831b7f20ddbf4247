"""Benchmark of split blocks at small size on two ranks: its output, checks and result files."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tensor
from splitting.names import ALONE, CANDIDATES, DTENSOR, MESSAGES, OURS
from support.jobs import JobStarter
from support.programs import be_alone, in_one_job

from hpctrain.errors import UsageError

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAM = FOLDER / "tensor.py"
WHOLE = pytest.mark.benchmark


@WHOLE
@pytest.mark.limit(400)
def test_all_candidates_are_timed_and_reductions_are_counted(launch: JobStarter, tmp_path: Path) -> None:
    """Run in one job, after a run without torch that writes its result as JSON."""
    quick, without = ("--quick", "--rounds", "2", "--results"), ("--json", "--without", "torch-dtensor,alone")
    done = launch(2, in_one_job(PROGRAM, (*quick, tmp_path / "json", *without), (*quick, tmp_path)), timeout=300)
    assert done.returncode == 0, done
    check_json(json.JSONDecoder().raw_decode(done.stdout)[0])
    (path,) = tmp_path.glob("tensor-np2-*.json")
    found = json.loads(path.read_text())
    assert set(found["seconds"]) == {*CANDIDATES, MESSAGES} and list(found["optimizers"]) == list(CANDIDATES)
    for time in found["seconds"].values():
        assert 0 < time["min"] <= time["median"] <= time["max"] and time["repeats"] == 2
    blocks = found["task"]["blocks"]
    assert found["reductions"] == {"forward": blocks, "backward": blocks, "step": 2 * blocks}
    drift = found["largest_relative_loss_differences"]
    assert set(drift) == {OURS, DTENSOR} and max(drift.values()) < 1e-5
    medians = {name: time["median"] for name, time in found["seconds"].items()}
    values = [one["value"] for one in found["targets"]]
    assert values[0] == pytest.approx((medians[ALONE] / 2 + medians[MESSAGES]) / medians[OURS])
    assert values[1] == pytest.approx(medians[DTENSOR] / medians[OURS]) and values[2:] == [blocks, blocks]
    assert {"commit", "processor", "command", "mpi", "torch"} <= found["provenance"].keys()
    assert done.stdout.index("target") < done.stdout.index("median ms")
    assert path.with_suffix(".svg").exists()


def check_json(printed: dict[str, Any]) -> None:
    assert set(printed["seconds"]) == {OURS, MESSAGES} and printed["quick"]
    assert printed["largest_relative_loss_differences"] == {}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--rounds", "1"), "1 rounds: at least 2 are needed"),
        (("--without", "gloo"), "no candidate is called 'gloo': known are alone, torch-dtensor"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        tensor.parse(arguments)


def test_one_rank_is_refused(
    comm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be_alone(monkeypatch, comm)
    assert tensor.main(["--quick"]) == 2
    assert "one rank shares nothing" in capsys.readouterr().err


def test_variables_of_make_become_valid_options_of_the_program() -> None:
    command = ["make", "--no-print-directory", "-C", str(FOLDER), "-n", "tensor", "NP=3", "ROUNDS=5", "WITHOUT=alone"]
    line = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    program = re.search(r'PROGRAM="benchmarks/tensor.py (.*)" NP=3 MPI=mpich', line)
    assert program
    words = subprocess.run(["sh", "-c", f"printf '%s\\n' {program[1]}"], capture_output=True, text=True).stdout
    args = tensor.parse(words.splitlines())
    assert args.rounds == 5 and args.names == [OURS, DTENSOR]
