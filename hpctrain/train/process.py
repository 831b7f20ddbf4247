"""Settings of this process: the thresholds of malloc, the import of torch's compiler, and the versions of packages.

glibc serves large allocations by mmap. By default it raises this threshold to up to 32 MiB as such
memory is freed. From then on, tensors that live for the whole run and tensors of a single layer
share one heap. Free memory between them is neither used nor returned to the system. If all large
tensors used mmap, every allocation would have to zero its pages: a ResNet step takes 1.8 times as
long at a threshold of 1 MiB, and 1.4 times at 4 MiB (benchmarks/README.md).

The threshold is therefore low while a run allocates what is permanent: parameters, buckets and
optimizer states. After the second update it is high: short-lived tensors share a heap that contains
little else, and the heap keeps its pages.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import shutil
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from hpctrain._version import __version__

VARIABLE = "HPCTRAIN_MALLOC"
UPDATES = 2  # updates after which all permanent tensors have been allocated
LOW, HIGH = 2**17, 2**25  # bytes: the threshold at first and later; glibc allows at most 32 MiB
TRIM_THRESHOLD = 2**30  # free bytes at the top of the heap that are kept before memory is returned
# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
NAME = "torch._dynamo"
_MARK = "__dynamo_disable"  # the attribute in which torch stores the disabled form of a function
_TUNED_BY_USERS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


class Allocator:
    """Control of the process's malloc; ``libc`` is None if malloc must not be changed."""

    def __init__(self, libc: Any) -> None:
        self._libc = libc
        self._handle: Any = None
        self._updates = 0
        self._raised = libc is None

    def start(self) -> None:
        """Use mmap for large allocations until the optimizer has made its first updates."""
        if self._raised or self._handle is not None:
            return
        from hpctrain.parallel.hooks import StepHooks

        self._set(LOW)
        self._handle = StepHooks(self, after=Allocator._count)

    def raise_threshold(self) -> None:
        """Allocate from the shared heap from now on; return its free memory to the system."""
        if self._raised:
            return
        self._raised = True
        self._set(HIGH)
        self._libc.malloc_trim(0)

    def _count(self, _: Any) -> None:
        self._updates += 1
        if self._updates == UPDATES:
            self._handle.remove()
            self.raise_threshold()

    def _set(self, threshold: int) -> None:
        self._libc.mallopt(_M_MMAP_THRESHOLD, threshold)
        self._libc.mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD)


def library(environ: Mapping[str, str] = os.environ) -> Any:
    """Return glibc, or None if another C library or allocator is used, or the user tuned or disabled this."""
    tuned = [name for name in _TUNED_BY_USERS if name in environ]
    if environ.get(VARIABLE, "1") == "0" or tuned or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return None
    if "malloc" in environ.get("LD_PRELOAD", "") or platform.libc_ver()[0] != "glibc":
        return None
    try:
        libc = ctypes.CDLL(None)
        return libc if libc.mallopt and libc.malloc_trim else None
    except (OSError, AttributeError):
        return None


ALLOCATOR = Allocator(library())


# Deferred import of torch's compiler: it is loaded when a program first uses it ---------------------------------------
#
# torch's optimizers import the compiler on first use (1.2 s on every rank, more if ranks outnumber
# cores), only to exclude themselves from tracing: they call ``disable`` and ``graph_break``. While
# the compiler is not loaded, no tracing can be active. Until then, a stub replaces ``torch._dynamo``:
# ``graph_break`` does nothing, like the real function outside of a trace, and ``disable`` returns a
# function of torch or hpctrain unchanged. Access to any other attribute loads the real module, which
# replaces the stub. Functions that the stub did not disable are then disabled at their next call:
# ``torch._compile._disable_dynamo``, which both use, asks again, and activation checkpoints make new
# ones per pass. A program that decorates a function with ``torch.compiler.disable`` keeps the result,
# so the real module must return it. Activation checkpoints read a flag of ``torch._dynamo.config``
# that only a trace needs, so the stub defines it. The compiler takes 70 MB on every rank.


def defer_compiler() -> None:
    """Install the stub for the compiler, unless the compiler is already loaded; it is to skip hpctrain's own code."""
    if NAME not in sys.modules:
        import torch

        placeholder = _LazyDynamo(NAME)
        sys.modules[NAME] = placeholder
        setattr(torch, "_dynamo", placeholder)
    elif not isinstance(sys.modules[NAME], _LazyDynamo):
        _skip_own_code(sys.modules[NAME])


def _skip_own_code(compiler: ModuleType) -> None:
    from hpctrain.parallel.compiled import skip_in_graphs

    skip_in_graphs(compiler)


class _LazyConfig:
    """Flags of ``torch._dynamo.config`` that activation checkpoints read outside of a trace."""

    error_on_nested_fx_trace = True

    def __init__(self, placeholder: _LazyDynamo) -> None:
        self.__dict__["_placeholder"] = placeholder

    def __getattr__(self, name: str) -> Any:
        """Read any other flag from the real compiler."""
        return getattr(self._placeholder.load().config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a flag of the real compiler."""
        setattr(self._placeholder.load().config, name, value)


class _LazyDynamo(ModuleType):
    """Stub for ``torch._dynamo`` for callers that only exclude themselves from tracing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__dict__["_passed"] = weakref.WeakSet()  # checkpoints create new functions in each pass
        self.__dict__["config"] = _LazyConfig(self)

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: there is no graph."""

    def disable(self, function: Any = None, *args: Any, **options: Any) -> Any:
        """Return a function of torch or hpctrain unchanged, as no trace is active; load the compiler for others."""
        if not str(getattr(function, "__module__", "")).startswith(("torch.", "hpctrain.")):
            return self.load().disable(function, *args, **options)
        self._passed.add(function)
        return function

    def __getattr__(self, name: str) -> Any:
        """Load the real compiler and return its attribute; the real module replaces the stub from now on.

        Code that looks through all modules of a process (``inspect.getmodule``, which torch calls
        while it defines operators) asks for ``__file__``. It must not load the compiler in the
        middle of another import. An import of a submodule needs ``__path__``.
        """
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"module {NAME!r} is not loaded yet, and has no attribute {name!r}")
        return getattr(self.load(), name)

    def load(self) -> ModuleType:
        """Return the real compiler, which replaces the stub."""
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
            importlib.import_module(NAME)  # binds torch._dynamo, too
            for function in self._passed:
                function.__dict__.pop(_MARK, None)
            _skip_own_code(sys.modules[NAME])
        return sys.modules[NAME]


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect the results of a run."""
    from importlib import metadata

    import torch

    found = {"hpctrain": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("numpy", "mpi4py", "h5py"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def command_name() -> str:
    """Return how to call the command from this folder: its name if it is in PATH, otherwise its path."""
    if shutil.which("hpctrain"):
        return "hpctrain"
    script = Path(sys.executable).with_name("hpctrain")
    return os.path.relpath(script) if script.exists() else f"{sys.executable} -m hpctrain"
