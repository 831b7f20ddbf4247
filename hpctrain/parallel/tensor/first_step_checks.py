"""Checks of the first step of a tensor-parallel model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import HpctrainError, MismatchError
from hpctrain.log import logger
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.hooks import ModuleHook, StepHooks
from hpctrain.parallel.pipeline.pipeline import Pipeline
from hpctrain.parallel.pipeline.stage import Run, Tensors
from hpctrain.parallel.rng import has_dropout
from hpctrain.parallel.strategy import SplitStrategy, SyncStrategy
from hpctrain.parallel.tensor.first_pass import PassTracker, unwatch, watch
from hpctrain.parallel.tensor.kinds import PlanEntry
from hpctrain.parallel.tensor.sequence import gather_activations, split_before
from hpctrain.parallel.tensor.sharding import TensorSplit
from hpctrain.parallel.tensor.whole_model import WholeModel, blank_copy, fits
from hpctrain.plain_tensors import on_shards

PROJECTIONS = 4  # projections of each gradient
SAMPLE = 2**20  # approximate number of elements sampled from each gradient
MAX_NAMES = 4  # parameters named in an error
Checksums = dict[str, tuple[float, ...]]


@on_shards
@torch.no_grad()
def gradient_checksums(gradients: Sequence[tuple[str, Tensor]]) -> Checksums:
    """Return for each gradient, or a sample of its elements: the norm, its tolerance, and sums with fixed signs.

    The norm of the difference of two gradients is about that of the difference of such sums. All
    ranks compute a replicated gradient from the same bits by the same functions, so on a CPU there
    is no difference. On a GPU, functions that add in nondeterministic order differ by rounding
    errors. A missing sum over the ranks changes a gradient by a fraction of itself. The tolerance
    is between the two: the square root of the precision.
    """
    found: Checksums = {}
    for name, gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        values = (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).reshape(-1)
        values = values[:: 1 + len(values) // SAMPLE]
        converted = values.to(torch.float64 if values.device.type == "cpu" else torch.float32)
        generator = torch.Generator().manual_seed(converted.numel())
        signs = [
            torch.randint(0, 2, (converted.numel(),), generator=generator, dtype=torch.int8).to(converted.device) * 2
            - 1
            for _ in range(PROJECTIONS)
        ]
        sums = [float(torch.dot(converted, sign.to(converted.dtype))) for sign in signs]
        found[name] = (float(converted.norm()), math.sqrt(torch.finfo(gradient.dtype).eps), *sums)
    return found


def check_same(by_rank: Sequence[Mapping[str, tuple[float, ...]]]) -> None:
    """Raise ``MismatchError`` if tensor ranks have different gradients of parameters that they hold alike.

    A name may be followed by a space and the slice that a rank holds. Names of a single rank are
    not compared.
    """
    first = by_rank[0]
    # If a gradient is zero except for rounding, every digit may differ.
    negligible = 1e-6 * math.sqrt(sum(values[0] ** 2 for values in first.values()))
    for rank, other in enumerate(by_rank):
        differing = [
            name.partition(" ")[0]
            for name, values in first.items()
            if name in other and _differ(values, other[name], negligible)
        ]
        if differing:
            names = list(reversed(differing))[:MAX_NAMES]
            more = f" and {len(differing) - MAX_NAMES} more" if len(differing) > MAX_NAMES else ""
            raise MismatchError(
                f"gradients of parameters that are not split, in the first step: {', '.join(names)}{more} differ "
                f"between tensor ranks 0 and {rank}; each computes them from its part of split features, and nothing "
                f"sums them up; write '{names[0].rpartition('.')[0] or '*'}=replicated' in parallel.tensor_plan",
                everywhere=True,
            )


def _differ(values: tuple[float, ...], other: tuple[float, ...], negligible: float) -> bool:
    norm, tolerance, *_ = values
    if not all(map(math.isfinite, (*values, *other))):
        return False  # reported by other checks
    allowed = tolerance * max(norm, other[0]) + negligible
    return any(abs(one - two) > allowed for one, two in zip(values, other))


# Checks of the first step of a tensor-parallel model ------------------------------------------------------------------
#
# In the first forward pass, a wrong plan raises an error that names modules (``first_pass``), and the
# outputs are compared with those of the whole model (``whole_model``). Before the first update, the
# gradients of parameters that are not split are compared over the tensor ranks (``check_same``).
# Later steps have no overhead.
#
# All tensor ranks of a replica raise the error. If the job has other ranks, the error ends the job,
# because they may be waiting.


def whole_copy(
    model: nn.Module, comm: Communicator, settings: ParallelSettings, device: torch.device
) -> nn.Module | None:
    """Return a copy of the whole model for the comparison, made before it is split; None to skip it. Collective."""
    if settings.tensor == 1 or not settings.check_split or settings.pipe > 1 and has_dropout(model):
        return None
    if not fits(model, comm, device):
        logger.debug("tensor parallelism: no comparison with the whole model, as there is not enough memory")
        return None
    whole = blank_copy(model)
    return whole if all(comm.all_gather_object(whole is not None)) else None


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
        self._update_hooks: StepHooks | None = StepHooks(self, FirstStep._before_update)
        self._compared: WholeModel | None = None
        self._tracker = PassTracker(self._model, entries, sequence=sequence) if pipeline is not None else None
        if whole is not None:
            self._compared = WholeModel(self._model, whole, tensor, entries, inner.unshard, rounds=rounds)
        if pipeline is not None:
            self._watch_stages(pipeline, {entry.module: entry.kind for entry in entries})
        else:
            watch(self._model, entries, sequence=sequence)
            self._compare_first_pass()

    def close(self) -> None:
        """Remove the remaining hooks."""
        unwatch(self._model)
        if self._update_hooks is not None:
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

    def _compare_first_pass(self) -> None:
        compared, model = self._compared, self._model
        if compared is None:
            return

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
        if tracker is None:
            yield
            return
        with tracker.explain_errors(everywhere=False):
            yield

    def _watch_stages(self, pipeline: Pipeline, kinds: Mapping[nn.Module, str]) -> None:
        """Search each stage's graph for partial gradients, and compare its first pass with that of the whole layers."""
        search, compared = self._tensor.partial_gradients, self._compared
        varies = _varying_inputs(pipeline.modules, kinds)
        split_before_chunk = self._split_sequences(pipeline.modules, kinds)
        pending = {
            chunk for chunk in pipeline.held if not (varies[chunk] or varies[chunk + 1] or pipeline.carried[chunk])
        }

        def after(chunk: int, inputs: Tensors, outputs: Tensors, run: Run) -> None:
            with self._raising():
                if search is not None:
                    given, ends = inputs if varies[chunk] else (), chunk + 1 == len(pipeline.layers)
                    search.after_forward(outputs, given, ends=ends)
                if compared is not None and chunk in pending and torch.is_grad_enabled():
                    pending.discard(chunk)
                    with torch.no_grad():
                        begin = gather_activations(inputs, self._tensor.comm) if split_before_chunk[chunk] else inputs
                        end = (
                            gather_activations(outputs, self._tensor.comm) if split_before_chunk[chunk + 1] else outputs
                        )
                    compared.compare_layers(pipeline.held_layers(chunk), lambda layers: run(layers, begin), end)
                    if not pending:
                        compared.drop()

        pipeline.watch(after)

    def _split_sequences(self, chunks: Sequence[Sequence[nn.Module]], kinds: Mapping[nn.Module, str]) -> list[bool]:
        """Return whether sequences are split before each chunk, and at the end."""
        if not self._sequence:
            return [False] * (len(chunks) + 1)
        before = split_before((layer for layers in chunks for layer in layers), kinds)
        return [before[begin] for begin in (0, *accumulate(len(layers) for layers in chunks))]

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
        if self._update_hooks is not None:
            self._update_hooks.remove()
            self._update_hooks = None
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
                varies = kinds.get(layer) in ("column", "heads")
    return [*found, varies]
