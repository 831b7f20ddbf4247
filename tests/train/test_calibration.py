"""Stored calibrations: all ranks find the same one; damaged ones and those of other machines never stop a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import file_size_limit

from hpctrain import __version__
from hpctrain.comm.device.cuda_aware_probe import ProbeResult
from hpctrain.comm.tuning.table import AlgorithmTable, RankLayout
from hpctrain.errors import DataError, SettingsError
from hpctrain.log import logger
from hpctrain.train import calibration
from hpctrain.train.calibration import (
    Calibration,
    Measurement,
    NodeType,
    find,
    folder,
    mpi_name,
    path_of,
    processor,
    read,
    store_calibration,
    stored,
    this_machine,
)

MACHINE = NodeType("EPYC", 64, "", 0, "MPICH 5", "2.13", "0.1")


def measurement(layout: RankLayout, name: str = "window") -> Measurement:
    table = AlgorithmTable(layout, {("all_reduce", "window", "carried"): ((4096, "mpi"), (inf, name))})
    return Measurement(table, {"all_reduce/window/carried": {name: {"4": 1.5e-6}}}, "2026-01-01T00:00:00+00:00")


TWO, FOUR = measurement(RankLayout(2, 1, 2)), measurement(RankLayout(4, 2, 2), "hierarchical")
VERDICT = ProbeResult(True, "it did", "MPICH 5")
FULL = Calibration(MACHINE).with_measurement(TWO).with_measurement(FOUR).with_verdict(VERDICT)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the warnings so far."""
    logger.propagate = True  # restored after each test
    return lambda: [record.getMessage() for record in caplog.records]


def in_folder(path: Path) -> dict[str, str]:
    return {"HPCTRAIN_CALIBRATION": str(path)}


def test_a_stored_calibration_is_found(tmp_path: Path) -> None:
    path = path_of(MACHINE, in_folder(tmp_path))
    assert path is not None and path.parent == tmp_path
    assert find(MACHINE, in_folder(tmp_path)) is None
    store_calibration(FULL, path)
    assert find(MACHINE, in_folder(tmp_path)) == FULL
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_file_holds_several_layouts_and_the_newest_measurement_of_each(tmp_path: Path) -> None:
    path = tmp_path / "site.json"
    store_calibration(FULL, path)
    again = read(path).with_measurement(measurement(RankLayout(2, 1, 2), "ring"))
    store_calibration(again, path)
    found = read(path).measurements
    assert list(found) == [RankLayout(2, 1, 2), RankLayout(4, 2, 2)]
    assert found[RankLayout(2, 1, 2)].table.best("all_reduce", "window", "carried", 8192) == "ring"
    assert found[RankLayout(4, 2, 2)] == FOUR


@pytest.mark.parametrize("name", ["processor", "cores", "gpu", "gpus", "mpi", "torch", "hpctrain"])
def test_each_different_machine_has_its_own_file(name: str, tmp_path: Path) -> None:
    value = getattr(MACHINE, name)
    other = replace(MACHINE, **{name: value + 1 if isinstance(value, int) else value + "x"})
    assert path_of(other, in_folder(tmp_path)) != path_of(MACHINE, in_folder(tmp_path))


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder({}) == tmp_path / ".cache" / "hpctrain" / "calibration"
    assert folder({"XDG_CACHE_HOME": "/scratch"}) == Path("/scratch/hpctrain/calibration")
    assert folder({"XDG_CACHE_HOME": "relative"}) == folder({})
    assert folder(in_folder(tmp_path / "new")) == tmp_path / "new"
    assert folder(in_folder(tmp_path / "new.json")) is None
    assert path_of(MACHINE, in_folder(tmp_path / "new.json")) == tmp_path / "new.json"
    (tmp_path / "plain").touch()
    assert path_of(MACHINE, in_folder(tmp_path / "plain")) == tmp_path / "plain"
    monkeypatch.setenv("HOME", "relative")  # no home folder
    assert folder({}) is None and path_of(MACHINE, {}) is None and find(MACHINE, {}) is None


@pytest.mark.parametrize(
    "content, message",
    [
        (b"{", "is damaged: it is not JSON"),
        (b"\xff\xfe", "is damaged: it is not JSON"),
        (b"[" * 200_000, "is damaged: it is not JSON"),
        (b"[]", "is not a calibration: its format is not 'hpctrain-calibration 1'"),
        (b'{"format": "hpctrain-calibration 2"}', "is not a calibration: its format is not"),
        (b'{"format": "hpctrain-calibration 1"}', "is not a calibration: a calibration: 'cuda_aware' is missing"),
        (b"", "is damaged"),
    ],
)
def test_a_damaged_file_is_a_warning_in_one_line(
    content: bytes, message: str, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    path = tmp_path / "site.json"
    path.write_bytes(content)
    assert find(MACHINE, in_folder(path)) is None
    (said,) = warned()
    assert f"{path} {message}" in said and said.endswith("using the default choice of algorithms") and "\n" not in said


def test_paths_that_are_not_regular_files_are_a_warning(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    assert find(MACHINE, in_folder(tmp_path / "pipe.json")) is None
    assert find(MACHINE, in_folder(tmp_path / "lost.json")) is None
    assert ["no such file:" in said for said in warned()] == [True, True]
    (tmp_path / "large.json").write_bytes(b" " * (calibration.LARGEST + 1))
    with pytest.raises(DataError, match="it has more than"):
        read(tmp_path / "large.json")


def test_a_file_of_another_machine_is_not_used(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    path = tmp_path / "site.json"
    store_calibration(FULL, path)
    assert find(replace(MACHINE, torch="2.14"), in_folder(path)) is None
    said = f"{path} was measured on another machine: torch 2.13 (here 2.14); using the default choice of algorithms"
    assert warned() == [said]


def changed(path: str, value: Any) -> Any:
    tree = json.loads(json.dumps(FULL.to_json()))
    *way, last = path.split(".")
    node = tree
    for step in way:
        node = node[int(step) if step.isdigit() else step]
    node[last] = value
    return tree


@pytest.mark.parametrize(
    "tree, message",
    [
        (changed("more", 1), "'more' is unknown, its members are format, machine, cuda_aware, measurements"),
        (changed("machine.cores", "64"), "cores of machine: expected int, found '64'"),
        (changed("machine.gpus", True), "gpus of machine: expected int, found True"),
        (changed("machine", None), "machine: expected an object"),
        (changed("cuda_aware.cuda_aware", 1), "cuda_aware of cuda_aware: expected bool, found 1"),
        (changed("measurements", {}), "measurements of a calibration: expected a list"),
        (changed("measurements.0.table.rules", {"x": []}), "unknown rule 'x'"),
        (changed("measurements.0.date", 7), "expected a date in text"),
        (changed("measurements.0.load", "much"), "load of a measurement: expected a number"),
        (changed("measurements.0.times", {"a": 1}), "expected seconds by rule, algorithm and bytes"),
        (changed("measurements.0.times", {"a": {"mpi": {"4": "1"}}}), "expected seconds by rule"),
        (changed("measurements.1.times", {"a": {"mpi": {"x": 1}}}), "expected seconds by rule"),
    ],
)
def test_every_value_of_a_file_is_checked(tree: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Calibration.from_json(tree)


def test_readers_during_a_write_get_the_old_file(tmp_path: Path) -> None:
    path, held = tmp_path / "site.json", tmp_path / "held.json"
    store_calibration(FULL, path)
    os.link(path, held)  # like an open file, it keeps the old content
    store_calibration(Calibration(MACHINE), path)
    assert read(held) == FULL and read(path) == Calibration(MACHINE)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "site.json"
    store_calibration(FULL, path)
    with file_size_limit(100), pytest.raises(DataError, match=f"cannot store the calibration in {path}: File too"):
        store_calibration(Calibration(MACHINE), path)
    assert read(path) == FULL and list(tmp_path.iterdir()) == [path]


class RankZero:
    rank, size = 0, 2

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        return item


def fail() -> NodeType:
    raise RuntimeError("CUDA driver error")


def test_a_failure_on_rank_0_does_not_leave_the_others_waiting(warned: Callable[[], list[str]]) -> None:
    assert stored(RankZero(), fail) is None
    assert "cannot look for a calibration: RuntimeError: CUDA driver error" in warned()[0]


def test_a_verdict_applies_to_its_mpi_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTRAIN_CALIBRATION", str(tmp_path / "site.json"))
    here = this_machine(mpi_name())
    for library, expected in ((here.mpi, True), ("Other MPI", False)):
        store_calibration(Calibration(here).with_verdict(ProbeResult(True, "it did", library)), tmp_path / "site.json")
        found = stored(RankZero())
        assert found is not None and found.verdict is not None
        assert (found.verdict.library == here.mpi) is expected


@pytest.mark.ranks
def test_all_ranks_get_the_calibration_of_rank_0(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shared_tmp_path / f"rank{comm.rank}.json"  # the files of the other ranks must not be used
    monkeypatch.setenv("HPCTRAIN_CALIBRATION", str(own))
    layout = RankLayout(comm.size, comm.nodes, comm.local_size)
    names = ("window", "ring", "tree", "direct")
    store_calibration(
        Calibration(this_machine(mpi_name())).with_measurement(measurement(layout, names[comm.rank])), own
    )
    found = stored(comm)
    assert found is not None and found.verdict is None and list(found.measurements) == [layout]
    assert found.measurements[layout].table.best("all_reduce", "window", "carried", 2**20) == "window"
    assert comm.all_gather_object(found) == [found] * comm.size
    assert stored(comm.transport) == found


def test_a_single_rank_does_not_look_for_a_calibration(comm: Any, warned: Callable[[], list[str]]) -> None:
    assert stored(comm, fail) is None and not warned()


# Identity of a machine: the properties on which measurements depend, found without starting MPI -----------------------


NODE = NodeType("EPYC", 64, "H200", 4, "MPICH 5", "2.13", "0.1")


def test_this_machine_is_described() -> None:
    found = this_machine("Some MPI 1")
    assert (found.mpi, found.torch, found.hpctrain) == ("Some MPI 1", str(torch.__version__), __version__)
    assert found.cores >= 1 and found.gpus == torch.cuda.device_count() and found.processor == processor()


def test_machines_are_compared_and_described() -> None:
    assert NODE.differences(NODE) == []
    other = replace(NODE, gpu="", gpus=0, torch="2.11")
    assert NODE.differences(other) == [
        "gpu none (here H200)",
        "gpus none (here 4)",
        "torch 2.11 (here 2.13)",
    ]
    assert str(NODE) == "EPYC, 64 cores, 4 x H200; MPICH 5, torch 2.13, hpctrain 0.1"
    assert "; Open MPI v5, torch" in str(replace(other, mpi="Open MPI v5, package: Open MPI user@host"))
    assert str(replace(other, cores=1)) == "EPYC, 1 core; MPICH 5, torch 2.11, hpctrain 0.1"


def test_processor_names_are_read_from_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: AMD  EPYC 9654\nflags\t: a b\n")
    assert processor(cpuinfo) == "AMD EPYC 9654"
    cpuinfo.write_text("processor\t: 0\ncpu\t\t: POWER9, altivec\nclock : 1\n")
    assert processor(cpuinfo) == "POWER9, altivec"
    assert processor(tmp_path / "missing") != ""


def test_the_mpi_is_named_without_initializing_it() -> None:
    code = """
import sys
from hpctrain.train.calibration import mpi_name
name = mpi_name()
assert "mpi4py.MPI" not in sys.modules
from mpi4py import MPI
print(name, MPI.Is_initialized() and mpi_name() == name and name in " ".join(MPI.Get_library_version().split()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split()[-1] == "True" and len(done.stdout.split()) > 1


def test_without_mpi_the_name_is_empty() -> None:
    code = "import hpctrain.train.calibration as m; m._ASK_MPI = 'import sys; sys.exit(1)'; print(repr(m.mpi_name()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "''\n"
    assert isinstance(mpi_name(), str)
