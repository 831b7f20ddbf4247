"""Process groups that a program requests from torch: the names of its back ends, and which of them are ours.

torch calls one function for every group, ``_new_process_group_helper``. ``watch`` puts a function around it, which
checks the names and remembers the request. After ``take_over`` (``hpctrain run``), the back ends gloo and mpi are
ours, too: that function then finds our classes under the names of torch's. ``dist.get_backend()`` returns the name
that the program has given. If another back end serves some types of devices (``cpu:hpctrain,cuda:nccl``), torch's
function makes two groups, see ``device_group``.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

NAME = "hpctrain"
TIMEOUT = timedelta(minutes=30)  # torch's default for all back ends but NCCL
ALIASES = ("gloo", "mpi")
_GLOO_SETTINGS = ("gloo_device_transport", "gloo_socket_ifname")  # of the environment, in capitals
_THREADS = 2  # threads of a rank that carry out a group's operations: the caller's, and that of the group
_STOCK = {name: getattr(c10d, name, None) for name in ("ProcessGroupGloo", "ProcessGroupMPI")}


class Takeover:
    """Changes of ``hpctrain run`` to its process: ``env://`` is ours, and so are groups with names of torch's."""

    rendezvous = False  # even if MASTER_ADDR is set: many programs set it themselves
    aliases: tuple[str, ...] = ()  # names of torch's back ends that ours serves


@dataclass(frozen=True)
class GroupRequest:
    """Group that torch is about to create: its ranks (none: all), and the back end of each type of device."""

    ranks: tuple[int, ...]
    backends: Mapping[str, str]
    timeout: timedelta
    name: str

    @property
    def own(self) -> str:
        """Return the name under which our back end serves this group; empty if it does not."""
        return next((name for name in self.backends.values() if is_ours(name)), "")

    @property
    def own_devices(self) -> dict[str, str]:
        """Return the types of devices that our back end serves in this group, with its name."""
        return {device: name for device, name in self.backends.items() if is_ours(name)}

    @property
    def others(self) -> dict[str, str]:
        """Return the back ends of torch that serve other types of devices in the same group."""
        return {device: name for device, name in self.backends.items() if self.own and not is_ours(name)}


def is_ours(name: str) -> bool:
    """Return whether our back end serves groups of this name."""
    return name in (NAME, *Takeover.aliases)


_Make = Callable[[Mapping[str, Any], GroupRequest], Any]
_current: ContextVar[GroupRequest | None] = ContextVar("_current", default=None)


def requested() -> GroupRequest:
    """Return the request of the group that torch is creating in this thread."""
    request = _current.get()
    assert request is not None, "torch creates groups in the function that watch() has replaced"
    return request


def watch() -> None:
    """Check and remember each request for a group from now on."""
    stock = c10d._new_process_group_helper
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def helper(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        text = str(given["backend"])
        check_names(text)
        given["backend"] = with_host(text)
        ranks = tuple(given["global_ranks_in_group"])
        request = GroupRequest(ranks, backends(given["backend"]), given.get("timeout") or TIMEOUT, given["group_name"])
        if not request.own:
            return make(given, request)
        check_options(given)
        if not request.others:
            return make({**given, "device_id": None}, request)  # a GPU is prepared at its first tensor
        return _make_two(make, given, request)

    def make(given: Mapping[str, Any], request: GroupRequest) -> Any:
        if Takeover.aliases:
            _substitute(request)
        token = _current.set(request)
        try:
            return stock(**given)
        finally:
            _current.reset(token)

    c10d._new_process_group_helper = helper


def _make_two(make: _Make, given: Mapping[str, Any], request: GroupRequest) -> Any:
    """Return our group and its store, as torch's function does; a second group serves the other devices."""
    from hpctrain.torch_backend.device_group import TwoBackends, hide

    # torch makes none of the back ends behind ours. It records their names, and uses them again for new groups.
    own = {"backend": listed({**request.own_devices, **request.others}), "device_id": None}
    made = make({**given, **own}, request)
    group = made[0]
    if not isinstance(group, TwoBackends) or group.other is not None:
        return made  # this rank is no member, or torch has found an existing group with the tag of this one
    names = listed(request.others)
    second = GroupRequest(request.ranks, request.others, request.timeout, f"{request.name} {names}")
    try:
        other = make({**given, "backend": names, "group_name": second.name, "pg_tag": None}, second)[0]
    except BaseException:
        hide(group)
        group.shutdown()
        raise
    hide(other)
    group.forward_to(other, request.others, request.own_devices)
    return made


def listed(names: Mapping[str, str]) -> Any:
    """Return the back ends of types of devices in torch's form, such as ``cpu:hpctrain,cuda:nccl``."""
    return c10d.Backend(",".join(f"{device}:{name}" for device, name in names.items()))


def take_over(*, aliases: bool) -> None:
    """Serve ``env://`` in this process from now on, and with ``aliases`` groups of the back ends gloo and mpi, too."""
    Takeover.rendezvous = True
    if aliases:
        Takeover.aliases = ALIASES
        setattr(c10d, "_MPI_AVAILABLE", True)
        _extend_ddp_log()


def backends(text: str) -> dict[str, str]:
    """Return the back end of each type of device, as torch reads the name of a back end; no name: the default one."""
    found = c10d.BackendConfig(c10d.Backend(text)).get_device_backend_map()
    return {device: str(name) for device, name in found.items()}


def with_host(text: str) -> Any:
    """Return the back ends of a request; after ``take_over``, no name means ours beside that of the GPUs, if any."""
    if text == c10d.Backend.UNDEFINED and Takeover.aliases and "cpu" not in (found := backends(text)):
        return listed({"cpu": c10d.Backend.GLOO, **found})
    return c10d.Backend(text)


def check_names(text: str) -> None:
    """Raise ``UsageError`` for an unknown back end or a malformed list, if ``hpctrain run`` started the program.

    In other programs, one of the names must be ours, or probably a misspelled one of ours: torch refuses all others.
    """
    known = [name for name in c10d.Backend.backend_list if name not in ("undefined", "fake")]
    parts = [part.rpartition(":") for part in text.lower().split(",")]
    if not Takeover.rendezvous and not any(_means_ours(name, known) for _, _, name in parts):
        return
    for _, _, name in parts:
        if not is_known(name):
            from hpctrain.settings import unknown  # takes 9 ms, which every import of torch would take longer

            raise UsageError(unknown("back end of torch.distributed", name, known), everywhere=True)
    devices = [device for device, _, _ in parts]
    if devices != [""] and not (len(set(devices)) == len(devices) and all(map(_is_device_type, devices))):
        raise UsageError(
            f"back ends of torch.distributed: {text!r}; allowed are one name, or one name per type of device; "
            f"write cpu:{NAME},cuda:nccl",
            everywhere=True,
        )


def _means_ours(name: str, known: list[str]) -> bool:
    """Return whether a name is ours, or probably a misspelled or shortened one of ours."""
    if is_known(name):
        return name == NAME
    return (len(name) > 2 and NAME.startswith(name)) or difflib.get_close_matches(name, known, n=1) == [NAME]


def _is_device_type(name: str) -> bool:
    try:
        return torch.device(name).index is None
    except RuntimeError:
        return False


def is_known(name: str, registry: Any = c10d.Backend) -> bool:
    """Return whether torch knows a back end; since 2.14, it registers those of entry points at their first use."""
    if name not in registry.backend_list:
        getattr(registry, "_ensure_backend_registered", lambda _: None)(name)
    return name in registry.backend_list


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for options of torch 2.14 that our groups cannot serve."""
    if options.get("enable_reconfigure"):
        raise UsageError("enable_reconfigure=True: ranks of an hpctrain group are fixed; leave it out", everywhere=True)


def _extend_ddp_log() -> None:
    """Let DDP's log of a model name the back end as the program does, and for gloo contain gloo's entries.

    DDP's C++ code, which must see our own name (see below), adds these entries for the name gloo only.
    """
    from torch.nn.parallel import DistributedDataParallel

    stock: Any = DistributedDataParallel._get_ddp_logging_data

    @functools.wraps(stock)
    def logging_data(model: Any) -> dict[str, Any]:
        data: dict[str, Any] = stock(model)
        if data.get("backend_name") == NAME:
            data["backend_name"] = name = str(c10d.get_backend(model.process_group))
            if name == "gloo":
                settings = {each: os.environ.get(each.upper(), "N/A") for each in _GLOO_SETTINGS}
                data |= {**settings, "gloo_num_threads": _THREADS}
        return data

    setattr(DistributedDataParallel, "_get_ddp_logging_data", logging_data)


def _store(timeout: timedelta) -> Store:
    """Return a store for groups of the back end mpi, for which torch has no rendezvous. Collective."""
    from hpctrain.torch_backend.world import world

    everyone = world(timeout.total_seconds())
    return PrefixStore(everyone.prefix(), everyone.store)


def kind_of(kind: Any, request: GroupRequest) -> Any:
    """Return the class of a group of ours, which forwards to another one if another back end serves some devices."""
    if not request.others:
        return kind
    from hpctrain.torch_backend.device_group import two_backends

    return two_backends(kind)


# Classes under the names of torch's -----------------------------------------------------------------------------------


def _substitute(request: GroupRequest) -> None:
    """Let torch find our classes for this group, and its own ones for groups of torch's back ends."""
    ours = request.own
    setattr(c10d, "ProcessGroupGloo", kind_of(_gloo(), request) if ours else _STOCK["ProcessGroupGloo"])
    setattr(c10d, "ProcessGroupMPI", _mpi() if ours else _STOCK["ProcessGroupMPI"])


@functools.cache
def _alias() -> Any:
    from hpctrain.torch_backend.group import HpctrainGroup

    class Alias(HpctrainGroup):
        """Our group under the name of a back end of torch."""

        def __init__(self, comm: Communicator, store: Store) -> None:
            request = requested()
            super().__init__(comm, store, request.timeout, request.name, request.own)

        def getBackendName(self) -> str:
            """Return our own name: C++ code of DDP takes a group with the name gloo for an object of its own class."""
            return NAME

    return Alias


@functools.cache
def _gloo() -> type:
    class Gloo(_alias()):  # type: ignore[misc]
        """Our group, with the constructor and those attributes of ``ProcessGroupGloo`` that torch uses."""

        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta = TIMEOUT, **_: object) -> None:
            from hpctrain.torch_backend.world import communicator

            ranks = list(requested().ranks)
            super().__init__(communicator(ranks, rank, size, timeout), store)
            self.options = SimpleNamespace(global_ranks_in_group=ranks, group_name="")

        def _set_sequence_number_for_group(self) -> None:
            """Do nothing: the ranks compare operations in another way."""

    return Gloo


@functools.cache
def _mpi() -> type:
    class Mpi:
        """Our group, with the constructor of ``ProcessGroupMPI``."""

        @staticmethod
        def create(ranks: list[int]) -> Any:
            from hpctrain.torch_backend.world import communicator

            timeout = requested().timeout
            return kind_of(_alias(), requested())(communicator(list(ranks), -1, -1, timeout), _store(timeout))

    return Mpi
