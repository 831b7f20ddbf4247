"""Names of the candidates in tables, plots and results."""

from __future__ import annotations

ALONE = "one rank alone"
OURS = "hpctrain tensor"
DTENSOR = "torch DTensor + gloo"
MESSAGES = "all_reduces alone"  # the communication of hpctrain's step, without the step
CANDIDATES = (ALONE, OURS, DTENSOR)
