"""Training of PyTorch models on the ranks that ``mpirun`` or ``srun`` started.

Importing this package loads neither torch nor MPI; both are imported at first use of one of the
names below. It registers the back end ``hpctrain`` of torch.distributed.

    import hpctrain

    job = hpctrain.init()
    model = job.wrap(model)
    with job.run(model, optimizer, loader, checkpoints="runs/a") as run:
        for step, batch in run:
            ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hpctrain._version import __version__
from hpctrain.torch_backend.autoload import start as _register_backend

if TYPE_CHECKING:
    from hpctrain import checkpoint as checkpoint
    from hpctrain.comm.communicator import Communicator as Communicator
    from hpctrain.parallel.asynchronous.config import AsynchronousSettings as AsynchronousSettings
    from hpctrain.parallel.config import ParallelSettings as ParallelSettings
    from hpctrain.parallel.offload.config import OffloadSettings as OffloadSettings
    from hpctrain.stage.local import staged as staged
    from hpctrain.train.init import init as init
    from hpctrain.train.job import Job as Job

    ServerSettings = AsynchronousSettings

__all__ = [
    "AsynchronousSettings",
    "Communicator",
    "Job",
    "OffloadSettings",
    "ParallelSettings",
    "__version__",
    "checkpoint",
    "init",
    "staged",
]

_HOMES = {
    "AsynchronousSettings": "hpctrain.parallel.asynchronous.config",
    "Communicator": "hpctrain.comm.communicator",
    "Job": "hpctrain.train.job",
    "OffloadSettings": "hpctrain.parallel.offload.config",
    "ParallelSettings": "hpctrain.parallel.config",
    "init": "hpctrain.train.init",
    "staged": "hpctrain.stage.local",
}
_FORMER_NAMES = {"ServerSettings": "AsynchronousSettings"}

_register_backend()  # of torch.distributed, as soon as a program imports that


def __getattr__(name: str) -> Any:
    """Import a public name when it is first requested (PEP 562)."""
    if name == "checkpoint":
        return importlib.import_module("hpctrain.checkpoint")
    if name in _FORMER_NAMES:
        present = _FORMER_NAMES[name]
        warn_once = importlib.import_module("hpctrain.log").warn_once
        warn_once(f"hpctrain.{name} is now named hpctrain.{present}; the former name still works")
        name = present
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
