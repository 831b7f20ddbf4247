"""Time after the passes: gradient norm, optimizer step, and the fixed overhead of a step."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.forecast.machine import Machine, Seat
from hpctrain.forecast.run import PlannedRun
from hpctrain.forecast.time_exchange import FLOAT, Held, gradient_bytes, sharers_of
from hpctrain.train.optimizer import kept_per_element

# Memory traffic per element: the norm reads each gradient once; clipping reads and writes it.
NORM, CLIP = FLOAT, 2 * FLOAT
# Operators per parameter, in both; and the fixed overhead of a step, in operators: batch, learning
# rate, log.
EACH, BESIDE = 3, 150


@dataclass(frozen=True)
class Update:
    """Seconds of the work after the passes."""

    clip: float
    optimizer: float
    offload: float  # exposed time of the link to the host
    beside: float


def update_bytes(run: PlannedRun) -> float:
    """Return the memory traffic per element of an optimizer step: 28 bytes for AdamW.

    One pass reads parameter, gradient and optimizer state (two moments), and writes all except the
    gradient.
    """
    return FLOAT * (3 + 2 * kept_per_element(run.settings.optimizer))


def update_of(run: PlannedRun, held: Held, machine: Machine, seat: Seat, backward: float) -> Update:
    """Return the time after the passes; copies to the host may overlap with ``backward`` seconds."""
    owned = held.numel / sharers_of(run).size
    tensors = held.tensors / sharers_of(run).size if run.parallel.data != "ddp" else held.tensors
    each = EACH * tensors * seat.call if machine.kind == "cpu" else EACH * seat.call  # a GPU has one kernel for many
    clip = (NORM + (CLIP if run.settings.train.clip else 0)) * owned / seat.bandwidth + each
    beside = BESIDE * seat.call
    if run.parallel.pipe > 1 and run.parallel.schedule == "pipedream":
        return Update(0.0, 0.0, 0.0, beside)  # updates are made between the passes
    if not run.offload.any_update:
        return Update(clip, update_bytes(run) * owned / seat.bandwidth + each, 0.0, beside)
    return Update(clip, *_offloaded(run, owned, machine, seat, backward), beside)


def update_seconds(run: PlannedRun, held: Held, seat: Seat) -> float:
    """Return the seconds of an optimizer step for all parameters of a rank, clipping included."""
    return (update_bytes(run) + NORM + CLIP) * held.numel / seat.bandwidth + 2 * EACH * held.tensors * seat.call


def _offloaded(
    run: PlannedRun, owned: float, machine: Machine, seat: Seat, backward: float
) -> tuple[float, float]:
    """Return the seconds of an optimizer step on the host, and of the exposed copies.

    Gradients are copied to the host while backward computes them. Parameters are copied back chunk
    by chunk, while the next chunk is updated.
    """
    ranks, up = run.ranks_on_node, 2 if run.parallel.mixed_precision == "bfloat16" else FLOAT
    if machine.kind == "cpu":  # one memory: the copies are passes over it
        return update_bytes(run) * owned / seat.bandwidth, 2 * (FLOAT + up) * owned / seat.bandwidth
    kept = max(run.offload.device_fraction, 0.0)
    moved = (1 - kept) * owned
    down = max(gradient_bytes(run) * moved / machine.host_link - backward, 0.0)
    host = update_bytes(run) * moved / (machine.host_bandwidth / ranks)
    device = update_bytes(run) * kept * owned / seat.bandwidth
    return max(host, device), down + max(up * moved / machine.host_link - host, 0.0)
