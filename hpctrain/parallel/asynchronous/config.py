"""Settings of asynchronous data parallelism."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpctrain.errors import SettingsError
from hpctrain.log import warn_once
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.settings import check as check_fields
from hpctrain.settings import section_of

SECTION, FORMER_SECTION = "asynchronous", "server"  # name of these settings, and the name that they had before
# Values of parallel.data under which every worker makes its own updates
PER_WORKER_UPDATES = ("easgd", "server", "hogwild")
_STRATEGIES_OF = {"mode": ("easgd", "server"), "lock": ("server",), "max_staleness": ("server",), "ranks": ("server",)}
_STRATEGIES_OF |= {"period": ("easgd",), "rho": ("easgd",), "average": ("easgd",)}


@dataclass(frozen=True)
class AsynchronousSettings:
    """Settings of the exchange between workers (parallel.data = "server", "hogwild", "easgd")."""

    # synchronous: all workers exchange together. asynchronous: each exchanges with the centre at its own
    # pace. round-robin (easgd): workers take turns, as in the first version of the method. auto: synchronous
    # for easgd, asynchronous for server.
    mode: Literal["auto", "synchronous", "asynchronous", "round-robin"] = "auto"
    # server: one worker at a time per part of the parameters; without it, concurrent updates may overlap.
    lock: bool = False
    # server: updates of others allowed between a worker's read and its own update; 0: no limit.
    max_staleness: int = 0
    # server: ranks that only hold parameters; 0: every worker holds a part.
    ranks: int = 0
    # Local steps of a worker between two exchanges.
    period: int = 1
    # Strength of the pull between workers and centre: learning rate x rho times their distance; 0: all
    # workers together move the centre by 0.9 of the distance.
    rho: float = 0.0
    # Replace the parameters of all workers by their average instead: local SGD.
    average: bool = False

    def __post_init__(self) -> None:
        check_fields(self, SECTION)
        for name, least in {"period": 1, "max_staleness": 0, "ranks": 0}.items():
            if getattr(self, name) < least:
                raise SettingsError(f"setting asynchronous.{name} = {getattr(self, name)}: must be at least {least}")
        if not 0 <= self.rho < math.inf:
            raise SettingsError(f"setting asynchronous.rho = {self.rho}: must be a number >= 0")
        if self.average and self.mode not in ("auto", "synchronous"):
            raise SettingsError(
                f'setting asynchronous.mode = "{self.mode}": an average is over all workers; remove '
                "asynchronous.average"
            )
        if self.average and self.rho:
            raise SettingsError(
                f"asynchronous.rho = {self.rho} has no effect with asynchronous.average = true; remove one of them"
            )


def is_asynchronous(settings: AsynchronousSettings, parallel: ParallelSettings) -> bool:
    """Return whether workers step without waiting for each other."""
    if parallel.data == "easgd":
        return settings.mode not in ("auto", "synchronous")
    return parallel.data == "hogwild" or parallel.data == "server" and settings.mode != "synchronous"


def check(settings: AsynchronousSettings, parallel: ParallelSettings, offload: OffloadSettings) -> None:
    """Raise ``SettingsError`` for settings that asynchronous strategies do not support, or that only they support."""
    for name, strategies in _STRATEGIES_OF.items():
        if getattr(settings, name) != getattr(AsynchronousSettings(), name) and parallel.data not in strategies:
            raise SettingsError(
                f"setting asynchronous.{name} = {getattr(settings, name)!r}: is for parallel.data = "
                f'{", ".join(strategies)}, not "{parallel.data}"'
            )
    if parallel.data not in PER_WORKER_UPDATES:
        return
    if parallel.data == "server" and settings.mode == "round-robin":
        raise SettingsError(
            'setting asynchronous.mode = "round-robin": is for parallel.data = easgd; see asynchronous.lock'
        )
    if parallel.data == "server" and settings.mode == "synchronous" and (settings.ranks or settings.max_staleness):
        raise SettingsError(
            'setting asynchronous.mode = "synchronous": all workers hold a part, and no update is stale'
        )
    chosen = f'parallel.data = "{parallel.data}"'
    for name in ("pipe", "tensor"):
        if getattr(parallel, name) > 1:
            raise SettingsError(
                f"setting parallel.{name} = {getattr(parallel, name)}: workers with {chosen} hold whole models"
            )
    refused = {
        "parallel.compression": parallel.compression != "none",
        "parallel.sync_batchnorm": parallel.sync_batchnorm is True,
        'parallel.accumulate = "reduced"': parallel.accumulate == "reduced",
        "offload.optimizer": offload.optimizer,
        "offload.parameters": offload.parameters,
    }
    for name, given in refused.items():
        if given:
            raise SettingsError(f"setting {name}: not possible with {chosen}, whose gradients stay on their rank")


Given = AsynchronousSettings | Mapping[str, Any] | None  # settings as arguments of a program


def asynchronous_settings(value: Given, former: Given = None) -> AsynchronousSettings:
    """Return settings given as ``AsynchronousSettings`` or as a dict. Raises ``SettingsError`` for anything else.

    ``former`` is the argument with the former name, which is accepted with a warning.
    """
    if former is not None:
        if value is not None:
            raise SettingsError(
                f"{FORMER_SECTION} and {SECTION} are two names of one argument: give {SECTION} only", everywhere=True
            )
        warn_once(f"the argument {FORMER_SECTION} is now named {SECTION}; the former name still works")
    return section_of(AsynchronousSettings, value if former is None else former, SECTION)


def rename_section(tree: dict[str, Any]) -> None:
    """Give the section ``[server]`` of a run's settings its present name, in place, with a warning.

    Raises ``SettingsError`` if the settings contain both names.
    """
    if FORMER_SECTION not in tree:
        return
    if SECTION in tree:
        raise SettingsError(
            f"[{FORMER_SECTION}] and [{SECTION}] are two names of one section of the settings: use [{SECTION}] only"
        )
    tree[SECTION] = tree.pop(FORMER_SECTION)
    warn_once(f"the settings [{FORMER_SECTION}] are now named [{SECTION}]; the former name still works")
