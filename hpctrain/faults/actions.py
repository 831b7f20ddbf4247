"""Actions of faults on their rank, checks of faults against the run, and the record of those that have fired."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.format import writer
from hpctrain.errors import UsageError
from hpctrain.faults.spec import Fault, refusal
from hpctrain.log import logger
from hpctrain.plain_tensors import on_shards
from hpctrain.settings import unknown
from hpctrain.util import atomic
from hpctrain.util.reading import parse_json, read_lines
from hpctrain.util.text import counted

RECORD = "faults.jsonl"  # in the run folder: one line per fault, written before it fires
FORWARD_TIME = 0.2  # seconds in which the launcher passes on the message before the process ends
_ENDS = ("kill", "segfault", "node", "pause", "hang")  # kinds after which the process writes nothing
_WRITES = {"full": errno.ENOSPC, "eio": errno.EIO}


# Checks against the run -----------------------------------------------------------------------------------------------


def check(faults: Sequence[Fault], run: Any) -> Sequence[Fault]:
    """Return the faults of a run. Raises ``UsageError`` for a rank, step or tensor that the run does not have."""
    size, steps, options = run.job.size, run.options.steps, run.options
    for fault in faults:
        if isinstance(fault.rank, int) and fault.rank >= size:
            what = f"rank={fault.rank}: the job has {counted(size, 'rank')}"
            raise refusal(what, f"allowed are 0 to {size - 1}", fault.text)
        if steps is not None and fault.step > steps:
            what = f"step={fault.step}: the run has {counted(steps, 'step')}"
            raise refusal(what, f"allowed are 1 to {steps}", fault.text)
        if fault.kind == "hang" and size == 1:
            raise refusal("no other rank would wait for the only one", "hang needs several ranks", fault.text)
        if fault.kind in _WRITES and (options.background or options.io != "posix"):
            what = "checkpoint.background = false and checkpoint.io = 'posix'"
            raise refusal(f"{fault.kind} needs writes in the rank's own process", f"set {what}", fault.text)
        names = [name for name, _ in _parameters(run)]  # of this rank: the stages of a pipeline have different ones
        if fault.tensor and fault.rank_of(size) == run.job.rank and fault.tensor not in names:
            raise refusal(unknown(f"tensor {fault.tensor}", fault.tensor, names[:20]), "name a parameter", fault.text)
    return faults


def _parameters(run: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of all models with the names that their datasets have in a checkpoint."""
    for key, model in run.models.items():
        for name, parameter in model.named_parameters():
            yield f"{key}/{name}" if key else name, parameter


# Record in the run folder ---------------------------------------------------------------------------------------------


def unfired(folder: Path, faults: Sequence[Fault]) -> list[Fault]:
    """Return the faults for this start: of equal ones, each start has the first that no earlier start had."""
    fired, seen = _fired(folder), Counter[str]()
    found = []
    for fault in faults:
        if seen[fault.text] == fired[fault.text]:
            found.append(fault)
        seen[fault.text] += 1
    return found


def record(folder: Path, fault: Fault, rank: int) -> None:
    """Append a line about a fault that is about to fire, and flush it to the disk."""
    row = {"fault": fault.text, "rank": rank, "step": fault.step, "at": fault.at, "unix_time": round(time.time(), 3)}
    handle = atomic.open_growing(folder / RECORD)
    try:
        atomic.append_line(handle, json.dumps(row))
        os.fsync(handle)
    finally:
        os.close(handle)


def _fired(folder: Path) -> Counter[str]:
    """Return how often each fault has fired in earlier starts, by its text."""
    found = Counter[str]()
    try:
        for line in read_lines(folder / RECORD):
            try:
                row = parse_json(line or "")
            except ValueError:
                continue  # cut off by the fault itself
            if isinstance(row, dict):
                found[str(row.get("fault"))] += 1
    except OSError:
        pass  # no fault has fired in this folder
    return found


# Actions --------------------------------------------------------------------------------------------------------------


class Actions:
    """Actions of faults on this rank; ``processes`` are node and process id of each rank, if a fault needs them."""

    def __init__(self, run: Any, processes: Sequence[tuple[int, int]]) -> None:
        self._run, self._processes = run, processes
        self.writes = ShareWrites()
        self._calls: Mapping[str, Callable[[Fault], None]] = {
            "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
            "segfault": lambda fault: signal.raise_signal(signal.SIGSEGV),
            "exception": self._raise,
            "exit": lambda fault: sys.exit(0),
            "node": lambda fault: self._kill_node(),
            "hang": lambda fault: _wait_forever(),
            "pause": lambda fault: _stop_process(fault.seconds or 0.0),
            "flip": self._flip,
            "full": self._fail_writes,
            "eio": self._fail_writes,
        }

    def announce(self, fault: Fault) -> None:
        """Record a fault that is about to fire, and log it."""
        job = self._run.job
        record(self._run.folder, fault, job.rank)
        logger.warning("injected fault: %s", fault.describe(job.size))
        if fault.kind in _ENDS:
            time.sleep(FORWARD_TIME)

    def act(self, fault: Fault) -> None:
        """Make the fault happen; kinds that change what hooks return are not here."""
        if fault.kind in self._calls:
            self._calls[fault.kind](fault)

    def flip_file(self, fault: Fault, path: Path) -> None:
        """Invert one bit of a complete checkpoint: of a tensor, or by default in the middle of the file."""
        begin, nbytes = _place_of(path, fault.tensor) if fault.tensor else (0, path.stat().st_size)
        bit = 4 * nbytes if fault.bit is None else fault.bit % (8 * nbytes)
        handle = atomic.reopen(path)
        try:
            (byte,) = os.pread(handle, 1, begin + bit // 8)
            os.pwrite(handle, bytes([byte ^ 1 << bit % 8]), begin + bit // 8)
            os.fsync(handle)
        finally:
            os.close(handle)

    def _raise(self, fault: Fault) -> None:
        raise RuntimeError(f"injected fault: {fault.describe(self._run.job.size)}")

    def _kill_node(self) -> None:
        """Kill the other ranks of this node, then this one."""
        own = os.getpid()
        for node, process in self._processes:
            if node == self._run.job.node and process != own:
                os.kill(process, signal.SIGKILL)
        os.kill(own, signal.SIGKILL)

    @on_shards
    @torch.no_grad()
    def _flip(self, fault: Fault) -> None:
        """Invert one bit in the first element of a parameter, or of its first moment, on this rank alone."""
        for name, parameter in _parameters(self._run):
            if fault.tensor in ("", name) and parameter.numel():
                tensor = parameter if fault.target == "parameter" else self._moment(parameter)
                if tensor is not None:
                    flip_bit(tensor, fault.bit)
                    return
        what = f"{fault.target} {fault.tensor}".strip()
        raise UsageError(f"flip in={what}: this rank has no such values in step {self._run.step + 1}; name another")

    def _moment(self, parameter: Tensor) -> Tensor | None:
        """Return the first state of a parameter that has as many elements; None if there is none."""
        for optimizer in self._run.optimizers.values():
            for state in optimizer.state.get(parameter, {}).values():
                if isinstance(state, Tensor) and state.is_floating_point() and state.numel() == parameter.numel():
                    return state
        return None

    def _fail_writes(self, fault: Fault) -> None:
        """Let this rank's writes of checkpoints fail, for some seconds or until the run ends."""
        self.writes.fail(_WRITES[fault.kind], math.inf if fault.seconds is None else fault.seconds)


class ShareWrites:
    """Writes of this process's shares of checkpoints, after which faults may fire, or which fail.

    It replaces the function by which the writer opens a file, from its first use until ``close``.
    """

    def __init__(self) -> None:
        self._original = writer.open_private
        self._calls: list[Callable[[], None]] = []
        self._number, self._until = 0, -math.inf

    def then(self, call: Callable[[], None]) -> None:
        """Call a function once, when the next share has been written and the file is not complete."""
        self._calls.append(call)
        setattr(writer, "open_private", self._opened)

    def fail(self, number: int, seconds: float) -> None:
        """Raise this error of the system now, and by all writes of the next seconds."""
        self._number, self._until = number, time.monotonic() + seconds
        raise OSError(number, os.strerror(number))

    def close(self) -> None:
        """Restore the function."""
        setattr(writer, "open_private", self._original)

    @contextmanager
    def _opened(self, target: Any) -> Iterator[int]:
        if time.monotonic() < self._until:
            raise OSError(self._number, os.strerror(self._number))
        with self._original(target) as handle:
            yield handle
            while self._calls:
                self._calls.pop(0)()


def _wait_forever() -> None:
    while True:
        time.sleep(1.0)


def _stop_process(seconds: float) -> None:
    """Stop this process; a helper process continues it."""
    null = subprocess.DEVNULL
    command = ["/bin/sh", "-c", f"sleep {seconds:f}; kill -CONT {os.getpid()}"]
    helper = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    helper.wait()


def flip_bit(tensor: Tensor, bit: int | None) -> None:
    """Invert one bit, counted from the least significant, in the first element; by default the mantissa's highest."""
    if bit is None:
        bit = round(-math.log2(torch.finfo(tensor.dtype).eps)) - 1 if tensor.is_floating_point() else 0
    first = tensor[(0,) * tensor.dim()]
    one = first.reshape(1).cpu().clone()
    raw = one.view(torch.uint8)
    bit %= 8 * raw.numel()
    raw[bit // 8] ^= 1 << bit % 8
    first.copy_(one[0])


def _place_of(path: Path, name: str) -> tuple[int, int]:
    """Return offset and size in bytes of a parameter's dataset in a checkpoint."""
    import h5py

    with h5py.File(path, "r") as file:
        dataset = file[f"model/{name}"]
        return int(dataset.id.get_offset()), int(dataset.id.get_storage_size())
