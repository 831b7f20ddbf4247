"""Checks of the first step of a tensor-parallel model.

In the first forward pass, a wrong plan raises an error that names modules, and the outputs are
compared with those of the whole model (``whole_model``). Before the first update, the gradients of
parameters that are not split are compared over the tensor ranks (``partial_gradients``). Later
steps have no overhead.

All tensor ranks of a replica raise the error. If the job has other ranks, the error ends the job,
because they may be waiting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.parallel.compiled import ModuleHook
from hpctrain.parallel.hooks import StepHooks, subclass_with
from hpctrain.parallel.pipeline.blocks import ModelPart
from hpctrain.parallel.pipeline.pipeline import Pipeline
from hpctrain.parallel.pipeline.stage import Run, Tensors
from hpctrain.parallel.strategy import SplitStrategy, SyncStrategy
from hpctrain.parallel.tensor.layers import ColumnParallel, Parallel, RowParallel, SharedHeads
from hpctrain.parallel.tensor.partial_gradients import check_same, gradient_checksums
from hpctrain.parallel.tensor.plan import PlanEntry, described
from hpctrain.parallel.tensor.sequence import gather_activations, split_before_chunks
from hpctrain.parallel.tensor.sharding import TensorSplit
from hpctrain.parallel.tensor.whole_model import WholeModel
from hpctrain.plain_tensors import on_shards


class FirstStep:
    """First-step checks of a strategy whose model is split as ``entries``; ``inner`` is that of the data axis.

    ``whole`` is a ``whole_copy`` of the model. ``rounds`` means that the split model computes in
    lower precision, ``sequence`` that it splits sequences. Completed checks remove their hooks.
    """

    def __init__(
        self,
        strategy: SplitStrategy,
        inner: SyncStrategy,
        tensor: TensorSplit,
        pipeline: Pipeline | None,
        entries: Sequence[PlanEntry],
        whole: nn.Module | None,
        *,
        rounds: bool = False,
        sequence: bool = False,
    ) -> None:
        self._strategy, self._inner, self._tensor = strategy, inner, tensor
        self._model, self._sequence = strategy.model, sequence
        self._everywhere = tensor.comm.size == strategy.comm.size
        self._update_hooks = StepHooks(self, FirstStep._before_update)
        self._compared: WholeModel | None = None
        self._tracker: PassTracker | None = None
        if whole is not None:
            self._compared = WholeModel(self._model, whole, tensor, entries, inner.unshard, rounds=rounds)
        if pipeline is not None:
            self._tracker = PassTracker(self._model, entries, sequence=sequence)
            self._watch_stages(pipeline, {entry.module: entry.kind for entry in entries})
        else:
            watch(self._model, entries, sequence=sequence)
            if self._compared is not None:
                self._compare_first_pass(self._compared)

    def close(self) -> None:
        """Remove the remaining hooks."""
        unwatch(self._model)
        self._update_hooks.remove()

    def join_pass(self) -> None:
        """Join the first training pass of the other data ranks, without a sample."""
        if self._compared is not None and not self._compared.done:
            self._compared.join_pass(lambda: self._inner.join_empty(backward=False))

    @contextmanager
    def _raising(self) -> Iterator[None]:
        """Make errors in the ``with`` block end the job if not all ranks raise them."""
        try:
            yield
        except HpctrainError as error:
            error.everywhere = error.everywhere and self._everywhere
            raise

    # Forward ----------------------------------------------------------------------------------------------------------

    def _compare_first_pass(self, compared: WholeModel) -> None:
        model = self._model

        def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not compared.done and model.training and torch.is_grad_enabled():
                with self._strategy.unguarded(), self._raising():
                    compared.before(args, kwargs)

        def end(_: nn.Module, args: Any, result: Any) -> None:
            if model.training and torch.is_grad_enabled():
                after.remove()
                before.remove()
                if not compared.done:
                    with self._raising():
                        compared.after(result)

        before = model.register_forward_pre_hook(ModuleHook(begin), prepend=True, with_kwargs=True)
        after = model.register_forward_hook(ModuleHook(end))

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Add explanations to errors of a pipeline's first training passes, in the ``with`` block."""
        tracker, self._tracker = self._tracker, None
        with tracker.explain_errors(everywhere=False) if tracker is not None else nullcontext():
            yield

    def _watch_stages(self, pipeline: Pipeline, kinds: Mapping[nn.Module, str]) -> None:
        """Search each stage's graph for partial gradients, and compare its first pass with that of the whole layers."""
        search, compared = self._tensor.partial_gradients, self._compared
        varies = _varying_inputs(pipeline.modules, kinds)
        split_before_chunk = split_before_chunks(pipeline.modules, kinds if self._sequence else {})
        pending = {
            chunk
            for chunk in pipeline.chunks
            if not (varies[chunk] or varies[chunk + 1] or pipeline.carried[chunk])
            and not any(isinstance(module, ModelPart) for module in pipeline.modules[chunk])  # they run the split model
        }

        def after(chunk: int, inputs: Tensors, outputs: Tensors, run: Run) -> None:
            with self._raising():
                if search is not None:
                    given, ends = inputs if varies[chunk] else (), chunk + 1 == len(pipeline.modules)
                    search.after_forward(outputs, given, ends=ends)
                if compared is not None and chunk in pending and torch.is_grad_enabled():
                    pending.discard(chunk)
                    with torch.no_grad():
                        begin, end = (
                            gather_activations(values, self._tensor.comm) if is_split else values
                            for values, is_split in zip((inputs, outputs), split_before_chunk[chunk:])
                        )
                    compared.compare_layers(pipeline.chunks[chunk].layers, lambda layers: run(layers, begin), end)
                    if not pending:
                        compared.drop()

        pipeline.watch(after)

    # Backward ---------------------------------------------------------------------------------------------------------

    @on_shards
    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the gradients that must be equal on all tensor ranks, before the first update. Collective."""
        held = {id(parameter) for parameter in self._model.parameters()}
        if not any(id(each) in held for group in optimizer.param_groups for each in group["params"]):
            return
        gradients = self._inner.reduced_gradients()
        own = [(self._part_name(name, each), each) for name, each in gradients if not self._tensor.is_split(name)]
        by_rank = self._tensor.comm.all_gather_object((bool(gradients), gradient_checksums(own)))
        if not any(given for given, _ in by_rank):
            return  # an optimizer that computes gradients itself, in a closure
        self._update_hooks.remove()
        with self._raising():
            check_same([sums for _, sums in by_rank])

    def _part_name(self, name: str, gradient: Tensor) -> str:
        """Return a name of this rank's part of a gradient, which the data axis may cut differently on other ranks."""
        split = self._inner.split
        boxes = [] if split is None else [(each.start, each.extent) for each in split.shards(name, gradient)]
        return f"{name} {boxes}" if boxes else name


def _varying_inputs(chunks: Sequence[Sequence[nn.Module]], kinds: Mapping[nn.Module, str]) -> list[bool]:
    """Return whether each chunk starts, and the last ends, between a column- and a row-parallel layer."""
    found, varies = [], False
    for layers in chunks:
        found.append(varies)
        for layer in layers:
            if any(each in kinds for each in layer.modules()):
                varies = kinds.get(layer) in ("column", "heads", "qkv", "gate_up")
    return [*found, varies]


# Error messages of the first forward pass, with module names and entries of the plan ----------------------------------
#
# If a plan omits a ``row``, the next layer fails with torch's "mat1 and mat2 shapes cannot be
# multiplied". Until a model's first pass is complete, its ``forward`` is watched. An error of that
# kind after a column-parallel layer becomes a ``UsageError``.
#
# Note: the model gets a subclass of its own class (``subclass_with``) and gets its class back
# after the first pass.


_ERRORS = (RuntimeError, ValueError, IndexError, AssertionError)
_SHAPES = re.compile(
    r"shape|size|dimension|must match|broadcast|mat1|mat2|expect|head|einsum|not divisible|out of (range|bounds)|^$",
    re.IGNORECASE,
)


class PassTracker:
    """Record of the modules that run, and of the last split layer that has run, in a forward pass."""

    def __init__(self, model: nn.Module, entries: Sequence[PlanEntry], *, sequence: bool = False) -> None:
        self._model, self._sequence = model, sequence
        self._names = {module: name for name, module in model.named_modules()}
        self._entries = {entry.module: entry for entry in entries}
        self.running: list[nn.Module] = []
        self.split_layer: nn.Module | None = None  # the last layer whose outputs are split, until a row takes them
        self.scattered: nn.Module | None = None  # the module after which sequences are split, until they are gathered

    @contextmanager
    def explain_errors(self, *, everywhere: bool = True) -> Iterator[None]:
        """Convert errors in the ``with`` block that come from the plan to ``UsageError``, by default on all ranks."""
        handles: list[RemovableHandle] = []
        for module in self._names:
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave))  # not called if the module raises
        try:
            yield
        except _ERRORS as error:
            explained = self.explain(error)
            if explained is None:
                raise
            explained.everywhere = everywhere
            raise explained from error
        finally:
            for handle in handles:
                handle.remove()
            self.running, self.split_layer, self.scattered = [], None, None

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.running.append(module)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self.running.pop()
        if isinstance(module, (ColumnParallel, SharedHeads)):
            self.split_layer = None if getattr(module, "gathers", False) else module
        elif isinstance(module, Parallel):
            self.split_layer = None
        kind = self._entries[module].kind if self._sequence and module in self._entries else ""
        if kind in ("scatter", "gather", "vocabulary"):
            self.scattered = module if kind == "scatter" else None

    def explain(self, error: Exception) -> UsageError | None:
        """Return the ``UsageError`` for an error in the pass; None if the plan is not the cause."""
        failed = self.running[-1] if self.running else None
        known = _SHAPES.search(str(error)) and not isinstance(error, (HpctrainError, NotImplementedError))
        from_plan = self.split_layer is not None or self.scattered is not None or isinstance(failed, RowParallel)
        if not known or isinstance(error, torch.OutOfMemoryError) or not from_plan:
            return None
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = self.name(failed) or "the model"
        return UsageError(
            f"forward pass of the model split over tensor ranks in {where} failed: {text}; {self._advice(failed)}",
            everywhere=True,
        )

    def _advice(self, failed: nn.Module | None) -> str:
        if self.split_layer is None and self.scattered is not None:
            return (
                f"it follows {self.name(self.scattered)}, behind which each rank has a part of each sequence; what "
                "needs whole sequences, such as a table of positions, must come before: put it and the modules "
                "before it into one module, and write scatter for that"
            )
        if self.split_layer is None:
            return (
                f"a row-parallel layer takes features that a column-parallel layer before it has left split; write "
                f"'{self._path(failed)}=whole', or column for the layer that feeds it"
            )
        before = f"it follows {self.name(self.split_layer)}, whose outputs are split over the ranks"
        column = isinstance(failed, ColumnParallel) and not failed.gathers
        if isinstance(failed, nn.Linear) and not isinstance(failed, RowParallel):
            what = "a column-parallel layer takes whole features" if column else "a whole layer takes whole features"
            return f"{before}; {what}; write '{self._path(failed)}=row' in parallel.tensor_plan"
        siblings = self._unsplit_siblings(self.split_layer)
        if siblings:
            kind, verb = self._entries[self.split_layer].kind, "is" if len(siblings) == 1 else "are"
            return (
                f"{before}; {', '.join(siblings)} in the same module {verb} not; write "
                + ", ".join(f"'{name}={kind}'" for name in siblings)
                + f" in parallel.tensor_plan, or '{self._path(self.split_layer)}=whole' and whole for its row"
            )
        return (
            f"{before}; between a column- and a row-parallel layer only functions of each feature, or of each head, by "
            f"itself are allowed, with sizes taken from the split tensors; write "
            f"'{self._path(self.split_layer)}=whole' and whole for its row, or split by heads (kind heads, which "
            "divides num_heads of the parent)"
        )

    def _unsplit_siblings(self, split: nn.Module) -> list[str]:
        """Return the unsplit layers next to a split one that take the same features, such as one half of a gate."""
        path = self._path(split).rpartition(".")[0]
        entry = self._entries[split]
        return [
            f"{path}.{name}" if path else name
            for name, module in self._model.get_submodule(path).named_children()
            if isinstance(module, nn.Linear)
            and module not in self._entries
            and module.in_features == split.in_features
            and (entry.kind == "heads" or module.out_features == split.out_features)
        ]

    def name(self, module: nn.Module | None) -> str:
        """Return a module's name, class and entry of the plan."""
        path = self._path(module)
        return described(path, module, self._entries.get(module)) if module is not None and path else ""

    def _path(self, module: nn.Module | None) -> str:
        name: str = self._names.get(cast(nn.Module, module), "")
        return name


def watch(model: nn.Module, entries: Sequence[PlanEntry], *, sequence: bool = False) -> None:
    """Explain errors of a split model's forward passes, until the first pass with gradients is complete."""
    plain, tracker = type(model), PassTracker(model, entries, sequence=sequence)
    if isinstance(model, torch.jit.ScriptModule) or "forward" in vars(model):
        return

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with tracker.explain_errors():
            result = plain.forward(self, *args, **kwargs)
        if torch.is_grad_enabled():
            unwatch(model)
        return result

    model.__class__ = subclass_with(plain, forward, "_watched_class")


def unwatch(model: nn.Module) -> None:
    """Restore the model's own class."""
    model.__class__ = getattr(type(model), "_watched_class", type(model))
