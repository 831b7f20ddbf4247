"""Setup of sharded data parallelism: parameter groups and their initial values, and the components of the strategy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device.streams import streams_of
from hpctrain.errors import UsageError
from hpctrain.parallel.agreement import check_same_model
from hpctrain.parallel.buckets import assign_buckets
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.fsdp.buffer_pool import BufferPool, FreshPool, RingPool
from hpctrain.parallel.fsdp.param_group import CommStream, Locations, Memory, ParamGroup, ShardedParam
from hpctrain.parallel.fsdp.reduce import GradReduction, GroupReduction
from hpctrain.parallel.fsdp.residency import KeepUnsharded, Residency
from hpctrain.parallel.fsdp.units import Unit, find_units
from hpctrain.parallel.fsdp.unshard import UnitState, UnshardOnDemand
from hpctrain.parallel.meta_init import check_initialisable, initial_values, make_buffers
from hpctrain.parallel.strategy import trainable

if TYPE_CHECKING:
    from hpctrain.parallel.offload.config import OffloadSettings
    from hpctrain.parallel.offload.host_optimizer import HostOptimizer

    MakeHostOptimizer = Callable[[OffloadSettings, torch.device, Communicator], HostOptimizer]

FIRST_BUCKET = 2**20  # bytes: the group whose gradients are complete first is small, so that reduction starts early

Entry = tuple[str, nn.Parameter, Locations]


class GroupBuilder:
    """Factory of parameter groups for the ranks of ``comm``; ``flat(numel, dtype)`` allocates their memory.

    ``host`` and ``host_frozen`` allocate the memory of a rank's shards of trained and of frozen
    parameters. The shards are on the device if these are None.
    """

    def __init__(
        self,
        comm: Communicator,
        flat: Memory,
        device: torch.device,
        *,
        on_demand: bool,
        compute_dtype: torch.dtype | None,
        host: Memory | None = None,
        host_frozen: Memory | None = None,
    ) -> None:
        self._comm, self._flat, self._device = comm, flat, device
        self._host, self._host_frozen = host, host_frozen
        self._on_demand, self._compute_dtype = on_demand, compute_dtype

    def of_unit(self, unit: Unit) -> list[ParamGroup]:
        """Return the parameter groups of a unit: one per dtype, trained and frozen parameters separately."""
        return [self._make(entries) for entries in _by_kind(_entries([unit]))]

    def of_buckets(self, units: Sequence[Unit], names: Sequence[str], limit: int) -> list[ParamGroup]:
        """Return parameter groups of at most ``limit`` bytes, in reverse order of ``names``.

        The gradients of the last parameters are computed first.
        """
        groups = []
        position = {name: number for number, name in enumerate(names)}
        for entries in _by_kind(sorted(_entries(units), key=lambda entry: -position[entry[0]])):
            sizes = [parameter.numel() * parameter.itemsize for _, parameter, _ in entries]
            for numbers in assign_buckets(sizes, range(len(entries)), min(FIRST_BUCKET, limit), limit):
                groups.append(self._make([entries[number] for number in numbers]))
        return groups

    def _make(self, entries: Sequence[Entry]) -> ParamGroup:
        names, parameters, locations = zip(*entries)
        dtype = parameters[0].dtype
        compute_dtype = self._compute_dtype if self._compute_dtype and dtype is torch.float32 else dtype
        return ParamGroup(
            names,
            parameters,
            locations,
            self._comm,
            self._flat,
            dtype=compute_dtype,
            on_demand=self._on_demand,
            device=self._device,
            host=self._host if parameters[0].requires_grad else self._host_frozen,
        )


def _entries(units: Sequence[Unit]) -> list[Entry]:
    return [
        (name, parameter, locations)
        for unit in units
        for (name, parameter), locations in zip(unit.parameters, unit.locations)
    ]


def _by_kind(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Group the entries by dtype and ``requires_grad``: entries of one kind can share a flat tensor."""
    kinds: dict[tuple[torch.dtype, bool], list[Entry]] = {}
    for entry in entries:
        kinds.setdefault((entry[1].dtype, entry[1].requires_grad), []).append(entry)
    return list(kinds.values())


class InitialValues:
    """Initial values of parameters on rank 0; those on the meta device are initialised on demand, module by module."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._modules = dict(model.named_modules())
        self._values: dict[str, Tensor] = {}

    def of(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Return the values of a parameter. Each parameter may be requested only once."""
        if not parameter.is_meta:
            return parameter.detach()
        if name not in self._values:
            owner = name.rpartition(".")[0]
            found = initial_values(self._model, owner, self._modules[owner], self._device)
            self._values.update({f"{owner}.{attribute}".lstrip("."): value for attribute, value in found.items()})
        return self._values.pop(name)


# Setup of sharded data parallelism: its components, for a model, its ranks and its settings ---------------------------


IN_FLIGHT = 4  # number of gradient buckets that the buffers hold at a time, if gradients are not kept unsharded
ON_DEVICE = 2  # the same on a GPU: one bucket is filled while another is reduced


@dataclass(frozen=True)
class Parts:
    """Components of a sharded strategy. The ranks of ``comm`` share one replica of the model."""

    units: list[Unit]
    groups: list[ParamGroup]
    residency: Residency
    reduction: GradReduction
    comm: Communicator
    replicas: Communicator | None
    compute_dtype: torch.dtype | None  # compute dtype of float32 parameters
    replaced: dict[str, weakref.ref[nn.Parameter]]  # the model's parameters before sharding, while they are alive
    by_name: dict[str, ShardedParam]  # under every name in the model
    host_optimizer: HostOptimizer | None  # updates the shards that are stored on the host

    @property
    def members(self) -> list[ShardedParam]:
        """Return all parameters, in the model's order."""
        return list(dict.fromkeys(self.by_name.values()))


def shard_model(
    model: nn.Module,
    comm: Communicator,
    settings: ParallelSettings,
    device: torch.device,
    offload: OffloadSettings | None = None,
    make_host_optimizer: MakeHostOptimizer | None = None,
) -> Parts:
    """Shard the parameters of a model over the ranks, and return the components of the strategy. Collective.

    With ``offload``, this rank's shards are stored and updated by the ``make_host_optimizer`` that it configures.
    """
    _check(model, comm)
    units = find_units(model, settings.units)
    originals = dict(model.named_parameters())
    numbers = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    replaced = {name: weakref.ref(parameter) for name, parameter in originals.items()}
    uninitialised = make_buffers(model, device)

    shard_comm, replicas = _communicators(comm, settings)
    compute_dtype = torch.bfloat16 if settings.mixed_precision == "bfloat16" else None
    # Agreed on by all ranks, because replicas on other nodes must make the same calls.
    node_shared = device.type == "cpu" and all(comm.all_gather_object(shard_comm.shares_memory))
    node_shared = node_shared and comm.has_space(_bytes_of(originals, compute_dtype))
    on_demand = settings.data == "fsdp" and not node_shared
    host_optimizer = _host_optimizer(
        make_host_optimizer, offload, device, comm, list(originals.values()), shard_comm.size
    )
    host = host_optimizer.host if host_optimizer else None
    host_frozen = host if offload and offload.parameters else None
    flat = _memory(shard_comm, device, node_shared)
    builder = GroupBuilder(
        shard_comm, flat, device, on_demand=on_demand, compute_dtype=compute_dtype, host=host, host_frozen=host_frozen
    )
    unit_states, groups = _make_groups(builder, units, list(originals), settings, on_demand)
    members = {id(originals[member.name]): member for group in groups for member in group.members}
    by_name = {name: members[number] for name, number in numbers.items()}
    units = [Unit(unit.name, unit.module, [], []) for unit in units]  # without references to the old parameters
    stream = CommStream(streams_of(device))
    unsharder = UnshardOnDemand(unit_states, shard_comm, stream, settings.prefetch) if on_demand else None
    residency = unsharder or KeepUnsharded(groups, shard_comm, stream, node_shared=node_shared)
    trained = [group for group in groups if group.trained]
    # With offload, unsharded gradients of all groups would need too much memory.
    all_gradients = settings.data == "zero1" and host_optimizer is None
    buffers = _buffer_pool(trained, shard_comm, settings, device, all_gradients=all_gradients)
    reduction = GradReduction(
        trained,
        shard_comm,
        comm,
        replicas,
        buffers,
        stream,
        dtype=compute_dtype or (torch.bfloat16 if settings.compression == "bfloat16" else None),
        early=not all_gradients or stream.asynchronous or shard_comm.shares_memory,
        observer=unsharder,
        make_reduction=host_optimizer.grad_offload.make_reduction if host_optimizer else GroupReduction,
    )
    if host_optimizer is not None:
        host_optimizer.take_over(groups, reduction.reductions)
    _fill(model, groups, originals, comm, replicas, device)
    _share_buffers(model, uninitialised, comm, device)
    if unsharder:
        unsharder.reducer = reduction
    return Parts(
        units, groups, residency, reduction, shard_comm, replicas, compute_dtype, replaced, by_name, host_optimizer
    )


def _check(model: nn.Module, comm: Communicator) -> None:
    """Raise an error for a model that cannot be sharded, before the model is changed."""
    check_same_model(model, comm)
    if not trainable(model):
        raise UsageError("the model has no parameter that requires a gradient", everywhere=True)
    check_initialisable(model)


def _host_optimizer(
    make_host_optimizer: MakeHostOptimizer | None,
    offload: OffloadSettings | None,
    device: torch.device,
    comm: Communicator,
    parameters: list[nn.Parameter],
    ranks: int,
) -> HostOptimizer | None:
    """Return the engine that keeps this rank's slices on the host; None without offload.

    Raises an error on all ranks if a disk is full.
    """
    if offload is None or make_host_optimizer is None or not offload.any_update:
        return None

    def make() -> HostOptimizer:
        host_optimizer = make_host_optimizer(offload, device, comm)
        host_optimizer.reserve((each for each in parameters if each.requires_grad or offload.parameters), ranks)
        return host_optimizer

    return agreed(comm, make)


def _communicators(comm: Communicator, settings: ParallelSettings) -> tuple[Communicator, Communicator | None]:
    """Return the ranks that share one replica, and the ranks that hold the same slice of each replica."""
    if settings.shard_within == "world" or comm.nodes == 1:
        return comm, None
    if not comm.uniform:
        raise UsageError(
            "parallel.shard_within = 'node' needs the same number of ranks on every node: start as many on each, "
            "or shard within the world",
            everywhere=True,
        )
    return comm.split(comm.node), comm.split(comm.local_rank)


def _bytes_of(parameters: Mapping[str, nn.Parameter], compute_dtype: torch.dtype | None) -> int:
    """Return the bytes of unsharded parameters, including their copies in a narrower dtype."""
    more = compute_dtype.itemsize if compute_dtype else 0
    return sum(parameter.numel() * (parameter.itemsize + more) for parameter in parameters.values())


def _memory(comm: Communicator, device: torch.device, node_shared: bool) -> Callable[[int, torch.dtype], Tensor]:
    """Return the allocator of unsharded parameters: memory shared by the node, or memory of each rank."""
    if node_shared:
        return lambda numel, dtype: comm.common(numel, dtype, must_share=True)
    return lambda numel, dtype: torch.empty(numel, dtype=dtype, device=device)


def _make_groups(
    builder: GroupBuilder, units: list[Unit], names: list[str], settings: ParallelSettings, on_demand: bool
) -> tuple[list[UnitState], list[ParamGroup]]:
    """Return the states of the units, and all parameter groups, those of the last parameters first."""
    if not on_demand:
        return [], builder.of_buckets(units, names, int(settings.bucket_mib * 2**20))
    unit_states = []
    for number, unit in enumerate(units):
        unit_states.append(UnitState(number, unit.name, unit.module, builder.of_unit(unit)))
    return unit_states, [group for unit_state in reversed(unit_states) for group in unit_state.groups]


def _fill(
    model: nn.Module,
    groups: list[ParamGroup],
    originals: dict[str, nn.Parameter],
    comm: Communicator,
    replicas: Communicator | None,
    device: torch.device,
) -> None:
    """Scatter rank 0's values, register the shards in the model, and release the ``originals``."""
    values = InitialValues(model, device)

    def value(member: ShardedParam) -> Tensor:
        return values.of(member.name, originals[member.name])

    for group in groups:
        group.fill(value if comm.rank == 0 else None, replicas)
        group.to_sharded()
        for member in group.members:
            del originals[member.name]


def _share_buffers(model: nn.Module, uninitialised: list[str], comm: Communicator, device: torch.device) -> None:
    """Broadcast the buffers of rank 0, which initialises those that were on the meta device."""
    if comm.rank == 0:
        modules = dict(model.named_modules())
        for name in uninitialised:
            # parameters of the same module are initialised with them and dropped
            initial_values(model, name, modules[name], device)
    for buffer in model.buffers():
        comm.broadcast(buffer)


def _buffer_pool(
    groups: list[ParamGroup],
    comm: Communicator,
    settings: ParallelSettings,
    device: torch.device,
    *,
    all_gradients: bool,
) -> BufferPool:
    """Return buffers for the gradients of all parameter groups, or of a few at a time."""
    if device.type != "cpu":
        return FreshPool(device, len(groups) if all_gradients else ON_DEVICE)
    sizes = [group.layout.numel * group.members[0].unsharded.itemsize for group in groups]
    few = max(max(sizes), IN_FLIGHT * int(settings.bucket_mib * 2**20))
    return RingPool(comm, sum(sizes) if all_gradients else min(few, sum(sizes)))
