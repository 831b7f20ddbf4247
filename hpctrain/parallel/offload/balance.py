"""Division of the update between device and host, such that the device does not wait for the host.

Note: the balance. While the backward passes of a step take ``t`` seconds, the host updates
parameters whose gradients have already been copied. AdamW on float32 masters moves 28 bytes per
parameter through host memory: it reads the master and two moments (12) and a 16-bit gradient (2),
and writes the same three (12) and the 16-bit copy (2). So N parameters take 28 N / B seconds at B
bytes per second. Over a link with L bytes per second in each direction they take at least 2 N / L.
The share of the update that does not fit into ``t``,

    f = max(0, 1 - t / (N max(28 / B, 2 / L)))

is made on the device, whose memory is an order of magnitude faster. The f N parameters take 16
bytes each of it. This is the condition of ZeRO-Offload (Ren et al., 2021) for an update without
cost, solved for the share that violates it, as in the Twin-Flow of DeepSpeed's ZeRO-Offload++.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BYTES = 28.0  # bytes per parameter that an update by AdamW moves through host memory
LINK_BYTES = 2.0  # bytes per parameter over the link, in each direction


def share_on_device(
    parameters: int,
    backward: float,
    host_rate: float,
    link_rate: float = math.inf,
    *,
    host_bytes: float = BYTES,
    link_bytes: float = LINK_BYTES,
) -> float:
    """Return the share (0 to 1) of ``parameters`` parameters that is to be updated on the device.

    ``backward`` is the time of the backward passes of a step, in seconds. ``host_rate`` and
    ``link_rate`` are in bytes per second: of the update on the host, and of the link in one
    direction while both directions are in use.
    """
    if min(host_rate, link_rate) <= 0:
        return 1.0
    needed = parameters * max(host_bytes / host_rate, link_bytes / link_rate)
    return max(0.0, 1.0 - max(backward, 0.0) / needed) if needed else 0.0


def last_pieces(numels: Sequence[int], share: float) -> list[int]:
    """Return the indices of the last parameter groups whose elements together are closest to a share of all elements.

    The groups are in the order in which their gradients are computed. The last gradients have the
    least time to overlap with the backward pass, and the next forward pass needs these parameters
    first.
    """
    wanted, found, first = share * sum(numels), 0, len(numels)
    while first and abs(found + numels[first - 1] - wanted) < abs(found - wanted):
        first -= 1
        found += numels[first]
    return list(range(first, len(numels)))
