"""Benchmark of sharded steps at small size on two ranks: its output, checks and result files."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import fsdp_step
import pytest
from sharding import memory
from sharding.names import (
    ACTIVATIONS,
    ALONE,
    CANDIDATES,
    DDP,
    FSDP,
    GRADIENTS,
    KINDS,
    PARAMETERS,
    PASSING,
    REST,
    STATES,
    TORCH_DDP,
    TORCH_FSDP,
    ZERO1,
    ZERO2,
)
from sharding.task import SMALL, Task
from support.jobs import JobStarter
from support.programs import be_alone, in_one_job

from hpctrain.errors import UsageError

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAM = FOLDER / "fsdp_step.py"
BYTES = Task(SMALL).parameter_bytes
WITHOUT = ",".join(word for word, name in CANDIDATES.items() if name not in (DDP, FSDP))
JSON = ("--quick", "--rounds", "2", "--json", "--without", WITHOUT, "--results")
WHOLE = pytest.mark.benchmark


@WHOLE
@pytest.mark.limit(400)
def test_all_candidates_are_timed_in_one_run_and_weighed_in_separate_ones(launch: JobStarter, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    for word in ("fsdp", "torch-fsdp"):
        done = launch(2, PROGRAM, "--quick", "--memory", word, "--folder", kept, timeout=120)
        assert done.returncode == 0, done
    # Memory held does not depend on earlier candidates: the others share a job, which loads torch once.
    others = [word for word in CANDIDATES if word not in ("fsdp", "torch-fsdp")]
    calls = [("--quick", "--memory", word, "--folder", kept) for word in others]
    done = launch(2, in_one_job(PROGRAM, *calls, (*JSON, tmp_path / "json")), timeout=300)
    assert done.returncode == 0, done
    check_json(json.loads(done.stdout), tmp_path / "json")
    done = launch(2, PROGRAM, "--quick", "--rounds", "2", "--folder", kept, "--results", tmp_path / "r", timeout=120)
    assert done.returncode == 0, done
    (path,) = (tmp_path / "r").glob("fsdp-step-np2-*.json")
    found = json.loads(path.read_text())
    check_times(found)
    check_memory(found["memory"])
    assert {"commit", "processor", "command", "mpi", "torch"} <= found["provenance"].keys()
    assert done.stdout.index("target") < done.stdout.index("median ms") < done.stdout.index("MB of the node")
    assert "each treats the others as ranks of other nodes" in done.stdout
    assert path.with_suffix(".png").stat().st_size > 1000 and path.with_suffix(".svg").exists()


def check_times(found: dict[str, Any]) -> None:
    names = list(CANDIDATES.values())
    assert list(found["seconds"]) == list(found["memory"]) == list(found["optimizers"]) == names
    for time in found["seconds"].values():
        assert 0 < time["min"] <= time["median"] <= time["max"] and time["repeats"] == 2
    drift = found["largest_relative_loss_differences"]
    assert set(drift) == {*names} - {ALONE, TORCH_DDP} and max(drift.values()) < 1e-5
    targets = {one["what"]: one["value"] for one in found["targets"]}
    ratio = found["seconds"][FSDP]["median"] / found["seconds"][DDP]["median"]
    assert targets[f"step: {FSDP} / {DDP} (aim: below 1)"] == pytest.approx(ratio)
    assert len(targets) == 6


def check_memory(found: dict[str, Any]) -> None:
    for one in found.values():
        assert all(one["node"][kind] <= one["most"][kind]["node"] for kind in KINDS)
        assert sum(one["node"][kind] for kind in (*KINDS, REST)) == pytest.approx(one["node"]["total"])
        assert one["most"][ACTIVATIONS]["rank"] > 0
    for name in (ALONE, DDP, TORCH_DDP):
        most = found[name]["most"]
        assert most[PARAMETERS] == {"node": 2 * BYTES, "rank": BYTES}
        assert most[STATES]["rank"] == pytest.approx(2 * BYTES, rel=0.01)
    assert found[ALONE]["most"][GRADIENTS]["rank"] == BYTES
    assert found[TORCH_DDP]["most"][GRADIENTS]["rank"] >= 2 * BYTES  # its buckets are copies
    for name in (ZERO1, ZERO2, FSDP):
        assert found[name]["most"][PARAMETERS]["node"] == pytest.approx(BYTES, rel=0.01)
    for name in (ZERO1, ZERO2, FSDP, PASSING, TORCH_FSDP):
        assert sum(found[name]["moments"]) == pytest.approx(2 * BYTES, rel=0.001)
    for name in (ZERO1, ZERO2, FSDP, PASSING):
        assert sum(found[name]["moments"]) == 2 * BYTES
    unit = found[PASSING]["facts"]["largest_unit"]
    for name in (PASSING, TORCH_FSDP):
        most = found[name]["most"][PARAMETERS]["rank"]
        own = BYTES - 2 * unit  # the model's own unit: at this size it is not negligible
        assert BYTES / 2 + unit <= most <= 1.02 * (BYTES / 2 + unit + own)


def check_json(printed: dict[str, Any], folder: Path) -> None:
    (path,) = folder.glob("*.json")
    assert printed == json.loads(path.read_text())
    assert list(printed["seconds"]) == [DDP, FSDP] and printed["memory"] == {} and printed["quick"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--rounds", "1"), "1 rounds: at least 2 are needed"),
        (("--batch", "0"), "--batch 0: at least 1 sequence is needed"),
        (("--memory", "fsdp"), "--memory needs --folder"),
        (("--memory", "fsdp2", "--folder", "x"), "no candidate is called 'fsdp2': known are alone, ddp, zero1"),
        (("--without", "gloo"), "no candidate is called 'gloo'"),
        (("--without", ",".join(CANDIDATES)), "--without excludes every candidate"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        fsdp_step.parse(arguments)


def test_one_rank_is_refused(
    comm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be_alone(monkeypatch, comm)
    assert fsdp_step.main(["--quick"]) == 2
    assert "one rank shares nothing" in capsys.readouterr().err


@pytest.mark.parametrize("key, value", [("ranks", 4), ("parameters", 8), ("batch", 2)])
def test_memory_of_another_model_or_job_is_not_reported(tmp_path: Path, key: str, value: int) -> None:
    facts = {"ranks": 2, "parameters": BYTES, "batch": 1}
    memory.save(tmp_path, {"candidate": FSDP, "facts": facts})
    assert list(memory.load(tmp_path, 2, Task(SMALL))) == [FSDP] and memory.load(None, 2, Task(SMALL)) == {}
    memory.save(tmp_path, {"candidate": FSDP, "facts": {**facts, key: value}})
    with pytest.raises(UsageError, match=f"fsdp.json was measured with {key} = {value}, not"):
        memory.load(tmp_path, 2, Task(SMALL))


def test_make_measures_memory_in_one_job_per_candidate_and_then_times_all() -> None:
    command = ["make", "--no-print-directory", "-C", str(FOLDER), "-n", "fsdp-step"]
    variables = ["NP=3", "BATCH=4", "ROUNDS=5", "WITHOUT=alone,torch-fsdp"]
    script = subprocess.run([*command, *variables], capture_output=True, text=True, check=True).stdout
    script = re.sub(r"\bmake --no-print-directory -C \.\. _ranks", "show", script)
    show = """show() { for word; do export "$word"; done; eval "printf '%s|' $NP $PROGRAM"; echo; }\n"""
    done = subprocess.run(["sh", "-c", show + script], capture_output=True, text=True, cwd=FOLDER)
    *weighed, timed = [line.rstrip("|").split("|") for line in done.stdout.splitlines()]
    assert all(line[:2] == ["3", "benchmarks/fsdp_step.py"] for line in (*weighed, timed)), done
    options = [fsdp_step.parse(line[2:]) for line in weighed]
    assert [one.names[0] for one in options] == [DDP, ZERO1, ZERO2, FSDP, PASSING, TORCH_DDP]
    args = fsdp_step.parse(timed[2:])
    assert (args.rounds, args.batch, args.without, args.memory) == (5, 4, [ALONE, TORCH_FSDP], None)
    assert {one.folder for one in (*options, args)} == {args.folder} and not args.folder.exists()  # deleted again


def test_make_knows_all_candidates() -> None:
    (line,) = re.findall(r"^SHARERS := (.*)$", (FOLDER / "Makefile").read_text(), re.M)
    assert line.split() == list(CANDIDATES)
