"""Registration of the back end as soon as torch.distributed is imported, without importing torch.

``import hpctrain`` calls ``start``, and so does torch at the end of ``import torch``, through its entry point group
``torch.backends``. An exception there would break ``import torch`` for all programs of an environment. So ``start``
raises none, and this module and the package import the standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_MODULE = "torch.distributed"
_reported = False


def start() -> None:
    """Register the back end: now if torch.distributed has been imported, otherwise when it is."""
    try:
        if hasattr(sys.modules.get(_MODULE), "Backend"):
            _register()
        elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    except Exception as error:
        _report(error)


class _Finder:
    """Finder of torch.distributed on ``sys.meta_path``: it registers the back end after the module's own code."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own specification; None for all other modules."""
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        loader = spec.loader if spec is not None else None
        if loader is not None and hasattr(loader, "exec_module"):
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                delattr(loader, "exec_module")
                execute(module)
                start()

            setattr(loader, "exec_module", execute_and_register)
        return spec


def _register() -> None:
    from hpctrain.torch_backend.register import register

    register()


def _report(error: Exception) -> None:
    """Print once why the back end is missing; a warning could be an error in a program that wants that."""
    global _reported
    if _reported:
        return
    _reported = True
    print(f"hpctrain: the back end of torch.distributed is not registered: {error!r}", file=sys.stderr)
