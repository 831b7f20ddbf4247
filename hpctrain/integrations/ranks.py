"""Job of a program that has its own process groups: a communicator beside them, and the failure detection."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from hpctrain import log
from hpctrain.cluster.launcher import detect, is_launched
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.base import SingleTransport
from hpctrain.comm.transport.waiting import timeout_seconds
from hpctrain.errors import UsageError
from hpctrain.train.init import Machine, exchange_handshakes, resources
from hpctrain.train.job import Job
from hpctrain.train.watchdog import Watchdog

_jobs: list[Job] = []


def join() -> Job:
    """Return the job of this process, which is joined in the first call. Collective.

    Its communicator is apart from the process groups of torch, whose operations may be in progress
    on other threads.
    Raises ``UsageError`` if torch.distributed has not been initialized, or has other ranks than the launcher.
    """
    if not _jobs:
        _jobs.append(_join())
    _check_group(_jobs[0].comm.size)
    return _jobs[0]


def _join() -> Job:
    launch = detect(os.environ)
    comm, guard = _several() if is_launched() else _one()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    handshakes = exchange_handshakes(comm, device, {}, Machine())
    return Job(comm, device, launch, guard, resources=resources(handshakes))


def _check_group(size: int) -> None:
    """Raise ``UsageError`` unless torch.distributed has as many ranks as the launcher has started."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
    if ranks is None and size > 1:
        raise UsageError(
            f"the launcher has started {size} ranks, and torch.distributed has no process group: call "
            'torch.distributed.init_process_group("hpctrain") first, or start the program by hpctrain run',
            everywhere=True,
        )
    if ranks is not None and ranks != size:
        how = "mpiexec or srun" if is_launched() else "mpiexec or srun, not by torchrun"
        raise UsageError(
            f"torch.distributed has {ranks} ranks, and MPI has {size}: start the ranks by {how}", everywhere=True
        )


def _several() -> tuple[Communicator, Watchdog]:
    from hpctrain.torch_backend.world import communicator, world

    seconds = timeout_seconds()
    everyone = world(seconds)
    _check_group(everyone.size)
    return communicator([], everyone.rank, everyone.size, timedelta(seconds=seconds)), everyone.watchdog


def _one() -> tuple[Communicator, Watchdog]:
    _check_group(1)
    transport = SingleTransport()
    log.configure(0)
    return Communicator(transport), Machine().watch(transport)
