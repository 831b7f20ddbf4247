"""Names of the candidates in tables, plots and results."""

from __future__ import annotations

OURS = "hpctrain one pass"
TORCH = "torch: clip, AdamW fused, cast"
OURS_16 = "hpctrain one pass, bfloat16 gradients"
TORCH_16 = "torch: cast, clip, AdamW fused, cast"
ALONE = "torch AdamW fused alone"  # without the necessary work before and after it
TRIAD = "STREAM triad"
CANDIDATES = (OURS, TORCH, OURS_16, TORCH_16, ALONE)
PAIRS = ((OURS, TORCH), (OURS_16, TORCH_16))
