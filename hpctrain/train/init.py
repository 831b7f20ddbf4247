"""Initialization of a job: signal handlers first, then MPI, then the values on which the ranks must agree.

glibc serves large allocations by mmap. By default it raises this threshold to up to 32 MiB as such
memory is freed. From then on, tensors that live for the whole run and tensors of a single layer
share one heap. Free memory between them is neither used nor returned to the system. If all large
tensors used mmap, every allocation would have to zero its pages: a ResNet step takes 1.8 times as
long at a threshold of 1 MiB, and 1.4 times at 4 MiB (benchmarks/README.md).

The threshold is therefore low while a run allocates what is permanent: parameters, buckets and
optimizer states. After the second update it is high: short-lived tensors share a heap that contains
little else, and the heap keeps its pages.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpctrain.errors import SettingsError
from hpctrain.train import control

if TYPE_CHECKING:
    import torch

    from hpctrain.comm.communicator import Communicator
    from hpctrain.parallel.asynchronous.config import AsynchronousSettings
    from hpctrain.parallel.config import ParallelSettings
    from hpctrain.parallel.offload.config import OffloadSettings
    from hpctrain.train.job import Job


# Deferred import of torch's compiler: it is loaded when a program first uses it ---------------------------------------
#
# torch's optimizers import the compiler on first use (1.2 s on every rank, more if ranks outnumber
# cores), only to exclude themselves from tracing: they call ``disable`` and ``graph_break``. While
# the compiler is not loaded, no tracing can be active. Until then, a stub replaces ``torch._dynamo``:
# ``disable`` returns the function unchanged, and ``graph_break`` does nothing, like the real function
# outside of a trace. Access to any other attribute loads the real module, which replaces the stub.
# Functions that the stub did not disable are then disabled at their next call. Activation checkpoints
# read a flag of ``torch._dynamo.config`` that only a trace needs, so the stub defines it. Loading the
# compiler for this flag would cost 70 MB on every rank that recomputes activations.


NAME = "torch._dynamo"
_MARK = "__dynamo_disable"  # the attribute in which torch stores the disabled form of a function


def defer_compiler() -> None:
    """Install the stub for the compiler, unless the compiler is already loaded."""
    if NAME not in sys.modules:
        import torch

        placeholder = _LazyDynamo(NAME)
        sys.modules[NAME] = placeholder
        setattr(torch, "_dynamo", placeholder)


class _LazyConfig:
    """Flags of ``torch._dynamo.config`` that activation checkpoints read outside of a trace."""

    error_on_nested_fx_trace = True

    def __init__(self, placeholder: _LazyDynamo) -> None:
        self.__dict__["_placeholder"] = placeholder

    def __getattr__(self, name: str) -> Any:
        """Read any other flag from the real compiler."""
        return getattr(self._placeholder.load().config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a flag of the real compiler."""
        setattr(self._placeholder.load().config, name, value)


class _LazyDynamo(ModuleType):
    """Stub for ``torch._dynamo`` for callers that only exclude themselves from tracing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__dict__["_passed"] = weakref.WeakSet()  # checkpoints create new functions in each pass
        self.__dict__["config"] = _LazyConfig(self)

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: there is no graph."""

    def disable(self, function: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
        """Return the function unchanged: no trace is active."""
        self._passed.add(function)
        return function

    def __getattr__(self, name: str) -> Any:
        """Load the real compiler and return its attribute; the real module replaces the stub from now on."""
        return getattr(self.load(), name)

    def load(self) -> ModuleType:
        """Return the real compiler, which replaces the stub."""
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
            importlib.import_module(NAME)  # binds torch._dynamo, too
            for function in self._passed:
                function.__dict__.pop(_MARK, None)
        return sys.modules[NAME]


# Initialization of a job: signal handlers first, then MPI, then the values on which the ranks must agree --------------


@control.starting()
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
    visible), ``cpu`` or ``cuda``. Two ranks share a GPU only with ``oversubscribe``. ``parallel``,
    ``offload`` and ``asynchronous`` are the settings of these sections, or dicts of them;
    ``parallel="fsdp"`` names a strategy; ``server`` is the former name of ``asynchronous``. They
    are the defaults for every model that ``Job.wrap`` gets without its own settings. ``settings``
    are values that all ranks must share: they are compared over the ranks and not interpreted.
    ``verbose`` prints the cores and devices of each rank.

    After this call, a rank that fails ends the job. Raises ``SettingsError`` for a wrong setting,
    ``LaunchError`` if the launcher started ranks that MPI does not see, ``MismatchError`` if ranks
    disagree on versions or settings, ``DeviceError`` if ranks would share a GPU.
    """
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
        from hpctrain.parallel.asynchronous.config import asynchronous_settings
        from hpctrain.parallel.config import parallel_settings
        from hpctrain.parallel.offload.config import offload_settings
        from hpctrain.train import handshake
        from hpctrain.train.handshake import check_unshared, select_device
        from hpctrain.train.job import Job
        from hpctrain.train.watchdog import Watchdog

        defer_compiler()
        shape = parallel_settings(parallel), offload_settings(offload), asynchronous_settings(asynchronous, server)
        exchange = asynchronous if server is None else server
        sections = {"parallel": parallel, "offload": offload, "asynchronous": exchange, "server": exchange}
        _refuse_unread(settings or {}, sections)
        transport, launch = connect(comm)
        log.configure(transport.rank, verbose=verbose)
        guard = Watchdog(transport)
    except BaseException as error:
        end_if_uncaught(error, rank_from_environment(), launched=is_launched())
        raise
    world = Communicator(transport)
    own = agreed(world, lambda: select_device(device, world.local_rank))
    if own.type == "cuda":
        torch.cuda.set_device(own)
    handshakes = handshake.exchange_handshakes(world, own, settings or {})
    if not oversubscribe:
        check_unshared([(one.host, one.device_identity) for one in handshakes], handshake.table(handshakes))
    torch.set_num_threads(handshake.threads(handshakes, world.rank))
    _equip(world, own)
    broadcast_generators(world)  # otherwise a program without a seed would split its data differently on every rank
    if verbose and world.rank == 0:
        log.logger.info("%s", handshake.table(handshakes))
    return Job(world, own, launch, guard, *shape, resources=handshake.resources(handshakes))


def _refuse_unread(settings: Mapping[str, Any], sections: Mapping[str, Any]) -> None:
    """Raise ``SettingsError`` for a section that is only in ``settings``, where it has no effect."""
    for name, given in sections.items():
        if name in settings and given is None:
            argument = "asynchronous" if name == "server" else name
            raise SettingsError(
                f"settings = {{{name!r}: ...}}: settings are compared over the ranks and not read; "
                f"give hpctrain.init({argument}=...)"
            )


def _equip(world: Communicator, device: torch.device) -> None:
    """Give the communicator the calibration of this machine type and the GPUs of its ranks."""
    from hpctrain.train.calibration import stored

    calibration = stored(world)
    if calibration is not None:
        world.use_tables({layout: one.table for layout, one in calibration.measurements.items()})
    if world.size > 1 and all(kind == "cuda" for kind in world.all_gather_object(device.type)):
        world.use_device(device, calibration.verdict if calibration is not None else None)
