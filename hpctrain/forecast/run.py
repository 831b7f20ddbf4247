"""Description of a planned run: settings, model and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hpctrain.collectives.mesh import Shape
from hpctrain.errors import UsageError
from hpctrain.forecast.facts import Facts
from hpctrain.parallel.offload.settings import OffloadSettings
from hpctrain.parallel.pipeline.schedule import Schedule, make
from hpctrain.parallel.plan import microbatches_for
from hpctrain.parallel.settings import ParallelSettings
from hpctrain.train.settings import Settings

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class PlannedRun:
    """Settings of a run, description of its model, and the ranks that it will have.

    Raises ``UsageError`` or ``SettingsError`` if the settings do not fit that number of ranks.
    """

    settings: Settings
    facts: Facts
    ranks: int
    ranks_per_node: int
    device: Device = "cpu"

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1:
            raise UsageError(f"{self.ranks} ranks, {self.ranks_per_node} per node: there must be at least 1 of each")
        check_run(self.settings, self.ranks)

    @property
    def parallel(self) -> ParallelSettings:
        """Return the settings of parallelism."""
        return self.settings.parallel

    @property
    def offload(self) -> OffloadSettings:
        """Return the settings of CPU offload."""
        return self.settings.offload

    @cached_property
    def shape(self) -> Shape:
        """Return the mesh of the ranks."""
        return check_run(self.settings, self.ranks)

    @property
    def nodes(self) -> int:
        """Return the number of nodes; the last may be only partly filled."""
        return -(-self.ranks // self.ranks_per_node)

    @property
    def ranks_on_node(self) -> int:
        """Return the number of ranks on the fullest node."""
        return min(self.ranks, self.ranks_per_node)

    def node_of(self, rank: int) -> int:
        """Return the node of a rank; nodes are filled one after the other."""
        return rank // self.ranks_per_node

    @property
    def samples(self) -> int:
        """Return the samples per backward pass of a rank, or of a pipeline."""
        train = self.settings.train
        return train.batch // self.shape.data // train.accumulate

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches per backward pass of a pipeline; 1 without one."""
        return microbatches_for(self.parallel, self.samples) if self.parallel.pipe > 1 else 1

    @property
    def microbatch(self) -> int:
        """Return the number of samples of a microbatch."""
        return self.samples // self.microbatches

    @cached_property
    def schedule(self) -> Schedule | None:
        """Return the pipeline schedule; None without a pipeline."""
        if self.parallel.pipe == 1:
            return None
        parallel = self.parallel
        return make(parallel.schedule, parallel.pipe, self.microbatches, parallel.chunks_a_rank)


def check_run(settings: Settings, ranks: int) -> Shape:
    """Return the mesh if ranks, batch and microbatches fit together; otherwise raise an error."""
    from hpctrain.train.run import check_sizes

    return check_sizes(settings, ranks)
