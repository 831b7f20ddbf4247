"""Find the share of the update that stays on the device, by what the first steps took.

Note: when it is found. How long backward passes take, and how fast this host updates, shows in a step or two; the very
first tell nothing, as libraries warm up and states come into being. So the run begins with all of it on the host, and
after the third step moves what is to be on the device there, as far as there is room; results do not depend on it but
for the device's rounding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hpctrain.parallel.offload.balance import last_pieces, share_on_device
from hpctrain.parallel.offload.update import OnePass
from hpctrain.transport.streams import Streams

WARM, STEPS = 2, 3  # steps that tell nothing, and after which it is decided
ROOM = 0.8  # of what is free on the device may be used: passes of other sizes are to come
FLOATS = 4  # a parameter: master, gradient, two moments


class ShareFinder:
    """Watch the passes and updates of the first steps."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device, self._streams = device, streams
        self._steps, self._backward, self._began = 0, 0.0, 0.0
        self._before = 0, 0.0  # elements and seconds of the updates that tell nothing
        self.decided = False

    def begin(self) -> None:
        """Take note that a backward pass begins."""
        if not self.decided:
            self._finish()
            self._began = time.perf_counter()

    def end(self) -> None:
        """Take note that it has ended."""
        if not self.decided:
            self._finish()
            self._backward += time.perf_counter() - self._began

    def _finish(self) -> None:
        self._streams.synchronize(self._streams.record(self._streams.current()))

    def pieces(self, one_pass: OnePass, nbytes: Sequence[int]) -> list[int]:
        """Return the numbers of the pieces that move to the device after this step; none while it is too early.

        ``nbytes`` are those of the pieces' masters, in the order in which their gradients come.
        """
        self._steps += 1
        if self._steps == WARM:
            self._before, self._backward = (one_pass.elements, one_pass.seconds), 0.0
        if self._steps < STEPS:
            return []
        self.decided = True
        elements, seconds = one_pass.elements - self._before[0], one_pass.seconds - self._before[1]
        if not elements or not seconds:
            return []  # an optimizer that is not updated in slices: nothing was measured
        backward = self._backward / (STEPS - WARM)
        share = share_on_device(elements, backward, elements / seconds, host_bytes=1, link_bytes=0)
        return fitting(last_pieces(nbytes, share), nbytes, self.room())

    def room(self) -> int:
        """Return the bytes of the device that may be taken."""
        free, total = torch.cuda.mem_get_info(self._device)
        cap = int(torch.cuda.get_per_process_memory_fraction(self._device) * total)
        reserved, most = torch.cuda.memory_reserved(self._device), torch.cuda.max_memory_allocated(self._device)
        return int(ROOM * max(min(free + reserved, cap) - most, 0))


def fitting(numbers: Sequence[int], nbytes: Sequence[int], room: int) -> list[int]:
    """Return as many of the last pieces as find room with their gradients and moments."""
    found, taken = [], 0
    for number in reversed(numbers):
        taken += FLOATS * nbytes[number]
        if taken > room:
            break
        found.append(number)
    return sorted(found)


def move_states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, device: torch.device) -> None:
    """Bring an optimizer's states of a parameter to a device, as the optimizer would have made them there."""
    group = next((group for group in optimizer.param_groups if any(each is parameter for each in group["params"])), {})
    counts_there = bool(group.get("fused") or group.get("capturable"))
    for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and (name != "step" or counts_there):
            optimizer.state[parameter][name] = value.to(device, copy=True)
