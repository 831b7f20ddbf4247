"""Calibration: refusals before it begins, the result of the canary, and the stored file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.comm.device.cuda_aware_probe import ProbeResult
from hpctrain.comm.tuning.measure import AlgorithmTimes, layout_of
from hpctrain.errors import CommunicationError, UsageError
from hpctrain.train.calibrate import Instruments, calibrate
from hpctrain.train.calibration import Calibration, mpi_name, read, store_calibration, stored, this_machine


@pytest.fixture(autouse=True)
def own_store(shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Store the calibrations of these tests in a folder of their own."""
    monkeypatch.setenv("HPCTRAIN_CALIBRATION", str(shared_tmp_path / "store"))
    monkeypatch.delenv("HPCTRAIN_CHECK", raising=False)
    return shared_tmp_path / "store"


def with_gpu(outcome: Any = None) -> Instruments:
    """Return the instruments of a node with a GPU, whose canary has this outcome."""

    def probe(timeout: float) -> ProbeResult:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome  # type: ignore[no-any-return]

    return Instruments(probe=probe, gpus=lambda: 1)


def test_one_rank_without_a_gpu_stores_nothing(job: Any, own_store: Path) -> None:
    report = calibrate(job, [4], 1.0, instruments=Instruments(gpus=lambda: 0))
    assert (report.measurement, report.verdict, report.path) == (None, None, None)
    assert report.canary == "not tried: no GPU is visible"
    assert list(own_store.iterdir()) == []


def test_the_verdict_of_the_canary_is_stored(job: Any, own_store: Path) -> None:
    verdict = ProbeResult(True, "every value arrived", mpi_name())
    report = calibrate(job, [4], 1.0, instruments=with_gpu(verdict))
    assert report.canary == "MPI accepts device pointers: every value arrived"
    assert report.path is not None and report.path.parent == own_store and read(report.path).verdict == verdict
    # If it cannot be tried again, the earlier verdict stays.
    again = calibrate(job, [4], 1.0, instruments=with_gpu(CommunicationError("no mpiexec")))
    assert again.canary == "not tried: no mpiexec" and again.verdict == verdict and read(report.path).verdict == verdict


def test_the_verdict_of_a_dead_canary_names_this_mpi(job: Any) -> None:
    dead = ProbeResult(False, "the exchange ended with status -11", "")
    report = calibrate(job, [4], 1.0, instruments=with_gpu(dead))
    assert report.verdict is not None and report.verdict.library == mpi_name()
    assert report.canary == "MPI is not given device pointers: the exchange ended with status -11"


def test_the_canary_can_be_disabled(job: Any) -> None:
    instruments = with_gpu(AssertionError("it is not tried"))
    assert calibrate(job, [4], 1.0, try_canary=False, instruments=instruments).canary == "not tried (--no-canary)"


def unmeasured(*_: Any) -> AlgorithmTimes:
    raise AssertionError("it is refused before it measures")


def refusal(job: Any, output: Path | None) -> str:
    with pytest.raises(UsageError) as caught:
        calibrate(job, [4], 1.0, output=output, instruments=Instruments(measure=unmeasured))
    assert caught.value.everywhere
    return str(caught.value)


def test_files_of_the_user_are_not_overwritten(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("chapter 1")
    assert "thesis.txt is damaged" in refusal(job, path) and path.read_text() == "chapter 1"
    assert "is a folder" in refusal(job, tmp_path)
    store_calibration(Calibration(replace(this_machine(mpi_name()), torch="1.0")), path)
    assert "was measured on another machine: torch 1.0" in refusal(job, path)
    monkeypatch.setenv("HPCTRAIN_CALIBRATION", str(path))
    assert "give another file with --output, or delete this one" in refusal(job, None)


def test_an_unwritable_path_is_refused_before_measuring(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert "cannot store the calibration in" in refusal(job, tmp_path / "file" / "x.json")
    monkeypatch.setenv("HPCTRAIN_CHECK", "order")
    assert refusal(job, None) == "HPCTRAIN_CHECK slows every collective: unset it to calibrate"


def test_a_damaged_file_in_the_store_is_replaced(job: Any) -> None:
    instruments = with_gpu(ProbeResult(True, "fine", mpi_name()))
    path = calibrate(job, [4], 1.0, instruments=instruments).path
    assert path is not None
    path.write_text("{")
    assert calibrate(job, [4], 1.0, instruments=instruments).path == path and read(path).verdict is not None


@pytest.mark.ranks(2)
def test_all_ranks_use_the_calibration(job: Any, own_store: Path) -> None:
    report = calibrate(job, [4, 4096], 2.0)
    comm = job.comm
    assert comm.all_gather_object(report) == [report] * comm.size
    assert report.measurement is not None and report.path is not None
    found = stored(comm)
    assert found is not None and comm.all_gather_object(found) == [found] * comm.size
    assert found.measurements[layout_of(comm)].table == report.measurement.table
    assert read(report.path).measurements[layout_of(comm)].times == report.measurement.times
    assert [path.name for path in own_store.iterdir()] == [report.path.name]
