"""Division of the update between device and host, from measurements of the first steps.

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

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hpctrain.comm.device.streams import Streams
from hpctrain.parallel.offload.one_pass import OnePass


def last_groups(numels: Sequence[int], share: float) -> list[int]:
    """Return the indices of the last parameter groups whose elements together are closest to a share of all elements.

    The groups are in the order in which their gradients are computed. The last gradients have the
    least time to overlap with the backward pass, and the next forward pass needs these parameters
    first.
    """
    target, found, first = share * sum(numels), 0, len(numels)
    while first and abs(found + numels[first - 1] - target) < abs(found - target):
        first -= 1
        found += numels[first]
    return list(range(first, len(numels)))


# Choice of the share of the update that stays on the device, from measurements of the first steps ---------------------
#
# Note: when the share is chosen. The times of the backward passes and of the update on this host show
# within one or two steps. The very first steps are not representative, because libraries warm up and
# states are created. Therefore all updates begin on the host. After the third step, the chosen share
# moves to the device, as far as there is memory. The choice affects results only by the rounding of
# the device.


WARMUP_STEPS, MEASURED_STEPS = 2, 3  # steps that are not representative, and the step after which the share is chosen
MEMORY_SHARE = 0.8  # usable share of the free device memory: passes of other sizes may follow
FLOATS = 4  # per parameter: master, gradient, two moments


def free_bytes(device: torch.device) -> int:
    """Return the bytes of device memory that may be used."""
    free, total = torch.cuda.mem_get_info(device)
    cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    reserved, most = torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device)
    return int(MEMORY_SHARE * max(min(free + reserved, cap) - most, 0))


class ShareFinder:
    """Measurement of the passes and updates of the first steps."""

    def __init__(
        self,
        streams: Streams,
        clock: Callable[[], float] = time.perf_counter,
        free_bytes: Callable[[torch.device], int] = free_bytes,
    ) -> None:
        self._streams, self._clock, self._free_bytes = streams, clock, free_bytes
        self._steps, self._backward, self._began = 0, 0.0, 0.0
        self._at_warmup = 0, 0.0  # elements and seconds of the updates before the measurement
        self.decided = False

    def begin(self) -> None:
        """Record the beginning of a backward pass."""
        if not self.decided:
            self._synchronise()
            self._began = self._clock()

    def end(self) -> None:
        """Record the end of a backward pass."""
        if not self.decided:
            self._synchronise()
            self._backward += self._clock() - self._began

    def _synchronise(self) -> None:
        self._streams.synchronize(self._streams.record(self._streams.current()))

    def groups_to_move(self, one_pass: OnePass, nbytes: Sequence[int]) -> list[int]:
        """Return the indices of the groups that move to the device after this step; an empty list if it is too early.

        ``nbytes`` are the sizes of the groups' masters, in the order in which their gradients are
        computed.
        """
        self._steps += 1
        if self._steps == WARMUP_STEPS:
            self._at_warmup, self._backward = (one_pass.elements, one_pass.seconds), 0.0
        if self._steps < MEASURED_STEPS:
            return []
        self.decided = True
        elements, seconds = one_pass.elements - self._at_warmup[0], one_pass.seconds - self._at_warmup[1]
        if not elements or not seconds:
            return []  # the optimizer does not update in slices: nothing was measured
        backward = self._backward / (MEASURED_STEPS - WARMUP_STEPS)
        share = max(0.0, 1.0 - backward / seconds)
        return limit_to_memory(last_groups(nbytes, share), nbytes, self._free_bytes(self._streams.device))


def limit_to_memory(numbers: Sequence[int], nbytes: Sequence[int], free_bytes: int) -> list[int]:
    """Return as many of the last groups as fit into ``free_bytes`` with their gradients and moments."""
    found, needed = [], 0
    for number in reversed(numbers):
        needed += FLOATS * nbytes[number]
        if needed > free_bytes:
            break
        found.append(number)
    return sorted(found)


def move_states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, device: torch.device) -> None:
    """Move an optimizer's states of a parameter to a device, as the optimizer would have created them there."""
    group = next((group for group in optimizer.param_groups if any(each is parameter for each in group["params"])), {})
    counts_there = bool(group.get("fused") or group.get("capturable"))
    for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and (name != "step" or counts_there):
            optimizer.state[parameter][name] = value.to(device, copy=True)
