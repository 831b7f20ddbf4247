"""Hooks that strategies register on modules, gradients and optimizers, and subclasses that replace only ``forward``."""

from __future__ import annotations

import copyreg
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from hpctrain.errors import UsageError
from hpctrain.parallel.compiled import ModuleHook


def after_gradient(parameter: Tensor, method: Callable[..., None], *args: int | str) -> RemovableHandle:
    """Call the bound ``method`` with ``args`` and the parameter whenever autograd has accumulated its gradient.

    Python's garbage collector does not traverse the references of such a hook. Therefore the hook
    must not hold a reference to its owner, nor ``args`` to the parameter: a model and its strategy
    would never be freed.
    """
    reference = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        bound = reference()
        if bound is not None:
            bound(*args, parameter)

    # Use torch's own method: the parameter's attribute of the same name defers hooks.
    register: Callable[..., RemovableHandle] = Tensor.register_post_accumulate_grad_hook
    return register(parameter, hook)


# Hooks before and after every optimizer step of the process -----------------------------------------------------------
#
# Note: torch stores such hooks in a dict that it iterates over at each step. If the garbage collector
# frees an owner meanwhile, that owner must not remove its hooks from the dict ("OrderedDict mutated
# during iteration"). Therefore torch gets one permanent hook of each kind, and these iterate over a
# copy of the list of owners.


Call = Callable[[Any, torch.optim.Optimizer], None]  # arguments: owner and optimizer

_hooks: list[StepHooks] = []
_registered = False


class StepHooks:
    """Registered ``before(owner, optimizer)`` and ``after(owner, optimizer)``, until removed or the owner is freed."""

    def __init__(self, owner: Any, before: Call | None = None, after: Call | None = None) -> None:
        global _registered
        self.owner, self.before, self.after = weakref.ref(owner), before, after
        _hooks.append(self)
        if not _registered:
            _registered = True
            register_optimizer_step_pre_hook(_before)
            register_optimizer_step_post_hook(_after)

    def remove(self) -> None:
        if self in _hooks:
            _hooks.remove(self)


@_disable_dynamo  # of a compiled step, together with what the hooks call
def _before(optimizer: Any, args: Any, kwargs: Any) -> None:
    for hooks in list(_hooks):
        owner = hooks.owner()
        if owner is None:
            hooks.remove()
        elif hooks.before is not None:
            hooks.before(owner, optimizer)


@_disable_dynamo
def _after(optimizer: Any, args: Any, kwargs: Any) -> None:
    for hooks in list(_hooks):
        if hooks.after is not None and (owner := hooks.owner()) is not None:
            hooks.after(owner, optimizer)


class OptimizerHooks:
    """Hooks that call ``before`` and ``after`` around each update of ``shards`` by any optimizer.

    ``replaced`` holds the parameters that the model had before sharding, by name. An optimizer that
    still holds them would update tensors that the model no longer uses.
    """

    def __init__(
        self,
        shards: Iterable[nn.Parameter],
        replaced: Mapping[str, weakref.ref[nn.Parameter]],
        elementwise: tuple[str, ...],
        before: Callable[[torch.optim.Optimizer], None],
        after: Callable[[torch.optim.Optimizer], None],
        whole: tuple[str, ...] = (),
    ) -> None:
        self._shards = {id(shard) for shard in shards}
        living = {name: old() for name, old in replaced.items()}
        self._replaced = {id(living[name]): (name, old) for name, old in replaced.items() if living[name] is not None}
        self._elementwise, self._whole, self._before, self._after = elementwise, whole, before, after

    def attach(self) -> StepHooks:
        """Hook all optimizers of the process; the hooks last as long as this object."""
        return StepHooks(self, OptimizerHooks._before_step, OptimizerHooks._after_step)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.check(optimizer):
            self._before(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.holds(optimizer):
            self._after(optimizer)

    def check(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer updates shards; raise ``UsageError`` if it cannot update them correctly."""
        for parameter in parameters_of(optimizer):
            name, old = self._replaced.get(id(parameter), ("", None))
            if old is not None and old() is parameter:
                raise UsageError(
                    f"the optimizer holds parameter {name} as it was before job.wrap(model) split it: "
                    "make the optimizer after job.wrap(model)",
                    everywhere=True,
                )
        if not self.holds(optimizer):
            return False
        self.updates_whole(optimizer)
        return True

    def updates_whole(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an update of a parameter needs all of its elements; raise ``UsageError`` as the function."""
        return updates_whole(optimizer, self._elementwise, self._whole)

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(parameter) in self._shards for parameter in parameters_of(optimizer))


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


class AddedParameters:
    """Parameters that a program has created after its model was wrapped: no strategy reduces their gradients."""

    def __init__(self, model: nn.Module, held: Iterable[nn.Parameter]) -> None:
        self._model = weakref.ref(model)
        self._known = {id(parameter) for parameter in held}

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``UsageError`` for a parameter of the model that the optimizer holds and the strategy does not."""
        model = self._model()
        if model is None or all(self._known.issuperset(map(id, group["params"])) for group in optimizer.param_groups):
            return
        new = {id(parameter) for parameter in parameters_of(optimizer)} - self._known
        added = [name for name, parameter in model.named_parameters() if id(parameter) in new]
        if added:
            raise UsageError(
                f"parameters that the model has got after job.wrap(model): {', '.join(added[:4])}"
                f"{', ...' if len(added) > 4 else ''}; their gradients would stay each rank's own; build the whole "
                "model, its parametrizations included, before job.wrap",
                everywhere=True,
            )
        self._known |= new  # of another model


class PlainInUpdates:
    """Parameters (by name) of the class ``guarded``, and exact ``nn.Parameter`` in updates and in ``suspend`` blocks.

    Their gradients may be ``marked`` tensors, and are plain ones in updates.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], guarded: type[nn.Parameter], marked: type[Tensor]
    ) -> None:
        self.parameters, self._guarded, self._marked = dict(parameters), guarded, marked
        self._held = {id(parameter) for parameter in self.parameters.values()}
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # that have begun an update
        self._suspensions = 0  # number of active ``suspend`` blocks, passes and updates
        self._updating = False
        self._handles: list[RemovableHandle | StepHooks] = [
            StepHooks(self, PlainInUpdates._before_update, PlainInUpdates._after_update)
        ]

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Make the parameters plain ``nn.Parameter`` for the ``with`` block."""
        self._suspend()
        try:
            yield
        finally:
            self._resume()

    def first_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare an optimizer that begins its first update of the parameters."""

    def _suspend(self) -> None:
        self._suspensions += 1
        if self._suspensions == 1:
            self._set_class(nn.Parameter)

    def _resume(self) -> None:
        self._suspensions -= 1
        if not self._suspensions and self._handles:
            self._set_class(self._guarded)

    def _set_class(self, kind: type[nn.Parameter]) -> None:
        for parameter in self.parameters.values():
            parameter.__class__ = kind

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._holds(optimizer):
            return
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self.first_update(optimizer)
        if not self._updating:  # still True if the last update has raised
            self._updating = True
            self._suspend()
        for parameter in self.parameters.values():
            if type(parameter.grad) is self._marked:
                parameter.grad.__class__ = Tensor

    def _after_update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._updating and self._holds(optimizer):
            self._updating = False
            self._resume()

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(not self._held.isdisjoint(map(id, group["params"])) for group in optimizer.param_groups)


# In these optimizers, the new value of an element depends only on the gradients of that element and
# on the number of steps.
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
# Torch's other optimizers, by name: not all versions of torch have Muon. These update each parameter by itself, ...
WHOLE = ("Adafactor", "Muon")
# ... and these do not.
NOT_SPLIT = {
    "LBFGS": "its steps depend on all parameters together",
    "SparseAdam": "it needs sparse gradients, which cannot be reduced",
}


def updates_whole(optimizer: torch.optim.Optimizer, elementwise: Sequence[str] = (), whole: Sequence[str] = ()) -> bool:
    """Return whether an update of a parameter needs all its elements: torch's Adafactor and Muon, classes in ``whole``.

    Raises ``UsageError`` unless an optimizer is known to update element by element, or parameter by parameter, or is
    named in ``elementwise`` or ``whole`` by its class. A subclass of a known optimizer counts as known if it does not
    override ``step``.
    """
    kind = type(optimizer)
    name = kind.__name__
    reason = next((text for each, text in NOT_SPLIT.items() if _is_torchs(kind, each)), None)
    if reason is None:
        if needs_matrices(optimizer, whole):
            return True
        if name in elementwise or _step(kind) in {_step(known) for known in ELEMENTWISE}:
            return False
    advice = "use parallel.data = 'ddp', whose ranks hold whole parameters" + (
        ""
        if reason
        else f", or add {name!r} to parallel.elementwise if it updates every element by itself, or to "
        "parallel.whole_parameters if it updates every parameter by itself"
    )
    raise UsageError(
        f"optimizer {name} cannot be used where parameters are split over ranks: "
        + (reason or "it is not known to update every element or every parameter by itself")
        + f"; allowed are {', '.join(known.__name__ for known in ELEMENTWISE)}, {', '.join(WHOLE)}; {advice}",
        everywhere=True,
    )


def needs_matrices(optimizer: torch.optim.Optimizer, whole: Sequence[str] = ()) -> bool:
    """Return whether an optimizer is torch's Adafactor or Muon, or of a class in ``whole``."""
    kind = type(optimizer)
    return kind.__name__ in whole or any(_is_torchs(kind, each) for each in WHOLE)


def _is_torchs(kind: type[torch.optim.Optimizer], name: str) -> bool:
    """Return whether a class updates as the class of this name in ``torch.optim`` does."""
    known = getattr(torch.optim, name, None)
    return known is not None and _step(kind) is _step(known)


def _step(kind: type[torch.optim.Optimizer]) -> Callable[..., object]:
    """Return the original ``step`` function. Torch wraps it, and wraps it again on a subclass at its first use."""
    step: Callable[..., object] = inspect.unwrap(kind.step)
    return step


# Subclasses of a module's own class that differ only in ``forward`` and pickling --------------------------------------
#
# A ``forward`` assigned to the instance would be shared by copies, which ``copy.deepcopy`` and
# torch's DataParallel make, and would refer to the parameters of the original. The subclass cannot be
# imported: copies and pickles refer to the plain class.


def empty_module(plain: type[nn.Module], *arguments: Any) -> nn.Module:
    """Return an empty module of a plain class, whose state is set later."""
    return plain.__new__(plain, *arguments)


def subclass_with(
    plain: type[nn.Module],
    forward: Callable[..., Any],
    marker: str,
    make_copy: Callable[..., nn.Module] = empty_module,
) -> type[nn.Module]:
    """Return a subclass with another ``forward`` and the same name; its attribute ``marker`` is the plain class.

    ``make_copy(plain)``, a function that pickle can import, creates the module that receives a
    copy's state.
    """

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = plain.__reduce_ex__(self, max(2, int(protocol)))
        make, arguments, *rest = reduced
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            make, arguments = make_copy, (plain, *arguments[1:])
        return make, arguments, *rest

    same: Mapping[str, Any] = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    overrides = {"forward": wraps(plain.forward)(forward), "__reduce_ex__": reduce, marker: plain}
    return type(plain.__name__, (plain,), {**same, **overrides})


def differentiable(values: Any) -> list[Tensor]:
    """Return the tensors in a nest of values that a backward pass can reach."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]


def before_backward(outputs: Any, call: Callable[[], None]) -> None:
    """Call ``call`` once when the first gradient of a module's outputs has been computed."""
    tensors = differentiable(outputs)
    if tensors:
        register_multi_grad_hook(tensors, lambda _: call(), mode="any")


def after_backward(inputs: Any, call: Callable[[], None]) -> None:
    """Call ``call`` once when the gradients of all inputs of a module have been computed.

    It is never called if no input requires a gradient.
    """
    tensors = differentiable(inputs)
    if tensors:
        register_multi_grad_hook(tensors, lambda _: call(), mode="all")


def around_forward(
    module: nn.Module, before: Callable[[Any, Any], Any], after: Callable[[Any, Any, Any], None]
) -> list[RemovableHandle]:
    """Call ``before(args, kwargs)``, which may return replacements, and ``after(args, kwargs, result)``.

    If the forward pass raises, ``after`` is called with None as the result.
    """
    first, last = ModuleHook(lambda _, *call: before(*call)), ModuleHook(lambda _, *call: after(*call))
    return [
        module.register_forward_pre_hook(first, with_kwargs=True, prepend=True),
        module.register_forward_hook(last, with_kwargs=True, always_call=True),
    ]


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Return a nest of values with its floating-point tensors converted to another dtype."""

    def one(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(one, values)
