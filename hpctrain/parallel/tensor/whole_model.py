"""Comparison of a split model with the unsplit one, in the first training pass.

A function over split features that needs all of them (a softmax, a mean, a norm) raises no error
and trains another model. Before the first training pass, rank 0 of the tensor ranks therefore
gathers the parameters into a copy of the unsplit model and computes the same batch forward, once.
Then the outputs are compared and the copy is freed. If the model has dropout, both compute in
evaluation mode, and the split model runs one additional pass. Three kinds of model are not
compared: models that draw other random numbers, models with hooks of the program, and models whose
copy takes more than a quarter of the free memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hpctrain.cluster.resources import free_memory
from hpctrain.comm.communicator import Communicator
from hpctrain.errors import MismatchError
from hpctrain.log import logger
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import CallArguments, flatten
from hpctrain.parallel.pipeline.layers import Layer, copied, tensors_in
from hpctrain.parallel.pipeline.stage import evaluation_mode
from hpctrain.parallel.rng import has_dropout, restored_generators
from hpctrain.parallel.sync_batchnorm import SyncBatchNorm
from hpctrain.parallel.tensor.layers import Parallel, RowParallel
from hpctrain.parallel.tensor.plan import PlanEntry, described
from hpctrain.parallel.tensor.sharding import TensorSplit
from hpctrain.shard import Shard

MAX_MEMORY_FRACTION = 0.25  # fraction of the free memory that the whole model may take
# Largest difference of outputs, relative to their norm, that rounding explains.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
TF32 = 1e-2
SAMPLE = 4096  # elements that are stored of a module's output
_ADVICE = (
    "between a column- and a row-parallel layer only functions of each feature, or of each head, by itself are "
    "allowed; write whole for both layers in parallel.tensor_plan, or set parallel.check_split = false if the whole "
    "model would differ, too"
)
Trace = list[tuple[str, Tensor]]  # outputs of modules, in order


def _blank_copy(model: nn.Module) -> nn.Module | None:
    """Return a copy of a whole model with parameters and buffers on the meta device; None if it cannot be compared."""
    if any(isinstance(module, SyncBatchNorm) for module in model.modules()) or _has_own_hooks(model):
        return None
    try:
        return copied(model, lambda tensor: torch.empty_like(tensor, device="meta"))
    except Exception as error:  # classes of the program may raise any exception
        logger.debug("tensor parallelism: no comparison with the whole model, as it cannot be copied: %s", error)
        return None


def _has_own_hooks(model: nn.Module) -> bool:
    """Return whether the program has registered forward hooks, which a copy must not call."""
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            owner = getattr(hook, "func", hook)  # of a partial
            if not str(getattr(owner, "__module__", "")).startswith("hpctrain."):
                return True
    return False


def whole_copy(
    model: nn.Module, comm: Communicator, settings: ParallelSettings, device: torch.device
) -> nn.Module | None:
    """Return a copy of the whole model for the comparison, made before it is split; None to skip it. Collective."""
    if settings.tensor == 1 or not settings.check_split or settings.pipe > 1 and has_dropout(model):
        return None
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory() // comm.local_size
    needed = sum(tensor.numel() * tensor.itemsize for tensor in tensors_in(model))
    if needed > MAX_MEMORY_FRACTION * min(comm.all_gather_object(free)):
        logger.debug("tensor parallelism: no comparison with the whole model, as there is not enough memory")
        return None
    whole = _blank_copy(model)
    return whole if all(comm.all_gather_object(whole is not None)) else None


class WholeModel:
    """Comparison of the first training pass of ``model`` with ``whole``, its ``whole_copy`` from before the split.

    A context manager argument unshards the parameters that the data axis shards. All ranks of the
    data axis make the passes that call ``before`` and ``after``; a rank without samples calls
    ``join_pass``.
    """

    def __init__(
        self,
        model: nn.Module,
        whole: nn.Module,
        split: TensorSplit,
        entries: Sequence[PlanEntry],
        unshard: Callable[[], AbstractContextManager[None]],
        *,
        rounds: bool,
    ) -> None:
        self._model, self._whole, self._split, self._unshard, self._rounds = model, whole, split, unshard, rounds
        self._entries = {entry.name: entry for entry in entries}
        self._expected: list[Tensor] | None = None
        self._traces: tuple[Trace, Trace] = ([], [])  # of the split model and the whole one
        self._rows: tuple[Trace, Trace] = ([], [])  # inputs of layers of kind row
        self._handles: list[Any] = []
        self._has_dropout = has_dropout(model)
        self.done = False

    # The pass ---------------------------------------------------------------------------------------------------------

    def before(self, args: Any, kwargs: Any) -> None:
        """Compute the batch with the whole model; in evaluation mode compare at once. Collective."""
        comm = self._split.comm
        digests = comm.all_gather_object(CallArguments(tuple(args), dict(kwargs)).digest())
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise MismatchError(
                f"inputs of the split model in its first pass: tensor ranks 0 and {other} got different ones; ranks "
                "that hold parts of one replica need the same samples; give the loader strategy.data.rank and "
                "strategy.data.size, or pass the DataLoader itself to job.run",
                everywhere=True,
            )
        with self._unshard():
            self._fill()
        mode = evaluation_mode(self._model) if self._has_dropout else nullcontext()
        with mode, _watched_generators(args, kwargs) as used_generators:
            draws = _has_own_hooks(self._model)
            if not draws:
                self._compute(args, kwargs)
            if any(comm.all_gather_object(draws or used_generators())):
                logger.debug("tensor parallelism: no comparison with the whole model, which is random, or has hooks")
                self._expected, self.done = None, True
                self._remove_hooks()
            else:
                self._record(self._model, 0)
                if self._has_dropout:
                    with torch.no_grad():
                        self.after(self._model(*args, **kwargs))
        self.drop()

    def after(self, result: Any) -> None:
        """Compare the outputs of the pass. Raises ``MismatchError`` if they differ. Collective."""
        self.done = True
        self._compare_outputs(result)

    def drop(self) -> None:
        """Free the memory of the whole model."""
        self._whole = nn.Module()

    def join_pass(self, contribute: Callable[[], None]) -> None:
        """Take part in the comparison on a rank without samples; ``contribute`` does so in a forward pass."""
        self.done = True
        with self._unshard():
            pass
        if self._has_dropout:
            contribute()

    @torch.no_grad()
    def compare_layers(
        self, layers: Sequence[Layer], run: Callable[[Sequence[Layer]], Any], outputs: Sequence[Tensor]
    ) -> None:
        """Compare the outputs of a stage's layers for a microbatch. Collective over the tensor ranks of the stage.

        ``outputs``, and the return value of ``run(layers)`` for other layers, have whole sequences.
        """
        self._fill()
        with _watched_generators(outputs, {}) as used_generators:
            if self._split.comm.rank == 0:
                held = dict(self._whole.named_modules())
                whole = [
                    replace(layer, module=held[layer.name]) if any(True for _ in layer.module.parameters()) else layer
                    for layer in layers
                ]
                try:
                    found = flatten(run(whole))[1]
                    self._expected = None if used_generators() else _floating(found)
                except Exception as error:
                    logger.debug("tensor parallelism: no comparison of a stage with the whole model: %s", error)
        self._compare_outputs(outputs, f"layers {layers[0].name} to {layers[-1].name}, which are split")

    # Implementation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _fill(self) -> None:
        """Fill the copy with the values of the model, on rank 0."""
        held = dict(self._model.named_parameters(remove_duplicate=False))
        filled: dict[int, nn.Parameter] = {}
        comm = self._split.comm
        for path, module in self._whole.named_modules():
            for name, blank in module._parameters.items():
                full = f"{path}.{name}" if path else name
                if blank is None or full not in held:  # of another stage
                    continue
                if id(blank) not in filled:
                    value = self._gathered(full, held[full], comm)
                    filled[id(blank)] = nn.Parameter(value, requires_grad=False) if comm.rank == 0 else blank
                module._parameters[name] = filled[id(blank)]
        own = dict(self._model.named_modules(remove_duplicate=False))
        for path, module in self._whole.named_modules():
            for name, buffer in own[path]._buffers.items():
                if buffer is not None and comm.rank == 0:
                    module._buffers[name] = buffer.detach().clone()

    def _gathered(self, name: str, tensor: Tensor, comm: Communicator) -> Tensor:
        position, local = self._split.positions.get(name), tensor.detach().as_subclass(Tensor)
        if position is None:
            return local.clone() if comm.rank == 0 else local
        whole = local.new_zeros(position.shape)
        for shard in position.whole_shards(Shard.whole(name, local)):
            whole[tuple(slice(start, start + extent) for start, extent in zip(shard.start, shard.extent))] = (
                shard.tensor
            )
        comm.reduce(whole, "sum", 0)
        return whole

    @torch.no_grad()
    def _compute(self, args: Any, kwargs: Any) -> None:
        """Compute with the whole model on rank 0."""
        if self._split.comm.rank:
            return
        modes = {name: module.training for name, module in self._model.named_modules()}
        for name, module in self._whole.named_modules():
            module.training = modes.get(name, module.training)
        self._record(self._whole, 1)
        try:
            self._expected = _floating(self._whole(*args, **kwargs))
        except Exception as error:  # if the batch is the cause, the split model's own pass raises
            logger.debug("tensor parallelism: no comparison with the whole model: %s", error)

    def _record(self, model: nn.Module, index: int) -> None:
        """Record samples of the outputs of modules, and of the inputs of rows, on rank 0."""
        if self._split.comm.rank:
            return
        names = {module: name for name, module in model.named_modules() if name}

        def record(module: nn.Module, args: Any, result: Any) -> None:
            name = names[module]
            _sample(result, name, self._traces[index])
            if name in self._entries and self._entries[name].kind == "row":
                _sample(args, name, self._rows[index])

        self._handles += [module.register_forward_hook(record) for module in names]

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _compare_outputs(self, result: Any, what: str = "the split model") -> None:
        self._remove_hooks()
        found = "" if self._expected is None else self._difference(_floating(result), self._expected, what)
        if self._expected is not None and not found:
            found = self._different_rows()
        self._expected, self._traces, self._rows = None, ([], []), ([], [])
        text = self._split.comm.broadcast_object(found)
        if text:
            raise MismatchError(text, everywhere=True)

    def _difference(self, results: list[Tensor], expected: list[Tensor], what: str) -> str:
        """Return how outputs differ, and after which module; empty if they do not."""
        for result, reference in zip(results, expected):
            shape = tuple(result.shape)
            if self._split.has_head and shape and shape[:-1] == reference.shape[:-1]:
                reference = reference[..., : shape[-1]]  # the logits of rank 0
            if shape != reference.shape:
                return (
                    f"outputs of {what} in the first pass: shape {shape}, of the whole model {tuple(reference.shape)}; "
                    f"{self._first_difference()}"
                )
            distance = _distance(result, reference)
            if distance > self._tolerance(result):
                return (
                    f"outputs of {what} differ from those of the whole model in the first pass: by {distance:.1e} of "
                    f"their norm; allowed is {self._tolerance(result):.0e}; {self._first_difference()}"
                )
        return ""

    def _different_rows(self) -> str:
        """Return how the input of a row differs from that in the whole model; empty if it does not.

        Weights of zeros would hide such a difference in the outputs.
        """
        for (name, actual), (other, reference) in zip(*self._rows):
            if name != other:
                break
            distance = _distance(actual, reference[: len(actual)])
            if len(actual) <= len(reference) and distance > self._tolerance(actual):
                return (
                    f"what {self._name(name)} is given in the first pass differs from the whole model by "
                    f"{distance:.1e} of its norm: {_ADVICE}"
                )
        return ""

    def _tolerance(self, result: Tensor) -> float:
        reduced_precision = self._rounds or torch.is_autocast_enabled(result.device.type)
        if reduced_precision and result.dtype is not torch.float64:
            return TOLERANCES[torch.bfloat16]
        if result.device.type == "cuda" and result.dtype is torch.float32:
            precise = torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
            return TOLERANCES[result.dtype] if precise else TF32
        return TOLERANCES.get(result.dtype, 0.1)

    def _first_difference(self) -> str:
        before = ""
        for (name, actual), (other, reference) in zip(*self._traces):
            if name != other:
                break
            size, module = min(len(actual), len(reference)), self._model.get_submodule(name)
            if _distance(actual[:size], reference[:size]) > self._tolerance(actual):
                if isinstance(module, RowParallel):
                    where = f"between {before} and {self._name(name)}" if before else f"before {self._name(name)}"
                    where += " (a layer whose outputs are cut into several, as gate and up, must be several layers)"
                else:
                    where = f"in {self._name(name)}" + (f", after {before}" if before else "")
                return f"the first difference is {where}: {_ADVICE}"
            before = self._name(name) if isinstance(module, Parallel) else before
        return _ADVICE.replace("write whole for both layers in parallel.tensor_plan, or ", "")

    def _name(self, name: str) -> str:
        return described(name, self._model.get_submodule(name), self._entries.get(name))


def _sample(values: Any, name: str, trace: Trace) -> None:
    """Record the features of the first position of the first tensor in ``values``."""
    found = _floating(values)
    if found and found[0].dim() and found[0].numel():
        trace.append((name, found[0].detach()[(0,) * (found[0].dim() - 1)][:SAMPLE].clone()))


def _floating(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference relative to the norm of the second tensor; 0 if that is not finite."""
    one, other = one.detach().to(torch.float64), other.detach().to(torch.float64)
    norm = float(other.norm())
    distance = float((one - other).norm())
    if norm != norm or norm == float("inf"):
        return 0.0
    return distance / norm if norm else distance


@contextmanager
def _watched_generators(args: Any, kwargs: Any) -> Iterator[Callable[[], bool]]:
    """Restore torch's generators after the block; yield a function that returns in it whether they were used."""
    devices = {leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)} | {torch.device("cpu")}
    with restored_generators(device for device in devices if device.type in ("cpu", "cuda")) as saved:
        yield lambda: any(not torch.equal(one.get_state(), state) for one, state in saved)
