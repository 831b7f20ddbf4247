"""Choose how much of the update stays on the device, so that the device need not wait for the host.

Note: the balance. While backward passes take ``t`` seconds, the host updates what has come down already. AdamW on
float32 masters moves 28 bytes a parameter through the host's memory: it reads master, two moments (12) and a gradient
of 16 bits (2), and writes the same three and the copy in 16 bits. So N parameters take 28 N / B seconds at B bytes a
second, and over a link that carries L bytes a second each way no less than 2 N / L. What does not fit into ``t``,

    f = max(0, 1 - t / (N max(28 / B, 2 / L)))

is updated on the device, where memory is an order of magnitude faster; f N parameters take 16 bytes each of it. This is
the condition of ZeRO-Offload (Ren et al., 2021) for an update that costs nothing, solved for the share that breaks it,
as in the Twin-Flow of DeepSpeed's ZeRO-Offload++.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BYTES = 28.0  # that an update by AdamW moves through the host's memory for a parameter
LINK_BYTES = 2.0  # that a parameter sends over the link, in each direction


def share_on_device(
    parameters: int,
    backward: float,
    host_rate: float,
    link_rate: float = math.inf,
    *,
    host_bytes: float = BYTES,
    link_bytes: float = LINK_BYTES,
) -> float:
    """Return which share (0 to 1) of so many parameters is to be updated on the device.

    ``backward`` is how many seconds the backward passes of a step take, ``host_rate`` and ``link_rate`` are bytes a
    second: of the host's update, and of the link in one direction while both are in use.
    """
    if min(host_rate, link_rate) <= 0:
        return 1.0
    needed = parameters * max(host_bytes / host_rate, link_bytes / link_rate)
    return max(0.0, 1.0 - max(backward, 0.0) / needed) if needed else 0.0


def last_pieces(numels: Sequence[int], share: float) -> list[int]:
    """Return the numbers of the last pieces that together come nearest to a share of all elements.

    Pieces are in the order in which their gradients come. The last to come have the least left of the backward pass to
    hide behind, and the next forward pass needs them first.
    """
    wanted, found, first = share * sum(numels), 0, len(numels)
    while first and abs(found + numels[first - 1] - wanted) < abs(found - wanted):
        first -= 1
        found += numels[first]
    return list(range(first, len(numels)))
