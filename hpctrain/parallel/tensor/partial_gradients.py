"""Gradients that are partial on each tensor rank: detection in autograd's graph, and summation.

A tensor is *replicated* if all tensor ranks hold the same values, and *varies* if each rank holds
its own. The output of a column-parallel layer varies. The output of a row-parallel layer is
replicated. Any other function of a varying operand varies. Such a function may also take a
replicated operand (the weight of a norm over each head, keys that all heads share). Each rank then
computes the operand's gradient from its own part only: the gradient is the sum over the ranks.
These are the typing rules of JAX's ``shard_map`` ("varying manual axes"), in which the missing sum
is called ``pvary``.

Note: autograd's graph has one node per function, with an edge to the node of each differentiable
operand. The gradients that need a sum are those on edges from a varying node to a replicated one. A
hook on the varying node sums them. All ranks have the same graph and run its nodes in the same
order, so their collectives match.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import MismatchError, UsageError
from hpctrain.log import logger
from hpctrain.parallel.tensor import functional
from hpctrain.parallel.tensor.layers import Parallel
from hpctrain.parallel.tensor.sequence import sum_gradients
from hpctrain.plain_tensors import on_shards

Node = Any  # torch.autograd.graph.Node
_METADATA_KEY = "hpctrain.summed"


class PartialGradients:
    """Sums over the tensor ranks of gradients that no split layer and no module of kind ``replicated`` sums.

    ``split`` contains the modules whose parameters are slices. The graphs of forward passes are
    searched until a pass needs no sum. If only parameters meet split features, the search ends,
    because their modules then sum the gradients. If activations meet split features too, the search
    continues in every pass. A module that is called for the first time later restarts the search.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        split: Iterable[Parallel],
        entries: Mapping[nn.Module, str],
    ) -> None:
        self._comm, self._split, self._entries = comm, tuple(split), entries
        self._model = model
        self._searches, self._in_every_pass = True, False
        self._summed_modules: set[nn.Module] = set()
        self._logged = False
        self._uncalled = {
            module: module.register_forward_pre_hook(lambda called, args: self._called(called))  # copies share it
            for module in model.modules()
            if any(one is not None and one.requires_grad for one in module._parameters.values())
        }

    def _called(self, module: nn.Module) -> None:
        if torch.is_grad_enabled() and module in self._uncalled:
            self._searches = True
            self._uncalled.pop(module).remove()

    def after_forward(self, result: Any, varying: Collection[Tensor] = (), *, ends: bool = True) -> None:
        """Register sums of partial gradients for the backward pass; ``varying`` contains inputs of the model that vary.

        ``ends`` is true if the result is that of the whole model. Raises ``UsageError`` if a
        column-parallel layer, or the program, receives split features where whole ones are
        required.
        """
        if not (self._searches and torch.is_grad_enabled()):
            return
        nodes = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        slices = {id(module._parameters[name]) for module in self._split for name in module.dims}
        states = varies(nodes, slices | {id(tensor) for tensor in varying})
        self._check(states)
        if ends and nodes and states[nodes[0]]:
            self._check_result(nodes[0], states)
        found: list[Node] = []
        for node, own in states.items():
            if own and _declared_varying(node) is None:
                indices = _replicated_operands(node, states)
                if indices and _METADATA_KEY not in node.metadata:
                    node.metadata[_METADATA_KEY] = True
                    node.register_hook(_summing_hook(indices, self._comm))
                    found += [node.next_functions[index][0] for index in indices]
        if found:
            self._in_every_pass = not self._sum_in_modules(found, states) or self._in_every_pass
        self._searches = bool(found) or self._in_every_pass
        self._log(found)

    def _sum_in_modules(self, found: Sequence[Node], states: Mapping[Node, bool]) -> bool:
        """Let modules sum the gradients of their own parameters from the next pass on, if no other sums are needed.

        Return whether that is the case; then the search ends with the first pass that needs no sum.
        """
        leaves = {id(leaf.variable) for leaf in found if hasattr(leaf, "variable")}
        owners = {id(one): module for module in self._model.modules() for one in module._parameters.values()}
        also_replicated = {  # parameters that functions of replicated operands also use
            id(child.variable)
            for node, varying in states.items()
            if not varying
            for child, _ in node.next_functions
            if hasattr(child, "variable")
        }
        held = {owners[leaf] for leaf in leaves if leaf in owners}
        own = [one for owner in held for one in owner._parameters.values()]
        used = {id(one) for one in own if one is not None and one.requires_grad}
        if (
            len(leaves) < len({id(node) for node in found})
            or used != leaves
            or used & also_replicated
            or held & self._summed_modules
        ):
            return False
        for owner in held:
            sum_gradients(owner, self._comm)
        self._summed_modules |= held
        return True

    def _check(self, states: Mapping[Node, bool]) -> None:
        """Raise ``UsageError`` if inputs of a column-parallel layer vary: it would sum their gradients over ranks."""
        for node in states:
            input_node = node.next_functions[0][0] if node.next_functions else None
            layer = getattr(node, "layer", None)
            if layer is not None and input_node is not None and states[input_node]:
                raise UsageError(
                    f"module {self._entries.get(layer, 'of kind column')} takes whole features; its inputs are "
                    f"{self._source(input_node, states)}; a row must come between two columns, and replicated is only "
                    "for modules between a column and its row",
                    everywhere=True,
                )

    def _check_result(self, node: Node, states: Mapping[Node, bool]) -> None:
        """Raise ``UsageError`` if the model returns split features, unless they are logits for a split loss."""
        heads = [one for one in self._split if self._entries.get(one, "").endswith("=vocabulary)")]
        if all(getattr(head, "gathers", True) for head in heads):
            raise UsageError(
                f"the outputs of the model are {self._source(node, states)}; a row must come behind a column before "
                "the model ends; name the next linear layer as row, or give the last one the kind vocabulary, which "
                "gathers",
                everywhere=True,
            )

    def _source(self, node: Node, states: Mapping[Node, bool]) -> str:
        layer = _nearest_column(node, states)
        if layer is None:
            return "each tensor rank's own, as a replicated module has computed them"
        return f"each tensor rank's own, behind {self._entries.get(layer, 'a column')}"

    def _log(self, found: list[Node]) -> None:
        if found and not self._logged and not self._comm.rank:
            leaves = {id(leaf.variable) for leaf in found if hasattr(leaf, "variable")}
            named = [name for name, parameter in self._model.named_parameters() if id(parameter) in leaves]
            logger.debug(
                "tensor parallelism: gradients that are summed over the tensor ranks, as their operands meet split "
                "features: %s and %d activations per pass",
                ", ".join(sorted(named)) or "no parameters",
                len(found) - len(leaves),
            )
        self._logged = self._logged or bool(found)


def replicate(module: nn.Module, comm: Communicator) -> None:
    """Sum over the ranks the gradients of a whole module's parameters, and of its replicated inputs.

    Whether an input varies is a property of the model. It is determined from the graph of the first
    pass that has one.
    """
    for inner in module.modules():
        if any(parameter is not None for parameter in inner._parameters.values()):
            sum_gradients(inner, comm)
    replicated: dict[int, bool] = {}  # whether all ranks hold an input alike, by its index among the leaves

    def spread(_: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        if not torch.is_grad_enabled():
            return None
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                if index not in replicated:
                    replicated[index] = not varies([leaf.grad_fn])[leaf.grad_fn]
                if replicated[index]:
                    leaves[index] = functional.copy_to_tensor_model_parallel_region(leaf, comm)
        return tree_unflatten(leaves, structure)

    module.register_forward_pre_hook(spread, with_kwargs=True)


def varies(nodes: Iterable[Node], leaves: Collection[int] = ()) -> dict[Node, bool]:
    """Return, for each node reachable from ``nodes``, whether its function's result varies over the tensor ranks.

    ``leaves`` contains the ids of the varying leaves of the graph.
    """
    states: dict[Node, bool] = {}
    stack = list(nodes)
    while stack:
        node = stack[-1]
        below = [child for child, _ in node.next_functions if child is not None]
        missing = [child for child in below if child not in states] if node not in states else []
        if missing:
            stack += missing
            continue
        stack.pop()
        if node not in states:
            mark = _declared_varying(node)
            leaf = getattr(node, "variable", None)
            own = id(leaf) in leaves if leaf is not None else any(states[child] for child in below)
            states[node] = own if mark is None else mark
    return states


def _nearest_column(node: Node, states: Mapping[Node, bool]) -> nn.Module | None:
    """Return the nearest column-parallel layer below a varying node."""
    queue, seen = deque([node]), {node}
    while queue:
        each = queue.popleft()
        layer: nn.Module | None = getattr(each, "layer", None)
        if layer is not None:
            return layer
        if _declared_varying(each) is None:
            new = [child for child, _ in each.next_functions if child is not None and states[child]]
            queue.extend(child for child in new if child not in seen)
            seen.update(new)
    return None


def _declared_varying(node: Node) -> bool | None:
    """Return whether a function of this package declares its result varying; None for any other function."""
    kind = getattr(type(node), "_forward_cls", None)
    if kind is None:
        return None
    mark: bool | None = getattr(node, "varies", getattr(kind, "varies", None))
    return mark


def _replicated_operands(node: Node, states: dict[Node, bool]) -> list[int]:
    """Return the indices of the replicated operands of a function with a varying result."""
    indices = []
    for index, (child, _) in enumerate(node.next_functions):
        if child is not None and not states[child]:
            leaf = getattr(child, "variable", None)
            if leaf is None or leaf.numel():  # a leaf without elements only triggers a node (``split_backward``)
                indices.append(index)
    return indices


def _summing_hook(indices: list[int], comm: Communicator) -> Any:
    def hook(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        partial = {index: one for index in indices if (one := gradients[index]) is not None}
        sums = dict(zip(partial, functional.all_reduce_together(partial.values(), comm)))
        return tuple(sums.get(index, one) for index, one in enumerate(gradients))

    return hook


# Comparison of gradients before the first update ----------------------------------------------------------------------


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
        numel, generator, sums = converted.numel(), torch.Generator().manual_seed(converted.numel()), []
        for _ in range(PROJECTIONS):
            signs = torch.randint(0, 2, (numel,), generator=generator, dtype=torch.int8).to(converted.device) * 2 - 1
            sums.append(float(torch.dot(converted, signs.to(converted.dtype))))
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
