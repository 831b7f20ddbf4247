"""Reaction of a run to the death of a rank (``run.on_failure``), and the conditions of continuing without it.

Needs neither torch nor MPI.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.errors import LaunchError, SettingsError, UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.offload.config import OffloadSettings

if TYPE_CHECKING:
    from hpctrain.train.options import RunOptions

OnFailure = Literal["restart", "shrink"]
CONTINUES = ("ddp", "zero1", "zero2", "fsdp")  # values of parallel.data with which the other ranks can continue
ALLOWED = (
    f"allowed are parallel.data = {', '.join(CONTINUES)} over all ranks (with pipelines or tensor parallelism: ddp), "
    "without offload"
)
RESTART = 'set it to "restart", with which the job ends and a job script starts it again'
LAUNCHER = "mpiexec --with-ft ulfm"
SRUN = "SLURM_STEP_ID"  # set in processes that srun has started


def why_not(parallel: ParallelSettings, offload: OffloadSettings) -> str:
    """Return why a run with these settings cannot continue with fewer ranks; empty if it can."""
    if parallel.data not in CONTINUES:
        return f'parallel.data = "{parallel.data}"'
    if parallel.splits_model and parallel.data != "ddp":
        axes = [
            f"parallel.{axis} = {getattr(parallel, axis)}" for axis in ("pipe", "tensor") if getattr(parallel, axis) > 1
        ]
        return f'parallel.data = "{parallel.data}" and {", ".join(axes)}'
    if parallel.pipe > 1 and parallel.schedule == "pipedream":
        return 'parallel.schedule = "pipedream"'
    if parallel.data != "ddp" and parallel.shard_within != "world":
        return f'parallel.shard_within = "{parallel.shard_within}"'
    return "offload" if offload.any_update else ""


def survives(parallel: ParallelSettings, offload: OffloadSettings) -> bool:
    """Return whether the other ranks can continue without a rank that has died."""
    return not why_not(parallel, offload)


def keeps_state(on_failure: str, ranks: int) -> bool:
    """Return whether each rank keeps copies of what the other ranks do not have, from which a step is repeated."""
    return on_failure == "shrink" and ranks > 1


def check_settings(on_failure: str, parallel: ParallelSettings, offload: OffloadSettings, device: str) -> None:
    """Raise ``SettingsError`` if a run with these settings cannot continue with fewer ranks."""
    if on_failure != "shrink":
        return
    if reason := why_not(parallel, offload):
        raise SettingsError(
            f'setting run.on_failure = "shrink" with {reason}: a dead rank takes its part of the state with it; '
            f"{ALLOWED}; {RESTART}",
            everywhere=True,
        )
    if device == "cuda":
        raise SettingsError(
            f'setting run.on_failure = "shrink" with run.device = "cuda": GPUs are not supported yet; {RESTART}',
            everywhere=True,
        )


def check_replicate(every: int, on_failure: str, prefix: str) -> None:
    """Raise ``SettingsError`` for copies on other nodes in a run that would not use them."""
    if every and on_failure != "shrink":
        raise SettingsError(
            f'{prefix}replicate = {every}: is for on_failure = "shrink", with which the other ranks continue; '
            "set both, or replicate = 0",
            everywhere=True,
        )


def check_launch(*, reports: bool, library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ``LaunchError`` if MPI does not report dead ranks; ``library`` is its name and version."""
    if reports:
        return
    name = " ".join(library.split(",")[0].split("\n")[0].replace("Version:", "").split())
    if "Open MPI" not in library:
        reason, advice = f"{name} ends a job whose rank has died", f"take Open MPI 5 and start by {LAUNCHER}"
    elif SRUN in environ:
        reason, advice = "srun ends a step whose rank has died", f"start by {LAUNCHER} inside the job"
    else:
        reason, advice = "Open MPI was started without fault tolerance", f"start by {LAUNCHER}"
    raise LaunchError(
        f'on_failure = "shrink": {reason}; {advice}, or take on_failure = "restart": a job script starts the job again',
        everywhere=True,
    )


def check_options(options: RunOptions, *, splits: bool, loader: Any, lacks: str, on_gpu: bool) -> None:
    """Raise ``UsageError`` on all ranks if a run with these options, loader and strategies cannot continue.

    ``splits``: the run divides the batches of its loader over the ranks. ``lacks`` is the
    setting with which its strategies cannot continue with fewer ranks, if any.
    """
    for reason in _refused(options, splits=splits, loader=loader, lacks=lacks, on_gpu=on_gpu):
        raise UsageError(f'a run with on_failure = "shrink" {reason}', everywhere=True)


def _refused(options: RunOptions, *, splits: bool, loader: Any, lacks: str, on_gpu: bool) -> Iterator[str]:
    kind = type(loader).__name__
    if lacks:
        yield f"and {lacks}: a dead rank takes its part of the state with it; {ALLOWED}; {RESTART}"
    if on_gpu:
        yield f"on GPUs: not supported yet; {RESTART}"
    if not splits:
        yield (
            f"and a loader that every rank reads by itself ({kind}): the samples of a dead rank would be missing; "
            "pass a DataLoader without a DistributedSampler, whose batches the run divides over the ranks"
        )
    if options.fingerprint_every:
        yield f"and fingerprint_every = {options.fingerprint_every}: not supported together; set one of them"
    if options.background:
        yield "and background = true: a checkpoint in progress would be lost; set background = false"
    if options.on_nonfinite == "rollback":
        yield 'and on_nonfinite = "rollback": not supported together; allowed are "abort" and "skip"'
