"""Benchmark of pipelines at small size on two ranks: its output, checks and result files."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pipeline
import pytest
from piping.names import ALONE, CANDIDATES, FEW_ONE_F_ONE_B, FEW_ZERO_BUBBLE, GPIPE, ONE_F_ONE_B, OURS, TORCH_GPIPE
from support.jobs import JobStarter
from support.programs import be_alone, in_one_job

from hpctrain.errors import UsageError

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAM = FOLDER / "pipeline.py"
WITHOUT = "torch-gpipe,torch-1f1b,alone,naive,interleaved,1f1b-4,zb-h1-4"
WHOLE = pytest.mark.benchmark


@WHOLE
@pytest.mark.limit(400)
def test_all_candidates_are_timed_and_compared_with_an_ideal(launch: JobStarter, tmp_path: Path) -> None:
    """Run in one job, after a run without torch and others that writes its result as JSON."""
    quick, without = ("--quick", "--rounds", "2", "--results"), ("--json", "--without", WITHOUT)
    done = launch(2, in_one_job(PROGRAM, (*quick, tmp_path / "json", *without), (*quick, tmp_path)), timeout=300)
    assert done.returncode == 0, done
    check_json(json.JSONDecoder().raw_decode(done.stdout)[0])
    (path,) = tmp_path.glob("pipeline-np2-*.json")
    found = json.loads(path.read_text())
    assert list(found["seconds"]) == list(CANDIDATES) and list(found["schedules"]) == list(OURS)
    for time in found["seconds"].values():
        assert 0 < time["min"] <= time["median"] <= time["max"] and time["repeats"] == 2
    for name, one in found["schedules"].items():
        assert one["measured"] == pytest.approx(found["seconds"][name]["median"])
        assert one["efficiency"] == pytest.approx(one["ideal"] / one["measured"]) and 0 < one["played"] <= 1
        splits = "zb-h1" in name
        assert set(one["medians"]) == ({"forward", "input", "weight"} if splits else {"forward", "backward"})
        for share in one["shares"]:
            assert 0 < share["passes"] < 1 and 0 <= share["rest"] < 1
            assert sum(share.values()) == pytest.approx(1, abs=0.2)  # medians, each of a different step
    assert found["schedules"][GPIPE]["bubble"]["formula"] == pytest.approx(1 / 9)
    assert found["schedules"][FEW_ONE_F_ONE_B]["bubble"]["formula"] == pytest.approx(1 / 5)
    drift = found["relative_differences_from_one_rank"]
    assert set(drift) == set(CANDIDATES) and max(max(one.values()) for one in drift.values()) < 1e-5
    values = {one["what"]: one["value"] for one in found["targets"]}
    ratio = found["seconds"][TORCH_GPIPE]["median"] / found["seconds"][GPIPE]["median"]
    assert values[f"step: {TORCH_GPIPE} / {GPIPE}"] == pytest.approx(ratio) and len(values) == 7
    assert {"commit", "processor", "command", "mpi", "torch"} <= found["provenance"].keys()
    assert found["provenance"]["threads_per_rank"] == 1
    assert done.stdout.index("target") < done.stdout.index("median ms") < done.stdout.index("ideal ms")
    for end in (".svg", "-1f1b.svg", "-zb-h1.svg"):
        assert path.with_name(path.stem + end).exists()


def check_json(printed: dict[str, Any]) -> None:
    assert list(printed["seconds"]) == [GPIPE, ONE_F_ONE_B, "hpctrain zb-h1"] and printed["quick"]
    assert list(printed["cuts"]) == ["stages"] and len(printed["targets"]) == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--rounds", "1"), "1 rounds: at least 2 are needed"),
        (("--without", "gloo"), "no candidate is called 'gloo': known are alone, naive, gpipe, 1f1b, interleaved"),
        (("--without", ",".join(pipeline.WORDS)), "every candidate is left out"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        pipeline.parse(arguments)


def test_one_rank_is_refused(
    comm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be_alone(monkeypatch, comm)
    assert pipeline.main(["--quick"]) == 2
    assert "one rank is no pipeline" in capsys.readouterr().err


def test_variables_of_make_become_valid_options_of_the_program() -> None:
    without = "WITHOUT=naive,interleaved,torch-gpipe,torch-1f1b,gpipe,1f1b,zb-h1"
    command = ["make", "--no-print-directory", "-C", str(FOLDER), "-n", "pipeline", "NP=3", "ROUNDS=5", without]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout.replace("\\\n", "")
    program = re.search(r'PROGRAM="benchmarks/pipeline.py (.*?)" +NP=3 MPI=mpich', text)
    assert program
    words = subprocess.run(["sh", "-c", f"printf '%s\\n' {program[1]}"], capture_output=True, text=True).stdout
    args = pipeline.parse(words.splitlines())
    assert args.rounds == 5 and args.names == [ALONE, FEW_ONE_F_ONE_B, FEW_ZERO_BUBBLE]
