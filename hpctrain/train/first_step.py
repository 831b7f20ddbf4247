"""Checks of a run's first step for mistakes that train a wrong model without raising an error.

Each rank records its first forward and backward passes. The records are gathered once, before the
first update. Later steps have no overhead. ``updates.ReplicaChecks`` compares the parameters after it.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import MismatchError, UsageError
from hpctrain.log import logger
from hpctrain.parallel.compiled import ModuleHook
from hpctrain.parallel.model_agreement import trainable
from hpctrain.parallel.strategy import Strategy

LOSSES = (
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy"),
    *("gaussian_nll_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss"),
    *("mse_loss", "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "nll_loss"),
    *("poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss"),
)
BY_CLASS = ("cross_entropy", "nll_loss")  # the mean of these is over the targets, weighted by the class weights
MOST_NAMED = 4  # parameters that a message lists
ADVICE = "write loss = run.backward(batch, compute) with compute(batch) returning"


@dataclass
class _FirstStepRecord:
    """Record of one rank's first step."""

    inputs: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # by model: digest, data rank, data ranks
    sums: list[str] = field(default_factory=list)  # loss functions called with reduction="sum"
    uneven: list[str] = field(default_factory=list)  # losses whose mean is not over the number of samples, and why
    unchanged: dict[str, list[str]] = field(default_factory=dict)  # by model: parameters with a gradient, never updated


class FirstStepChecks:
    """Checks of the first step after a start; models and strategies have the same keys.

    ``splits_loader`` tells whether the run splits the loader's batches over the data ranks: False
    if the caller requested the same batches on all ranks, None if the loader is used unchanged.
    ``loader`` is the loader's name in messages.

    Call ``check_optimizers`` and ``attach`` before the loop, ``before_update`` before the first
    update, and ``close`` in any case.
    """

    def __init__(
        self,
        comm: Communicator,
        models: Mapping[str, nn.Module],
        strategies: Mapping[str, Strategy],
        optimizers: Mapping[str, Optimizer],
        splits_loader: bool | None = None,
        *,
        loader: str = "the loader",
    ) -> None:
        self._comm, self._models, self._strategies, self._optimizers = comm, models, strategies, optimizers
        self._splits, self._loader = splits_loader, loader
        self._record_of_step = _FirstStepRecord()
        self._hooks, self._attached = ExitStack(), False
        self._weighted = 0
        self.resumed = False  # whether an earlier start has made the first step
        self.compiled = False  # whether a model was passed as returned by torch.compile
        # Asynchronous ranks must not wait for each other, and each has its own parameters.
        self._compares = not any(strategy.asynchronous for strategy in strategies.values())

    # Before the loop --------------------------------------------------------------------------------------------------

    def check_optimizers(self) -> None:
        """Raise ``UsageError`` if a strategy lacks trainable parameters."""
        for key, model in self._models.items():
            held, named = self._strategies[key].held, trainable(model)
            unknown = [name for name, parameter in named if held is not None and id(parameter) not in held]
            if unknown:
                raise UsageError(
                    f"parameters that are not part of the wrapped model: {_some(unknown)}; all that are trained must "
                    "exist, and require gradients, when the model is wrapped; create them before job.wrap"
                )

    def attach(self) -> None:
        """Record the inputs and the loss functions of the first step until ``before_update`` or ``close``.

        Compiled models are skipped: a hook, or a replaced function in torch.nn.functional, would
        cause a recompilation.
        """
        modules = [module for model in self._models.values() for module in model.modules()]
        if self.compiled or any("_orig_mod" in one._modules or one._compiled_call_impl is not None for one in modules):
            return
        for key, model in self._models.items():
            hook = ModuleHook(functools.partial(self._record, key))
            handle = model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            self._hooks.callback(handle.remove)
        self._hooks.enter_context(_watching(LOSSES, self._look))
        self._attached = True

    def close(self) -> None:
        """Remove all hooks and replaced functions that ``attach`` installed."""
        self._attached = False
        self._hooks.close()

    @contextmanager
    def weighted(self) -> Iterator[None]:
        """Accept any loss in the ``with`` block: its gradients are weighted by the number of targets."""
        self._weighted += 1
        try:
            yield
        finally:
            self._weighted -= 1

    # Recording --------------------------------------------------------------------------------------------------------

    def _record(self, key: str, model: nn.Module, args: Any, kwargs: Any) -> None:
        strategy = self._strategies[key]
        # A rank without samples computes on a placeholder of weight 0, possibly that of another rank.
        counts = strategy.sample_weight > 0 and self._attached  # else a compiled graph calls a removed hook
        if key in self._record_of_step.inputs or not (model.training and torch.is_grad_enabled() and counts):
            return
        tensors = [each for each in _tensors((args, kwargs), set()) if each.numel()]
        if tensors:
            data = strategy.data
            self._record_of_step.inputs[key] = (_digest(tensors), data.rank, data.size)

    def _look(self, name: str, given: Mapping[str, Any]) -> None:
        if not torch.is_grad_enabled() or self._weighted:
            return
        if given.get("reduction") == "sum":
            self._record_of_step.sums.append(name)
        if uneven := _not_over_samples(name, given):
            self._record_of_step.uneven.append(uneven)

    # Around the first update ------------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """Compare the records of all ranks and stop recording. Collective.

        Raises ``MismatchError`` on all ranks if ranks of one model replica got different inputs.
        """
        self.close()
        self._record_of_step.unchanged = self._never_updated()
        if not self._compares:
            self._warn_of_unchanged([self._record_of_step])
            return
        everyone: list[_FirstStepRecord] = self._comm.all_gather_object(self._record_of_step)
        for key in self._models:
            seen = {rank: notes.inputs[key] for rank, notes in enumerate(everyone) if key in notes.inputs}
            self._compare_inputs(key, seen)
        self._warn_of_unchanged(everyone)
        if self._comm.rank or not any(strategy.data.size > 1 for strategy in self._strategies.values()):
            return
        if sums := _known(notes.sums for notes in everyone):
            logger.warning(
                'loss with reduction="sum": %s; the sums of the data ranks are averaged, so the step is that of the '
                "sum divided by the number of ranks; %s (sum of the losses, number of samples), or divide by the "
                "number of samples",
                ", ".join(sums),
                ADVICE,
            )
        if uneven := _known(notes.uneven for notes in everyone):
            logger.warning(
                "loss whose mean is not over the samples: %s; the means of the data ranks are averaged, though each is "
                "over a different number of targets; %s (sum of the losses, number or weight of the targets)",
                ", ".join(uneven),
                ADVICE,
            )

    def _never_updated(self) -> dict[str, list[str]]:
        """Return by model the parameters that got a gradient and that no optimizer has.

        A parameter without a gradient may be intended, as in an average of another model's weights.
        """
        groups = [group for one in self._optimizers.values() for group in one.param_groups]
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        return {
            key: [name for name, one in trainable(model) if one.grad is not None and id(one) not in updated]
            for key, model in self._models.items()
        }

    def _warn_of_unchanged(self, everyone: Iterable[_FirstStepRecord]) -> None:
        if self._comm.rank or self.resumed:
            return
        notes = list(everyone)
        for key in self._models:
            if names := _known(one.unchanged[key] for one in notes):
                logger.warning(
                    "parameters of %s in no optimizer: %s; they get gradients and never change; pass "
                    "model.parameters() to the optimizer, or freeze them by requires_grad_(False)",
                    model_name(key),
                    _some(names),
                )

    def _compare_inputs(self, key: str, found: Mapping[int, tuple[int, int, int]]) -> None:
        """Raise if ranks of one replica got different inputs; warn if two replicas got the same inputs."""
        replicas: dict[int, tuple[int, int]] = {}  # by data rank: one of its ranks, and the digest on that rank
        for rank, (digest, number, _) in found.items():
            first, other = replicas.setdefault(number, (rank, digest))
            if other != digest:
                raise MismatchError(
                    f"inputs of {model_name(key)} in the first step: ranks {first} and {rank} got different ones; "
                    "ranks that hold parts of one replica (parallel.tensor, parallel.pipe) need the same samples; give "
                    "the loader strategy.data.rank and strategy.data.size, or pass the DataLoader itself to job.run",
                    everywhere=True,
                )
        alike: dict[int, list[int]] = {}
        for rank, digest in replicas.values():
            alike.setdefault(digest, []).append(rank)
        same = next((ranks for ranks in alike.values() if len(ranks) > 1), None)
        if same is None or self._splits is False or self._comm.rank:
            return
        if self._splits:
            advice = "its batches are divided, so the dataset itself gives equal samples, or draws alike on all ranks"
        else:
            advice = "pass the DataLoader itself to job.run, which divides its batches; split=False if intended"
        logger.warning(
            "inputs of %s in the first step: data ranks %s got the same ones from %s, so they train on the data of "
            "one rank; %s",
            model_name(key),
            ", ".join(map(str, same)),
            self._loader,
            advice,
        )


def watching_means(found: list[str]) -> AbstractContextManager[None]:
    """Return a ``with`` block in which losses whose mean is not over the samples are added to ``found``."""

    def look(name: str, given: Mapping[str, Any]) -> None:
        if uneven := _not_over_samples(name, given):
            found.append(uneven)

    return _watching(BY_CLASS, look)


@contextmanager
def _watching(names: Iterable[str], look: Callable[[str, Mapping[str, Any]], None]) -> Iterator[None]:
    plain = {name: getattr(functional, name) for name in names}
    for name, original in plain.items():
        setattr(functional, name, _watched(name, original, look))
    try:
        yield
    finally:
        for name, original in plain.items():
            setattr(functional, name, original)


def _watched(
    name: str, plain: Callable[..., Any], look: Callable[[str, Mapping[str, Any]], None]
) -> Callable[..., Any]:
    """Return a function that calls ``look`` with its name and arguments, and then the plain function."""
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def recording(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            with suppress(TypeError):  # the function itself will raise this error
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                look(name, bound.arguments)
        return plain(*args, **kwargs)

    return recording


def _not_over_samples(name: str, given: Mapping[str, Any]) -> str:
    """Return what a loss function's mean is over, if not the number of samples; empty otherwise."""
    if name not in BY_CLASS or given.get("reduction") != "mean":
        return ""
    target, ignored = given["target"], given["ignore_index"]
    if given["weight"] is not None:
        return f"{name} has class weights"
    if isinstance(target, Tensor) and not target.is_floating_point() and bool((target == ignored).any()):
        return f"{name} ignores targets (ignore_index = {ignored})"
    return ""


def model_name(key: str) -> str:
    """Return how messages call the model with a key."""
    return f"model {key!r}" if key else "the model"


def _tensors(values: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and objects; each object is visited once."""
    if isinstance(values, Tensor):
        yield values
        return
    if isinstance(values, (str, bytes, type, nn.Module)) or callable(values) or id(values) in seen:
        return
    seen.add(id(values))
    inner: Iterable[Any] = ()
    if isinstance(values, Mapping):
        inner = values.values()
    elif isinstance(values, (tuple, list)):
        inner = values
    elif hasattr(values, "__dict__"):
        inner = list(vars(values).values())
    for each in inner:
        yield from _tensors(each, seen)


def _digest(tensors: Iterable[Tensor]) -> int:
    """Return a CRC-32 over shapes, dtypes and bytes."""
    digest = 0
    for tensor in tensors:
        digest = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest)
        if tensor.layout is torch.strided:
            digest = zlib.crc32(flat_elements(tensor).cpu().view(torch.uint8).numpy().data, digest)
    return digest


def flat_elements(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as one contiguous row of real numbers."""
    plain = tensor.detach()
    return (torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain).contiguous().reshape(-1)


def _known(lists: Iterable[list[str]]) -> list[str]:
    """Return the items of all lists without duplicates, in order."""
    return list(dict.fromkeys(each for one in lists for each in one))


def _some(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
