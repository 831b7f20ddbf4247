"""Presets of known machines: data-sheet rates, and the fraction of them that a training run is assumed to reach.

Peaks are those of dense products (no sparsity) in the data sheets: A100 and H100 SXM, H200 SXM,
V100 SXM2 by NVIDIA; MI250X by AMD, whose two dies are one rank each. Networks are those of
well-known systems with these GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.errors import UsageError
from hpctrain.forecast.machine import Link, Machine
from hpctrain.settings import unknown

TERA, GIGA = 1e12, 1e9
# Fractions of the peak that matrix products and streams reach in well-tuned training. Megatron-LM
# reports 41 to 48 % of an H100's peak for whole steps; their products alone run at about 60 %.
# Streams reach 80 to 90 % of the memory bandwidth.
PRODUCTS, STREAMS = 0.6, 0.8


@dataclass(frozen=True)
class Device:
    """Data-sheet rates of a GPU, and of the network of nodes that have it."""

    bfloat16: float  # operations per second
    float32: float  # default float32 products of torch: without TF32
    memory: float  # bytes per second
    inside: float  # bytes per second from a GPU to others of its node
    between: float  # bytes per second of a node's network


DEVICES = {
    "A100": Device(312 * TERA, 19.5 * TERA, 2039 * GIGA, 300 * GIGA, 100 * GIGA),
    "H100": Device(989 * TERA, 67 * TERA, 3350 * GIGA, 450 * GIGA, 200 * GIGA),
    "H200": Device(989 * TERA, 67 * TERA, 4800 * GIGA, 450 * GIGA, 200 * GIGA),
    "MI250X": Device(191.5 * TERA, 47.9 * TERA, 1600 * GIGA, 150 * GIGA, 100 * GIGA),
}
_LAUNCH = 5e-6  # seconds for the host to launch a kernel
_DISK = 2 * GIGA


def preset(name: str, dtype: str = "float32") -> Machine:
    """Return the machine of a name in ``DEVICES``; raises ``UsageError`` for any other name."""
    known = {one.lower(): one for one in DEVICES}
    if name.lower() not in known:
        raise UsageError(unknown(f"machine {name!r}", name, list(DEVICES)))
    chosen = known[name.lower()]
    device = DEVICES[chosen]
    peak = device.bfloat16 if dtype == "bfloat16" else device.float32
    return Machine(
        name=chosen,
        source=f"data sheet of {chosen}",
        kind="cuda",
        cores=1,
        flops={1: peak * PRODUCTS},
        bandwidth={1: device.memory * STREAMS},
        call=_LAUNCH,
        meeting=_LAUNCH,
        turn=_LAUNCH,
        inside=Link(5e-6, device.inside * STREAMS),
        between=Link(10e-6, device.between * STREAMS),
        disk=_DISK,
        peak=peak,
        assumed=(
            f"products in {dtype} reach {PRODUCTS:.0%} of {peak / TERA:g} TFLOP/s, streams and links {STREAMS:.0%} of "
            f"{device.memory / GIGA:g} GB/s in memory, {device.inside / GIGA:g} between GPUs of a node, "
            f"{device.between / GIGA:g} between nodes",
            f"starting a kernel takes {_LAUNCH * 1e6:g} us; a checkpoint is written at {_DISK / GIGA:g} GB/s",
        ),
    )
