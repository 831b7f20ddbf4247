"""Calibration files: measurements of a machine in JSON, one file per node type, MPI library and set of versions.

``HPCTRAIN_CALIBRATION`` names the file, or the folder of such files. The default is
``hpctrain/calibration`` in ``$XDG_CACHE_HOME`` (``~/.cache``). A file contains tables for several
layouts of ranks, and whether its MPI accepts device pointers. A file that is damaged or from
another machine is ignored with one warning: a calibration never makes a run fail.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from hpctrain._version import __version__
from hpctrain.comm.device.cuda_aware_probe import ProbeResult
from hpctrain.comm.tuning.table import AlgorithmTable, RankLayout, members
from hpctrain.errors import DataError, SettingsError
from hpctrain.log import logger
from hpctrain.util import atomic
from hpctrain.util.probe import python, run_program
from hpctrain.util.reading import read_json

if TYPE_CHECKING:
    import torch

    from hpctrain.comm.communicator import Communicator

VARIABLE = "HPCTRAIN_CALIBRATION"
FORMAT = "hpctrain-calibration 1"
LARGEST = 2**24  # bytes; a larger file was not written by this module
_CPUINFO = Path("/proc/cpuinfo")
_NAMES = ("model name", "cpu model", "cpu", "Model")  # keys of the processor's name on various architectures
# Runs in a subprocess, because MPI must not start in a process that only needs the library's name.
_ASK_MPI = "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI as m; print(m.Get_library_version())"


@dataclass(frozen=True)
class NodeType:
    """Type of node and its software; a measurement is valid only on an equal machine."""

    processor: str
    cores: int
    gpu: str  # empty if no GPU is visible
    gpus: int
    mpi: str
    torch: str
    hpctrain: str

    def differences(self, other: NodeType) -> list[str]:
        """Return the differences of another machine: ``torch 2.11.0 (here 2.13.0)``."""
        pairs = [(field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return [f"{name} {there or 'none'} (here {here or 'none'})" for name, here, there in pairs if here != there]

    def __str__(self) -> str:
        gpus = f", {self.gpus} x {self.gpu}" if self.gpus else ""
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        # Open MPI's version string continues with the builder and the date.
        software = f"{self.mpi.partition(',')[0] or 'no MPI'}, torch {self.torch}, hpctrain {self.hpctrain}"
        return f"{self.processor}, {cores}{gpus}; {software}"


def this_machine(mpi: str) -> NodeType:
    """Return the description of this node as seen by this process; ``mpi`` is the name of its MPI library."""
    import torch

    gpus = torch.cuda.device_count()
    return NodeType(
        processor=processor(),
        cores=os.cpu_count() or 1,
        gpu=torch.cuda.get_device_name(0) if gpus else "",
        gpus=gpus,
        mpi=mpi,
        torch=str(torch.__version__),
        hpctrain=__version__,
    )


def processor(cpuinfo: Path = _CPUINFO) -> str:
    """Return the name of the processor, or its architecture if the system does not report a name."""
    try:
        pairs = [line.partition(":") for line in cpuinfo.read_text(errors="replace").splitlines()]
    except OSError:
        pairs = []
    found = {name.strip(): " ".join(value.split()) for name, _, value in pairs}
    return next((found[name] for name in _NAMES if found.get(name)), platform.machine() or "unknown")


def mpi_name() -> str:
    """Return the MPI library of this environment without starting MPI; empty if there is none."""
    module = sys.modules.get("mpi4py.MPI")
    if module is not None:
        from hpctrain.comm.device.cuda_aware_probe import library_name

        return library_name()
    answer = run_program(python("-c", _ASK_MPI), timeout=60)
    lines = answer.text.splitlines()
    return " ".join(lines[0].strip("\0").split()) if lines and not answer.error else ""


@dataclass(frozen=True)
class Measurement:
    """Table of one layout and its raw data: seconds by rule, algorithm and bytes."""

    table: AlgorithmTable
    times: Mapping[str, Mapping[str, Mapping[str, float]]]
    date: str
    load: float | None = None  # load average per core at the start, over the last minute; None in older files


@dataclass(frozen=True)
class Calibration:
    """Content of one calibration file."""

    machine: NodeType
    measurements: Mapping[RankLayout, Measurement] = field(default_factory=dict)
    verdict: ProbeResult | None = None

    def with_measurement(self, measurement: Measurement) -> Calibration:
        return replace(self, measurements={**self.measurements, measurement.table.layout: measurement})

    def with_verdict(self, verdict: ProbeResult) -> Calibration:
        return replace(self, verdict=verdict)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "machine": asdict(self.machine),
            "cuda_aware": asdict(self.verdict) if self.verdict else None,
            "measurements": [
                {"table": one.table.to_json(), "times": one.times, "date": one.date, "load": one.load}
                for one in self.measurements.values()
            ],
        }

    @classmethod
    def from_json(cls, tree: Any) -> Calibration:
        """Return the calibration from plain values. Raises ``SettingsError`` if they are not a calibration."""
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise SettingsError(f"its format is not {FORMAT!r}")
        parts = members(tree, "a calibration", ("format", "machine", "cuda_aware", "measurements"))
        if not isinstance(parts["measurements"], list):
            raise SettingsError("measurements of a calibration: expected a list")
        found = [_measurement(one) for one in parts["measurements"]]
        verdict = None if parts["cuda_aware"] is None else _record(ProbeResult, parts["cuda_aware"], "cuda_aware")
        machine = _record(NodeType, parts["machine"], "machine")
        return cls(machine, {one.table.layout: one for one in found}, verdict)


# Location -------------------------------------------------------------------------------------------------------------


def folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of the files; None if a single file is named or there is no home directory."""
    named = environ.get(VARIABLE, "")
    if named:
        return None if _names_file(Path(named)) else Path(named)
    cache = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG standard says to ignore a relative path
        home = os.path.expanduser("~")
        cache = os.path.join(home, ".cache") if os.path.isabs(home) else ""
    return Path(cache, "hpctrain", "calibration") if cache else None


def path_of(machine: NodeType, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the calibration file of a machine; None if there is no home directory."""
    named = environ.get(VARIABLE, "")
    if named and _names_file(Path(named)):
        return Path(named)
    where = folder(environ)
    # Machines that differ in any field have different files.
    digest = hashlib.sha256(json.dumps(asdict(machine), sort_keys=True).encode()).hexdigest()
    return where / f"{digest[:16]}.json" if where else None


def _names_file(path: Path) -> bool:
    return path.is_file() or not path.is_dir() and path.suffix == ".json"


# Reading and writing --------------------------------------------------------------------------------------------------


def read(path: Path) -> Calibration:
    """Return the calibration in a file. Raises ``DataError`` if it is missing, damaged or another kind of file."""
    try:
        if not path.is_file():
            raise DataError(f"no such file: {path}; create one with hpctrain bench calibrate")
        return Calibration.from_json(read_json(path, LARGEST))
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise DataError(f"{path} is not a calibration: {error.strerror}") from error
        raise DataError(f"cannot read the calibration {path}: {error.strerror}") from error
    except SettingsError as error:
        raise DataError(f"{path} is not a calibration: {error}") from error
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is damaged: it is not JSON") from error


def store_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration atomically: a concurrent reader finds either the old file or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, json.dumps(calibration.to_json(), indent=1))
    except OSError as error:
        raise DataError(f"cannot store the calibration in {path}: {error.strerror}") from error


def find(machine: NodeType, environ: Mapping[str, str] = os.environ) -> Calibration | None:
    """Return the calibration of a machine, or None. Logs a warning if a file exists but cannot be used."""
    path = path_of(machine, environ)
    if path is None or not path.exists() and folder(environ) is not None:
        return None
    try:
        found = read(path)
    except DataError as error:
        logger.warning("%s; using the default choice of algorithms", error)
        return None
    if found.machine != machine:
        what = ", ".join(machine.differences(found.machine))
        logger.warning("%s was measured on another machine: %s; using the default choice of algorithms", path, what)
        return None
    return found


# In a job -------------------------------------------------------------------------------------------------------------


def stored(
    comm: Communicator, machine: Callable[[], NodeType] = lambda: this_machine(mpi_name())
) -> Calibration | None:
    """Return rank 0's calibration on all ranks, because all ranks must choose the same algorithms. Collective."""
    if comm.size == 1:
        return None  # no algorithms to choose, and possibly no MPI
    found: Calibration | None = comm.broadcast_object(_find_own(machine) if comm.rank == 0 else None)
    return found


def _find_own(machine: Callable[[], NodeType]) -> Calibration | None:
    try:
        return find(machine())
    except Exception as error:  # any error: the other ranks wait for an answer, and training needs no calibration
        logger.warning("cannot look for a calibration: %s: %s", type(error).__name__, error)
        return None


# Checking -------------------------------------------------------------------------------------------------------------


def _record(kind: Any, tree: Any, what: str) -> Any:
    """Return a dataclass of plain fields after checking the type of each field."""
    kinds = get_type_hints(kind)
    parts = members(tree, what, tuple(kinds))
    for name, value in parts.items():
        if type(value) is not kinds[name]:
            raise SettingsError(f"{name} of {what}: expected {kinds[name].__name__}, found {value!r:.60}")
    return kind(**parts)


def _measurement(tree: Any) -> Measurement:
    if isinstance(tree, dict):
        tree = {"load": None, **tree}
    parts = members(tree, "a measurement", ("table", "times", "date", "load"))
    if parts["load"] is not None and not isinstance(parts["load"], (int, float)):
        raise SettingsError(f"load of a measurement: expected a number, found {parts['load']!r:.60}")
    if not isinstance(parts["date"], str) or not isinstance(parts["times"], dict):
        raise SettingsError("a measurement: expected a date in text and an object of times")
    for of_rule in parts["times"].values():
        for of_algorithm in of_rule.values() if isinstance(of_rule, dict) else [None]:
            if not isinstance(of_algorithm, dict) or not all(
                size.isdecimal() and isinstance(seconds, (int, float)) for size, seconds in of_algorithm.items()
            ):
                raise SettingsError("times of a measurement: expected seconds by rule, algorithm and bytes")
    return Measurement(AlgorithmTable.from_json(parts["table"]), parts["times"], parts["date"], parts["load"])


# Operations that measure a device: a matrix product for its operations, a sum of arrays for its bandwidth -------------


@dataclass(frozen=True)
class RateKernel:
    """Repeated operation, and its size in operations or bytes."""

    run: Callable[[], object]
    amount: float


def product_kernel(side: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> RateKernel:
    """Return a product of two square matrices with ``side`` rows."""
    import torch

    one, two = (torch.rand(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty(side, side, dtype=dtype, device=device)
    return RateKernel(lambda: torch.mm(one, two, out=out), 2.0 * side**3)


def stream_kernel(nbytes: int, device: torch.device | str = "cpu") -> RateKernel:
    """Return a sum of two float32 arrays of ``nbytes`` into a third; its memory traffic is that of all three."""
    import torch

    one, two, out = (torch.ones(nbytes // 4, device=device) for _ in range(3))
    return RateKernel(lambda: torch.add(one, two, out=out), 3.0 * nbytes)
