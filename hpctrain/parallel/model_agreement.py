"""Agreement on a model: checks that all ranks have the same one, and broadcasts of its values."""

from __future__ import annotations

import hashlib
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import MismatchError
from hpctrain.shard import dtype_name

# The ranks compare for each entry: kind, name, shape, dtype, and whether it requires a gradient.
Entry = tuple[str, str, tuple[int, ...], str, bool]


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that require gradients, each once, under the first of its names."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def check_same_model(model: nn.Module, comm: Communicator) -> None:
    """Raise ``MismatchError`` on all ranks if parameters or buffers of any rank differ in name, shape or dtype.

    Collective. MPI would reduce mismatched tensors without an error and return garbage. Only
    digests are exchanged unless there is a difference.
    """
    entries = model_entries(model)
    digest = hashlib.sha256(repr(entries).encode()).digest()
    digests = comm.all_gather_object(digest)
    if len(set(digests)) == 1:
        return
    raise MismatchError(_first_difference(comm.all_gather_object(entries)), everywhere=True)


def broadcast_model(model: nn.Module, comm: Communicator) -> None:
    """Broadcast the parameters and buffers of rank 0 to all ranks. Collective."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        comm.broadcast(tensor)


def model_entries(model: nn.Module) -> list[Entry]:
    """Return the entries that must be equal on all ranks, in order."""
    named: list[tuple[str, str, Any]] = [("parameter", *item) for item in model.named_parameters()]
    named += [("buffer", *item) for item in model.named_buffers()]
    return [
        (kind, name, tuple(tensor.shape), dtype_name(tensor.dtype), tensor.requires_grad)
        for kind, name, tensor in named
    ]


def _first_difference(entries_of_ranks: list[list[Entry]]) -> str:
    for position, rows in enumerate(zip_longest(*entries_of_ranks)):
        for rank, row in enumerate(rows):
            if row != rows[0]:
                return (
                    f"the ranks hold different models: rank 0 has {_describe(rows[0])}, "
                    f"rank {rank} has {_describe(row)} at position {position}; "
                    "build the same model on every rank, from the same settings"
                )
    raise AssertionError("digests differ, entries do not")


def _describe(row: Entry | None) -> str:
    if row is None:
        return "nothing"
    kind, name, shape, dtype, trained = row
    return f"{kind} {name} of shape {shape} and dtype {dtype}{'' if trained or kind == 'buffer' else ', frozen'}"
