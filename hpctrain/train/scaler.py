"""Steps that a GradScaler leaves out: they end a step of the run like the updates that it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def watch_scalers(optimizers: Sequence[torch.optim.Optimizer], note: Callable[[], None]) -> Callable[[], None]:
    """Call ``note`` whenever a GradScaler has handled a step of one of the optimizers; return what ends that.

    A scaler that finds infinities does not call the optimizer, so that no hook of it runs.
    """
    kind: Any = torch.amp.GradScaler
    original = kind.step
    watched = {id(optimizer) for optimizer in optimizers}

    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, optimizer, *args, **kwargs)
        if id(optimizer) in watched:
            note()
        return result

    def unwatch() -> None:
        if kind.step is step:
            kind.step = original

    kind.step = step
    return unwatch
