"""Detection of a program's writes to parameters that come from servers or from a centre.

The next step, or the end of the run, overwrites such parameters, so a program's writes would be
lost silently. ``job.unshard(model, write=True)`` is the supported way to write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hpctrain.errors import UsageError
from hpctrain.parallel.module_hooks import ModuleHook
from hpctrain.parallel.strategy import trainable

_HOW = "allowed is, on all ranks, with job.unshard(model, write=True): ..., in which rank 0's values count"


class Writes:
    """Guard against a program's writes to parameters where they would be lost; ``where`` names their source."""

    def __init__(self, model: nn.Module, where: str) -> None:
        self._where = where
        self._parameters = trainable(model)
        self._versions: list[int] = []
        self.open = False  # whether writes count
        modules: list[Any] = list(model.modules())
        self._handles: list[RemovableHandle] = [
            module.register_load_state_dict_pre_hook(ModuleHook(self._load_comes)) for module in modules
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Let the program write in the ``with`` block."""
        before, self.open = self.open, True
        try:
            yield
        finally:
            self.open = before

    def note(self) -> None:
        """Record the current versions of the parameters as valid."""
        self._versions = [parameter._version for _, parameter in self._parameters]

    def check(self) -> None:
        """Raise ``UsageError`` if the program has changed parameters in place since ``note``."""
        now = [parameter._version for _, parameter in self._parameters]
        if not self._versions or now == self._versions:
            return
        changed = [name for (name, _), one, other in zip(self._parameters, now, self._versions) if one != other]
        self._versions = now
        raise UsageError(
            f"parameters {', '.join(changed[:4])}{', ...' if len(changed) > 4 else ''} were changed in place by the "
            f"program: they come from {self._where}, and the change would be lost; {_HOW}"
        )

    def _load_comes(self, *_: Any) -> None:
        if not self.open:
            raise UsageError(
                f"load_state_dict of a model whose parameters come from {self._where}: what it loads would be lost; "
                f"{_HOW}; or load before job.wrap(model)"
            )
