"""A model whose forward pass occupies a core for a known time, for tests of forecasts."""

from __future__ import annotations

import time

from torch import Tensor, nn

BURN = 0.03  # seconds of CPU time per forward pass


class Burning(nn.Module):
    """Linear layer whose forward pass takes BURN seconds of CPU time; prints a message or fails on request."""

    def __init__(self, message: str = "", fails: bool = False) -> None:
        super().__init__()
        self.linear, self.message, self.fails = nn.Linear(4, 3), message, fails

    def forward(self, x: Tensor) -> Tensor:
        """Return classes."""
        if type(x) is Tensor and not x.is_meta:
            if self.message:
                print(self.message)
            if self.fails:
                raise RuntimeError("this model fails")
            end = time.thread_time() + BURN
            while time.thread_time() < end:
                pass
        result: Tensor = self.linear(x)
        return result
