"""Steps that a GradScaler skips: they end a step of the run, as its updates do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def watch_scalers(optimizers: Sequence[torch.optim.Optimizer], note: Callable[[], None]) -> Callable[[], None]:
    """Call ``note`` whenever a GradScaler has handled a step of these optimizers; return a function that ends this.

    If a scaler finds infinities, it does not call the optimizer, so no optimizer hook runs.
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
