"""Model parallelism (pipeline and tensor axes), combined with replicas or shards on the data axis.

The steps of ``ModelParallel``: first each rank drops the layers of other stages, so that they are
not allocated. Then the remaining weight matrices are sliced. The result is an ordinary model, to
which the strategy of the data axis is attached unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.mesh import AXES, Mesh
from hpctrain.comm.tolerant import tolerating
from hpctrain.errors import MismatchError, UsageError
from hpctrain.parallel.clip import clip_factor, norm_of, sum_of_squares
from hpctrain.parallel.config import ParallelSettings, shape_of
from hpctrain.parallel.guard.gradient_hooks import ALTERNATIVE, GradientHooks
from hpctrain.parallel.hooks import StepHooks, needs_matrices, parameters_of
from hpctrain.parallel.meta_init import is_meta, materialise
from hpctrain.parallel.model_agreement import broadcast_model, check_same_model
from hpctrain.parallel.objective import Objective, cross_entropy
from hpctrain.parallel.pipeline.blocks import has_blocks
from hpctrain.parallel.pipeline.pipeline import Pipeline
from hpctrain.parallel.pipeline.stage import StageSplit
from hpctrain.parallel.rng import synchronize_generators
from hpctrain.parallel.strategy import SplitStrategy, Strategy, SyncStrategy, WholeTensors
from hpctrain.parallel.sync_batchnorm import SyncBatchNorm
from hpctrain.parallel.tensor.first_step_checks import FirstStep
from hpctrain.parallel.tensor.plan import apply as split_matrices
from hpctrain.parallel.tensor.plan import check, choose
from hpctrain.parallel.tensor.plan_source import Plan, plan_of
from hpctrain.parallel.tensor.sharding import TensorSplit
from hpctrain.parallel.tensor.whole_model import whole_copy
from hpctrain.plain_tensors import on_shards
from hpctrain.shard import Split

_HOOKS = "the gradients of a slice or of a microbatch are not what one process gives to it"
Attach = Callable[[nn.Module, Communicator, ParallelSettings, torch.device], Strategy]


class ModelParallel(SplitStrategy):
    """Strategy for the axes pipe, tensor and data, attached in place; ``attach`` creates that of the data axis.

    Construction is collective over ``comm``. Raises ``UsageError`` for a model that cannot be
    split, before it is changed.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        settings: ParallelSettings,
        device: torch.device,
        attach: Attach,
        example: Any = None,
    ) -> None:
        super().__init__(model, comm)
        self.settings, self.device = settings, device
        _check_hooks(model)
        _broadcast_values(model, comm, settings)
        self.mesh = Mesh(comm, shape_of(settings, comm.size))
        coordinates = self._locate()
        self.stage = coordinates["pipe"]
        self.pipe = self.mesh.pipe if settings.pipe > 1 else None
        plan = plan_of(model, settings.tensor_plan) if settings.tensor > 1 else {}
        chosen = choose(model, plan)
        check(chosen, settings.tensor)  # before the model is split
        whole = whole_copy(model, comm, settings, device)
        self._pipeline: Pipeline | None = None
        if settings.pipe > 1:
            self._pipeline = Pipeline(
                model,
                self.mesh.pipe,
                settings,
                device,
                example,
                replica=self.mesh.data.rank,
                local_ranks=comm.local_size,
            )
        self._tensor = self._split_tensors(plan) if settings.tensor > 1 else None
        self._gradient_hooks: GradientHooks | None = None
        for module in model.modules():
            if isinstance(module, SyncBatchNorm):
                module.comm = self.mesh.data  # tensor ranks have the same samples
        data_settings = replace(settings, pipe=1, tensor=1, sequence=False, tensor_plan=(), recompute=False, chunks=0)
        inner = attach(model, self.mesh.data, data_settings, device)
        assert isinstance(inner, SyncStrategy), "other strategies do not support split models"
        self.inner, self._sharding = inner, inner if isinstance(inner, SplitStrategy) else None
        self.gradients, self.early_updates, self.copies = inner.gradients, inner.early_updates, inner.copies
        self.continues = inner.continues and self._sharding is None and settings.schedule != "pipedream"
        self.replica = coordinates["data"], settings.pipe * settings.tensor
        self.reduces_early = self._pipeline is None and inner.reduces_early
        if not self._shards()[1] and self.mesh.data.size == 1:
            # Without a reduction, autograd would call the hooks with the gradient of a slice, or of
            # each microbatch.
            self._gradient_hooks = GradientHooks(dict(model.named_parameters()), refused=_HOOKS)
        self._step_hooks = StepHooks(self, ModelParallel._check_matrices)
        self._first_step: FirstStep | None = None
        if self._tensor is not None:
            rounds = settings.mixed_precision != "none"
            self._first_step = FirstStep(
                self, self.inner, self._tensor, self._pipeline, chosen, whole, rounds=rounds, sequence=settings.sequence
            )
        if self._pipeline is not None:
            vars(model)["forward"] = self._pipeline  # the whole model, for callers other than this strategy
            if self._pipeline.versions is not None:
                self._pipeline.versions.make_update = self._update

    def _split_tensors(self, plan: Plan) -> TensorSplit:
        """Split the matrices of the stage over the tensor ranks."""
        split = split_matrices(
            self.model,
            self.mesh.tensor,
            plan,
            sequence=self.settings.sequence,
            device=self.device,
            layers=sum(self._pipeline.modules, []) if self._pipeline is not None else (),
        )
        if self.settings.schedule == "zb-h1":
            split.separate_backward()
        return split

    def _locate(self) -> dict[str, int]:
        """Return the coordinates of this rank, and name its place by them."""
        coordinates = {axis: self.mesh.shape.coordinate(axis, self.comm.rank) for axis in AXES}
        self.place = ", ".join(f"{axis} {coordinates[axis]}" for axis in AXES if self.mesh.shape.length(axis) > 1)
        return coordinates

    @property
    def data(self) -> Communicator:
        return self.mesh.data

    def rejoin(self) -> None:
        """Continue with the replicas that are left: the ranks of each of them are all there. Collective."""
        self.mesh.shape = replace(self.mesh.shape, data=self.mesh.data.size)
        self.replica = self._locate()["data"], self.settings.pipe * self.settings.tensor
        self.inner.rejoin()
        if self._pipeline is not None:
            self._pipeline.rejoin(self.mesh.data.rank)
        if self._first_step is not None:
            self._first_step.close()
            self._first_step = None

    # Passes -----------------------------------------------------------------------------------------------------------

    def forward_backward(self, inputs: Any, targets: Any, objective: Objective, *, weight: float = 1.0) -> Tensor:
        """Add the gradients of weight x loss to the parameters; return the loss of this data rank's samples.

        Collective. All stages and tensor ranks of the data rank get the same loss, a scalar without
        a graph.
        """
        compute = partial(self._compute, inputs, targets, objective, weight)
        return tolerating(self.comm, compute, lambda: torch.zeros((), device=self.device))

    def _compute(self, inputs: Any, targets: Any, objective: Objective, weight: float) -> Tensor:
        with self._split_loss(objective) as split, self.unguarded():
            if self._pipeline is None:
                return super().forward_backward(inputs, targets, split, weight=weight)
            # PipeDream reduces the gradients of each microbatch by itself; those of the last one at
            # the end, as in other schedules.
            with self.inner.deferred_reduction(reduces=self._syncing), self._explain_errors():
                loss = self._pipeline.train(inputs, targets, split, weight)
                if self._syncing:
                    self._pipeline.tied.reduce()
            return loss

    def _explain_errors(self) -> AbstractContextManager[None]:
        return nullcontext() if self._first_step is None else self._first_step.explain()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync(), self.inner.no_sync():
            yield

    @torch.no_grad()
    def measure(self, inputs: Any, targets: Any, objective: Objective) -> Tensor:
        """Return the loss of this data rank's samples, a scalar, on all of its stages and tensor ranks. Collective."""
        with self._split_loss(objective) as split, self.unguarded():
            if self._pipeline is None:
                return super().measure(inputs, targets, split)
            with self.inner.deferred_reduction(reduces=False):
                return self._pipeline.measure(inputs, targets, split)

    def skip_checks(self) -> None:
        if self._pipeline is not None:
            self._pipeline.skip_checks()

    def set_sample_weight(self, weight: float) -> None:
        super().set_sample_weight(weight)
        self.inner.set_sample_weight(weight)

    def join_empty(self, *, backward: bool = True) -> None:
        if self._pipeline is None:
            if backward and self._first_step is not None:
                self._first_step.join_pass()
            self.inner.join_empty(backward=backward)
            return
        with self.inner.deferred_reduction(reduces=backward):
            if backward:
                self._pipeline.tied.reduce()

    @contextmanager
    def _split_loss(self, objective: Objective) -> Iterator[Objective]:
        """Keep logits split over the tensor axis if the loss can be computed from split logits."""
        tensor = self._tensor
        if tensor is None or not tensor.has_head or objective.compare is not cross_entropy:
            yield objective
            return
        with tensor.split_outputs():
            yield replace(objective, compare=tensor.cross_entropy)

    # Gradients --------------------------------------------------------------------------------------------------------

    @on_shards
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their global norm is at most ``max_norm``; return the norm before, a scalar.

        Collective. PipeDream's stages clip by their own norms, as they do within a step.
        """
        held = self.reduced_gradients()
        squares, gradients = self._squares(held), [gradient for _, gradient in held]
        own = norm_of(squares, gradients)
        self.mesh.pipe.all_reduce(squares)
        norm = norm_of(squares, gradients)
        clip_norm = own if self._pipeline is not None and self._pipeline.versions is not None else norm
        if bool(torch.isfinite(norm)):
            self._scale(clip_norm, max_norm)
        return norm

    def _scale(self, norm: Tensor, max_norm: float) -> None:
        """Scale this stage's gradients, whose norm is given, down to ``max_norm``, as torch does."""
        if math.isfinite(max_norm):
            self.gradients.scale(clip_factor(norm, max_norm))

    def _squares(self, held: list[tuple[str, Tensor]]) -> Tensor:
        """Return the sum of squares of this stage's gradients, each element counted once."""
        counted = [gradient for name, gradient in held if self.counts(name)]
        device = held[0][1].device if held else torch.device("cpu")
        squares = sum_of_squares(counted, device)
        for comm in [*self._shard_groups(), self.mesh.tensor]:
            comm.all_reduce(squares)
        return squares

    def counts(self, name: str) -> bool:
        if self._tensor is not None and self.mesh.tensor.rank and not self._tensor.is_split(name):
            return False
        return self._pipeline is None or self._pipeline.tied.counts(name)

    def _update(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        """Update only this stage's parameters (pipedream)."""
        with self.inner.deferred_reduction():
            pass
        held = self.reduced_gradients()
        self._scale(norm_of(self._squares(held), [gradient for _, gradient in held]), max_norm)
        self.updates_itself = True
        try:
            optimizer.step()
            optimizer.zero_grad()
        finally:
            self.updates_itself = False

    def _shard_groups(self) -> list[Communicator]:
        """Return the groups of ranks over which the data axis divides gradients."""
        return [] if self._sharding is None else self._sharding.norm_groups()

    def norm_groups(self) -> list[Communicator]:
        return [*self._shard_groups(), self.mesh.tensor, self.mesh.pipe]

    def before_write(self) -> None:
        if self._sharding is not None:
            self._sharding.before_write()

    def gradients_final(self) -> None:
        if self._sharding is not None:
            self._sharding.gradients_final()

    def _shards(self) -> tuple[str, Mapping[str, nn.Parameter], bool]:
        """Return the partial parameters of the data axis."""
        return ("", {}, False) if self._sharding is None else self._sharding.partial_parameters()

    def partial_parameters(self) -> tuple[str, Mapping[str, nn.Parameter], bool]:
        """Return the shards of the data axis, else slices of matrices or all parameters of a stage."""
        what, parts, in_passes = self._shards()
        if parts:
            return what, parts, in_passes
        named = dict(self.model.named_parameters())
        if self._pipeline is not None:
            return "one pipeline stage's parameter", named, True
        assert self._tensor is not None
        slices = {name: parameter for name, parameter in named.items() if self._tensor.is_split(name)}
        return "this tensor rank's slice of parameter", slices, True

    def drain(self) -> None:
        self.inner.drain()

    # Layout of the split model ----------------------------------------------------------------------------------------

    def whole_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the whole tensor; None if neither the tensor axis nor the data axis splits it."""
        position = self._tensor.positions.get(name) if self._tensor is not None else None
        if position is not None:
            return position.shape
        return None if self._sharding is None else self._sharding.whole_shape(name)

    @property
    def split(self) -> Split:
        split = self.inner.split
        if self._tensor is not None:
            split = self._tensor.compose(split)
        split = split if split is not None else WholeTensors()  # not all of them are present on every rank
        return split if self._pipeline is None else StageSplit(split, self._pipeline.tied)

    @contextmanager
    def unshard(self, *, write: bool = False) -> Iterator[None]:
        """Unshard the parameters that the data axis splits; stages and matrix slices stay unchanged. Collective."""
        with self.inner.unshard(write=write):
            yield

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._check_matrices(optimizer)
        self.inner.check_optimizer(optimizer)
        if self._pipeline is not None and self._pipeline.versions is not None:
            self._pipeline.versions.optimizer = optimizer

    def _check_matrices(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``UsageError`` if an optimizer needs whole matrices of which the tensor axis leaves slices."""
        if self._tensor is None or not needs_matrices(optimizer, self.settings.whole_parameters):
            return
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        for name, parameter in self.model.named_parameters():
            if id(parameter) in held and self._tensor.is_split(name):
                raise UsageError(
                    f"optimizer {type(optimizer).__name__} of parameter {name}, which parallel.tensor = "
                    f"{self.settings.tensor} splits: it needs whole matrices; allowed are optimizers that update each "
                    "element by itself; use another one for it, or parallel.data = 'fsdp' in place of parallel.tensor",
                    everywhere=True,
                )

    def refresh(self) -> None:
        self.inner.refresh()

    def agree_on_generators(self) -> None:
        """Make ranks along the tensor axis draw the same dropout; the tensor split handles masks that must differ."""
        if self.mesh.tensor.size > 1:
            synchronize_generators(self.mesh.tensor, *{torch.device("cpu"), self.device})

    def detach(self) -> None:
        """Remove all hooks from the module; the parts on other ranks are not restored."""
        self.inner.detach()
        self._step_hooks.remove()
        if self._first_step is not None:
            self._first_step.close()
        if self._gradient_hooks is not None:
            self._gradient_hooks.close()
        if self._pipeline is not None:
            vars(self.model).pop("forward", None)


def _check_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UsageError(f"hook on parameter {name}: {_HOOKS}; {ALTERNATIVE}", everywhere=True)


def _broadcast_values(model: nn.Module, comm: Communicator, settings: ParallelSettings) -> None:
    """Broadcast rank 0's model before each rank drops its part; models without values must draw the same ones."""
    check_same_model(model, comm)
    if not is_meta(model):
        broadcast_model(model, comm)
        return
    seeds = comm.all_gather_object(torch.initial_seed())
    other = next((rank for rank, seed in enumerate(seeds) if seed != seeds[0]), None)
    if other is not None:
        raise MismatchError(
            f"the model has no values yet, and the ranks would draw different ones: torch's seed is {seeds[0]} on rank "
            f"0 and {seeds[other]} on rank {other}; call torch.manual_seed with one seed on all before job.wrap(model)",
            everywhere=True,
        )
    if settings.pipe > 1 and has_blocks(model):  # the trial run that finds their order needs values
        materialise(model, torch.device("cpu"))
