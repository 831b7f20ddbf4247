"""Initialization of a job: signal handlers first, then MPI, then the values on which the ranks must agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpctrain.errors import SettingsError
from hpctrain.train import signals

if TYPE_CHECKING:
    import torch

    from hpctrain.collectives.communicator import Communicator
    from hpctrain.parallel.asynchronous.settings import ServerSettings
    from hpctrain.parallel.offload.settings import OffloadSettings
    from hpctrain.parallel.settings import ParallelSettings
    from hpctrain.train.job import Job


@signals.starting()
def init(
    comm: Any = None,
    *,
    device: str = "auto",
    oversubscribe: bool = False,
    parallel: ParallelSettings | Mapping[str, Any] | str | None = None,
    offload: OffloadSettings | Mapping[str, Any] | None = None,
    server: ServerSettings | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    verbose: bool = False,
) -> Job:
    """Join the ranks that the launcher started, and return this rank's ``Job``. Collective.

    ``comm`` is the mpi4py communicator to train in, ``COMM_WORLD`` by default. A process without a
    launcher is a job of one rank and needs no MPI. ``device`` is ``auto`` (a GPU if one is
    visible), ``cpu`` or ``cuda``. Two ranks share a GPU only with ``oversubscribe``. ``parallel``,
    ``offload`` and ``server`` are the settings of these sections, or dicts of them;
    ``parallel="fsdp"`` names a strategy. They are the defaults for every model that ``Job.wrap``
    gets without its own settings. ``settings`` are values that all ranks must share: they are
    compared over the ranks and not interpreted. ``verbose`` prints the cores and devices of each
    rank.

    After this call, a rank that fails ends the job. Raises ``SettingsError`` for a wrong setting,
    ``LaunchError`` if the launcher started ranks that MPI does not see, ``MismatchError`` if ranks
    disagree on versions or settings, ``DeviceError`` if ranks would share a GPU.
    """
    signals.install()  # before the import of torch, which takes seconds in which USR1 would kill this process

    from hpctrain.cluster.launcher import first_guess_of_rank, is_launched
    from hpctrain.train.leaving import end_if_uncaught

    try:
        import torch

        from hpctrain import log
        from hpctrain.collectives.agreement import agreed
        from hpctrain.collectives.communicator import Communicator
        from hpctrain.data.random_streams import draw_alike
        from hpctrain.parallel.asynchronous.settings import server_settings
        from hpctrain.parallel.offload.settings import offload_settings
        from hpctrain.parallel.settings import parallel_settings
        from hpctrain.train import compiler, hello
        from hpctrain.train.device import check_unshared, pick
        from hpctrain.train.guard import Guard
        from hpctrain.train.job import Job
        from hpctrain.transport.connect import connect

        compiler.put_off()
        shape = parallel_settings(parallel), offload_settings(offload), server_settings(server)
        _refuse_unread(settings or {}, {"parallel": parallel, "offload": offload, "server": server})
        transport, launch = connect(comm)
        log.configure(transport.rank, verbose=verbose)
        guard = Guard(transport)
    except BaseException as error:
        end_if_uncaught(error, first_guess_of_rank(), launched=is_launched())
        raise
    world = Communicator(transport)
    own = agreed(world, lambda: pick(device, world.local_rank))
    if own.type == "cuda":
        torch.cuda.set_device(own)
    hellos = hello.introduce(world, own, settings or {})
    if not oversubscribe:
        check_unshared([(one.host, one.device_identity) for one in hellos], hello.table(hellos))
    torch.set_num_threads(hello.threads(hellos, world.rank))
    _equip(world, own)
    draw_alike(world)  # otherwise a program without a seed would split its data differently on every rank
    if verbose and world.rank == 0:
        log.logger.info("%s", hello.table(hellos))
    return Job(world, own, launch, guard, *shape, resources=hello.resources(hellos))


def _refuse_unread(settings: Mapping[str, Any], sections: Mapping[str, Any]) -> None:
    """Raise ``SettingsError`` for a section that is only in ``settings``, where it has no effect."""
    for name, given in sections.items():
        if name in settings and given is None:
            raise SettingsError(
                f"settings = {{{name!r}: ...}}: settings are compared over the ranks and not read; "
                f"give hpctrain.init({name}=...)"
            )


def _equip(world: Communicator, device: torch.device) -> None:
    """Give the communicator the calibration of this machine type and the GPUs of its ranks."""
    from hpctrain.train.calibration import stored

    calibration = stored(world)
    if calibration is not None:
        world.use_tables({layout: one.table for layout, one in calibration.measurements.items()})
    if world.size > 1 and all(kind == "cuda" for kind in world.all_gather_object(device.type)):
        world.use_device(device, calibration.verdict if calibration is not None else None)
