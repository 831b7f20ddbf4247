"""Calibration: measures the algorithms on the present ranks, tests MPI on GPUs, and stores both for later jobs."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hpctrain.comm.agreement import on_first_rank
from hpctrain.comm.debug import check_enabled
from hpctrain.comm.device.cuda_aware_probe import TIMEOUT, ProbeResult, probe
from hpctrain.comm.transport.waiting import timeout_seconds
from hpctrain.comm.tuning.measure import AlgorithmTimes, measure
from hpctrain.errors import CommunicationError, DataError, UsageError
from hpctrain.train.calibration import (
    Calibration,
    Measurement,
    NodeType,
    find,
    folder,
    mpi_name,
    path_of,
    read,
    store_calibration,
    this_machine,
)
from hpctrain.train.job import Job
from hpctrain.util import atomic

_NO_CANARY = None, "not tried (--no-canary)"


@dataclass(frozen=True)
class Instruments:
    """Measurements of a calibration: the algorithms, the canary on GPUs, and the number of visible GPUs."""

    measure: Callable[..., AlgorithmTimes] = measure
    probe: Callable[..., ProbeResult] = probe
    gpus: Callable[[], int] = torch.cuda.device_count


@dataclass(frozen=True)
class CalibrationReport:
    """Results of a calibration and the file that contains them."""

    machine: NodeType
    measured: AlgorithmTimes
    measurement: Measurement | None  # None for a single rank, which has no choice of algorithms
    verdict: ProbeResult | None
    canary: str  # the verdict in words, or why there is none
    path: Path | None  # None if there was nothing to store


def calibrate(
    job: Job,
    sizes: Sequence[int],
    seconds: float,
    *,
    output: Path | None = None,
    try_canary: bool = True,
    progress: Callable[[float, str], None] = lambda seconds, what: None,
    instruments: Instruments = Instruments(),
) -> CalibrationReport:
    """Measure for about ``seconds`` and store the results; all ranks return the same report. Collective.

    ``output`` is the file to write; the default is the file that jobs on this machine read. Raises
    ``UsageError`` before the measurement if this file cannot be written or is not a calibration.
    """
    if check_enabled():
        raise UsageError("HPCTRAIN_CHECK slows every collective: unset it to calibrate", everywhere=True)
    comm = job.comm
    # Checked first: a minute of measuring must not be lost because the folder is not writable.
    earlier, path = on_first_rank(comm, lambda: _prepare(output))
    load = float(f"{os.getloadavg()[0] / (os.cpu_count() or 1):.2g}")  # average of the last minute per core
    measured = instruments.measure(comm, sizes, seconds, job.device, progress)
    verdict, description = on_first_rank(
        comm, lambda: _canary(earlier.machine, instruments) if try_canary else _NO_CANARY
    )
    measurement = _measurement(measured, load) if measured.times else None
    found = earlier if measurement is None else earlier.with_measurement(measurement)
    found = found if verdict is None else found.with_verdict(verdict)
    stores = found is not earlier
    if stores:
        on_first_rank(comm, lambda: store_calibration(found, path))
    return CalibrationReport(
        found.machine, measured, measurement, verdict or earlier.verdict, description, path if stores else None
    )


def _prepare(output: Path | None) -> tuple[Calibration, Path]:
    """Return the stored calibration to extend, and the file to write."""
    machine = this_machine(mpi_name())
    path = output or path_of(machine)
    if path is None:
        raise UsageError("there is no home folder to store a calibration in: give a file with --output")
    if path.is_dir():
        raise UsageError(f"{path} is a folder: give a file in it with --output")
    named = output is not None or folder() is None
    if named and path.exists():
        earlier = _of_this_machine(path, machine)
    else:
        earlier = (None if named else find(machine)) or Calibration(machine)
    _check_writable(path)
    return earlier, path


def _of_this_machine(path: Path, machine: NodeType) -> Calibration:
    """Return the calibration in a file that the user named; refuse to overwrite anything else."""
    advice = "give another file with --output, or delete this one"
    try:
        found = read(path)
    except DataError as error:
        raise UsageError(f"{error}: {advice}") from error
    if found.machine != machine:
        differences = ", ".join(machine.differences(found.machine))
        raise UsageError(f"{path} was measured on another machine: {differences}: {advice}")
    return found


def _check_writable(path: Path) -> None:
    """Raise ``UsageError`` if a file cannot be created; leave no file behind."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        private = atomic.private_name(path)
        os.close(atomic.create(private))
        private.unlink()
    except OSError as error:
        raise UsageError(f"cannot store the calibration in {path}: {error.strerror}") from error


def _canary(machine: NodeType, instruments: Instruments) -> tuple[ProbeResult | None, str]:
    """Test in a separate job whether MPI accepts device pointers; return the verdict and a description."""
    if not instruments.gpus():
        return None, "not tried: no GPU is visible"
    try:
        verdict = instruments.probe(timeout=min(TIMEOUT, timeout_seconds() / 2))
    except (CommunicationError, OSError) as error:
        return None, f"not tried: {error}"
    if not verdict.library:  # it died before it reported its MPI: assume that of this environment
        verdict = replace(verdict, library=machine.mpi)
    return verdict, verdict_in_words(verdict)


def verdict_in_words(verdict: ProbeResult) -> str:
    """Return a sentence on whether MPI receives device pointers, and why."""
    return f"MPI {'accepts' if verdict.cuda_aware else 'is not given'} device pointers: {verdict.reason}"


def _measurement(measured: AlgorithmTimes, load: float) -> Measurement:
    times = {
        "/".join(key): {
            name: {str(size): float(f"{seconds:.4g}") for size, seconds in by_size.items()}
            for name, by_size in of_key.items()
        }
        for key, of_key in measured.times.items()
    }
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Measurement(measured.table(), times, date, load)
