"""Division of a model's parameters into parameter groups, and their initial values from rank 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hpctrain.collectives.communicator import Communicator
from hpctrain.parallel.buckets import group
from hpctrain.parallel.fsdp.piece import Memory, Piece, Places
from hpctrain.parallel.fsdp.units import Unit
from hpctrain.parallel.materialise import draw

FIRST_BUCKET = 2**20  # bytes: the group whose gradients are complete first is small, so that reduction starts early

Entry = tuple[str, nn.Parameter, Places]


class PieceMaker:
    """Factory of parameter groups (``Piece``) for the ranks of ``comm``; ``flat(numel, dtype)`` allocates their memory.

    ``host`` and ``host_frozen`` allocate the memory of a rank's shards of trained and of frozen
    parameters. The shards are on the device if these are None.
    """

    def __init__(
        self,
        comm: Communicator,
        flat: Memory,
        device: torch.device,
        *,
        passing: bool,
        narrow: torch.dtype | None,
        host: Memory | None = None,
        host_frozen: Memory | None = None,
    ) -> None:
        self._comm, self._flat, self._device = comm, flat, device
        self._host, self._host_frozen = host, host_frozen
        self._passing, self._narrow = passing, narrow

    def of_unit(self, unit: Unit) -> list[Piece]:
        """Return the parameter groups of a unit: one per dtype, trained and frozen parameters separately."""
        return [self._make(entries) for entries in _kinds(_entries([unit]))]

    def of_buckets(self, units: Sequence[Unit], names: Sequence[str], limit: int) -> list[Piece]:
        """Return parameter groups of at most ``limit`` bytes, in reverse order of ``names``.

        The gradients of the last parameters are computed first.
        """
        pieces = []
        place = {name: number for number, name in enumerate(names)}
        for entries in _kinds(sorted(_entries(units), key=lambda entry: -place[entry[0]])):
            sizes = [parameter.numel() * parameter.itemsize for _, parameter, _ in entries]
            for numbers in group(sizes, range(len(entries)), min(FIRST_BUCKET, limit), limit):
                pieces.append(self._make([entries[number] for number in numbers]))
        return pieces

    def _make(self, entries: Sequence[Entry]) -> Piece:
        names, parameters, places = zip(*entries)
        dtype = parameters[0].dtype
        narrow = self._narrow if self._narrow and dtype is torch.float32 else dtype
        return Piece(
            names,
            parameters,
            places,
            self._comm,
            self._flat,
            dtype=narrow,
            passing=self._passing,
            device=self._device,
            host=self._host if parameters[0].requires_grad else self._host_frozen,
        )


def _entries(units: Sequence[Unit]) -> list[Entry]:
    return [
        (name, parameter, places)
        for unit in units
        for (name, parameter), places in zip(unit.parameters, unit.places)
    ]


def _kinds(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Group the entries by dtype and ``requires_grad``: entries of one kind can share a flat tensor."""
    kinds: dict[tuple[torch.dtype, bool], list[Entry]] = {}
    for entry in entries:
        kinds.setdefault((entry[1].dtype, entry[1].requires_grad), []).append(entry)
    return list(kinds.values())


class Values:
    """Initial values of parameters on rank 0; those on the meta device are initialised on demand, module by module."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._modules = dict(model.named_modules())
        self._drawn: dict[str, Tensor] = {}

    def of(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Return the values of a parameter. Each parameter may be requested only once."""
        if not parameter.is_meta:
            return parameter.detach()
        if name not in self._drawn:
            owner = name.rpartition(".")[0]
            found = draw(self._model, owner, self._modules[owner], self._device)
            self._drawn.update({f"{owner}.{attribute}".lstrip("."): value for attribute, value in found.items()})
        return self._drawn.pop(name)
