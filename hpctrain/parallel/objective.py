"""Objective of a pass, and the arguments of its calls: nests of tensors, and their partition into microbatches.

A skeleton is the same nest with a ``Slot`` in place of each tensor. Skeletons can be pickled and
compared.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hpctrain.errors import UsageError
from hpctrain.settings import function_named


@dataclasses.dataclass(frozen=True)
class Slot:
    """Placeholder of a tensor in a skeleton, with its index."""

    number: int


ONE_TENSOR = Slot(0)  # the skeleton of a plain tensor


def map_leaves(value: Any, change: Callable[[Any], Any], kind: type | tuple[type, ...] = Tensor) -> Any:
    """Return a nest with all leaves of a class transformed; other leaves stay unchanged."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping):
        return _rebuilt(value, {key: map_leaves(each, change, kind) for key, each in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(each, change, kind) for each in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_leaves(each, change, kind) for each in value)
    if _is_node(value):
        return dataclasses.replace(value, **{name: map_leaves(each, change, kind) for name, each in _fields(value)})
    return value


def named_leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nest with the expressions that address them, in the order of ``mapped``."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from named_leaves(each, f"{name}[{key!r}]")
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for key, each in zip(value._fields, value):
            yield from named_leaves(each, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for number, each in enumerate(value):
            yield from named_leaves(each, f"{name}[{number}]")
    elif _is_node(value):
        for key, each in _fields(value):
            yield from named_leaves(each, f"{name}.{key}")
    else:
        yield name, value


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in named_leaves(value, "") if isinstance(leaf, Tensor)]


def flatten(value: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """Return the skeleton of a nest, and its tensors in the order of the slots."""
    found: list[Tensor] = []

    def slot(tensor: Tensor) -> Slot:
        found.append(tensor)
        return Slot(len(found) - 1)

    return map_leaves(value, slot), tuple(found)


def unflatten(skeleton: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the nest that was flattened, with other tensors."""
    return map_leaves(skeleton, lambda slot: tensors[slot.number], Slot)


def check_leaves(value: Any, name: str) -> None:
    """Raise ``UsageError`` for an object with tensors in its attributes, which cannot be cut or sent."""
    for place, leaf in named_leaves(value, name):
        inside = getattr(leaf, "__dict__", None)
        if isinstance(leaf, Tensor) or callable(leaf) or not isinstance(inside, dict):
            continue
        hidden = next((key for key, each in inside.items() if tensors_of(each)), None)
        if hidden is not None:
            raise UsageError(
                f"{place} is a {type(leaf).__name__} with a tensor in its attribute {hidden}; allowed are tensors, and "
                "tuples, lists, dicts and dataclasses of tensors; pass the tensors themselves",
                everywhere=True,
            )


def _is_node(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, Slot))


def _fields(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init]


def _rebuilt(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return values in a mapping of the same class; a plain dict if that class cannot be constructed from one."""
    kind: Any = type(mapping)
    if kind is dict:
        return values
    try:
        return kind(values)
    except TypeError:
        return values


@dataclass(frozen=True)
class CallArguments:
    """Positional and keyword arguments of one call of a model."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: Any) -> CallArguments:
        """Return the call that inputs represent: ``model(x)``, ``model(*inputs)`` or ``model(**inputs)``.

        A tuple or list contains positional arguments, a mapping with string keys contains keyword
        arguments, and any other value is the only argument. A named tuple and a dataclass are one
        argument.
        """
        if isinstance(inputs, CallArguments):
            return inputs
        if isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
            return cls(tuple(inputs))
        if isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs):
            return cls((), dict(inputs))
        return cls((inputs,))

    def call(self, model: Callable[..., Any]) -> Any:
        return model(*self.args, **self.kwargs)

    def changed(self, change: Callable[[Tensor], Tensor]) -> CallArguments:
        return CallArguments(map_leaves(self.args, change), map_leaves(dict(self.kwargs), change))

    @property
    def device(self) -> torch.device:
        """Device of the first tensor; the host if there is none."""
        return next((tensor.device for tensor in tensors_of((self.args, dict(self.kwargs)))), torch.device("cpu"))

    @property
    def samples(self) -> int:
        """Number of samples: the first dim of every tensor that has one.

        Raises ``UsageError`` if tensors differ in it, or if no tensor has one.
        """
        return samples_of(self._named(), "inputs of the model")

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the expressions that address them."""
        return {name: leaf for name, leaf in named_leaves_of(self._named()) if isinstance(leaf, Tensor)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by the expression that addresses it."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors().items()}

    def cut(self, count: int) -> list[CallArguments]:
        """Return the arguments of ``count`` microbatches of equal size."""
        chunks = cut((self.args, dict(self.kwargs)), count)
        return [CallArguments(args, kwargs) for args, kwargs in chunks]

    def key(self) -> tuple[Any, ...]:
        """Return a hashable key of everything that the shapes and structures of a model's activations may depend on."""
        skeleton, tensors = flatten((self.args, dict(self.kwargs)))
        leaves = named_leaves(skeleton, "")
        rest = [(name, leaf) for name, leaf in leaves if isinstance(leaf, (bool, str, type(None)))]
        specs = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        return tuple(specs), tuple(rest), (len(self.args), *self.kwargs)

    def digest(self) -> int:
        """Return a CRC-32 over the shapes, dtypes and bytes of the tensors."""
        found = 0
        for tensor in tensors_of((self.args, dict(self.kwargs))):
            found = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), found)
            if tensor.layout is torch.strided and tensor.numel():
                flat = tensor.detach().contiguous().resolve_conj().cpu().reshape(-1)
                found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
        return found

    def _named(self) -> dict[str, Any]:
        return {**{f"inputs[{place}]": each for place, each in enumerate(self.args)}, **self.kwargs}


def named_leaves_of(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [leaf for name, each in values.items() for leaf in named_leaves(each, name)]


def samples_of(values: Mapping[str, Any], what: str) -> int:
    """Return the first dim of all tensors that have one. Raises ``UsageError`` if they differ or none has one."""
    for name, value in values.items():
        check_leaves(value, name)
    sizes = {name: leaf.shape[0] for name, leaf in named_leaves_of(values) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(set(sizes.values())) == 1:
        return int(next(iter(sizes.values())))
    if not sizes:
        raise UsageError(
            f"{what}: no tensor with a first dim; allowed are tensors of samples, and tuples, lists and dicts of them",
            everywhere=True,
        )
    listing = ", ".join(f"{name} has {size}" for name, size in sizes.items())
    raise UsageError(
        f"{what} have different numbers of samples: {listing}; a pipeline cuts all of them along the first dim; make "
        "what is not per sample (such as a causal mask) inside the model, or expand it to all samples",
        everywhere=True,
    )


def cut(value: Any, count: int) -> list[Any]:
    """Return ``count`` equal chunks of the samples of a nest; leaves without a first dim are shared by all chunks."""
    chunks: dict[int, tuple[Tensor, ...]] = {}

    def chunk_of(number: int) -> Callable[[Tensor], Tensor]:
        def of(tensor: Tensor) -> Tensor:
            if not tensor.dim():
                return tensor
            if id(tensor) not in chunks:
                chunks[id(tensor)] = tensor.chunk(count)
            return chunks[id(tensor)][number]

        return of

    return [map_leaves(value, chunk_of(number)) for number in range(count)]


Compare = Callable[[Any, Any], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over samples and, for tokens, positions, in float32."""
    return F.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error, in float32.

    If the samples of one side are vectors or scalars, the shapes of the samples may differ: targets
    ``[n]`` fit outputs ``[n, 1]``. The elements per sample must be equally many. Raises
    ``UsageError`` for other shapes, which torch would broadcast.
    """
    output_shape, target_shape = tuple(outputs.shape), tuple(targets.shape)
    if output_shape != target_shape:
        if (
            output_shape[:1] != target_shape[:1]
            or outputs.numel() != targets.numel()
            or min(len(output_shape), len(target_shape)) > 2
        ):
            raise UsageError(
                f"train.loss = 'mse': the model's output has shape {output_shape}, the targets have shape "
                f"{target_shape}; they must agree sample by sample"
            )
        targets = targets.reshape(output_shape)
    return F.mse_loss(outputs.float(), targets.float())


LOSSES: dict[str, Compare] = {"cross_entropy": cross_entropy, "mse": mse}


def loss_named(name: str) -> Compare:
    """Return a loss of ``LOSSES``, or the user's function named by ``package.module:function``."""
    if name in LOSSES:
        return LOSSES[name]
    function = function_named(name, "train.loss")

    def compare(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = function(outputs, targets)
        if isinstance(loss, Tensor) and not loss.dim() and loss.is_floating_point():
            return loss
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(f"train.loss {name} returned {what}, expected a tensor of one number, the mean of the samples")

    return compare


@dataclass(frozen=True)
class Objective:
    """Loss of a step: a mean over the samples, computed from outputs and targets; ``dtype`` enables autocast.

    ``max_norm`` is for strategies that make updates by themselves (pipedream): they clip gradients
    to this norm.
    """

    compare: Compare
    dtype: torch.dtype | None = None
    max_norm: float = float("inf")

    def computing(self, device: torch.device) -> torch.autocast:
        """Return the autocast context of the model's forward pass."""
        return torch.autocast(device.type, self.dtype, enabled=self.dtype is not None)
