"""Names of the candidates in tables, results and plots."""

OURS = "hpctrain"
OUTSIDE = "hpctrain outside"  # tensors that are not allocated by comm.empty
COMMON = "hpctrain common"  # shares within one tensor of comm.common
LIBRARY = "mpi"
PIECES = "mpi 16 MiB"
GLOO = "gloo"
NCCL = "torch nccl"
COPY = "copy"  # of a tensor of the same size, on every rank: the streaming rate

PEERS = (LIBRARY, PIECES, GLOO, NCCL)
ORDER = (*PEERS, COPY)
