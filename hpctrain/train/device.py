"""Device selection for a rank, and refusal of shared GPUs unless they are allowed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from hpctrain.errors import DeviceError


def pick(wanted: str, local_rank: int) -> torch.device:
    """Return the device of a rank: ``auto`` is a GPU if one is visible, otherwise the CPU.

    GPUs are assigned by local rank among the visible ones. The result is therefore the same whether
    the launcher shows each rank all GPUs of the node or only one.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise DeviceError(f"unknown device {wanted!r}: known are auto, cpu, cuda", everywhere=True)
    visible = 0 if wanted == "cpu" else torch.cuda.device_count()
    if wanted == "cuda" and not visible:
        raise DeviceError("device cuda: no GPU is visible to this rank (is it in CUDA_VISIBLE_DEVICES?)")
    return torch.device("cuda", local_rank % visible) if visible else torch.device("cpu")


def identity(device: torch.device) -> str:
    """Return a name that is the same in every process that uses this device."""
    if device.type != "cuda":
        return str(device)
    return str(torch.cuda.get_device_properties(device).uuid)


def check_unshared(owners: Sequence[tuple[str, str]], table: str) -> None:
    """Raise ``DeviceError`` if two ranks of a host use one GPU; ``owners`` contains (host, identity) by rank."""
    users: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, (host, name) in enumerate(owners):
        if name != "cpu":
            users[host, name].append(rank)
    for (host, _), ranks in users.items():
        if len(ranks) > 1:
            raise DeviceError(
                f"ranks {', '.join(map(str, ranks))} share one GPU of {host}: start fewer ranks per node, "
                f"or allow it with run.oversubscribe = true\n{table}",
                everywhere=True,
            )
