"""Setup of sharded data parallelism: parameter groups and their initial values, and the components of the strategy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device.streams import CommStream, Streams, streams_of
from hpctrain.errors import UsageError
from hpctrain.parallel.buckets import assign_buckets
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.fsdp.collectives import GradReduction, KeepUnsharded, Residency
from hpctrain.parallel.fsdp.param_group import Entry, GroupReduction, Memory, ParamGroup, ShardedParam
from hpctrain.parallel.fsdp.units import Unit, find_units
from hpctrain.parallel.fsdp.unshard import UnitState, UnshardOnDemand
from hpctrain.parallel.meta_init import check_initialisable, initial_values, make_buffers
from hpctrain.parallel.model_agreement import check_same_model, trainable

if TYPE_CHECKING:
    from hpctrain.parallel.offload.host_optimizer import HostOptimizer

FIRST_BUCKET = 2**20  # bytes: the group whose gradients are complete first is small, so that reduction starts early
IN_FLIGHT = 4  # number of gradient buckets that the buffers hold at a time, if gradients are not kept unsharded
ON_DEVICE = 2  # the same on a GPU: one bucket is filled while another is reduced


@dataclass(frozen=True)
class Components:
    """Components of a sharded strategy."""

    plan: ShardingPlan
    units: list[nn.Module]
    groups: list[ParamGroup]
    residency: Residency
    reduction: GradReduction
    replaced: dict[str, weakref.ref[nn.Parameter]]  # the model's parameters before sharding, while they are alive
    by_name: dict[str, ShardedParam]  # under every name in the model
    host_optimizer: HostOptimizer | None  # updates the shards that are stored on the host

    @property
    def members(self) -> list[ShardedParam]:
        """Return all parameters, in the model's order."""
        return list(dict.fromkeys(self.by_name.values()))

    def rejoin(self) -> None:
        """Divide the parameters over the ranks that the plan's communicators now have. Collective.

        The values of the shards are undefined until they are filled.
        """
        self.plan.rejoin()
        for group in self.groups:
            group.rejoin(self.plan.flat)
            group.to_sharded()
        self.residency.rejoin(self.plan)
        memory, trained = self.reduction.memory, [each.group for each in self.reduction.reductions]
        if memory is not None:
            every = _keeps_all_gradients(self.plan, self.host_optimizer)
            memory = _gradient_memory(self.plan, trained, all_of_them=every)
        self.reduction.rejoin(memory)


@dataclass(frozen=True)
class Parts:
    """Streams and classes of which a sharded strategy is made."""

    streams: Callable[[torch.device], Streams] = streams_of
    group: type[ParamGroup] = ParamGroup
    reduction: type[GroupReduction] = GroupReduction


@dataclass
class ShardingPlan:
    """Ranks and memory of a sharded model, the same on all ranks: collectives on other nodes depend on them.

    ``on_demand``: units are unsharded only while they compute.
    """

    world: Communicator
    comm: Communicator  # ranks that share one replica
    replicas: Communicator | None  # ranks that hold the same slice of each replica
    settings: ParallelSettings
    device: torch.device
    compute_dtype: torch.dtype | None  # of float32 parameters; None: float32
    nbytes: int  # of the unsharded parameters
    node_shared: bool  # whether the ranks of a node share the memory of unsharded parameters
    on_demand: bool
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
        copied = compute_dtype.itemsize if compute_dtype else 0
        nbytes = sum(each.numel() * (each.itemsize + copied) for each in parameters)
        plan = cls(world, comm, replicas, settings, device, compute_dtype, nbytes, False, False, parts)
        plan.node_shared = plan._can_share()
        plan.on_demand = settings.data == "fsdp" and not plan.node_shared
        return plan

    def rejoin(self) -> None:
        """Find again whether the ranks of a node share memory, after others have died. Collective."""
        self.node_shared = not self.on_demand and self._can_share()

    def _can_share(self) -> bool:
        shares = self.device.type == "cpu" and all(self.world.all_gather_object(self.comm.shares_memory))
        return shares and self.world.has_space(self.nbytes)

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
    make_host_optimizer: Callable[[Communicator], HostOptimizer] | None,
    parts: Parts,
) -> Components:
    """Shard the parameters of a model over the ranks, and return the components of the strategy. Collective.

    If ``make_host_optimizer`` is given, its result stores and updates this rank's shards. Raises an
    error on all ranks if its disk is full.
    """
    # Raise an error for a model that cannot be sharded, before the model is changed.
    check_same_model(model, comm)
    if not trainable(model):
        raise UsageError("the model has no parameter that requires a gradient", everywhere=True)
    check_initialisable(model)
    units = find_units(model, settings.units)
    originals = dict(model.named_parameters())
    numbers = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    replaced = {name: weakref.ref(parameter) for name, parameter in originals.items()}
    uninitialised = make_buffers(model, device)

    plan = ShardingPlan.of(comm, settings, device, list(originals.values()), parts)
    host = host_frozen = host_optimizer = None
    if make_host_optimizer is not None:
        host_optimizer = agreed(comm, lambda: make_host_optimizer(comm).reserve(originals.values(), plan.comm.size))
        host = host_optimizer.host
        host_frozen = host if host_optimizer.settings.parameters else None
    unit_states, groups = _make_groups(plan, units, list(originals), host, host_frozen)
    members = {id(originals[member.name]): member for group in groups for member in group.members}
    by_name = {name: members[number] for name, number in numbers.items()}

    stream = CommStream(parts.streams(device))
    unsharder = UnshardOnDemand(unit_states, plan.comm, stream, settings.prefetch) if plan.on_demand else None
    residency = unsharder or KeepUnsharded(groups, plan, stream)
    reduction = _grad_reduction(plan, [group for group in groups if group.trained], stream, unsharder, host_optimizer)
    if host_optimizer is not None:
        host_optimizer.take_over(groups, reduction.reductions)
    _fill(model, groups, originals, plan)
    _share_buffers(model, uninitialised, comm, device)
    if unsharder:
        unsharder.reducer = reduction
    modules = [unit.module for unit in units]
    return Components(plan, modules, groups, residency, reduction, replaced, by_name, host_optimizer)


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


def _make_groups(
    plan: ShardingPlan, units: Sequence[Unit], names: Sequence[str], host: Memory | None, host_frozen: Memory | None
) -> tuple[list[UnitState], list[ParamGroup]]:
    """Return the states of the units, and all parameter groups, those of the last parameters first.

    ``host`` and ``host_frozen`` allocate the memory of a rank's shards of trained and of frozen
    parameters. The shards are on the device if these are None.
    """

    def make(entries: Sequence[Entry]) -> ParamGroup:
        dtype, trained = entries[0][1].dtype, entries[0][1].requires_grad
        return plan.parts.group(
            entries,
            plan.comm,
            plan.flat,
            dtype=plan.compute_dtype if plan.compute_dtype and dtype is torch.float32 else dtype,
            on_demand=plan.on_demand,
            device=plan.device,
            host=host if trained else host_frozen,
        )

    if plan.on_demand:
        states = [
            UnitState(number, unit.name, unit.module, [make(entries) for entries in _by_kind(unit.entries())])
            for number, unit in enumerate(units)
        ]
        return states, [group for state in reversed(states) for group in state.groups]
    # Groups of limited size, in reverse order of the parameters: the gradients of the last ones are computed first.
    limit = int(plan.settings.bucket_mib * 2**20)
    position = {name: number for number, name in enumerate(names)}
    every = sorted((entry for unit in units for entry in unit.entries()), key=lambda entry: -position[entry[0]])
    groups = []
    for entries in _by_kind(every):
        sizes = [parameter.nbytes for _, parameter, _ in entries]
        for numbers in assign_buckets(sizes, range(len(entries)), min(FIRST_BUCKET, limit), limit):
            groups.append(make([entries[number] for number in numbers]))
    return [], groups


def _by_kind(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Group the entries by dtype and ``requires_grad``: entries of one kind can share a flat tensor."""
    kinds: dict[tuple[torch.dtype, bool], list[Entry]] = {}
    for entry in entries:
        kinds.setdefault((entry[1].dtype, entry[1].requires_grad), []).append(entry)
    return list(kinds.values())


def _fill(model: nn.Module, groups: list[ParamGroup], originals: dict[str, nn.Parameter], plan: ShardingPlan) -> None:
    """Scatter rank 0's values, register the shards in the model, and release the ``originals``.

    Parameters on the meta device are initialised on demand, module by module.
    """
    modules, initialised = dict(model.named_modules()), dict[str, Tensor]()

    def value(member: ShardedParam) -> Tensor:
        name, parameter = member.name, originals[member.name]
        if not parameter.is_meta:
            return parameter.detach()
        if name not in initialised:
            owner = name.rpartition(".")[0]
            found = initial_values(model, owner, modules[owner], plan.device)
            initialised.update({f"{owner}.{attribute}".lstrip("."): tensor for attribute, tensor in found.items()})
        return initialised.pop(name)

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
    all_gradients = _keeps_all_gradients(plan, host_optimizer)
    has_memory = not stream.asynchronous and not plan.settings.reproducible
    return GradReduction(
        groups,
        plan,
        _gradient_memory(plan, groups, all_of_them=all_gradients) if has_memory else None,
        len(groups) if all_gradients else ON_DEVICE,
        stream,
        dtype=plan.compute_dtype or compressed,
        early=not all_gradients or stream.asynchronous or plan.comm.shares_memory,
        observer=unsharder,
        make_reduction=host_optimizer.grad_offload.make_reduction if host_optimizer else plan.parts.reduction,
    )


def _keeps_all_gradients(plan: ShardingPlan, host_optimizer: HostOptimizer | None) -> bool:
    """Return whether the unsharded gradients of all groups stay in memory; with offload they would need too much."""
    return plan.settings.data == "zero1" and host_optimizer is None


def _gradient_memory(plan: ShardingPlan, groups: Sequence[ParamGroup], *, all_of_them: bool) -> Tensor:
    """Return the buffer for unsharded gradients, of all groups or of a few at a time. Collective."""
    sizes = [group.layout.numel * group.members[0].unsharded.itemsize for group in groups]
    few = max(max(sizes), IN_FLIGHT * int(plan.settings.bucket_mib * 2**20))
    return plan.comm.empty(sum(sizes) if all_of_them else min(few, sum(sizes)), torch.uint8)
