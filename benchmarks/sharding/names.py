"""Names of the candidates: short words for the command line, names for tables and plots."""

from __future__ import annotations

ALONE = "no synchronisation"  # each rank trains independently: only sharing of memory can make a candidate faster
DDP = "hpctrain DDP"
ZERO1 = "hpctrain ZeRO-1"
ZERO2 = "hpctrain ZeRO-2"
FSDP = "hpctrain FSDP"  # one copy of the parameters in node memory
PASSING = "hpctrain FSDP, one rank per node"  # each rank acts as if alone on its node: units are gathered and freed
TORCH_DDP = "torch DDP + gloo"
TORCH_FSDP = "torch FSDP2 + gloo"

CANDIDATES = {
    "alone": ALONE,
    "ddp": DDP,
    "zero1": ZERO1,
    "zero2": ZERO2,
    "fsdp": FSDP,
    "passing": PASSING,
    "torch-ddp": TORCH_DDP,
    "torch-fsdp": TORCH_FSDP,
}

# Kinds of memory.
PARAMETERS, GRADIENTS, STATES, ACTIVATIONS, REST = "parameters", "gradients", "states", "activations", "rest"
KINDS = (PARAMETERS, GRADIENTS, STATES, ACTIVATIONS)

NOTE = (
    f"{PASSING}: all ranks are on this node, but each treats the others as ranks of other nodes; "
    "gathers and reductions are MPI messages"
)
