"""Comparison of the gradients of unsplit parameters between tensor ranks, before the first update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hpctrain.errors import MismatchError
from hpctrain.plain_tensors import as_parts

SIGNS = 4  # projections of each gradient
SAMPLE = 2**20  # approximate number of elements sampled from each gradient
NAMED = 4  # parameters named in an error
Sums = dict[str, tuple[float, ...]]


@as_parts
@torch.no_grad()
def sums_of(gradients: Sequence[tuple[str, Tensor]]) -> Sums:
    """Return for each gradient, or a sample of its elements: the norm, its tolerance, and sums with fixed signs.

    The norm of the difference of two gradients is about that of the difference of such sums. All
    ranks compute a replicated gradient from the same bits by the same functions, so on a CPU there
    is no difference. On a GPU, functions that add in nondeterministic order differ by rounding
    errors. A missing sum over the ranks changes a gradient by a fraction of itself. The tolerance
    is between the two: the square root of the precision.
    """
    found: Sums = {}
    for name, gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        values = (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).reshape(-1)
        values = values[:: 1 + len(values) // SAMPLE]
        wide = values.to(torch.float64 if values.device.type == "cpu" else torch.float32)
        generator = torch.Generator().manual_seed(wide.numel())
        signs = [
            torch.randint(0, 2, (wide.numel(),), generator=generator, dtype=torch.int8).to(wide.device) * 2 - 1
            for _ in range(SIGNS)
        ]
        sums = [float(torch.dot(wide, sign.to(wide.dtype))) for sign in signs]
        found[name] = (float(wide.norm()), math.sqrt(torch.finfo(gradient.dtype).eps), *sums)
    return found


def check_same(everyone: Sequence[Mapping[str, tuple[float, ...]]]) -> None:
    """Raise ``MismatchError`` if tensor ranks have different gradients of parameters that they hold alike.

    A name may be followed by a space and the slice that a rank holds. Names of a single rank are
    not compared.
    """
    first = everyone[0]
    # If a gradient is zero except for rounding, every digit may differ.
    negligible = 1e-6 * math.sqrt(sum(values[0] ** 2 for values in first.values()))
    for rank, other in enumerate(everyone):
        differing = [
            name.partition(" ")[0]
            for name, values in first.items()
            if name in other and _differ(values, other[name], negligible)
        ]
        if differing:
            named = list(reversed(differing))[:NAMED]
            more = f" and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
            raise MismatchError(
                f"gradients of parameters that are not split, in the first step: {', '.join(named)}{more} differ "
                f"between tensor ranks 0 and {rank}; each computes them from its part of split features, and nothing "
                f"sums them up; write '{named[0].rpartition('.')[0] or '*'}=replicated' in parallel.tensor_plan",
                everywhere=True,
            )


def _differ(values: tuple[float, ...], other: tuple[float, ...], negligible: float) -> bool:
    norm, tolerance, *_ = values
    if not all(map(math.isfinite, (*values, *other))):
        return False  # reported by other checks
    allowed = tolerance * max(norm, other[0]) + negligible
    return any(abs(one - two) > allowed for one, two in zip(values, other))
