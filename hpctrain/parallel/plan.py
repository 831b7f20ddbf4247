"""Derivation of a run's mesh and microbatches from its settings, before anything is built."""

from __future__ import annotations

from hpctrain.collectives.mesh import Shape, fill_in
from hpctrain.errors import SettingsError
from hpctrain.parallel.settings import ParallelSettings

A_STAGE = 4  # microbatches per stage that suffice to keep the pipeline bubble small


def shape_of(settings: ParallelSettings, size: int) -> Shape:
    """Return the mesh of ``size`` ranks. Raises ``UsageError``, which names lengths that would work."""
    return fill_in(size, pipe=settings.pipe, tensor=settings.tensor, order=settings.order)


def generator_number(shape: Shape, rank: int) -> int:
    """Return a number shared by the ranks that must draw the same dropout: those along the tensor axis."""
    return shape.line("tensor", rank)[0]


def microbatches_for(settings: ParallelSettings, samples: int) -> int:
    """Return the number of microbatches for a rank's samples.

    Raises ``SettingsError`` for a number that does not divide the samples, or that the schedule
    does not support.
    """
    stages = settings.pipe
    if settings.microbatches:
        if samples % settings.microbatches:
            raise SettingsError(
                f"parallel.microbatches = {settings.microbatches} does not divide the {samples} samples that each "
                f"pipeline has in a backward pass: allowed are {_tell(_divisors(samples))}",
                everywhere=True,
            )
        return settings.microbatches
    fitting = [count for count in _divisors(samples) if count <= A_STAGE * stages]
    if settings.schedule == "interleaved":
        fitting = [count for count in fitting if count % stages == 0]
    if not fitting:
        raise SettingsError(
            f"{samples} samples cannot be cut into microbatches for the interleaved schedule, whose number must be a "
            f"multiple of the {stages} stages: take a batch of which each pipeline gets a multiple of {stages}",
            everywhere=True,
        )
    return fitting[-1]


def even_pieces(samples: int, most: int) -> int:
    """Return the largest number of equal pieces, at most ``most``."""
    return max(count for count in _divisors(samples) if count <= most)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _tell(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
