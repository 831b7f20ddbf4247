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
from hpctrain.parallel.buckets import group
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.fsdp.buffer_pool import BufferPool, FreshPool, RingPool
from hpctrain.parallel.fsdp.param_group import CommStream, Memory, ParamGroup, Places, ShardedParam
from hpctrain.parallel.fsdp.reduce import GradReduction, GroupReduction
from hpctrain.parallel.fsdp.residency import KeepUnsharded, Residency
from hpctrain.parallel.fsdp.units import Unit, find_units
from hpctrain.parallel.fsdp.unshard import UnitState, UnshardOnDemand
from hpctrain.parallel.meta_init import check_drawable, draw, make_buffers
from hpctrain.parallel.strategy import trainable

if TYPE_CHECKING:
    from hpctrain.parallel.offload.config import OffloadSettings
    from hpctrain.parallel.offload.host_optimizer import HostOptimizer

    MakeHostOptimizer = Callable[[OffloadSettings, torch.device, Communicator], HostOptimizer]

FIRST_BUCKET = 2**20  # bytes: the group whose gradients are complete first is small, so that reduction starts early

Entry = tuple[str, nn.Parameter, Places]


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
        passing: bool,
        narrow: torch.dtype | None,
        host: Memory | None = None,
        host_frozen: Memory | None = None,
    ) -> None:
        self._comm, self._flat, self._device = comm, flat, device
        self._host, self._host_frozen = host, host_frozen
        self._passing, self._narrow = passing, narrow

    def of_unit(self, unit: Unit) -> list[ParamGroup]:
        """Return the parameter groups of a unit: one per dtype, trained and frozen parameters separately."""
        return [self._make(entries) for entries in _kinds(_entries([unit]))]

    def of_buckets(self, units: Sequence[Unit], names: Sequence[str], limit: int) -> list[ParamGroup]:
        """Return parameter groups of at most ``limit`` bytes, in reverse order of ``names``.

        The gradients of the last parameters are computed first.
        """
        pieces = []
        place = {name: number for number, name in enumerate(names)}
        for entries in _kinds(sorted(_entries(units), key=lambda entry: -place[entry[0]])):
            sizes = [parameter.numel() * parameter.itemsize for _, parameter, _ in entries]
            for numbers in group(sizes, range(len(entries)), min(FIRST_BUCKET, limit), limit):
                pieces.append(self._make([entries[number] for number in numbers]))
        return pieces

    def _make(self, entries: Sequence[Entry]) -> ParamGroup:
        names, parameters, places = zip(*entries)
        dtype = parameters[0].dtype
        narrow = self._narrow if self._narrow and dtype is torch.float32 else dtype
        return ParamGroup(
            names,
            parameters,
            places,
            self._comm,
            self._flat,
            dtype=narrow,
            passing=self._passing,
            device=self._device,
            host=self._host if parameters[0].requires_grad else self._host_frozen,
        )


def _entries(units: Sequence[Unit]) -> list[Entry]:
    return [
        (name, parameter, places) for unit in units for (name, parameter), places in zip(unit.parameters, unit.places)
    ]


def _kinds(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Group the entries by dtype and ``requires_grad``: entries of one kind can share a flat tensor."""
    kinds: dict[tuple[torch.dtype, bool], list[Entry]] = {}
    for entry in entries:
        kinds.setdefault((entry[1].dtype, entry[1].requires_grad), []).append(entry)
    return list(kinds.values())


class Values:
    """Initial values of parameters on rank 0; those on the meta device are initialised on demand, module by module."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._modules = dict(model.named_modules())
        self._drawn: dict[str, Tensor] = {}

    def of(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Return the values of a parameter. Each parameter may be requested only once."""
        if not parameter.is_meta:
            return parameter.detach()
        if name not in self._drawn:
            owner = name.rpartition(".")[0]
            found = draw(self._model, owner, self._modules[owner], self._device)
            self._drawn.update({f"{owner}.{attribute}".lstrip("."): value for attribute, value in found.items()})
        return self._drawn.pop(name)


# Setup of sharded data parallelism: its components, for a model, its ranks and its settings ---------------------------


IN_FLIGHT = 4  # number of gradient buckets that the buffers hold at a time, if gradients are not kept unsharded
ON_DEVICE = 2  # the same on a GPU: one bucket is filled while another is reduced


@dataclass(frozen=True)
class Parts:
    """Components of a sharded strategy. The ranks of ``comm`` share one replica of the model."""

    units: list[Unit]
    pieces: list[ParamGroup]
    form: Residency
    reduction: GradReduction
    comm: Communicator
    replicas: Communicator | None
    narrow: torch.dtype | None  # compute dtype of float32 parameters
    replaced: dict[str, weakref.ref[nn.Parameter]]  # the model's parameters before sharding, while they are alive
    by_name: dict[str, ShardedParam]  # under every name in the model
    engine: HostOptimizer | None  # updates the shards that are stored on the host

    @property
    def members(self) -> list[ShardedParam]:
        """Return all parameters, in the model's order."""
        return list(dict.fromkeys(self.by_name.values()))


def assemble(
    model: nn.Module,
    comm: Communicator,
    settings: ParallelSettings,
    device: torch.device,
    offload: OffloadSettings | None = None,
    host_optimizer: MakeHostOptimizer | None = None,
) -> Parts:
    """Shard the parameters of a model over the ranks, and return the components of the strategy. Collective.

    With ``offload``, this rank's shards are stored and updated by the ``host_optimizer`` that it configures.
    """
    _check(model, comm)
    units = find_units(model, settings.units)
    old = dict(model.named_parameters())
    numbers = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    replaced = {name: weakref.ref(parameter) for name, parameter in old.items()}
    undrawn = make_buffers(model, device)

    inside, replicas = _groups(comm, settings)
    narrow = torch.bfloat16 if settings.mixed_precision == "bfloat16" else None
    # Agreed on by all ranks, because replicas on other nodes must make the same calls.
    mapped = device.type == "cpu" and all(comm.all_gather_object(inside.shares_memory))
    mapped = mapped and comm.has_space(_bytes_of(old, narrow))
    passing = settings.data == "fsdp" and not mapped
    engine = _engine(host_optimizer, offload, device, comm, list(old.values()), inside.size)
    host = engine.host if engine else None
    host_frozen = host if offload and offload.parameters else None
    flat = _memory(inside, device, mapped)
    maker = GroupBuilder(inside, flat, device, passing=passing, narrow=narrow, host=host, host_frozen=host_frozen)
    stations, pieces = _cut(maker, units, list(old), settings, passing)
    members = {id(old[member.name]): member for piece in pieces for member in piece.members}
    by_name = {name: members[number] for name, number in numbers.items()}
    units = [Unit(unit.name, unit.module, [], []) for unit in units]  # without references to the old parameters
    lane = CommStream(streams_of(device))
    on_demand = UnshardOnDemand(stations, inside, lane, settings.prefetch) if passing else None
    form = on_demand or KeepUnsharded(pieces, inside, lane, mapped=mapped)
    trained = [piece for piece in pieces if piece.trained]
    whole = settings.data == "zero1" and engine is None  # with offload, unsharded gradients would need too much memory
    room = _room(trained, inside, settings, device, whole=whole)
    reduction = GradReduction(
        trained,
        inside,
        comm,
        replicas,
        room,
        lane,
        dtype=narrow or (torch.bfloat16 if settings.compression == "bfloat16" else None),
        early=not whole or lane.beside or inside.shares_memory,
        watcher=on_demand,
        flow_of=engine.landing.flow if engine else GroupReduction,
    )
    if engine is not None:
        engine.adopt(pieces, reduction.flows)
    _fill(model, pieces, old, comm, replicas, device)
    _share_buffers(model, undrawn, comm, device)
    if on_demand:
        on_demand.reducer = reduction
    return Parts(units, pieces, form, reduction, inside, replicas, narrow, replaced, by_name, engine)


def _check(model: nn.Module, comm: Communicator) -> None:
    """Raise an error for a model that cannot be sharded, before the model is changed."""
    check_same_model(model, comm)
    if not trainable(model):
        raise UsageError("the model has no parameter that requires a gradient", everywhere=True)
    check_drawable(model)


def _engine(
    host_optimizer: MakeHostOptimizer | None,
    offload: OffloadSettings | None,
    device: torch.device,
    comm: Communicator,
    parameters: list[nn.Parameter],
    ranks: int,
) -> HostOptimizer | None:
    """Return the engine that keeps this rank's slices on the host; None without offload.

    Raises an error on all ranks if a disk is full.
    """
    if offload is None or host_optimizer is None or not offload.any_update:
        return None

    def make() -> HostOptimizer:
        engine = host_optimizer(offload, device, comm)
        engine.reserve((each for each in parameters if each.requires_grad or offload.parameters), ranks)
        return engine

    return agreed(comm, make)


def _groups(comm: Communicator, settings: ParallelSettings) -> tuple[Communicator, Communicator | None]:
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


def _bytes_of(parameters: Mapping[str, nn.Parameter], narrow: torch.dtype | None) -> int:
    """Return the bytes of unsharded parameters, including their copies in a narrower dtype."""
    more = narrow.itemsize if narrow else 0
    return sum(parameter.numel() * (parameter.itemsize + more) for parameter in parameters.values())


def _memory(comm: Communicator, device: torch.device, mapped: bool) -> Callable[[int, torch.dtype], Tensor]:
    """Return the allocator of unsharded parameters: memory shared by the node, or memory of each rank."""
    if mapped:
        return lambda numel, dtype: comm.common(numel, dtype, must_share=True)
    return lambda numel, dtype: torch.empty(numel, dtype=dtype, device=device)


def _cut(
    maker: GroupBuilder, units: list[Unit], names: list[str], settings: ParallelSettings, passing: bool
) -> tuple[list[UnitState], list[ParamGroup]]:
    """Return the states of the units, and all parameter groups, those of the last parameters first."""
    if not passing:
        return [], maker.of_buckets(units, names, int(settings.bucket_mib * 2**20))
    stations = []
    for number, unit in enumerate(units):
        stations.append(UnitState(number, unit.name, unit.module, maker.of_unit(unit)))
    return stations, [piece for station in reversed(stations) for piece in station.pieces]


def _fill(
    model: nn.Module,
    pieces: list[ParamGroup],
    old: dict[str, nn.Parameter],
    comm: Communicator,
    replicas: Communicator | None,
    device: torch.device,
) -> None:
    """Scatter rank 0's values, register the shards in the model, and release the ``old`` parameters."""
    values = Values(model, device)

    def value(member: ShardedParam) -> Tensor:
        return values.of(member.name, old[member.name])

    for piece in pieces:
        piece.fill(value if comm.rank == 0 else None, replicas)
        piece.show_shards()
        for member in piece.members:
            del old[member.name]


def _share_buffers(model: nn.Module, undrawn: list[str], comm: Communicator, device: torch.device) -> None:
    """Broadcast the buffers of rank 0, which initialises those that were on the meta device."""
    if comm.rank == 0:
        modules = dict(model.named_modules())
        for name in undrawn:
            # parameters of the same module are initialised with them and dropped
            draw(model, name, modules[name], device)
    for buffer in model.buffers():
        comm.broadcast(buffer)


def _room(
    pieces: list[ParamGroup], comm: Communicator, settings: ParallelSettings, device: torch.device, *, whole: bool
) -> BufferPool:
    """Return buffers for the gradients of all parameter groups, or of a few at a time."""
    if device.type != "cpu":
        return FreshPool(device, len(pieces) if whole else ON_DEVICE)
    sizes = [piece.layout.numel * piece.members[0].whole.itemsize for piece in pieces]
    few = max(max(sizes), IN_FLIGHT * int(settings.bucket_mib * 2**20))
    return RingPool(comm, sum(sizes) if whole else min(few, sum(sizes)))
