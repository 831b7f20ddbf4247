"""Tensors that hold one rank's part of a parameter; operations that need the other parts raise an error.

Between the passes, a program sees only this rank's part of the parameters: a slice of each (zero1,
zero2, fsdp, tensor parallelism), or the parameters of one pipeline stage. Element-wise operations
on them give the same result as in one process. A sum, a norm or a product gives only this rank's
share, without any error. Therefore these parameters have the class ``ShardParameter`` between the
passes. Element-wise functions run and return a ``ShardTensor``; all others raise ``UsageError``.

Note: why the class is switched. An optimizer must find plain ``nn.Parameter``: a subclass doubles
the time of fused AdamW on 200 small parameters, and disables foreach on CUDA, where ``type(p)`` is
tested. Assigning ``__class__`` takes 40 ns per parameter, so classes are switched around each
update. A function of a ``ShardParameter`` takes 2 us more. A ``TorchFunctionMode`` would add that
to every function of the program, including those on its data.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.guard.operators import (
    BY_POSITION,
    ELEMENTWISE,
    FILLS,
    MOVES,
    PRODUCTS,
    REDUCES_TOO,
    is_elementwise,
    is_in_place,
    name_of,
)
from hpctrain.plain_tensors import plain_tensors

if TYPE_CHECKING:
    from hpctrain.parallel.strategy import SplitStrategy

ATTRIBUTE = "_hpctrain_part"  # attribute of parameters, and of tensors computed from them


@dataclass(frozen=True)
class ShardInfo:
    """Description of the content of a tensor: part of the parameter ``name`` of a model with a ``strategy``."""

    name: str
    strategy: weakref.ref[SplitStrategy]
    description: str  # "a slice of the parameter" ...

    @property
    def text(self) -> str:
        return f"{self.description} {self.name}"


def part_of(tensor: object) -> ShardInfo | None:
    """Return the ``ShardInfo`` of a tensor; None if it is whole or computed from several parameters."""
    found = getattr(tensor, "__dict__", {}).get(ATTRIBUTE)
    return found if isinstance(found, ShardInfo) else None


class _Guarded:
    """Mixin of tensor classes whose functions are restricted to those that a part of a parameter allows."""

    __slots__ = ()  # the class of tensors can only be switched if the memory of their objects stays alike

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an element-wise function and mark its results; raise ``UsageError`` for others."""
        kwargs = kwargs or {}
        name = name_of(func)
        if name == "__set__" or name == "__delete__":
            with plain_tensors():
                return func(*args, **kwargs)
        if name == "_has_compatible_shallow_copy_type":
            _check_converted(args[0], args[1])
        elif name in BY_POSITION and (found := _indexed(name, args, kwargs)) is not None:
            raise _position_error(name, found)
        elif not _allowed(name, func, args, kwargs):
            raise _not_allowed_error(name, func, args, kwargs)
        if is_in_place(func, kwargs):
            _notify_write(args, kwargs)
        try:
            with plain_tensors():
                result = func(*args, **kwargs)
        except RuntimeError as error:
            raise _mismatch_error(name, args, kwargs) or error
        if name == "as_subclass" or not isinstance(result, (Tensor, list, tuple)):
            return result
        return _marked(name, result, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise ``UsageError``: a file would contain only this rank's part."""
        raise UsageError(
            f"writing {_text(self)}: the file would hold this rank's part only; write job.state_dict(model), which "
            "every rank calls and which returns whole tensors; run.save() writes checkpoints"
        )


class ShardTensor(_Guarded, Tensor):
    """Tensor that was computed from parts of parameters."""

    def __deepcopy__(self, memo: Any) -> Any:
        with plain_tensors():
            copied = torch.Tensor.detach(self).clone()
        return mark(copied, getattr(self, ATTRIBUTE, None))


class ShardParameter(_Guarded, nn.Parameter):
    """This rank's part of a parameter; an exact ``nn.Parameter`` during updates."""

    def __deepcopy__(self, memo: Any) -> Any:
        """Raise ``UsageError``: a copy of the module would have no strategy that unshards the parameter."""
        raise UsageError(
            f"deepcopy of {_text(self)}: the copy of a model that is split over ranks would compute with parts; make "
            "the copy, such as average = AveragedModel(model), before job.wrap(model), and call job.wrap(average) "
            "too; whole tensors are job.state_dict(model)"
        )


def _text(tensor: object) -> str:
    part = part_of(tensor)
    return part.text if part else "a part of a parameter"


def _origin(tensor: object) -> tuple[ShardInfo | None, SplitStrategy | None]:
    part = part_of(tensor)
    return part, None if part is None else part.strategy()


def _indexed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardInfo | None:
    """Return the parameter whose part is indexed by position; None for masks and for all elements."""
    first = args[0] if args else kwargs.get("input")
    part, strategy = _origin(first)
    if part is None or strategy is None or not isinstance(first, Tensor):
        return None
    if name in ("getitem", "setitem") and len(args) > 1:
        index = args[1]
        every = index if isinstance(index, tuple) else (index,)
        if all(one is None or one is Ellipsis or isinstance(one, slice) and one == slice(None) for one in every):
            return None
        if isinstance(index, Tensor) and index.dtype is torch.bool:
            with plain_tensors():
                return None if index.shape == first.shape else part
    with plain_tensors():
        whole = strategy.whole_shape(part.name)
        held = strategy.guarded(part.name)
        return part if whole is not None and held is not None and tuple(held.shape) != whole else None


def _position_error(name: str, part: ShardInfo) -> UsageError:
    return UsageError(
        f"{name} of {part.text}: places in it are not those in the whole tensor, so other elements would be taken; "
        "allowed are element-wise functions, masks computed from the part itself, and all elements ([:]); change rows "
        "of weights inside of with job.unshard(model, write=True), and keep rows from being trained by a mask in the "
        "model's forward"
    )


def _check_converted(parameter: Tensor, converted: Tensor) -> None:
    """Raise ``UsageError`` if a conversion (``model.to``) changes the dtype or device of a part."""
    with plain_tensors():
        before, after = (parameter.dtype, parameter.device), (converted.dtype, converted.device)
    if before != after:
        raise UsageError(
            f"conversion of {_text(parameter)} from {before[0]} on {before[1]} to "
            f"{after[0]} on {after[1]}: the strategy holds its memory; convert the model before job.wrap; "
            'parallel.mixed_precision = "bfloat16" computes in bfloat16',
            everywhere=True,
        )


def _allowed(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if getattr(func, "__name__", "") == "__get__":
        return True
    if getattr(func, "__module__", "") in ("torch.nn.init", "torch.autograd"):
        return name in ELEMENTWISE
    if name in FILLS or name.rstrip("_") + "_" in FILLS:
        return name in FILLS and not _writes_parameter(args)
    if name in REDUCES_TOO:
        return len(args) == 2 and isinstance(args[1], Tensor) and "dim" not in kwargs
    return is_elementwise(name)


def _notify_write(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Notify strategies that code other than an optimizer is about to change parameters."""
    changed = kwargs.get("out", args[0] if args else kwargs.get("tensor"))
    for tensor in _tensors_in(changed):
        _, strategy = _origin(tensor)
        if strategy is not None and _writes_parameter((tensor,)):
            with plain_tensors():
                strategy.before_write()
            return


def _writes_parameter(args: tuple[Any, ...]) -> bool:
    """Return whether the first tensor is a parameter, or shares its memory."""
    first = args[0] if args else None
    if isinstance(first, ShardParameter):
        return True
    part, strategy = _origin(first)
    if part is None or strategy is None or not isinstance(first, Tensor):
        return False
    with plain_tensors():
        owner = strategy.guarded(part.name)
        return owner is not None and owner.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()


# Results --------------------------------------------------------------------------------------------------------------


def _marked(name: str, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts = [one for one in _tensors_in((args, kwargs)) if isinstance(one, (ShardParameter, ShardTensor))]
    if name not in MOVES and isinstance(result, Tensor):
        _check_shapes(name, result, parts)
    found = {id(getattr(one, ATTRIBUTE, None)): getattr(one, ATTRIBUTE, None) for one in parts}
    part = next(iter(found.values())) if len(found) == 1 else None
    for one in (result,) if isinstance(result, Tensor) else result:
        if isinstance(one, Tensor):
            mark(one, part)
    return result


def _check_shapes(name: str, result: Tensor, parts: Sequence[Tensor]) -> None:
    """Raise ``UsageError`` if a part was broadcast against a tensor of another shape, such as a whole mask."""
    for one in parts:
        with plain_tensors():
            differs = one.numel() != result.numel() and one.dim() > 0
        if differs:
            raise _shape_error(name, one, result)


def _mismatch_error(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UsageError | None:
    """Return the error for a function of a part and a tensor of another shape; None if all shapes are equal."""
    given = list(_tensors_in((args, kwargs)))
    with plain_tensors():
        for one in given:
            other = next((each for each in given if each.dim() and each.shape != one.shape), None)
            if isinstance(one, (ShardParameter, ShardTensor)) and other is not None:
                return _shape_error(name, one, other)
    return None


def _shape_error(name: str, tensor: Tensor, other: Tensor) -> UsageError:
    with plain_tensors():
        shapes = tuple(tensor.shape), tuple(other.shape)
    return UsageError(
        f"{name} of {_text(tensor)}: it has the shape {shapes[0]} and another tensor "
        f"{shapes[1]}; allowed are numbers and tensors made of it, such as zeros_like; work with whole tensors before "
        "job.wrap, or inside of with job.unshard(model, write=True)"
    )


def mark(result: Tensor, part: Any) -> Tensor:
    """Mark a tensor as a part of a parameter."""
    if type(result) in (Tensor, nn.Parameter):
        result.__class__ = ShardTensor if type(result) is Tensor else ShardParameter
        result.__dict__[ATTRIBUTE] = part
    return result


def mark_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter, marked as a part if the parameter is one."""
    with plain_tensors():
        gradient = parameter.grad
    assert gradient is not None
    part = part_of(parameter)
    return gradient if part is None else mark(gradient, part)


def _tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for one in values:
            yield from _tensors_in(one)
    elif isinstance(values, dict):
        yield from _tensors_in(tuple(values.values()))


# Errors ---------------------------------------------------------------------------------------------------------------


def _not_allowed_error(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UsageError:
    found = [one for one in _tensors_in((args, kwargs)) if isinstance(one, (ShardParameter, ShardTensor))]
    part = next(filter(None, map(part_of, found)), None)
    description = part.text if part else "parts of parameters"
    module = getattr(func, "__module__", None) or ""
    if name in FILLS or module == "torch.nn.init":
        return UsageError(
            f"{name} on {description}: each rank would draw its part by itself, and one process other numbers; "
            "initialise the model before job.wrap, or inside of with job.unshard(model, write=True)"
        )
    if module == "torch.autograd":
        return UsageError(
            f"torch.autograd.{name} with respect to {description}: passes compute with whole parameters, of which this "
            "is a part; call loss.backward() and use parameter.grad"
        )
    prefix = f"{name} of {description}: it would see this rank's elements only"
    if name in ("numpy", "array", "tolist", "item", "float", "int"):
        return UsageError(
            f"{prefix}; whole tensors are job.state_dict(model), or inside of with job.unshard(model); if this rank's "
            "are meant, write tensor.as_subclass(torch.Tensor) first"
        )
    if module.startswith(("torch._C._nn", "torch.nn.functional")) or name in PRODUCTS:
        return UsageError(
            f"{prefix}; modules have whole parameters while the wrapped model itself is called; call the model, and "
            "let its forward use the parameter, or compute inside of with job.unshard(model)"
        )
    return UsageError(
        f"{prefix}; run.clip(max_norm) returns the norm of all gradients, torch.nn.utils.get_total_norm(tensors) "
        "that of chosen gradients or parameters, with job.unshard(model) gives whole parameters; all ranks call these; "
        "if this rank's elements are meant, write tensor.as_subclass(torch.Tensor)"
    )
