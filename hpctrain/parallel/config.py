"""Settings of the strategies, and the mesh and microbatches that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpctrain.comm.mesh import AXES, Shape, fill_in
from hpctrain.errors import SettingsError
from hpctrain.settings import check as check_fields
from hpctrain.settings import check_most, section_of

SHARDED = ("zero1", "zero2", "fsdp")


@dataclass(frozen=True)
class ParallelSettings:
    """Distribution of the work over the ranks (section ``[parallel]``)."""

    # Strategy of the data axis. ddp: every rank holds the whole model; zero1: the optimizer states
    # are sharded over the ranks; zero2: also the gradients; fsdp: also the parameters (ZeRO 3); dp:
    # torch's DataParallel, one process, several GPUs; easgd: every rank trains its own replica,
    # coupled by a centre (section asynchronous).
    data: Literal["ddp", "zero1", "zero2", "fsdp", "dp", "easgd", "server", "hogwild"] = "ddp"
    # Shard over all ranks, or only inside each node, with a replica on every node.
    shard_within: Literal["world", "node"] = "world"
    # Number of pipeline stages, and number of ranks that split each weight matrix. The remaining
    # factor of the ranks is the data axis.
    pipe: int = 1
    tensor: int = 1
    # Axes of the mesh from the slowest to the fastest: ranks along the last axis are neighbours.
    order: tuple[str, ...] = AXES
    # Pipeline schedule: naive, gpipe, 1f1b, interleaved, zb-h1, or pipedream, which updates the
    # weights after every microbatch.
    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "pipedream"] = "1f1b"
    # Number of microbatches per backward pass; 0: as many as the samples allow, up to four per
    # stage.
    microbatches: int = 0
    # Model chunks per stage (interleaved); 0: 2 for interleaved, else 1.
    chunks: int = 0
    # Partition of the layers into stages: by their estimated work (compute), by their measured
    # time, by their parameters, or explicitly: layer numbers ("3,5") or names of the first layers
    # of stages ("blocks.2").
    partition: str = "compute"
    # Tensor-parallel plan in addition to the model's own: "*.fc=column", "*.project=row"
    # (docs/tensor.md).
    tensor_plan: tuple[str, ...] = ()
    # Sequence parallelism: also split the activations between the split matrices, along the
    # sequence.
    sequence: bool = False
    # Modules that are unsharded (fsdp) or recomputed as a unit: names of classes ("Block") or
    # modules ("blocks.*"); empty: repeated blocks, and sufficiently large modules.
    units: tuple[str, ...] = ()
    # Number of units to unshard ahead of the computing one, if a GPU can do both concurrently.
    prefetch: int = 1
    # Compute and communicate in bfloat16, with shards, moments and updates in float32 (zero1,
    # zero2, fsdp).
    mixed_precision: Literal["none", "bfloat16"] = "none"
    # Gradients of all but the last backward pass of a step: keep them whole on each rank (local),
    # or reduce them immediately (reduced), which needs messages but no memory; auto: reduced for
    # zero2 and fsdp.
    accumulate: Literal["auto", "local", "reduced"] = "auto"
    # Recompute the activations of each unit in the backward pass instead of storing them.
    recompute: bool = False
    # Optimizer classes that update each element independently, in addition to those of torch.
    elementwise: tuple[str, ...] = ()
    # Bucket size of the gradient reduction, in MiB; the first bucket is small, so that reductions
    # start early.
    bucket_mib: float = 4.0
    # Round gradients to bfloat16 for the reduction, which halves its bytes; sums are still computed
    # in float32.
    compression: Literal["none", "bfloat16"] = "none"
    # Broadcast the batch-norm statistics (and all other buffers) of rank 0 before each forward pass
    # in training.
    broadcast_buffers: bool = True
    # Convert batch norms to use the statistics of all data ranks' batches. Unset: if a synchronous
    # strategy (ddp, zero1, zero2, fsdp) without a pipeline divides the samples of a batch.
    sync_batchnorm: bool | None = None
    # Compare the outputs of a tensor-parallel model with those of the whole model, in the first
    # pass.
    check_split: bool = True
    # Optimizer classes that update each parameter independently, but need all of its elements, in
    # addition to Adafactor and Muon of torch. Under zero1, zero2 and fsdp, one rank updates each
    # parameter.
    whole_parameters: tuple[str, ...] = ()
    # Results that do not depend on the number of ranks and nodes, nor on the strategy (ddp, zero1,
    # zero2, fsdp): every batch is computed in microbatches of a fixed size (train.microbatch), whose
    # gradients are added in a fixed order (docs/reproducible.md).
    reproducible: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "parallel")
        if not 0 < self.bucket_mib < math.inf:
            raise SettingsError(f"setting parallel.bucket_mib = {self.bucket_mib}: must be a number of MiB above 0")
        check_most(self, "parallel", bucket_mib=2**24, prefetch=2**20, microbatches=2**20, chunks=2**10)
        check_most(self, "parallel", pipe=2**20, tensor=2**20)
        self._check_mesh()
        if self.reproducible:
            self._check_reproducible()
        for name, default in {"shard_within": "world", "mixed_precision": "none"}.items():
            if getattr(self, name) != default and self.data not in SHARDED:
                raise SettingsError(
                    f"setting parallel.{name} = {getattr(self, name)!r}: is for parallel.data = {', '.join(SHARDED)}, "
                    f"not {self.data}"
                )

    def _check_mesh(self) -> None:
        for name, least in {"pipe": 1, "tensor": 1, "microbatches": 0, "chunks": 0, "prefetch": 0}.items():
            if getattr(self, name) < least:
                raise SettingsError(f"setting parallel.{name} = {getattr(self, name)}: must be at least {least}")
        if sorted(self.order) != sorted(AXES):
            raise SettingsError(f"setting parallel.order = {list(self.order)}: name {', '.join(AXES)}, once each")
        for name in ("sequence", "tensor_plan"):
            if getattr(self, name) and self.tensor == 1:
                raise SettingsError(f"setting parallel.{name}: is for parallel.tensor above 1")
        interleaved = self.schedule == "interleaved"
        if self.chunks and (self.chunks > 1) is not interleaved:
            raise SettingsError(
                f"setting parallel.chunks = {self.chunks}: must be "
                + ("2 or more" if interleaved else "1")
                + f' for parallel.schedule = "{self.schedule}"'
            )
        if self.data == "dp" and self.splits_model:
            raise SettingsError('setting parallel.data = "dp": is for one process, without parallel.pipe or .tensor')
        if self.pipe > 1 and self.schedule == "pipedream" and self.data != "ddp":
            raise SettingsError(
                f'setting parallel.data = "{self.data}": parallel.schedule = "pipedream" keeps versions of whole '
                'parameters, and works with "ddp" only'
            )
        if self.pipe > 1 and self.sync_batchnorm:
            raise SettingsError("setting parallel.sync_batchnorm: is not for parallel.pipe above 1")

    def _check_reproducible(self) -> None:
        """Raise ``SettingsError`` for a setting whose results depend on the number of ranks."""
        refused = {
            "data": (self.data in ("ddp", *SHARDED), "updates depend on the order in which ranks make them"),
            "pipe": (self.pipe == 1, "stages split batches into microbatches of their own"),
            "tensor": (self.tensor == 1, "partial products are added over the ranks that split a matrix"),
            "compression": (self.compression == "none", "the sums of the ranks would be rounded, not the gradients"),
            "sync_batchnorm": (not self.sync_batchnorm, "its statistics are those of all microbatches together"),
            "shard_within": (self.shard_within == "world", "the sums of the nodes would be added"),
        }
        for name, (allowed, reason) in refused.items():
            if not allowed:
                raise SettingsError(
                    f"setting parallel.reproducible = true with parallel.{name} = {getattr(self, name)!r}: {reason}; "
                    "allowed are ddp, zero1, zero2 and fsdp without pipelines, tensor parallelism, compression, "
                    "synchronised batch norm and shard_within; remove one of the two settings"
                )

    @property
    def summary(self) -> str:
        """The strategy in a few words, as ``fsdp, pipe 2``."""
        axes = [f"{axis} {count}" for axis, count in (("pipe", self.pipe), ("tensor", self.tensor)) if count > 1]
        return ", ".join([self.data, *axes])

    @property
    def splits_model(self) -> bool:
        """Return whether ranks hold parts of the model (pipe, tensor)."""
        return self.pipe * self.tensor > 1

    @property
    def chunks_a_rank(self) -> int:
        """Return the number of model chunks per stage."""
        return self.chunks or (2 if self.schedule == "interleaved" else 1)

    @property
    def reduces_early(self) -> bool:
        """Return whether every backward pass of a step is reduced by itself."""
        return self.accumulate == "reduced" or self.accumulate == "auto" and self.data in ("zero2", "fsdp")


def parallel_settings(value: ParallelSettings | Mapping[str, Any] | str | None) -> ParallelSettings:
    """Return the settings that a program passed: an instance, a dict, or the name of a data strategy.

    Raises ``SettingsError`` for any other value.
    """
    if isinstance(value, str):
        value = {"data": value}
    return section_of(ParallelSettings, value, "parallel", allowed=", the name of a strategy (parallel.data)")


MICROBATCHES_PER_STAGE = 4  # microbatches per stage that suffice to keep the pipeline bubble small


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
                f"pipeline has in a backward pass: allowed are {', '.join(map(str, _divisors(samples)))}",
                everywhere=True,
            )
        return settings.microbatches
    fitting = [count for count in _divisors(samples) if count <= MICROBATCHES_PER_STAGE * stages]
    if settings.schedule == "interleaved":
        fitting = [count for count in fitting if count % stages == 0]
    if not fitting:
        raise SettingsError(
            f"{samples} samples cannot be cut into microbatches for the interleaved schedule, whose number must be a "
            f"multiple of the {stages} stages: take a batch of which each pipeline gets a multiple of {stages}",
            everywhere=True,
        )
    return fitting[-1]


def largest_divisor(samples: int, most: int) -> int:
    """Return the largest number of equal parts, at most ``most``."""
    return max(count for count in _divisors(samples) if count <= most)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
