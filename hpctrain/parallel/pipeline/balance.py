"""Partition of a sequence of layers into stages, by the costs of the layers or as the user specifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpctrain.parallel.pipeline.costs import costs
from hpctrain.parallel.pipeline.layers import Layer
from hpctrain.parallel.pipeline.partition import by_hand, check_parts, partition


def balance(
    layers: Sequence[Layer],
    parts: int,
    how: str | Sequence[int | str] = "compute",
    example: Any = None,
    device: torch.device = torch.device("cpu"),
) -> list[range]:
    """Return the layers of each part as ranges of indices into ``layers``.

    ``how`` is a measure of ``costs``, the number of layers of each part, or the names of the layers
    at which parts begin. Time is measured on the calling rank. Call this on one rank and broadcast
    the result.
    """
    check_parts(len(layers), parts)
    if not isinstance(how, str):
        return by_hand([layer.name for layer in layers], parts, how)
    return partition(costs(layers, how, example, device), parts)
