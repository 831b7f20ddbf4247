"""Hold what a run was asked to do, checked at birth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hpctrain.errors import UsageError
from hpctrain.train.health import Policy

Resume = Literal["auto", "never", "must"]


@dataclass(frozen=True)
class RunOptions:
    """Say how far a run goes, when it saves, and what it does about trouble; the settings of the same names explain."""

    steps: int | None  # updates in all, over all resumes; None: as long as the loader has batches
    every: int  # steps between checkpoints
    keep: int  # the newest checkpoints that stay
    resume: Resume
    strict: bool  # a damaged newest checkpoint is an error
    on_nonfinite: Policy

    def __post_init__(self) -> None:
        for name in ("steps", "every", "keep"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise UsageError(f"a run with {name} = {count}: must be at least 1", everywhere=True)
        for name, allowed in (("resume", get_args(Resume)), ("on_nonfinite", get_args(Policy))):
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(f"a run with {name} = {value!r}: allowed are {', '.join(allowed)}", everywhere=True)
