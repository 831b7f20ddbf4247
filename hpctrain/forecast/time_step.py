"""Time of a step: passes, pipeline, communication and optimizer step of the slowest rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from math import prod

from hpctrain.comm.tuning.table import RankLayout
from hpctrain.forecast.machine import MachineRates, RankShare
from hpctrain.forecast.rank import RankModel, rank_models
from hpctrain.forecast.recorder import Call
from hpctrain.forecast.run import Group, PlannedRun, cuts_of, group_of
from hpctrain.forecast.time_communication import (
    FLOAT,
    Network,
    ParameterTotals,
    exchange_of,
    gradient_bytes,
    shard_ranks,
)
from hpctrain.forecast.time_layers import LayerTime, LayerTimer
from hpctrain.parallel.pipeline.timeline import Costs, simulate
from hpctrain.train.calibration import Measurement
from hpctrain.train.optimizer import state_per_element

# Memory traffic per element: the norm reads each gradient once; clipping reads and writes it.
NORM, CLIP = FLOAT, 2 * FLOAT
# Operators per parameter, in both; and the fixed overhead of a step, in operators: batch, learning
# rate, log.
EACH, OPERATORS_BESIDE = 3, 150


def update_bytes(run: PlannedRun) -> float:
    """Return the memory traffic per element of an optimizer step: 28 bytes for AdamW.

    One pass reads parameter, gradient and optimizer state (two moments), and writes all except the
    gradient.
    """
    return FLOAT * (3 + 2 * state_per_element(run.settings.optimizer))


def update_of(
    run: PlannedRun, held: ParameterTotals, machine: MachineRates, rank_share: RankShare, backward: float
) -> dict[str, float]:
    """Return the seconds of the work after the passes; copies to the host may overlap with ``backward`` seconds."""
    owned, tensors = held.numel / shard_ranks(run), held.tensors / shard_ranks(run)
    kernels = EACH * tensors if machine.kind == "cpu" else EACH  # a GPU has one kernel for many
    each = kernels * rank_share.op_overhead
    clip = (NORM + (CLIP if run.settings.train.clip else 0)) * owned / rank_share.bandwidth + each
    optimizer, offload = update_bytes(run) * owned / rank_share.bandwidth + each, 0.0
    if run.parallel.pipe > 1 and run.parallel.schedule == "pipedream":
        clip = optimizer = 0.0  # updates are made between the passes
    elif run.offload.any_update:
        optimizer, offload = _offloaded(run, owned, machine, rank_share, backward)
    beside = OPERATORS_BESIDE * rank_share.op_overhead
    return {"clip": clip, "optimizer": optimizer, "offload": offload, "beside": beside}


def update_seconds(run: PlannedRun, held: ParameterTotals, rank_share: RankShare) -> float:
    """Return the seconds of an optimizer step for all parameters of a rank, clipping included."""
    return (
        update_bytes(run) + NORM + CLIP
    ) * held.numel / rank_share.bandwidth + 2 * EACH * held.tensors * rank_share.op_overhead


def _offloaded(
    run: PlannedRun, owned: float, machine: MachineRates, rank_share: RankShare, backward: float
) -> tuple[float, float]:
    """Return the seconds of an optimizer step on the host, and of the exposed copies.

    Gradients are copied to the host while backward computes them. Parameters are copied back chunk
    by chunk, while the next chunk is updated.
    """
    ranks, up = run.ranks_on_node, 2 if run.parallel.mixed_precision == "bfloat16" else FLOAT
    if machine.kind == "cpu":  # one memory: the copies are passes over it
        return update_bytes(run) * owned / rank_share.bandwidth, 2 * (FLOAT + up) * owned / rank_share.bandwidth
    kept = max(run.offload.device_fraction, 0.0)
    moved = (1 - kept) * owned
    down = max(gradient_bytes(run) * moved / machine.host_link - backward, 0.0)
    host = update_bytes(run) * moved / (machine.host_bandwidth / ranks)
    device = update_bytes(run) * kept * owned / rank_share.bandwidth
    return max(host, device), down + max(up * moved / machine.host_link - host, 0.0)


# Time of a pipeline, by simulation of its schedule --------------------------------------------------------------------


def pipeline(
    run: PlannedRun, layers: Sequence[LayerTime], cuts: Sequence[range], updates: Sequence[float], send: float
) -> dict[str, float]:
    """Return the parts of one backward pass of a run: the compute times of the slowest stage, and its bubble.

    ``cuts`` are the layers of each chunk, ``updates`` the seconds of an optimizer step of each
    stage, and ``send`` the seconds of a message between stages.
    """
    schedule = run.schedule
    assert schedule is not None  # there is more than one stage
    chunks = [_sum(layers[number] for number in cut) for cut in cuts]
    every = run.parallel.schedule == "pipedream"  # an optimizer step after each microbatch
    each = [updates[schedule.rank_of(number)] / run.parallel.chunks_a_rank * every for number in range(len(cuts))]
    forward = [chunk.forward + chunk.exchange_forward for chunk in chunks]
    backward = [chunk.backward + chunk.exchange_backward for chunk in chunks]
    half = [seconds / 2 for seconds in backward]  # each half of a split backward pass takes half of its time
    costs = Costs(forward=forward, backward=backward, input=half, weight=half, update=each, send=send)
    timeline = simulate(schedule, costs)
    longest = max(range(schedule.ranks), key=timeline.busy)
    own = _sum(chunk for number, chunk in enumerate(chunks) if schedule.rank_of(number) == longest)
    busy = own.forward + own.backward + own.exchange
    return {
        "forward": run.microbatches * own.forward,
        "backward": run.microbatches * own.backward,
        "activations": run.microbatches * own.exchange,
        "bubble": max(timeline.makespan - run.microbatches * busy, 0.0),
    }


def _sum(passes: Iterable[LayerTime]) -> LayerTime:
    """Return the sum of several passes."""
    return LayerTime(*(sum(numbers) for numbers in zip(*map(astuple, passes))))


# Time of a step: passes, pipeline, communication and optimizer step of the slowest rank -------------------------------


MOST_NODES = 2  # of a simulation that represents other numbers of ranks


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by its parts, and its samples, tokens and operations."""

    parts: Mapping[str, float]  # those of ``pipeline``, "gradients" and "parameters", and those of ``update_of``
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
    def samples_per_second(self) -> float:
        """Return the samples of a batch over the time of a step."""
        return self.samples / self.seconds

    @property
    def flops_a_rank(self) -> float:
        """Return the operations per second of a rank."""
        return self.flops / self.seconds / self.ranks

    @property
    def share_of_peak(self) -> float | None:
        """Return the share of the device's peak; None if the peak is unknown."""
        return self.flops_a_rank / self.peak if self.peak else None

    def as_dict(self) -> dict[str, object]:
        return {
            "seconds": self.seconds,
            "parts": dict(self.parts),
            "hidden_seconds": self.hidden,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens / self.seconds if self.tokens else None,
            "flops": self.flops,
            "flops_per_second_and_rank": self.flops_a_rank,
            "share_of_peak": self.share_of_peak,
        }


@dataclass(frozen=True)
class Forecast:
    """Forecast of steps on a machine."""

    machine: MachineRates
    timer: LayerTimer
    calibrated: Mapping[RankLayout, Measurement] = field(default_factory=dict)
    ranks: int = 0  # number of ranks whose groups are simulated as they are

    def network(self, run: PlannedRun) -> Network:
        """Return the timing of collectives between a run's ranks."""
        return Network(self.machine, self.machine.rank_share(run.ranks_on_node), self.calibrated)

    def step(self, run: PlannedRun) -> StepTime:
        network = self.network(run)
        layers = self.timer.layers(run, network)
        cuts = stages_of(run, len(layers))
        held = self._held(run, cuts)
        accumulate = run.settings.train.accumulate
        if run.parallel.pipe > 1:
            updates = [update_seconds(run, one, network.rank_share) for one in held]
            passed = pipeline(run, layers, cuts, updates, self._send(run, cuts))
        else:
            passed = _flat(layers)
        parts = {name: seconds * accumulate for name, seconds in passed.items()}
        fullest = max(range(len(held)), key=lambda stage: held[stage].numel)
        largest, calls = held[fullest], self._calls(run, fullest)
        exchange = exchange_of(run, largest, calls, network, parts["forward"], parts["backward"])
        parts |= {"gradients": exchange.gradients, "parameters": exchange.parameters}
        parts |= update_of(run, largest, self.machine, network.rank_share, parts["backward"])
        batch, accumulated = run.settings.train.batch, run.shape.data * accumulate * run.samples
        return StepTime(
            parts=parts,
            hidden=exchange.hidden,
            samples=batch,
            tokens=batch * prod(run.facts.targets.shape) if run.settings.data.format == "tokens" else 0,
            flops=self.timer.whole.flops(accumulated),
            ranks=run.ranks,
            peak=self.machine.peak,
        )

    def _calls(self, run: PlannedRun, stage: int) -> Sequence[Call]:
        """Return the calls of a rank of a stage.

        A group of other numbers of ranks is simulated with at most two nodes, for speed: only the
        padding of slices depends on the number of nodes.
        """
        if run.shape.data == 1:
            return ()
        part = rank_models(run)[stage]
        if run.ranks == self.ranks:
            return part.record().calls
        return [replace(call, group=_enlarged(call.group, part)) for call in part.record(MOST_NODES).calls]

    def _send(self, run: PlannedRun, cuts: Sequence[range]) -> float:
        """Return the seconds of the largest message between stages."""
        outputs = self.timer.local.at(run.microbatch)
        largest = max(outputs[cut.stop - 1].output for cut in cuts[:-1])
        return self.network(run).message(largest, crosses=group_of(run, "pipe").nodes > 1)

    def _held(self, run: PlannedRun, cuts: Sequence[range]) -> list[ParameterTotals]:
        """Return the parameters of each pipeline stage, over all its chunks."""
        layers, pipe = self.timer.local.at(1), run.parallel.pipe
        found = []
        for stage in range(pipe):
            own = [layers[number] for cut in cuts[stage::pipe] for number in cut]
            found.append(ParameterTotals(sum(layer.numel for layer in own), sum(layer.tensors for layer in own)))
        return found


def _enlarged(group: Group, part: RankModel) -> Group:
    """Return the group that a group of a simulation with few nodes represents."""
    nodes = part.data.nodes if group.nodes > 1 else 1
    return replace(group, nodes=nodes, size=group.size // group.nodes * nodes)


def stages_of(run: PlannedRun, layers: int) -> list[range]:
    """Return the layers of each chunk; the loss is in the last one."""
    if run.parallel.pipe == 1:
        return [range(layers)]
    *cuts, last = cuts_of(run)
    return [*cuts, range(last.start, last.stop + 1)]


def _flat(layers: Sequence[LayerTime]) -> dict[str, float]:
    return {
        "forward": sum(layer.forward for layer in layers),
        "backward": sum(layer.backward for layer in layers),
        "activations": sum(layer.exchange for layer in layers),
        "bubble": 0.0,
    }
