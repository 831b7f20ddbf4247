"""Process groups of two back ends, such as ``cpu:hpctrain,cuda:nccl``: ours, and one of torch's for other devices.

torch holds one back end per type of device in a group if their classes are written in C++: its ``Backend`` has no
constructor for Python. A group that is written in Python, as ours, takes the place of all others in torch's loop over
the types of devices (2.11 to 2.14). So torch makes its other back ends in a second group, which is hidden from the
program, and our group forwards the operations on tensors of those devices to it.
"""

# mypy: disable-error-code="override"
# torch's stub has each operation in several forms.

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from hpctrain.torch_backend.group import HpctrainGroup

# Operations, and their other name, under which a group of an earlier or later version of torch has them.
_OPERATIONS = {
    "broadcast": "",
    "allreduce": "",
    "allreduce_coalesced": "",
    "reduce": "",
    "reduce_scatter": "",
    "allgather": "",
    "allgather_coalesced": "",
    "gather": "",
    "scatter": "",
    "alltoall": "",
    "send": "",
    "recv": "",
    "recv_anysource": "recvAnysource",
    "recvAnysource": "recv_anysource",
    "all_gather_single": "_allgather_base",
    "_allgather_base": "all_gather_single",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "all_to_all_single": "alltoall_base",
    "alltoall_base": "all_to_all_single",
}


class TwoBackends(HpctrainGroup):
    """Group of ours that forwards operations on tensors of some types of devices to a group of torch.

    torch's C++ classes and its Python functions see one group. ``bound_device_id`` is that of the other group only:
    torch would split our group by NCCL otherwise, and so new groups make new communicators of NCCL.
    """

    _other: Any = None
    _forwarded: frozenset[str] = frozenset()  # types of the devices of the other group
    _own: tuple[str, ...] = ("cpu",)

    @property
    def other(self) -> Any:
        """Return the group that serves other devices; None before it has been made."""
        return self._other

    def forward_to(self, group: Any, devices: Iterable[str], own: Iterable[str] = ("cpu",)) -> None:
        """Let ``group``, which this one shuts down, serve the tensors on these types of devices."""
        self._other, self._forwarded, self._own = group, frozenset(devices), tuple(own)

    def forwards(self, device: torch.device | str | None) -> bool:
        """Return whether the other group serves the tensors of a device."""
        return device is not None and torch.device(device).type in self._forwarded

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in (*self._own, *sorted(self._forwarded))]

    def _get_backend(self, device: torch.device) -> Any:
        return self._other._get_backend(device) if self.forwards(device) else self

    def set_timeout(self, timeout: Any) -> None:
        """Set the time after which an operation fails, in both groups."""
        super().set_timeout(timeout)
        if self._other is not None:
            self._other.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Wait for all ranks; in the other group if the options, or that group, name a device."""
        opts = dist.BarrierOptions() if opts is None else opts
        device = getattr(self._other, "bound_device_id", None)
        if device is not None and not self.forwards(opts.device):
            opts.device = device
        return self._other.barrier(opts) if self.forwards(opts.device) else super().barrier(opts, timeout)

    def _start_coalescing(self, device: torch.device) -> None:
        if self.forwards(device):
            self._other._start_coalescing(device)
        else:
            super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._other._end_coalescing(device) if self.forwards(device) else super()._end_coalescing(device)

    def abort(self) -> None:
        """Make operations in progress, and later ones, fail in both groups."""
        if self._other is not None:
            self._other.abort()
        super().abort()

    def shutdown(self) -> None:
        """Shut down both groups."""
        if self._other is not None:
            self._other.shutdown()
        super().shutdown()


def _device(arguments: tuple[Any, ...]) -> torch.device | None:
    """Return the device of the first tensor of a call, which may be in lists."""
    for argument in arguments:
        while isinstance(argument, (list, tuple)) and argument:
            argument = argument[0]
        if isinstance(argument, Tensor):
            return argument.device
    return None


def _forwarding(name: str, other_name: str) -> Callable[..., Any]:
    ours = getattr(HpctrainGroup, name)

    def call(self: TwoBackends, *arguments: Any, **options: Any) -> Any:
        if not self.forwards(_device(arguments)):
            return ours(self, *arguments, **options)
        group = self._other
        return getattr(group, name if hasattr(group, name) else other_name)(*arguments, **options)

    call.__doc__ = ours.__doc__
    return call


for _name, _other_name in _OPERATIONS.items():
    setattr(TwoBackends, _name, _forwarding(_name, _other_name))


@functools.cache
def two_backends(kind: type[HpctrainGroup]) -> type[HpctrainGroup]:
    """Return a class of groups of ours that forwards operations, too."""
    return TwoBackends if kind is HpctrainGroup else type(f"Two{kind.__name__}", (kind, TwoBackends), {})


# Second group ---------------------------------------------------------------------------------------------------------


def hide(group: Any) -> None:
    """Remove a group from torch's tables of groups: the program must not find it, or destroy it twice."""
    module: Any = c10d
    world = module._world
    for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag, world.pg_group_ranks):
        table.pop(group, None)
    for groups in world.tags_to_pg.values():
        groups[:] = [each for each in groups if each is not group]
    module._unregister_process_group(group.group_name)


def batch_isend_irecv(operations: list[Any], stock: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Start messages; those that a second back end carries, such as NCCL, as one, as torch does in its own groups."""
    module: Any = c10d
    module._check_p2p_op_list(operations)
    group, device = operations[0].group, operations[0].tensor.device
    forwarded = isinstance(group, TwoBackends) and group.forwards(device)
    if not forwarded or not group._get_backend(device).supports_coalescing:
        return list(stock(operations))
    with module._coalescing_manager(group, device, async_ops=True) as manager:
        for each in operations:
            peer = {"group_dst" if each.op is c10d.isend else "group_src": each.group_peer}
            each.op(each.tensor, group=each.group, tag=each.tag, **peer)
    return list(manager.works)
