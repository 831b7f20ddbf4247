"""Models of ``torch.compile``: plain names, and hpctrain's own code outside of the compiled graphs.

Note: what the compiler must not trace. Hooks communicate, count passes and replace parameters. If a
program compiles a function that calls ``loss.backward()`` or ``optimizer.step()``, the compiler is
active while autograd and torch's optimizers call these hooks. It would compile them, and compile
them again in each step because a counter has changed. Excluding single functions is not enough: a
compiled function may also call a communicator or a job. Therefore the compiler skips all files of
hpctrain except those of ``TRACED``: a call ends the graph, the function runs as it is, and the next graph
begins behind it. Modules and losses of the program that it calls are compiled again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
from torch import nn

# Modules whose functions may be parts of graphs; all others of hpctrain stay outside.
TRACED = (
    "hpctrain.documents",
    "hpctrain.models",
    "hpctrain.parallel.compiled",
    "hpctrain.parallel.recompute",
    "hpctrain.parallel.sync_batchnorm",
    "hpctrain.train.first_step",  # its watchers of loss functions, which do nothing in a graph
)
REASON = (  # in torch's error for fullgraph=True
    "hpctrain gathers and reduces parameters before and after this module, outside of graphs; leave out "
    "fullgraph=True, or compile parts that are gathered as a whole: for block in model.blocks: block.compile()"
)
_COMPILED = "_orig_mod"  # the name of the original module inside the one that torch.compile returns


def skip_in_graphs(compiler: Any) -> None:
    """Make torch's compiler, the module ``torch._dynamo``, skip the files of hpctrain; once per process."""
    rules = compiler.trace_rules
    if not getattr(rules, "_skips_hpctrain", False):
        rules._skips_hpctrain = True
        rules.SKIP_DIRS.extend(skipped())
        rules.add("hpctrain.errors")  # compiles the list into one expression, which takes 10 ms
        ModuleHook.run = staticmethod(compiler.disable(_run, reason=REASON))


def skipped(folder: Path = Path(__file__).parents[1], prefix: str = "hpctrain.") -> list[str]:
    """Return the files and folders that the compiler skips: whole packages unless a part of them is traced."""
    found: list[str] = []
    for module in iter_modules([str(folder)], prefix):
        path = folder / module.name.removeprefix(prefix)
        if any(name.startswith(f"{module.name}.") for name in TRACED):
            found += skipped(path, f"{module.name}.")
        elif module.name not in TRACED:
            found.append(f"{path}/" if module.ispkg else f"{path}.py")
    return found


def forget_graphs() -> None:
    """Drop everything that is compiled: graphs do not notice hooks that are registered after their compilation."""
    compiler: Any = sys.modules.get("torch._dynamo.convert_frame")  # loaded with the real compiler only
    if compiler is not None:
        torch.compiler.reset()


def _run(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


class ModuleHook:
    """Hook of one module; copies and pickles of the module get a hook that does nothing.

    It runs between compiled graphs, never inside them: it communicates, and replaces the module's
    parameters.
    """

    run = staticmethod(_run)  # the compiler's form of it, with the reason why it ends a graph, once that is loaded

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ModuleHook.run(self._function, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _NoHook, ()


class _NoHook:
    """Hook that does nothing, in copies of a module with a strategy."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


def plain_module(model: nn.Module) -> nn.Module:
    """Return the original module of one that ``torch.compile`` has returned; any other module unchanged."""
    inner = model._modules.get(_COMPILED)
    return inner if inner is not None and _is_compiled(model) else model


def compile_in_place(model: nn.Module) -> nn.Module:
    """Return the original of a model; its compiled submodules are replaced by their originals, compiled in place.

    A submodule that ``torch.compile`` has returned adds ``_orig_mod`` to the names of its
    parameters. An original that was compiled in place, as by ``module.compile()``, runs the same
    code, and its names are those of the plain model.
    """
    inner = plain_module(model)
    for parent in list(inner.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and (original := plain_module(child)) is not child:
                parent._modules[name] = original
                if original._compiled_call_impl is None:
                    context: Any = child.dynamo_ctx
                    original._compiled_call_impl = context(original._call_impl)
    return inner


def _is_compiled(module: nn.Module) -> bool:
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)
