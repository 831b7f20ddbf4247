"""Parameter groups, sharded or unsharded; the ranks are simulated one after the other."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.fsdp.param_group import ParamGroup

CPU = torch.device("cpu")
SHAPES = [(3, 5), (), (0,), (7,), (2, 1, 3), (0, 4), (40,)]


def parameters(dtype: torch.dtype = torch.float32, trained: bool = True) -> list[nn.Parameter]:
    found, first = [], 1
    for shape in SHAPES:
        values = torch.arange(first, first + math.prod(shape), dtype=dtype).view(shape)
        found.append(nn.Parameter(values, requires_grad=trained))
        first += values.numel()
    return found


def holders(whole: list[nn.Parameter]) -> list[nn.Module]:
    """Return modules that each hold one parameter."""
    modules = []
    for parameter in whole:
        module = nn.Module()
        module.weight = parameter
        modules.append(module)
    return modules


class Root:
    """Fake of the collectives of filling: the other ranks receive what rank 0 has scattered."""

    def __init__(self, rank: int, size: int, mail: dict[str, Tensor]) -> None:
        self.rank, self.size, self.mail = rank, size, mail

    def scatter(self, out: Tensor, whole: Tensor | None) -> None:
        assert (whole is not None) == (self.rank == 0), "rank 0 alone gives values"
        if whole is not None:
            self.mail["whole"] = whole.clone()
        out.copy_(self.mail["whole"].chunk(self.size)[self.rank])

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        assert part.data_ptr() == out.chunk(self.size)[self.rank].data_ptr()
        own, whole = part.clone(), self.mail["whole"].to(out.dtype)
        out.copy_(whole)
        out.chunk(self.size)[self.rank].copy_(own)


def group_of(entries: Any, comm: Any, **options: Any) -> ParamGroup:
    """Return the parameter group of a rank."""
    flat = lambda numel, dtype: torch.full((numel,), 99, dtype=dtype)
    return ParamGroup(entries, comm, flat, **{"dtype": torch.float32, "on_demand": False, "device": CPU, **options})


def groups(size: int, trained: bool = True, **options: Any) -> list[tuple[ParamGroup, list[nn.Module]]]:
    """Return the filled group of every rank, and the modules that use it."""
    mail: dict[str, Tensor] = {}
    found = []
    for rank in range(size):
        whole = {f"p{number}": parameter for number, parameter in enumerate(parameters(trained=trained))}
        modules = holders(list(whole.values()))
        entries = [(name, one, [(module, "weight")]) for (name, one), module in zip(whole.items(), modules)]
        group = group_of(entries, Root(rank, size, mail), **options)
        values = {name: parameter.detach() for name, parameter in whole.items()}
        group.fill((lambda member, values=values: values[member.name]) if rank == 0 else None)
        found.append((group, modules))
    return found


def together(ranks: list[tuple[ParamGroup, list[nn.Module]]], number: int) -> list[float]:
    """Return the elements of a parameter that the ranks hold, in rank order."""
    return [value for group, _ in ranks for value in group.members[number].shard.detach().flatten().tolist()]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("on_demand", [False, True], ids=["kept_unsharded", "on_demand"])
def test_shards_are_slices_of_rank_0s_parameters(size: int, on_demand: bool) -> None:
    ranks = groups(size, on_demand=on_demand)
    for number, parameter in enumerate(parameters()):
        assert together(ranks, number) == parameter.flatten().tolist()
        for group, _ in ranks:
            shard = group.members[number].shard
            assert shard.dim() == max(parameter.dim(), 1) and shard.shape[1:] == (1,) * (parameter.dim() - 1)
            assert shard.is_leaf and shard.requires_grad
    # Padding is zero on all ranks: it does not change a norm and cannot become NaN.
    held = sum(shape.numel() for shape in map(torch.Size, SHAPES))
    total = sum(float(parameter.detach().sum()) for parameter in parameters())
    assert sum(float(group.shard_data.sum()) for group, _ in ranks) == total
    assert sum(int((group.shard_data == 0).sum()) for group, _ in ranks) == ranks[0][0].layout.numel - held


@pytest.mark.parametrize("on_demand", [False, True], ids=["kept_unsharded", "on_demand"])
def test_gathering_gives_whole_parameters(on_demand: bool) -> None:
    for group, _ in groups(3, on_demand=on_demand):
        group.allocate()
        group.gather()
        for member, parameter in zip(group.members, parameters()):
            assert torch.equal(member.unsharded, parameter) and member.unsharded.shape == parameter.shape
            assert member.unsharded.is_contiguous() and member.unsharded.is_leaf


def test_whole_parameters_have_memory_only_while_gathered() -> None:
    for group, _ in groups(2, on_demand=True):
        nbytes = 4 * group.layout.numel
        assert group.flat.untyped_storage().nbytes() == 0
        assert group.shard_data.untyped_storage().nbytes() == nbytes / 2
        group.allocate()
        assert group.flat.untyped_storage().nbytes() == nbytes
        group.free()
        assert group.flat.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.bfloat16], ids=["double", "bfloat16"])
def test_converted_shards_are_refused(change: Any) -> None:
    (group, modules), *_ = groups(2)
    group.to_sharded()
    group.copy_in()
    change(modules[0])
    with pytest.raises(UsageError, match=r"parameter p0 has other memory than job.wrap\(model\) gave it"):
        group.copy_in()


def test_parameters_that_stay_whole_are_held_once() -> None:
    for group, _ in groups(2):
        assert group.shard_data.data_ptr() == group.flat_slice.data_ptr()
        group.free()
        group.allocate()
        assert group.flat.untyped_storage().nbytes() == 4 * group.layout.numel


@pytest.mark.parametrize("on_demand", [False, True], ids=["kept_unsharded", "on_demand"])
def test_shards_of_a_wider_type_are_rounded_into_place(on_demand: bool) -> None:
    for group, _ in groups(2, on_demand=on_demand, dtype=torch.bfloat16):
        assert group.shard_data.dtype is torch.float32 and group.flat.dtype is torch.bfloat16
        assert group.layout.slice_numel * 2 % 64 == 0  # on cache lines in either type
        group.shard_data.add_(1 / 256)
        group.allocate()
        group.gather()
        for member, parameter in zip(group.members, parameters()):
            assert member.unsharded.dtype is torch.bfloat16 and member.shard.dtype is torch.float32
            assert torch.equal(member.unsharded, parameter.bfloat16())
        assert bool((group.shard_data[:1] % 1 == 1 / 256).all()), "the shards themselves were rounded"


def test_modules_use_shards_or_unsharded_parameters_under_all_names() -> None:
    one, two, tied = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Parameter(torch.ones(3, 3))
    one.weight = two.weight = tied
    group = group_of([("w", tied, [(one, "weight"), (two, "weight")])], Root(0, 1, {}))
    (member,) = group.members
    group.to_unsharded()
    assert one.weight is two.weight is member.unsharded and list(one.parameters())[0] is member.unsharded
    group.to_sharded()
    assert one.weight is two.weight is member.shard


def test_modules_with_references_of_their_own_compute_with_the_registered_tensors() -> None:
    torch.manual_seed(7)
    lstm = nn.LSTM(3, 4)
    values = dict(lstm.named_parameters())
    x = torch.randn(2, 1, 3)
    expected = lstm(x)[0]
    group = group_of([(name, one, [(lstm, name)]) for name, one in values.items()], Root(0, 1, {}))
    group.fill(lambda member: values[member.name])
    group.to_sharded()
    group.to_unsharded()
    assert torch.equal(lstm(x)[0], expected)
    with torch.no_grad():
        for member in group.members:
            member.unsharded.zero_()
    assert not lstm(x)[0].any()


def test_attributes_set_by_a_user_are_on_shards_and_whole_parameters() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.no_decay = True  # type: ignore[attr-defined]
    (member,) = group_of([("p", parameter, [])], Root(0, 1, {})).members
    assert member.unsharded.no_decay and member.shard.no_decay  # type: ignore[attr-defined]


def test_whole_parameters_are_frozen_like_their_shards() -> None:
    (group, modules), *_ = groups(1)
    group.members[3].shard.requires_grad_(False)
    group.to_unsharded()
    assert [member.unsharded.requires_grad for member in group.members] == [
        number != 3 for number in range(len(SHAPES))
    ]
    group.members[3].shard.requires_grad_(True)
    group.to_unsharded()
    assert all(member.unsharded.requires_grad for member in group.members)


def test_initially_frozen_parameters_cannot_be_trained() -> None:
    (group, _), *_ = groups(1, trained=False)
    assert not group.trained
    group.to_unsharded()
    group.members[0].shard.requires_grad_(True)
    with pytest.raises(UsageError, match="parameter p0 was frozen when the model was wrapped, so it has no memory for"):
        group.to_unsharded()


def test_filling_updates_the_replicas() -> None:
    sent: list[Tensor] = []
    whole = parameters()
    replicas: Any = SimpleNamespace(broadcast=sent.append)
    group = group_of([(str(number), each, []) for number, each in enumerate(whole)], Root(0, 1, {}))
    group.fill(lambda member: whole[int(member.name)], replicas)
    assert len(sent) == 1 and torch.equal(sent[0], group.flat)
