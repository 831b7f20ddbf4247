"""The whole communication benchmark at small size on two ranks: its output, checks and result files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmark_helpers import FOLDER, PROVENANCE
from communication_figures import FACTORS
from support.jobs import JobStarter
from support.programs import codes_of, in_one_job

WHOLE = pytest.mark.benchmark
PROGRAM = FOLDER / "communication.py"
OTHERS = ("reduce_scatter", "all_gather", "broadcast", "pingpong")
SMALL = ("--sizes", "4,64K", "--rounds", "3")


def read(folder: Path, pattern: str) -> dict[str, Any]:
    (path,) = folder.glob(f"{pattern}.json")
    content: dict[str, Any] = json.loads(path.read_text())
    content["name"] = path.stem
    return content


@WHOLE
def test_all_reduce_measures_all_candidates_in_one_run(launch: JobStarter, tmp_path: Path) -> None:
    done = launch(2, PROGRAM, "all_reduce", *SMALL, "--algorithms", "auto,ring", "--out", tmp_path)
    assert done.returncode == 0, done
    found = read(tmp_path, "*")
    assert re.fullmatch("all-reduce-np2-(mpich|openmpi)", found["name"])
    names = ["hpctrain", "hpctrain ring", "hpctrain outside", "hpctrain bfloat16", "mpi", "gloo"]
    assert [(row["size"], row["candidate"]) for row in found["rows"]] == [
        (size, name) for size in (4, 65536) for name in names
    ]
    for row in found["rows"]:
        assert 0 < row["min"] <= row["median"] <= row["p95"]
        assert row["algbw"] == pytest.approx(row["bytes"] / row["median"] / 1e9)
        assert row["repeats"] == (1 if row["candidate"] == "gloo" else 3)
    medians = {(row["size"], row["candidate"]): row["median"] for row in found["rows"]}
    assert found["ratios"]["mpi"]["65536"] == pytest.approx(medians[65536, "mpi"] / medians[65536, "hpctrain"])
    assert PROVENANCE <= found["provenance"].keys()
    assert done.stdout.index("times as fast") < done.stdout.index("target") < done.stdout.index("algbw")
    assert (tmp_path / f"{found['name']}.png").stat().st_size > 1000


@WHOLE
@pytest.mark.limit(400)
def test_the_other_operations_run(launch: JobStarter, tmp_path: Path) -> None:
    """Run them one after the other in one job, whose ranks load torch once."""
    calls = [
        *((operation, "--sizes", "4,33M", "--rounds", "1") for operation in OTHERS),
        ("overlap", "--sizes", "64K", "--rounds", "2"),
        ("all_reduce", *SMALL, "--dtype", "bfloat16"),
    ]
    done = launch(2, in_one_job(PROGRAM, *((*call, "--out", tmp_path) for call in calls)), timeout=300)
    assert done.returncode == 0, done
    for operation in OTHERS:
        check_operation(operation, read(tmp_path, f"{operation.replace('_', '-')}-np2-*"))
    check_overlap(read(tmp_path, "overlap-np2-*"))
    check_sixteen_bit_floats(read(tmp_path, "all-reduce-np2-*"))


def check_operation(operation: str, found: dict[str, Any]) -> None:
    names = {row["candidate"] for row in found["rows"] if row["size"] < 10}
    common = {"hpctrain common"} if operation == "all_gather" else set()
    assert names == {"hpctrain", "hpctrain outside", "mpi", "gloo", *common}
    assert {row["candidate"] for row in found["rows"] if row["size"] > 10} == {*names, "mpi 16 MiB"}
    assert not found["left_out"]
    for row in found["rows"]:
        assert row["busbw"] == pytest.approx(row["algbw"] * FACTORS[operation](2))


def check_overlap(found: dict[str, Any]) -> None:
    assert [row["candidate"] for row in found["rows"]] == ["hpctrain", "hpctrain outside", "mpi", "gloo"]
    for row in found["rows"]:
        hidden = 100 * (1 - (row["median"] - row["compute"]) / row["communication"])
        assert row["overlap"] == pytest.approx(max(hidden, 0))


def check_sixteen_bit_floats(found: dict[str, Any]) -> None:
    names = {row["candidate"] for row in found["rows"]}
    assert {"hpctrain", "hpctrain float32"} <= names
    assert "mpi" in names or "knows no torch.bfloat16" in found["left_out"]["mpi"]
    assert found["name"].endswith("-bfloat16")


WRONG = """
import sys
sys.path.insert(0, {folder!r})
from hpctrain.comm.communicator import Communicator
right = Communicator.all_reduce
def wrong(self, tensor, *arguments, **options):
    done = right(self, tensor, *arguments, **options)
    if self.rank == 1 and tensor.numel() > 1000:
        tensor[999] += 1
    return done
Communicator.all_reduce = wrong
import communication
sys.argv[1:] = ["all_reduce", "--sizes", "4,64K", "--out", {results!r}]
sys.exit(communication.main(communication.parse, communication.run))
"""


@WHOLE
def test_a_wrong_result_ends_the_benchmark(launch: JobStarter, tmp_path: Path) -> None:
    done = launch(2, WRONG.format(folder=str(PROGRAM.parent), results=str(tmp_path)))
    assert done.returncode == 1
    assert "wrong result: all_reduce of 16384 elements of torch.float32 by hpctrain differs" in done.stderr
    assert "on rank 1" in done.stderr
    assert not list(tmp_path.glob("*.json"))


@WHOLE
def test_bad_input_gives_one_line_and_an_unknown_algorithm_is_named(launch: JobStarter, tmp_path: Path) -> None:
    """The first call is refused on all ranks before any measurement, the second by the measured function."""
    calls = ["pingpong"], ["all_reduce", *SMALL, "--algorithms", "rnig"]
    done = launch(3, in_one_job(PROGRAM, *((*call, "--out", tmp_path / "none") for call in calls)))
    refused, *_ = [line for line in done.stderr.splitlines() if "hpctrain" in line]
    assert refused == "hpctrain: error: pingpong is between 2 ranks, not 3: set NP=2"
    assert done.stderr.count("hpctrain: error: pingpong") == 1, done
    assert "unknown algorithm 'rnig'" in done.stderr and "ring" in done.stderr
    assert codes_of(done.stderr) == [2, 1] and not (tmp_path / "none").exists()
