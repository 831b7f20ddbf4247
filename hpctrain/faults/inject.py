"""Hooks at the places of a step, which let the armed faults of this rank fire there.

A run without faults has none of them. Everything that is replaced here is an attribute of an object
of this run, or the function by which this process opens the files of checkpoints. All is restored
when no fault is left, and when the run ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hpctrain.checkpoint.retention import step_of
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.waiting import waiting
from hpctrain.faults.actions import Actions
from hpctrain.faults.spec import Fault
from hpctrain.log import logger
from hpctrain.parallel.compiled import ModuleHook, forget_graphs

COLLECTIVES = (
    *("barrier", "broadcast", "reduce", "all_reduce", "reduce_scatter", "all_gather", "gather", "scatter"),
    *("all_to_all", "all_gather_object", "broadcast_object"),
)
_LASTING = ("slow", "full", "eio")  # kinds that last until the run ends


class Injector:
    """Hooks of one run for the faults of this rank; ``run`` is a ``Run``, a class of a layer above."""

    def __init__(self, run: Any, faults: Sequence[Fault], actions: Actions) -> None:
        self._run, self._pending, self._actions = run, list(faults), actions
        self._lasts = False  # whether a fault has fired that lasts until the run ends
        self._inside = self._updated = self._poisoned = False
        self._outputs = self._gradients = 0  # of modules in this iteration, and gradients of these outputs
        self._factor = 1.0  # of the time of an iteration's computation
        self._began = self._waited = 0.0
        self._undo: list[Callable[[], object]] = []

    def attach(self) -> None:
        """Install the hooks for the places of the faults."""
        run, places = self._run, {fault.at for fault in self._pending}
        self._replace(run.streams, "enter_step", after=lambda *_, **__: self._begin())
        self._replace(run.feed, "consumed", after=lambda *_, **__: self._end())
        self._replace(run.feed, "close", after=lambda *_, **__: self.detach())
        for optimizer in run.optimizers.values():
            self._undo.append(optimizer.register_step_pre_hook(lambda *_: self._reach("optimizer")).remove)
            self._undo.append(optimizer.register_step_post_hook(lambda *_: self._note_update()).remove)
        if places & {"forward", "backward"}:
            self._hook_modules()
        if "collective" in places:
            for comm in self._communicators():
                for name in COLLECTIVES:
                    self._replace(comm, name, before=partial(self._reach, "collective"))
        if "save" in places:
            self._replace(run.state, "save_request", before=self._before_save)
            self._replace(run.state.retention, "apply", after=self._after_save)

    def detach(self) -> None:
        """Restore everything that ``attach`` has changed."""
        while self._undo:
            self._undo.pop()()
        self._actions.writes.close()
        self._drop([each for each in self._pending if each.step <= self._run.step])
        self._pending.clear()
        self._factor, self._poisoned = 1.0, False

    # Places in a step -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._poisoned = False
        self._drop([each for each in self._pending if each.step <= self._run.step and each.at != "save"])
        if not (self._pending or self._lasts):
            self.detach()
            return
        self._inside = True
        self._outputs = self._gradients = 0
        self._began, self._waited = time.monotonic(), waiting.total
        self._reach("")  # faults without a place
        self._reach("begin")

    def _drop(self, missed: Sequence[Fault]) -> None:
        """Warn of faults whose step has ended: the step was done by an earlier start, or did not reach the place."""
        for fault in missed:
            self._pending.remove(fault)
            what = fault.describe(self._run.job.size)
            logger.warning("fault not injected: %s; the run is after step %d", what, self._run.step)

    def _note_update(self) -> None:
        self._updated = True

    def _end(self) -> None:
        if self._updated:  # otherwise the step continues with the next iteration
            self._reach("end")
        computed = time.monotonic() - self._began - (waiting.total - self._waited)
        if self._factor > 1:
            time.sleep(max(0.0, computed) * (self._factor - 1))
        self._inside = self._updated = False

    def _before_module(self, module: Any, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._reach("forward")

    def _after_module(self, module: Any, args: Any, output: Any) -> None:
        """Hook the gradients of a module's outputs, in the step of a fault at backward."""
        if not (self._inside and torch.is_grad_enabled() and (self._poisoned or self._due("backward"))):
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self._outputs += 1
                leaf.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, gradient: Tensor) -> Tensor | None:
        """Let faults at backward fire in the middle of the pass: some gradients are complete, others are not."""
        self._gradients += 1
        if 2 * self._gradients >= self._outputs:
            self._reach("backward")
        return torch.full_like(gradient, torch.nan) if self._poisoned else None

    # Saves ------------------------------------------------------------------------------------------------------------

    def _before_save(self) -> None:
        """Let the faults of a save fire: when this rank's share is written, if this process itself writes it."""
        options, step = self._run.options, self._run.step
        due = [each for each in self._pending if each.at == "save" and each.step <= step]
        writes = not options.background and options.io == "posix"
        for fault in due:
            if fault.target == "checkpoint":
                continue  # when the file is complete
            if writes and fault.kind != "exception":  # as an exception, the writer would report it as its own
                self._actions.writes.then(partial(self._fire, fault, step))
            else:
                self._fire(fault, step)

    def _after_save(self, verified: Any = None) -> None:
        """Let the faults of a complete checkpoint fire; rank 0 makes this call, later if it was written meanwhile."""
        if verified is None:
            return
        step = step_of(verified.name) or 0
        for fault in [each for each in self._pending if each.target == "checkpoint" and each.step <= step]:
            self._fire(fault, step, lambda fault: self._actions.flip_file(fault, verified))

    # Firing -----------------------------------------------------------------------------------------------------------

    def _due(self, place: str) -> list[Fault]:
        step = self._run.step + 1
        return [each for each in self._pending if each.at == place and each.step == step]

    def _reach(self, place: str, *_: Any, **__: Any) -> None:
        """Let the faults of this place fire; no effect outside of a step."""
        if self._inside:
            for fault in self._due(place):
                self._fire(fault, fault.step)

    def _fire(self, fault: Fault, step: int, act: Callable[[Fault], None] | None = None) -> None:
        if fault not in self._pending:
            return
        self._pending.remove(fault)
        fault = replace(fault, step=step)
        self._actions.announce(fault)
        self._lasts |= fault.kind in _LASTING
        if fault.kind == "slow":
            self._factor = fault.factor
        elif fault.kind == "nan":
            self._poisoned = True  # until the next iteration: a check computes the gradients again
        else:
            (act or self._actions.act)(fault)

    # Installation -----------------------------------------------------------------------------------------------------

    def _replace(
        self,
        owner: Any,
        name: str,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> None:
        """Call functions before and after a method of one object, with its arguments."""
        method = getattr(owner, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            result = method(*args, **kwargs)
            if after is not None:
                after(*args, **kwargs)
            return result

        setattr(owner, name, replaced)
        self._undo.append(lambda: vars(owner).pop(name, None))

    def _hook_modules(self) -> None:
        for model in self._run.models.values():
            for module in model.modules():
                if next(module.parameters(recurse=False), None) is not None:
                    self._undo.append(module.register_forward_pre_hook(ModuleHook(self._before_module)).remove)
                    self._undo.append(module.register_forward_hook(ModuleHook(self._after_module)).remove)
        forget_graphs()

    def _communicators(self) -> list[Communicator]:
        """Return the communicators that a step may use, each of them once."""
        found = [self._run.job.comm]
        for strategy in self._run.strategies.values():
            found += [strategy.comm, strategy.data, strategy.pipe, strategy.copies]
        return list({id(comm): comm for comm in found if comm is not None}.values())
