"""Initialization of a job: signal handlers first, then MPI, then the values on which the ranks must agree.

The ranks compare versions and settings. Each selects its device; shared GPUs are refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.resources import Binding, cpu_affinity, requested_gpus
from hpctrain.cluster.resources import table as binding_table
from hpctrain.cluster.resources import threads_for
from hpctrain.errors import DeviceError, MismatchError, SettingsError
from hpctrain.settings import flatten
from hpctrain.train import control
from hpctrain.util.text import counted

if TYPE_CHECKING:
    import torch

    from hpctrain.comm.communicator import Communicator
    from hpctrain.comm.device.cuda_aware_probe import ProbeResult
    from hpctrain.comm.transport.base import Transport
    from hpctrain.parallel.asynchronous.config import AsynchronousSettings
    from hpctrain.parallel.config import ParallelSettings
    from hpctrain.parallel.offload.config import OffloadSettings
    from hpctrain.train.job import Job
    from hpctrain.train.watchdog import Watchdog


_IN_CONTAINER = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


class Machine:
    """Sources of a job on this machine: the visible GPUs, the versions of packages, and the watchdog of this rank."""

    def gpus(self) -> int:
        """Return the number of GPUs that this rank sees."""
        import torch

        return torch.cuda.device_count()

    def why_no_gpus(self) -> str:
        """Return why this rank sees no GPU of a job that has requested some, and what to do; empty if it has not."""
        import torch

        if not (number := requested_gpus()):
            return ""
        if not (torch.version.cuda or torch.version.hip):
            advice = f"torch {torch.__version__} is a build for CPUs: install one for CUDA or ROCm"
        elif any(name in os.environ for name in _IN_CONTAINER):
            advice = "start the container with --nv (NVIDIA) or --rocm (AMD)"
        else:
            shown = ", ".join(f"{name}={os.environ[name]!r}" for name in _VISIBLE if name in os.environ)
            advice = f"see what nvidia-smi or rocm-smi prints in this job{f', which has {shown}' if shown else ''}"
        return (
            f"the job has requested {counted(number, 'GPU')} per node, and this rank sees none, so it would train on "
            f'CPUs; {advice}; or set run.device = "cpu"'
        )

    def identity(self, device: torch.device) -> str:
        """Return a name that is the same in every process that uses this device."""
        import torch

        return str(device) if device.type != "cuda" else str(torch.cuda.get_device_properties(device).uuid)

    def use(self, device: torch.device) -> None:
        """Make a GPU the current device of this process."""
        import torch

        torch.cuda.set_device(device)

    def connect(self, world: Communicator, device: torch.device, verdict: ProbeResult | None) -> None:
        """Let the communicator carry tensors of the ranks' GPUs. Collective."""
        world.use_device(device, verdict)

    def versions(self) -> dict[str, str]:
        from hpctrain.train.process import versions

        return versions()

    def watch(self, transport: Transport) -> Watchdog:
        """Start the failure detection of this rank. Collective."""
        from hpctrain.train.watchdog import Watchdog

        return Watchdog(transport)


def init(
    comm: Any = None,
    *,
    device: str = "auto",
    oversubscribe: bool = False,
    parallel: ParallelSettings | Mapping[str, Any] | str | None = None,
    offload: OffloadSettings | Mapping[str, Any] | None = None,
    asynchronous: AsynchronousSettings | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    verbose: bool = False,
    server: AsynchronousSettings | Mapping[str, Any] | None = None,
) -> Job:
    """Join the ranks that the launcher started, and return this rank's ``Job``. Collective.

    ``comm`` is the mpi4py communicator to train in, ``COMM_WORLD`` by default. A process without a
    launcher is a job of one rank and needs no MPI. ``device`` is ``auto`` (a GPU if one is
    visible, an error if the job has requested GPUs and this rank sees none), ``cpu`` or ``cuda``.
    Two ranks share a GPU only with ``oversubscribe``. ``parallel``, ``offload`` and
    ``asynchronous`` are the settings of these sections, or dicts of them;
    ``parallel="fsdp"`` names a strategy; ``server`` is the former name of ``asynchronous``. They
    are the defaults for every model that ``Job.wrap`` gets without its own settings. ``settings``
    are values that all ranks must share: they are compared over the ranks and not interpreted.
    ``verbose`` prints the cores and devices of each rank.

    After this call, a rank that fails ends the job. Raises ``SettingsError`` for a wrong setting,
    ``LaunchError`` if the launcher started ranks that MPI does not see, ``MismatchError`` if ranks
    disagree on versions or settings, ``DeviceError`` if ranks would share a GPU.
    """
    sections = parallel, offload, asynchronous, server
    return join(Machine(), comm, device, sections, settings or {}, oversubscribe=oversubscribe, verbose=verbose)


@control.starting()
def join(
    machine: Machine,
    comm: Any = None,
    device: str = "auto",
    sections: tuple[Any, Any, Any, Any] = (None, None, None, None),
    settings: Mapping[str, Any] = MappingProxyType({}),
    *,
    oversubscribe: bool = False,
    verbose: bool = False,
) -> Job:
    """Join the ranks as ``init`` does; ``sections`` are its parallel, offload, asynchronous and server settings."""
    control.install()  # before the import of torch, which takes seconds in which USR1 would kill this process

    from hpctrain.cluster.launcher import is_launched, rank_from_environment
    from hpctrain.train.exit import end_if_uncaught

    try:
        import torch

        from hpctrain import log
        from hpctrain.comm.agreement import agreed
        from hpctrain.comm.communicator import Communicator
        from hpctrain.comm.transport.connect import connect
        from hpctrain.data.random_streams import broadcast_generators
        from hpctrain.train.job import Job
        from hpctrain.train.process import defer_compiler

        defer_compiler()
        shape = _shape(sections, settings)
        transport, launch = connect(comm)
        log.configure(transport.rank, verbose=verbose)
        guard = machine.watch(transport)
    except BaseException as error:
        end_if_uncaught(error, rank_from_environment(), launched=is_launched())
        raise
    world = Communicator(transport)
    own = agreed(world, lambda: select_device(device, world.local_rank, machine))
    if own.type == "cuda":
        machine.use(own)
    handshakes = exchange_handshakes(world, own, settings, machine)
    if not oversubscribe:
        check_unshared([(one.host, one.device_identity) for one in handshakes], table(handshakes))
    torch.set_num_threads(threads(handshakes, world.rank))
    _equip(world, own, machine)
    broadcast_generators(world)  # otherwise a program without a seed would split its data differently on every rank
    if verbose and world.rank == 0:
        log.logger.info("%s", table(handshakes))
    return Job(world, own, launch, guard, *shape, resources=resources(handshakes))


def _shape(sections: tuple[Any, Any, Any, Any], settings: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return the settings of the sections, after checking that none is only in ``settings``."""
    from hpctrain.parallel.asynchronous.config import asynchronous_settings
    from hpctrain.parallel.config import parallel_settings
    from hpctrain.parallel.offload.config import offload_settings

    parallel, offload, asynchronous, server = sections
    shape = parallel_settings(parallel), offload_settings(offload), asynchronous_settings(asynchronous, server)
    exchange = asynchronous if server is None else server
    given = {"parallel": parallel, "offload": offload, "asynchronous": exchange, "server": exchange}
    for name, section in given.items():
        if name in settings and section is None:
            argument = "asynchronous" if name == "server" else name
            raise SettingsError(
                f"settings = {{{name!r}: ...}}: settings are compared over the ranks and not read; "
                f"give hpctrain.init({argument}=...)"
            )
    return shape


def _equip(world: Communicator, device: torch.device, machine: Machine) -> None:
    """Give the communicator the calibration of this machine type and the GPUs of its ranks."""
    from hpctrain.train.calibration import stored

    calibration = stored(world)
    if calibration is not None:
        world.use_tables({layout: one.table for layout, one in calibration.measurements.items()})
    if world.size > 1 and all(kind == "cuda" for kind in world.all_gather_object(device.type)):
        machine.connect(world, device, calibration.verdict if calibration is not None else None)


# Devices --------------------------------------------------------------------------------------------------------------


def select_device(wanted: str, local_rank: int, machine: Machine = Machine()) -> torch.device:
    """Return the device of a rank: ``auto`` is a GPU if one is visible, the CPU in a job that has requested no GPUs.

    GPUs are assigned by local rank among the visible ones. The result is therefore the same whether
    the launcher shows each rank all GPUs of the node or only one.
    """
    import torch

    if wanted not in ("auto", "cpu", "cuda"):
        raise DeviceError(f"unknown device {wanted!r}: known are auto, cpu, cuda", everywhere=True)
    visible = 0 if wanted == "cpu" else machine.gpus()
    if wanted == "auto" and not visible and (why := machine.why_no_gpus()):
        raise DeviceError(f"device auto: {why}")
    if wanted == "cuda" and not visible:
        raise DeviceError("device cuda: no GPU is visible to this rank (is it in CUDA_VISIBLE_DEVICES?)")
    return torch.device("cuda", local_rank % visible) if visible else torch.device("cpu")


def check_unshared(owners: Sequence[tuple[str, str]], table: str) -> None:
    """Raise ``DeviceError`` if two ranks of a host use one GPU; ``owners`` contains (host, identity) by rank."""
    users: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, (host, name) in enumerate(owners):
        if name != "cpu":
            users[host, name].append(rank)
    for (host, _), ranks in users.items():
        if len(ranks) > 1:
            raise DeviceError(
                f"ranks {', '.join(map(str, ranks))} share one GPU of {host}: start fewer ranks per node, "
                f"or allow it with run.oversubscribe = true\n{table}",
                everywhere=True,
            )


# Handshake of the ranks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Handshake:
    """Description of one rank that it sends to the others."""

    host: str
    node: int
    local_rank: int
    cpus: tuple[int, ...]
    device: str
    device_identity: str
    versions: dict[str, str]
    settings: str  # digest


def exchange_handshakes(
    comm: Communicator,
    device: torch.device,
    settings: Mapping[str, Any],
    machine: Machine = Machine(),
) -> list[Handshake]:
    """Return the descriptions of all ranks, by rank. Collective.

    Raises ``MismatchError`` on all ranks if versions or settings differ.
    """
    flat = {name: repr(value) for name, value in flatten(settings).items()}
    digest = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()
    own = Handshake(
        host=socket.gethostname(),
        node=comm.node,
        local_rank=comm.local_rank,
        cpus=cpu_affinity(),
        device=str(device),
        device_identity=machine.identity(device),
        versions=machine.versions(),
        settings=digest,
    )
    handshakes: list[Handshake] = comm.all_gather_object(own)
    for rank, handshake in enumerate(handshakes):
        check_versions(handshakes[0], handshake, rank)
    first = handshakes[0].settings
    differing = next((rank for rank, handshake in enumerate(handshakes) if handshake.settings != first), None)
    if differing is not None:
        everyone = comm.all_gather_object(flat)
        refuse_settings(everyone[0], everyone[differing], differing, handshakes[differing].host)
    return handshakes


def check_versions(first: Handshake, other: Handshake, rank: int) -> None:
    """Raise ``MismatchError`` if rank ``rank`` has another version of any package than rank 0."""
    for package in sorted(first.versions | other.versions):
        here, there = first.versions.get(package, "none"), other.versions.get(package, "none")
        if here != there:
            raise MismatchError(
                f"rank 0 on {first.host} has {package} {here}, rank {rank} on {other.host} has {there}: "
                "start all ranks from one environment",
                everywhere=True,
            )


def refuse_settings(first: Mapping[str, str], other: Mapping[str, str], rank: int, host: str) -> None:
    """Raise ``MismatchError``, which names the settings in which rank ``rank`` differs from rank 0."""
    names = [name for name in sorted({*first, *other}) if first.get(name) != other.get(name)]
    shown = [f"{name} is {first.get(name, 'unset')} there and {other.get(name, 'unset')} here" for name in names[:4]]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    raise MismatchError(
        f"rank {rank} on {host} has different settings than rank 0: {'; '.join(shown)}{more}: "
        "give all ranks the same file and --set",
        everywhere=True,
    )


def threads(handshakes: list[Handshake], rank: int) -> int:
    """Return the number of threads for a rank; a valid ``OMP_NUM_THREADS`` takes precedence."""
    requested = os.environ.get("OMP_NUM_THREADS", "")
    if requested.isdigit() and int(requested) > 0:
        return int(requested)
    neighbours = [handshake.cpus for handshake in handshakes if handshake.node == handshakes[rank].node]
    return threads_for(handshakes[rank].cpus, neighbours)


def resources(handshakes: list[Handshake]) -> dict[str, int]:
    """Return the number of logical CPUs available to the ranks over all nodes, and of GPUs if there are any."""
    cpus = {(handshake.host, cpu) for handshake in handshakes for cpu in handshake.cpus}
    on_gpus = [handshake for handshake in handshakes if handshake.device.startswith("cuda")]
    gpus = {(handshake.host, handshake.device_identity) for handshake in on_gpus}
    return {"cpus": len(cpus)} | ({"gpus": len(gpus)} if gpus else {})


def table(handshakes: list[Handshake]) -> str:
    """Return the binding table: host, CPUs and device of each rank."""
    return binding_table(
        Binding(handshake.host, rank, handshake.local_rank, handshake.cpus, threads(handshakes, rank), handshake.device)
        for rank, handshake in enumerate(handshakes)
    )
