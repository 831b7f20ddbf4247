"""Name the candidates, the same everywhere: in tables, results and pictures."""

OURS = "hpctrain"
OUTSIDE = "hpctrain outside"  # tensors that do not come from comm.empty
COMMON = "hpctrain common"  # shares that lie in one tensor of comm.common
LIBRARY = "mpi"
PIECES = "mpi 16 MiB"
GLOO = "gloo"
NCCL = "torch nccl"
COPY = "copy"  # of a tensor of the same size, by every rank for itself: the streaming rate

PEERS = (LIBRARY, PIECES, GLOO, NCCL)
ORDER = (*PEERS, COPY)
