"""The asynchronous benchmark at small size on two ranks: its output, checks and result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asynchronous_members import DIGITS, GPT, SILENT, Name
from benchmark_helpers import FOLDER, PROVENANCE
from support.jobs import JobStarter
from support.programs import in_one_job

from hpctrain.data.dataset import write_arrays
from hpctrain.data.pack import pack

PROGRAM = FOLDER / "asynchronous.py"
WHOLE = pytest.mark.benchmark


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return small files of images, with one pattern per class, and of text."""
    folder = tmp_path_factory.mktemp("race")
    draw = np.random.default_rng(0)
    patterns, classes = draw.random((10, 8, 8), dtype=np.float32), draw.integers(0, 10, 200)
    images = patterns[classes] + 0.1 * draw.random((200, 8, 8), dtype=np.float32)
    write_arrays(folder / "d.h5", train=(images[:160], classes[:160]), validation=(images[160:], classes[160:]))
    for number in range(20):
        (folder / f"{number}.txt").write_text("to be or not to be, that is the question; " * 12)
    pack([folder], folder / "c.h5")
    return {"--digits": folder / "d.h5", "--corpus": folder / "c.h5"}


def options(data: dict[str, Path]) -> list[str]:
    return [str(word) for option in data.items() for word in option]


@WHOLE
@pytest.mark.limit(400)
def test_all_members_train_are_timed_and_compared(launch: JobStarter, data: dict[str, Path], tmp_path: Path) -> None:
    """Run in one job, after a run of one part that writes its result as JSON."""
    part = "--task", "digits", "--only", "ddp,server", "--parts", "race", "--json", "--out", tmp_path / "json"
    quick = "--quick", "--rounds", "2", *options(data)
    done = launch(2, in_one_job(PROGRAM, (*quick, *part), (*quick, "--out", tmp_path)), timeout=300)
    assert done.returncode == 0, done
    check_json(json.JSONDecoder().raw_decode(done.stdout)[0], tmp_path / "json")
    (path,) = tmp_path.glob("*.json")
    assert path.name.startswith("asynchronous-np2-")
    found = json.loads(path.read_text())
    assert list(found["tasks"]) == [DIGITS, GPT] and PROVENANCE <= found["provenance"].keys()
    assert found["provenance"]["threads_per_rank"] == 1
    for one in found["tasks"].values():
        assert list(one["members"]) == list(Name)
        assert one["same_bits"]["alike"] and one["same_bits"]["samples"] > 0
        check_race(one)
        assert list(one["exchange"]) == [SILENT, *Name] and list(one["pace"]) == [
            SILENT,
            Name.SERVER,
            Name.SERVER_LOCK,
            Name.HOGWILD,
        ]
        for cost in one["exchange"].values():
            assert cost["step"]["median"] > 0 and cost["share"] < 1
    assert len(found["targets"]) == 12
    assert done.stdout.index("target") < done.stdout.index("samples / ddp") < done.stdout.index("ms per exchange")
    for what in (DIGITS, GPT, "staleness"):
        assert path.with_name(f"{path.stem}-{what}.svg").exists()


def check_race(found: dict[str, Any]) -> None:
    members, mark, task = found["members"], found["mark"], found["task"]
    trained = members[Name.DDP]["points"]
    assert mark["accuracy"] == max(point["accuracy"] for point in trained) and mark["samples"] == task["samples"]
    for name, one in members.items():
        points = one["points"]
        assert points[0] == {**trained[0], "seconds": 0}  # the same initial weights
        seconds = [point["seconds"] for point in points]
        assert seconds == sorted(seconds) and mark["samples"] <= points[-1]["samples"] <= 2 * mark["samples"]
        updates = one["updates_a_second"] * points[-1]["seconds"] * task["batch"]
        assert updates == pytest.approx(points[-1]["samples"] / (2 if name == Name.DDP else 1))
        if one["samples_over_ddp"] is None:
            assert points[-1]["samples"] == 2 * mark["samples"]
        counted = name in (Name.SERVER, Name.SERVER_LOCK, Name.HOGWILD, Name.EASGD_ASYNC, Name.EASGD_TURNS)
        assert (sum(one["staleness_histogram"]) > 0) == counted, name


def check_json(printed: dict[str, Any], folder: Path) -> None:
    assert list(printed["tasks"]) == [DIGITS] and list(printed["tasks"][DIGITS]["members"]) == [Name.DDP, Name.SERVER]
    assert len(printed["targets"]) == 1 and list(folder.glob("asynchronous-digits-np2-*.json"))
