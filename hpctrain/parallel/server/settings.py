"""Hold the settings of workers with replicas of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpctrain.errors import SettingsError
from hpctrain.parallel.offload.settings import OffloadSettings
from hpctrain.parallel.settings import ParallelSettings

REPLICAS = ("easgd",)  # parallel.data: strategies under which ranks hold different parameters


@dataclass(frozen=True)
class ServerSettings:
    """Say how workers and the centre exchange what they have learnt (parallel.data = "easgd")."""

    # All workers exchange together (synchronous), each with the centre at its own pace (asynchronous), or each when it
    # is its turn (round-robin), as in the first version of the method.
    mode: Literal["synchronous", "asynchronous", "round-robin"] = "synchronous"
    # Steps of its own that a worker makes from one exchange to the next.
    period: int = 1
    # How strongly workers and centre pull at each other: by learning rate x rho of what lies between them; 0: so that
    # all workers together move the centre by 0.9 of it.
    rho: float = 0.0
    # Replace the parameters of all workers by their average instead: local SGD.
    average: bool = False

    def __post_init__(self) -> None:
        if self.period < 1:
            raise SettingsError(f"setting server.period = {self.period}: must be at least 1")
        if not 0 <= self.rho < math.inf:
            raise SettingsError(f"setting server.rho = {self.rho}: must be a number from 0 on")
        if self.average and self.mode != "synchronous":
            raise SettingsError(
                f'setting server.mode = "{self.mode}": an average is one of all workers; leave server.average out'
            )
        if self.average and self.rho:
            raise SettingsError(
                f"setting server.rho = {self.rho}: nothing pulls where server.average = true; leave one of them out"
            )


def check(settings: ServerSettings, parallel: ParallelSettings, offload: OffloadSettings) -> None:
    """Raise ``SettingsError`` for what workers with replicas of their own cannot do, or what is for them alone."""
    if parallel.data not in REPLICAS:
        if settings != ServerSettings():
            raise SettingsError(
                f'section [server]: is for parallel.data = {", ".join(REPLICAS)}, not "{parallel.data}"'
            )
        return
    chosen = f'parallel.data = "{parallel.data}"'
    for name in ("pipe", "tensor"):
        if getattr(parallel, name) > 1:
            raise SettingsError(
                f"setting parallel.{name} = {getattr(parallel, name)}: workers of {chosen} hold whole models"
            )
    refused = {
        "parallel.compression": parallel.compression != "none",
        "parallel.sync_batchnorm": parallel.sync_batchnorm,
        'parallel.accumulate = "reduced"': parallel.accumulate == "reduced",
        "offload.optimizer": offload.optimizer,
        "offload.parameters": offload.parameters,
    }
    for name, given in refused.items():
        if given:
            raise SettingsError(f"setting {name}: is not for {chosen}, whose gradients stay on their rank")
