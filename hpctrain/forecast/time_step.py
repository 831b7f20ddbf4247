"""Time of a step: passes, pipeline, communication and optimizer step of the slowest rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from hpctrain.collectives.choice.table import Layout
from hpctrain.forecast.machine import Machine
from hpctrain.forecast.run import PlannedRun
from hpctrain.forecast.stages import cuts_of
from hpctrain.forecast.time_collectives import Network, group_of
from hpctrain.forecast.time_exchange import Held, exchange_of
from hpctrain.forecast.time_passes import Clock, Passes
from hpctrain.forecast.time_pipeline import pipeline
from hpctrain.forecast.time_update import update_of, update_seconds
from hpctrain.train.calibration import Measurement

PARTS = ("forward", "backward", "activations", "bubble", "gradients", "parameters", "clip", "optimizer", "offload")
BESIDE = "beside"


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by its parts, and its samples, tokens and operations."""

    parts: Mapping[str, float]
    hidden: float  # seconds of communication that overlaps with the passes
    samples: int
    tokens: int  # 0 if samples are not token sequences
    flops: float  # operations of the model in a step, over all ranks
    ranks: int
    peak: float  # operations per second of a rank's device; 0: unknown

    @property
    def seconds(self) -> float:
        """Return the time of a step."""
        return sum(self.parts.values())

    @property
    def flops_a_rank(self) -> float:
        """Return the operations per second of a rank."""
        return self.flops / self.seconds / self.ranks

    @property
    def share_of_peak(self) -> float | None:
        """Return the share of the device's peak; None if the peak is unknown."""
        return self.flops_a_rank / self.peak if self.peak else None

    def as_dict(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "seconds": self.seconds,
            "parts": dict(self.parts),
            "hidden_seconds": self.hidden,
            "samples_per_second": self.samples / self.seconds,
            "tokens_per_second": self.tokens / self.seconds if self.tokens else None,
            "flops": self.flops,
            "flops_per_second_and_rank": self.flops_a_rank,
            "share_of_peak": self.share_of_peak,
        }


@dataclass(frozen=True)
class Forecast:
    """Forecast of steps on a machine."""

    machine: Machine
    clock: Clock
    calibrated: Mapping[Layout, Measurement] = field(default_factory=dict)

    def network(self, run: PlannedRun) -> Network:
        """Return the timing of collectives between a run's ranks."""
        return Network(self.machine, self.machine.seat(run.ranks_on_node), self.calibrated)

    def step(self, run: PlannedRun) -> StepTime:
        """Return the time of a step of a run."""
        network = self.network(run)
        layers = self.clock.layers(run, network)
        cuts = stages_of(run, len(layers))
        held = self._held(run, cuts)
        accumulate = run.settings.train.accumulate
        if run.parallel.pipe > 1:
            updates = [update_seconds(run, one, network.seat) for one in held]
            passed = pipeline(run, layers, cuts, updates, self._send(run, cuts))
        else:
            passed = _flat(layers)
        parts = {name: seconds * accumulate for name, seconds in passed.items()}
        largest = max(held, key=lambda one: one.numel)
        exchange = exchange_of(run, largest, network, parts["forward"], parts["backward"])
        update = update_of(run, largest, self.machine, network.seat, parts["backward"])
        parts |= {"gradients": exchange.gradients, "parameters": exchange.parameters}
        parts |= {"clip": update.clip, "optimizer": update.optimizer, "offload": update.offload}
        parts[BESIDE] = update.beside
        batch, accumulated = run.settings.train.batch, run.shape.data * accumulate * run.samples
        return StepTime(
            parts={name: parts[name] for name in (*PARTS, BESIDE)},
            hidden=exchange.hidden,
            samples=batch,
            tokens=batch * prod(run.facts.targets.shape) if run.settings.data.format == "tokens" else 0,
            flops=self.clock.whole.flops(accumulated),
            ranks=run.ranks,
            peak=self.machine.peak,
        )

    def _send(self, run: PlannedRun, cuts: Sequence[range]) -> float:
        """Return the seconds of the largest message between stages."""
        line = group_of(run.shape, "pipe", run.ranks_per_node)
        outputs = self.clock.local.at(run.microbatch)
        largest = max(outputs[cut.stop - 1].output for cut in cuts[:-1])
        return self.network(run).message(largest, crosses=line.nodes > 1)

    def _held(self, run: PlannedRun, cuts: Sequence[range]) -> list[Held]:
        """Return the parameters of each pipeline stage, over all its chunks."""
        layers, pipe = self.clock.local.at(1), run.parallel.pipe
        found = []
        for stage in range(pipe):
            own = [layers[number] for cut in cuts[stage::pipe] for number in cut]
            with_parameters = sum(1 for layer in own if layer.numel)
            numel, tensors = sum(layer.numel for layer in own), sum(layer.tensors for layer in own)
            found.append(Held(numel, tensors, with_parameters))
        return found


def stages_of(run: PlannedRun, layers: int) -> list[range]:
    """Return the layers of each chunk; the loss is in the last one."""
    if run.parallel.pipe == 1:
        return [range(layers)]
    *cuts, last = cuts_of(run)
    return [*cuts, range(last.start, last.stop + 1)]


def _flat(layers: Sequence[Passes]) -> dict[str, float]:
    return {
        "forward": sum(layer.forward for layer in layers),
        "backward": sum(layer.backward for layer in layers),
        "activations": sum(layer.exchange for layer in layers),
        "bubble": 0.0,
    }
