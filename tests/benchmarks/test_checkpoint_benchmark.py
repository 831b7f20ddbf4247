"""The whole checkpoint benchmark at small size on two ranks: its output, checks and result files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmark_helpers import FOLDER, PROVENANCE
from checkpoint_candidates import READERS, WRITERS, Name, load_from, written_by
from support.jobs import JobStarter

PROGRAM = FOLDER / "checkpoint.py"
SMALL = ("--size", "2MiB", "--rounds", "2")
WITHOUT = f"{Name.TORCH},{Name.DCP}"
WHOLE = pytest.mark.benchmark


def read(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    content: dict[str, Any] = json.loads(path.read_text())
    content["name"] = path.stem
    return content


@WHOLE
@pytest.mark.limit(400)
def test_all_candidates_are_measured_in_one_run(launch: JobStarter, tmp_path: Path) -> None:
    files = tmp_path / "files"
    for ranks in (1, 4):
        done = launch(ranks, PROGRAM, "--size", "2MiB", "--only-write", "--folder", files, timeout=120)
        assert done.returncode == 0, done
    done = launch(2, PROGRAM, *SMALL, "--folder", files, "--out", tmp_path / "results", timeout=300)
    assert done.returncode == 0, done
    found = read(tmp_path / "results")
    assert re.fullmatch("checkpoint-np2-(mpich|openmpi)", found["name"])
    names = {kind: [row["candidate"] for row in found["rows"] if row["kind"] == kind] for kind in ("write", "read")}
    assert [name for name in names["write"] if "mpiio" not in name] == [name for name in WRITERS if name != Name.MPIIO]
    assert names["read"] == [*READERS[:3], load_from(1), load_from(4), *READERS[3:]]
    medians = {row["candidate"]: row["median"] for row in found["rows"]}
    for row in found["rows"]:
        assert 0 < row["min"] <= row["median"] <= row["max"] and row["repeats"] == 2
        assert row["rate"] == pytest.approx(found["size"] / row["median"] / 1e9)
    targets = {one["what"]: one["value"] for one in found["targets"]}
    assert targets["write: speed / raw pwrite"] == pytest.approx(medians[Name.RAW] / medians[Name.OURS])
    worst = max(medians[load_from(ranks)] for ranks in (1, 4)) / medians[Name.LOAD]
    (other_ranks,) = [value for what, value in targets.items() if what.startswith("load: time")]
    assert other_ranks == pytest.approx(worst)
    assert {Name.FOREGROUND, Name.ASYNC} <= {row["candidate"] for row in found["background"]}
    assert PROVENANCE <= found["provenance"].keys()
    assert done.stdout.index("target") < done.stdout.index("times as fast") < done.stdout.index("memory +MiB")
    assert (tmp_path / "results" / f"{found['name']}.png").stat().st_size > 1000


WRONG_FILE = """
import checkpoint_candidates as ours
right_save = ours.save
def wrong(work, path, **options):
    with __import__("torch").no_grad():
        weight = next(work.state.model.parameters())
        weight[0, 0] += 1
        right_save(work, path, **options)
        weight[0, 0] -= 1
ours.save = wrong
"""
WRONG_LOAD = """
from hpctrain import checkpoint as package
right_load = package.load
def wrong(path, *, model, comm, **options):
    found = right_load(path, model=model, comm=comm, **options)
    if comm.rank == 1:
        model.norm.bias.data[3] += 1
    return found
package.load = wrong
"""


# The benchmark unchanged, one part of it in a temporary folder; then twice with a fault injected.
THREE = f"""
import sys
sys.path.insert(0, {str(PROGRAM.parent)!r})
import hpctrain, checkpoint
job = hpctrain.init(device="cpu")
hpctrain.init = lambda **options: job
run = lambda words: checkpoint.main(checkpoint.parse, checkpoint.run, words)
folder, small = sys.argv[1], {list(SMALL)!r}
codes = [run([*small, "--parts", "write", "--without", {WITHOUT!r}, "--out", folder + "/parts"])]
small += ["--folder", folder + "/files", "--out", folder + "/wrong"]
{WRONG_FILE}
codes.append(run([*small, "--parts", "write"]))
ours.save = right_save
{WRONG_LOAD}
codes.append(run([*small, "--parts", "read"]))
assert codes == [0, 1, 1], codes
"""


@WHOLE
@pytest.mark.long
@pytest.mark.limit(400)
def test_parts_run_separately_and_wrong_values_end_the_benchmark(launch: JobStarter, tmp_path: Path) -> None:
    before = set(PROGRAM.parent.iterdir())
    done = launch(2, THREE, tmp_path, timeout=300)
    assert done.returncode == 0, done
    assert "hpctrain: model/embedding.token.weight is not what was saved (rank 0)" in done.stderr
    assert "hpctrain load: model/norm.bias is not what was saved (rank 1)" in done.stderr
    assert not (tmp_path / "wrong").exists()
    found = read(tmp_path / "parts")
    assert {row["candidate"] for row in found["rows"]} >= {Name.RAW, Name.OURS}
    assert {row["kind"] for row in found["rows"]} == {"write"} and not found["background"]
    assert not {Name.TORCH, Name.DCP} & {row["candidate"] for row in found["rows"]}
    assert {path for path in PROGRAM.parent.iterdir() if "tmp" in path.name} <= before, "a temporary folder stays"


@WHOLE
@pytest.mark.limit(200)
def test_one_process_is_measured_and_a_bad_folder_is_one_line(launch: JobStarter, tmp_path: Path) -> None:
    words = ["--size", "1MiB", "--rounds", "1", "--out", tmp_path]
    done = launch(0, PROGRAM, *words, "--json", "--parts", "write,read")
    assert done.returncode == 0, done
    assert {row["candidate"] for row in json.loads(done.stdout)["rows"]} >= {"hpctrain", "torch DCP", "hpctrain load"}
    (tmp_path / "file").write_text("")
    done = launch(2, PROGRAM, *words, "--folder", tmp_path / "file")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert "file: files cannot be written there: File exists" in done.stderr


def test_files_are_identified_by_their_writers(tmp_path: Path) -> None:
    for name in ("from-4.h5", "from-1.h5", "raw", "hpctrain.h5"):
        (tmp_path / name).touch()
    assert written_by(tmp_path) == [1, 4]
