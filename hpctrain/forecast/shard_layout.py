"""Memory layout of the sharded strategies for a model: pure arithmetic on the strategies' own layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hpctrain.parallel.buckets import assign_buckets
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.fsdp.layout import lay_out
from hpctrain.parallel.fsdp.setup import FIRST_BUCKET, IN_FLIGHT, ON_DEVICE


@dataclass(frozen=True)
class RankParameter:
    """Parameter of a rank before data-parallel sharding: ``count`` elements."""

    name: str
    count: int
    dtype: torch.dtype
    trained: bool

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self.count * self.dtype.itemsize

    def numel(self) -> int:
        """Return the number of elements; a method, like that of torch's parameters."""
        return self.count


@dataclass(frozen=True)
class GroupBytes:
    """Sizes in bytes of one parameter group: unsharded in the compute dtype, and the shards of a rank."""

    unit: str
    trained: bool
    whole: int
    share: int  # in the dtype of the optimizer step
    narrow_shard: int  # in the compute dtype


@dataclass(frozen=True)
class ShardedGroups:
    """All parameter groups of a model, sharded over some ranks."""

    groups: tuple[GroupBytes, ...]
    limit: int  # bytes of a bucket

    @property
    def whole(self) -> int:
        """Return the bytes of all unsharded parameters in the compute dtype."""
        return sum(one.whole for one in self.groups)

    @property
    def share(self) -> int:
        """Return the bytes of a rank's shards, which it keeps permanently."""
        return sum(one.share for one in self.groups)

    @property
    def trained(self) -> list[GroupBytes]:
        """Return the parameter groups that require gradients."""
        return [one for one in self.groups if one.trained]

    def ring(self, *, whole: bool, on_device: bool) -> int:
        """Return the bytes of the buffers for unsharded gradients: for all groups, or for a few at a time."""
        sizes = sorted((one.whole for one in self.trained), reverse=True)
        if whole:
            return sum(sizes)
        return sum(sizes[:ON_DEVICE]) if on_device else min(max(sizes[0], IN_FLIGHT * self.limit), sum(sizes))

    def of_unit(self, name: str) -> int:
        """Return the bytes of a unit's unsharded parameters."""
        return sum(one.whole for one in self.groups if one.unit == name)


def sharded_groups(
    held: Sequence[RankParameter], settings: ParallelSettings, ranks: int, *, units: Mapping[str, str] | None
) -> ShardedGroups:
    """Return the parameter groups: by ``units`` if parameters are unsharded on demand, else by buckets."""
    narrow = torch.bfloat16 if settings.mixed_precision == "bfloat16" else None
    limit = int(settings.bucket_mib * 2**20)
    found = []
    if units is not None:
        for unit in dict.fromkeys(units[one.name] for one in held):
            members = [one for one in held if units[one.name] == unit]
            found += [_group_bytes(unit, kind, ranks, narrow) for kind in _kinds(members)]
        return ShardedGroups(tuple(found), limit)
    for kind in _kinds(list(reversed(held))):
        sizes = [one.nbytes for one in kind]
        for numbers in assign_buckets(sizes, range(len(kind)), min(FIRST_BUCKET, limit), limit):
            found.append(_group_bytes("", [kind[number] for number in numbers], ranks, narrow))
    return ShardedGroups(tuple(found), limit)


def _kinds(held: Sequence[RankParameter]) -> list[list[RankParameter]]:
    kinds: dict[tuple[torch.dtype, bool], list[RankParameter]] = {}
    for one in held:
        kinds.setdefault((one.dtype, one.trained), []).append(one)
    return list(kinds.values())


def _group_bytes(unit: str, held: Sequence[RankParameter], ranks: int, narrow: torch.dtype | None) -> GroupBytes:
    first = held[0].dtype
    computes = narrow if narrow and first is torch.float32 else first
    layout = lay_out([one.count for one in held], ranks, min(first.itemsize, computes.itemsize))
    return GroupBytes(
        unit,
        held[0].trained,
        layout.numel * computes.itemsize,
        layout.slice_numel * first.itemsize,
        layout.slice_numel * computes.itemsize,
    )


def gathered_for(layer: str, units: Sequence[str], groups: ShardedGroups) -> int:
    """Return the bytes of the units that are unsharded while a layer runs, without the root unit."""
    around = [unit for unit in units if unit and (layer == unit or layer.startswith(unit + "."))]
    inside = [unit for unit in units if unit.startswith(layer + ".")]
    return sum(map(groups.of_unit, around)) + max(map(groups.of_unit, inside), default=0)
