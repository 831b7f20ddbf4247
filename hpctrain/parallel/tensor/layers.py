"""Linear layers split over the tensor ranks, and their products, overlapped with communication.

Note: the two functions save work compared with ``F.linear`` followed by a collective. Products that
are summed over the ranks are written directly to the reduction buffer, and copied out with the
bias. The gradient of a column-parallel layer's weight is computed while the gradient of its input
is summed, so a rank that arrives early does not wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.rng import RngRegion
from hpctrain.parallel.tensor import functional


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class _ColumnLinear(torch.autograd.Function):
    varies = True  # whether each rank uses the result differently (``partial_gradients``)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, comm: Communicator, sequence: bool) -> Tensor:
        ctx.comm, ctx.sequence = comm, sequence
        ctx.save_for_backward(x, weight)  # with sequence parallelism only the part: backward gathers again
        return torch.nn.functional.linear(functional.all_gather_sequence(x, comm) if sequence else x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows, shape = _rows(grad), (*grad.shape[:-1], weight.shape[1])
        grad_x = grad_weight = work = None
        if ctx.sequence and needs_weight:
            x = functional.all_gather_sequence(x, ctx.comm)
        if needs_x and ctx.sequence:  # this rank gets its part of the sequence
            buffer, grad_x = functional.reduce_scatter_buffers(rows.mm(weight).view(shape), ctx.comm)
            work = ctx.comm.reduce_scatter(grad_x, buffer, async_op=True)
        elif needs_x:
            buffer = functional.get_buffer(ctx.comm, shape, rows)
            torch.mm(rows, weight, out=_rows(buffer))
            work = ctx.comm.all_reduce(buffer, async_op=True)
        if needs_weight:
            grad_weight = rows.t().mm(_rows(x))
        grad_bias = rows.sum(0) if needs_bias else None
        if work is not None:
            work.wait()
            grad_x = grad_x if ctx.sequence else functional.copy_from_buffer(buffer)
        return grad_x, grad_weight, grad_bias, None, None


class _RowLinear(torch.autograd.Function):
    varies = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, comm: Communicator, sequence: bool) -> Tensor:
        ctx.comm, ctx.sequence = comm, sequence
        ctx.save_for_backward(x, weight)
        shape = (*x.shape[:-1], weight.shape[0])
        if sequence:
            part = functional.reduce_scatter_sequence(_rows(x).mm(weight.t()).view(shape), comm)
            return part if bias is None else part.add_(bias)
        buffer = functional.get_buffer(comm, shape, x)
        torch.mm(_rows(x), weight.t(), out=_rows(buffer))
        comm.all_reduce(buffer)
        return functional.copy_from_buffer(buffer) if bias is None else buffer + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        # With sequence parallelism, a rank adds the bias only to its part.
        grad_bias = _rows(grad).sum(0) if needs_bias else None
        if grad_bias is not None and ctx.sequence:
            ctx.comm.all_reduce(grad_bias)
        rows = _rows(functional.all_gather_sequence(grad, ctx.comm) if ctx.sequence else grad)
        grad_x = rows.mm(weight).view(x.shape) if needs_x else None
        grad_weight = rows.t().mm(_rows(x)) if needs_weight else None
        return grad_x, grad_weight, grad_bias, None, None


column_linear: Callable[[Tensor, Tensor, Tensor | None, Communicator, bool], Tensor] = _ColumnLinear.apply
row_linear: Callable[[Tensor, Tensor, Tensor | None, Communicator, bool], Tensor] = _RowLinear.apply


# Linear layers split over the tensor ranks; each rank holds a slice ---------------------------------------------------
#
# They are constructed like torch's own layers, with a communicator in addition, or converted from
# torch's layers in place (``convert``). Their names in ``state_dict`` stay. ``in_features`` and
# ``out_features`` remain the sizes of the whole layer.


class Parallel(nn.Module, ABC):
    """Module whose parameters in ``dims`` are each split along one dim; the others are whole on all ranks."""

    dims: dict[str, int]
    parts = 1  # equal parts of the split dim, each of which is split; more if a layer computes several things
    torch_class: type[nn.Module]  # torch's own class
    comm: Communicator | None = None

    def __init__(self, *arguments: Any, comm: Communicator, **keywords: Any) -> None:
        """Create torch's own module by its arguments, and keep this rank's slice; options are class attributes."""
        options = {name: keywords.pop(name) for name in [*keywords] if hasattr(type(self), name)}
        super().__init__(*arguments, **keywords)
        self._check_sizes(self, comm.size, **options)
        self.adopt(self, comm, **options)
        self._slice()

    @classmethod
    def convert(cls, module: nn.Module, comm: Communicator, **options: Any) -> Self:
        """Convert torch's own module to this rank's slice of it, in place; ``options`` as for a new one.

        The parameter objects stay. Parameters on the meta device get no memory.
        """
        cls.check(module, comm.size, **options)
        parallel = cls.adopt(module, comm, **options)
        parallel._slice()
        return parallel

    @classmethod
    def adopt(cls, module: nn.Module, comm: Communicator, **options: Any) -> Self:
        """Convert a module whose parameters are already split to this class, in place."""
        module.__class__ = cls
        parallel = cast(Self, module)
        parallel.comm = comm
        for name, value in options.items():
            setattr(parallel, name, value)
        return parallel

    @classmethod
    def slice_of(cls, comm: Communicator, name: str, whole: Tensor) -> Tensor:
        """Return this rank's slice of a whole parameter, in its own memory."""
        if name not in cls.dims:
            return whole
        dim = cls.dims[name]
        pieces = [whole.narrow(dim, begin, end - begin) for begin, end in cls.spans(whole.shape[dim], comm)]
        return pieces[0].clone(memory_format=torch.contiguous_format) if len(pieces) == 1 else torch.cat(pieces, dim)

    @classmethod
    def spans(cls, length: int, comm: Communicator) -> list[tuple[int, int]]:
        """Return begin and end of the parts of a dim that this rank holds, in order."""
        part = length // cls.parts
        begin, end = functional.bounds(part, comm.rank, comm.size)
        return [(number * part + begin, number * part + end) for number in range(cls.parts)]

    @classmethod
    def check(cls, module: nn.Module, size: int, **options: Any) -> None:
        """Raise ``UsageError`` if a module cannot be split over ``size`` ranks."""
        if not isinstance(module, cls.torch_class) or type(module).forward is not cls.torch_class.forward:
            raise UsageError(f"{_article(type(module))} is not {_article(cls.torch_class)}", everywhere=True)
        cls._check_sizes(module, size, **options)

    @classmethod
    @abstractmethod
    def _check_sizes(cls, module: Any, size: int, **options: Any) -> None: ...

    def _slice(self) -> None:
        """Replace whole parameters by this rank's slices."""
        for name, parameter in self._parameters.items():
            if parameter is not None:
                parameter.data = self.slice_of(self._comm, name, parameter.data)

    @property
    def _comm(self) -> Communicator:
        assert self.comm is not None
        return self.comm

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the whole module as torch does, and keep this rank's slice."""
        if self.comm is None:  # in torch's constructor: not split yet
            cast(Any, self.torch_class).reset_parameters(self)
            return
        whole = self._whole_module()
        for name, parameter in self._parameters.items():
            if parameter is not None:
                parameter.copy_(self.slice_of(self.comm, name, cast(Tensor, whole._parameters[name])))

    @abstractmethod
    def _whole_module(self) -> nn.Module: ...


def _article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"


class _ParallelLinear(Parallel, nn.Linear):
    torch_class: type[nn.Module] = nn.Linear
    overlaps = True  # whether one function overlaps communication and computation; else a backward pass can be split
    sequence = False  # whether activations outside split regions are split along the sequence
    region: RngRegion | None = None  # in which dropout draws per rank, if the model has dropout

    def _whole_module(self) -> nn.Module:
        weight, bias = self.weight, self.bias is not None
        return nn.Linear(self.in_features, self.out_features, bias, weight.device, weight.dtype)

    def _arguments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return input, weight and bias in the dtype that autocast uses for the product."""
        bias: Tensor | None = self.bias
        kind = x.device.type
        if not torch.is_autocast_enabled(kind) or torch.float64 in (x.dtype, self.weight.dtype):
            return x, self.matrix, bias
        dtype = torch.get_autocast_dtype(kind)
        return x.to(dtype), self.matrix.to(dtype), None if bias is None else bias.to(dtype)

    @property
    def matrix(self) -> Tensor:
        """Return the weight as torch's linear function takes it, ``[out_features, in_features]``."""
        return self.weight

    def _whole_inputs(self, x: Tensor) -> Tensor:
        """Return whole sequences of whole features, whose gradients are summed over the ranks."""
        if self.sequence:
            return functional.gather_from_sequence_parallel_region(x, self._comm)
        return functional.copy_to_tensor_model_parallel_region(x, self._comm)

    def _enter_region(self, x: Tensor) -> None:
        if self.region is not None and self.training:
            self.region.enter(x.device)


class ColumnParallel(_ParallelLinear):
    """Linear layer of which each rank computes a slice of the outputs (the columns of A in x A).

    ``gathers`` gives all outputs to all ranks; the slices may then be unequal. It is an attribute
    that can be switched. Otherwise the outputs stay split, for a following ``RowParallel``. In the
    backward pass, the sum of the input's gradient over the ranks overlaps with the computation of
    the weight's gradient.
    """

    dims = {"weight": 0, "bias": 0}
    gathers = False

    @classmethod
    def _check_sizes(cls, module: Any, size: int, **options: Any) -> None:
        check = check_length if options.get("gathers") else _check_divides
        if module.out_features % cls.parts:
            raise UsageError(f"{module.out_features} outputs are not {cls.parts} equal parts", everywhere=True)
        check(module.out_features // cls.parts, size, "outputs" if cls.parts == 1 else "outputs of each part")

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, or to this rank's slice of it."""
        if self.overlaps:
            result = column_linear(*self._arguments(x), self._comm, self.sequence)
            if result.grad_fn is not None:
                result.grad_fn.layer = self  # type: ignore[attr-defined]  # for messages about the graph
        else:
            result = F.linear(self._whole_inputs(x), self.matrix, self.bias)
        if self.gathers:
            return functional.gather_from_tensor_model_parallel_region(result, self.out_features, self._comm)
        self._enter_region(x)
        return result


class SharedHeads(_ParallelLinear):
    """Linear layer with fewer heads than tensor ranks (keys and values of grouped-query attention).

    Each rank holds the whole layer and computes the one head that its query heads use. ``heads``
    divides the number of ranks; neighbouring ranks share a head. The gradients of weight, bias and
    input are summed over the ranks.
    """

    dims: dict[str, int] = {}
    heads: int

    @classmethod
    def _check_sizes(cls, module: Any, size: int, **options: Any) -> None:
        heads = options["heads"]
        if size % heads or module.out_features % heads:
            raise UsageError(
                f"{heads} heads cannot be shared by {size} tensor ranks: tensor degrees that do are multiples of "
                f"{heads}",
                everywhere=True,
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., head_width]``, this rank's head."""
        x = self._whole_inputs(x)
        bias: Tensor | None = self.bias
        parameters = [self.weight] if bias is None else [self.weight, bias]
        if torch.is_grad_enabled() and all(one.requires_grad for one in parameters):
            parameters = list(functional.copy_parameters_to_region(parameters, self._comm))
        width = self.out_features // self.heads
        begin = self._comm.rank * self.heads // self._comm.size * width
        weight, *rest = (one[begin : begin + width] for one in parameters)
        result = F.linear(x, weight, *rest)
        self._enter_region(x)
        return result


class RowParallel(_ParallelLinear):
    """Linear layer of which each rank takes a slice of the inputs; the partial products are summed over the ranks.

    The bias is whole on all ranks, and is added once, to the sum.
    """

    dims = {"weight": 1}

    @classmethod
    def _check_sizes(cls, module: Any, size: int, **options: Any) -> None:
        _check_divides(module.in_features, size, "inputs")

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's slice of ``[..., in_features]`` to ``[..., out_features]``."""
        if self.region is not None:
            self.region.leave(x.device)
        if self.overlaps:
            return row_linear(*self._arguments(x), self._comm, self.sequence)
        product = F.linear(x, self.matrix)
        if self.sequence:
            result = functional.reduce_scatter_to_sequence_parallel_region(product, self._comm)
        else:
            result = functional.reduce_from_tensor_model_parallel_region(product, self._comm)
        bias: Tensor | None = self.bias
        if bias is not None and self.sequence:
            bias = functional.copy_parameters_to_region([bias], self._comm)[0]
        return result if bias is None else result + bias.to(result.dtype)


def _check_divides(length: int, size: int, what: str) -> None:
    if length % size:
        raise UsageError(
            f"{length} {what} cannot be split over {size} tensor ranks: tensor degrees that divide them are "
            f"{functional.degrees(length)}",
            everywhere=True,
        )


def check_length(length: int, size: int, what: str) -> None:
    """Raise ``UsageError`` if a dim is too short for each rank to hold a part of it."""
    if length < size:
        raise UsageError(
            f"{length} {what} cannot be split over {size} tensor ranks: allowed are up to {length}", everywhere=True
        )
