"""Setup of sharded data parallelism: parameter groups and their initial values, and the components of the strategy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device.streams import Streams, streams_of
from hpctrain.errors import UsageError
from hpctrain.parallel.buckets import assign_buckets
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.fsdp.param_group import Locations, Memory, ParamGroup, ShardedParam
from hpctrain.parallel.fsdp.reduce import BufferPool, FreshPool, GradReduction, GroupReduction, RingPool
from hpctrain.parallel.fsdp.residency import CommStream, KeepUnsharded, Residency, UnitState
from hpctrain.parallel.fsdp.units import Unit, find_units
from hpctrain.parallel.fsdp.unshard import UnshardOnDemand
from hpctrain.parallel.meta_init import check_initialisable, initial_values, make_buffers
from hpctrain.parallel.model_agreement import check_same_model, trainable

if TYPE_CHECKING:
    from hpctrain.parallel.offload.config import OffloadSettings
    from hpctrain.parallel.offload.host_optimizer import HostOptimizer

    MakeHostOptimizer = Callable[[OffloadSettings, torch.device, Communicator], HostOptimizer]

FIRST_BUCKET = 2**20  # bytes: the group whose gradients are complete first is small, so that reduction starts early

Entry = tuple[str, nn.Parameter, Locations]


class GroupBuilder:
    """Factory of parameter groups.

    ``host`` and ``host_frozen`` allocate the memory of a rank's shards of trained and of frozen
    parameters. The shards are on the device if these are None.
    """

    def __init__(self, plan: ShardingPlan, host: Memory | None = None, host_frozen: Memory | None = None) -> None:
        self._plan, self._host, self._host_frozen = plan, host, host_frozen

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
        plan, dtype = self._plan, parameters[0].dtype
        return plan.parts.group(
            names,
            parameters,
            locations,
            plan.comm,
            plan.flat,
            dtype=plan.compute_dtype if plan.compute_dtype and dtype is torch.float32 else dtype,
            on_demand=plan.on_demand,
            device=plan.device,
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
class Components:
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


@dataclass(frozen=True)
class Parts:
    """Streams and classes of which a sharded strategy is made."""

    streams: Callable[[torch.device], Streams] = streams_of
    group: type[ParamGroup] = ParamGroup
    reduction: type[GroupReduction] = GroupReduction


@dataclass(frozen=True)
class ShardingPlan:
    """Ranks and memory of a sharded model, the same on all ranks: collectives on other nodes depend on them."""

    world: Communicator
    comm: Communicator  # ranks that share one replica
    replicas: Communicator | None  # ranks that hold the same slice of each replica
    settings: ParallelSettings
    device: torch.device
    compute_dtype: torch.dtype | None  # of float32 parameters; None: float32
    node_shared: bool  # whether the ranks of a node share the memory of unsharded parameters
    parts: Parts

    @classmethod
    def of(
        cls,
        world: Communicator,
        settings: ParallelSettings,
        device: torch.device,
        parameters: list[nn.Parameter],
        parts: Parts,
    ) -> ShardingPlan:
        """Return the plan for the parameters of a model. Collective."""
        comm, replicas = _communicators(world, settings)
        compute_dtype = torch.bfloat16 if settings.mixed_precision == "bfloat16" else None
        node_shared = device.type == "cpu" and all(world.all_gather_object(comm.shares_memory))
        node_shared = node_shared and world.has_space(_bytes_of(parameters, compute_dtype))
        return cls(world, comm, replicas, settings, device, compute_dtype, node_shared, parts)

    @property
    def on_demand(self) -> bool:
        """Return whether units are unsharded only while they compute."""
        return self.settings.data == "fsdp" and not self.node_shared

    def flat(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate unsharded parameters: in memory that the node shares, or in memory of each rank."""
        if self.node_shared:
            return self.comm.common(numel, dtype, must_share=True)
        return torch.empty(numel, dtype=dtype, device=self.device)


def shard_model(
    model: nn.Module,
    comm: Communicator,
    settings: ParallelSettings,
    device: torch.device,
    offload: OffloadSettings | None = None,
    make_host_optimizer: MakeHostOptimizer | None = None,
    parts: Parts = Parts(),
) -> Components:
    """Shard the parameters of a model over the ranks, and return the components of the strategy. Collective.

    With ``offload``, this rank's shards are stored and updated by the result of ``make_host_optimizer``.
    """
    _check(model, comm)
    units = find_units(model, settings.units)
    originals = dict(model.named_parameters())
    numbers = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    replaced = {name: weakref.ref(parameter) for name, parameter in originals.items()}
    uninitialised = make_buffers(model, device)

    plan = ShardingPlan.of(comm, settings, device, list(originals.values()), parts)
    host_optimizer = _host_optimizer(plan, make_host_optimizer, offload, list(originals.values()))
    host = host_optimizer.host if host_optimizer else None
    builder = GroupBuilder(plan, host=host, host_frozen=host if offload and offload.parameters else None)
    unit_states, groups = _make_groups(builder, units, list(originals), settings, plan.on_demand)
    members = {id(originals[member.name]): member for group in groups for member in group.members}
    by_name = {name: members[number] for name, number in numbers.items()}
    units = [Unit(unit.name, unit.module, [], []) for unit in units]  # without references to the old parameters

    stream = CommStream(parts.streams(device))
    unsharder = UnshardOnDemand(unit_states, plan.comm, stream, settings.prefetch) if plan.on_demand else None
    residency = unsharder or KeepUnsharded(groups, plan.comm, stream, node_shared=plan.node_shared)
    reduction = _grad_reduction(plan, [group for group in groups if group.trained], stream, unsharder, host_optimizer)
    if host_optimizer is not None:
        host_optimizer.take_over(groups, reduction.reductions)
    _fill(model, groups, originals, plan)
    _share_buffers(model, uninitialised, comm, device)
    if unsharder:
        unsharder.reducer = reduction
    return Components(
        units,
        groups,
        residency,
        reduction,
        plan.comm,
        plan.replicas,
        plan.compute_dtype,
        replaced,
        by_name,
        host_optimizer,
    )


def _check(model: nn.Module, comm: Communicator) -> None:
    """Raise an error for a model that cannot be sharded, before the model is changed."""
    check_same_model(model, comm)
    if not trainable(model):
        raise UsageError("the model has no parameter that requires a gradient", everywhere=True)
    check_initialisable(model)


def _host_optimizer(
    plan: ShardingPlan,
    make_host_optimizer: MakeHostOptimizer | None,
    offload: OffloadSettings | None,
    parameters: list[nn.Parameter],
) -> HostOptimizer | None:
    """Return the object that stores and updates this rank's slices on the host; None without offload.

    Raises an error on all ranks if a disk is full.
    """
    if offload is None or make_host_optimizer is None or not offload.any_update:
        return None

    def make() -> HostOptimizer:
        host_optimizer = make_host_optimizer(offload, plan.device, plan.world)
        host_optimizer.reserve(
            (each for each in parameters if each.requires_grad or offload.parameters), plan.comm.size
        )
        return host_optimizer

    return agreed(plan.world, make)


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


def _bytes_of(parameters: Sequence[nn.Parameter], compute_dtype: torch.dtype | None) -> int:
    """Return the bytes of unsharded parameters, including their copies in the compute dtype."""
    more = compute_dtype.itemsize if compute_dtype else 0
    return sum(parameter.numel() * (parameter.itemsize + more) for parameter in parameters)


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


def _fill(model: nn.Module, groups: list[ParamGroup], originals: dict[str, nn.Parameter], plan: ShardingPlan) -> None:
    """Scatter rank 0's values, register the shards in the model, and release the ``originals``."""
    values = InitialValues(model, plan.device)

    def value(member: ShardedParam) -> Tensor:
        return values.of(member.name, originals[member.name])

    for group in groups:
        group.fill(value if plan.world.rank == 0 else None, plan.replicas)
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


def _grad_reduction(
    plan: ShardingPlan,
    groups: list[ParamGroup],
    stream: CommStream,
    unsharder: UnshardOnDemand | None,
    host_optimizer: HostOptimizer | None,
) -> GradReduction:
    """Return the reduction of the gradients of trained groups."""
    compressed = torch.bfloat16 if plan.settings.compression == "bfloat16" else None
    # With offload, unsharded gradients of all groups would need too much memory.
    all_gradients = plan.settings.data == "zero1" and host_optimizer is None
    return GradReduction(
        groups,
        plan.comm,
        plan.world,
        plan.replicas,
        _buffer_pool(plan, groups, stream, all_gradients=all_gradients),
        stream,
        dtype=plan.compute_dtype or compressed,
        early=not all_gradients or stream.asynchronous or plan.comm.shares_memory,
        observer=unsharder,
        make_reduction=host_optimizer.grad_offload.make_reduction if host_optimizer else plan.parts.reduction,
    )


def _buffer_pool(
    plan: ShardingPlan, groups: list[ParamGroup], stream: CommStream, *, all_gradients: bool
) -> BufferPool:
    """Return buffers for the gradients of all parameter groups, or of a few at a time."""
    if stream.asynchronous:
        return FreshPool(plan.device, len(groups) if all_gradients else ON_DEVICE)
    sizes = [group.layout.numel * group.members[0].unsharded.itemsize for group in groups]
    few = max(max(sizes), IN_FLIGHT * int(plan.settings.bucket_mib * 2**20))
    return RingPool(plan.comm, sum(sizes) if all_gradients else min(few, sum(sizes)))
