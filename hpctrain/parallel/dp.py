"""Multi-threaded data parallelism of one process on several GPUs, by torch's DataParallel.

The model is copied to every GPU in each forward pass, and the threads share the GIL. This is a
plain baseline: one rank per GPU is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import data_parallel

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.strategy import SyncStrategy


class ThreadedDataParallel(SyncStrategy):
    """Data parallelism over all GPUs visible to this process: inputs are split along the first dim, in place.

    Outputs are gathered on the model's own GPU, gradients in its parameters. Hooks on the model
    itself receive whole batches; those on its submodules receive the parts. Raises ``UsageError``
    with several ranks, or fewer than two GPUs.
    """

    def __init__(
        self, model: nn.Module, comm: Communicator, gpus: int | None = None, run: Callable[..., Any] = data_parallel
    ) -> None:
        """Run the parts of a batch on ``gpus``, which are all by default, by torch's ``data_parallel``."""
        count = torch.cuda.device_count() if gpus is None else gpus
        if comm.size > 1:
            raise UsageError(
                f"parallel.data = 'dp' uses several GPUs in one process, but there are {comm.size} ranks: start one, "
                "or use ddp",
                everywhere=True,
            )
        if count < 2:
            raise UsageError(
                f"parallel.data = 'dp' needs at least two GPUs, and this process sees {count}: use ddp, "
                "or look at CUDA_VISIBLE_DEVICES",
                everywhere=True,
            )
        if "forward" in vars(model):
            raise UsageError(
                "parallel.data = 'dp' copies the model, which a forward that is set on the instance does not survive: "
                "define it in the class",
                everywhere=True,
            )
        super().__init__(model, comm)
        model.forward = _Parallel(model, count, run)

    def join_empty(self, *, backward: bool = True) -> None:
        """Do nothing: there are no other ranks."""

    def detach(self) -> None:
        vars(self.model).pop("forward", None)


class _Parallel:
    """Replacement of a model's ``forward``; a copy of the model gets a copy that refers to the copied model."""

    def __init__(self, model: nn.Module, gpus: int, run: Callable[..., Any]) -> None:
        self.model, self.gpus, self.run = model, gpus, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(_Body(self.model), args, devices_of(self.model, self.gpus), module_kwargs=kwargs)


class _Body(nn.Module):
    """Wrapper of the model for replication: runs the forward of its class, without its hooks, which ran before."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.model).forward(self.model, *args, **kwargs)


def devices_of(model: nn.Module, gpus: int) -> list[int]:
    """Return all GPUs, the model's own first, as torch requires."""
    own = next((parameter.device.index for parameter in model.parameters()), None) or 0
    return [own, *(gpu for gpu in range(gpus) if gpu != own)]
