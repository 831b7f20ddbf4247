"""Names of the candidates in tables, plots and results."""

from __future__ import annotations

from typing import Literal

MANY, FEW = 8, 4  # microbatches

ALONE = "one rank alone"
NAIVE, GPIPE, ONE_F_ONE_B = "hpctrain naive", "hpctrain gpipe", "hpctrain 1f1b"
INTERLEAVED, ZERO_BUBBLE = "hpctrain interleaved", "hpctrain zb-h1"
FEW_ONE_F_ONE_B, FEW_ZERO_BUBBLE = f"{ONE_F_ONE_B} m={FEW}", f"{ZERO_BUBBLE} m={FEW}"
TORCH_GPIPE, TORCH_ONE_F_ONE_B = "torch GPipe + gloo", "torch 1F1B + gloo"

# Schedule and microbatches of hpctrain's candidates.
OURS: dict[str, tuple[Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1"], int]] = {
    NAIVE: ("naive", MANY),
    GPIPE: ("gpipe", MANY),
    ONE_F_ONE_B: ("1f1b", MANY),
    INTERLEAVED: ("interleaved", MANY),
    ZERO_BUBBLE: ("zb-h1", MANY),
    FEW_ONE_F_ONE_B: ("1f1b", FEW),
    FEW_ZERO_BUBBLE: ("zb-h1", FEW),
}
TORCH = {TORCH_GPIPE: "ScheduleGPipe", TORCH_ONE_F_ONE_B: "Schedule1F1B"}
CANDIDATES = (ALONE, *OURS, *TORCH)
# Their names on the command line.
WORDS = {
    "alone": ALONE,
    **{name.removeprefix("hpctrain ").replace(" m=", "-"): name for name in OURS},
    "torch-gpipe": TORCH_GPIPE,
    "torch-1f1b": TORCH_ONE_F_ONE_B,
}
