"""Names of the candidates in tables, results and plots."""

RAW = "raw pwrite"  # one file per rank: the reference
RAW_ONE = "raw pwrite, one file"  # the same bytes, all ranks into one file
OURS = "hpctrain"
MPIIO = "hpctrain mpiio"
TORCH = "torch.save"
DCP = "torch DCP"
WRITERS = (RAW, RAW_ONE, OURS, MPIIO, TORCH, DCP)

RAW_READ = "raw preadv"
CRC = "crc32"  # of bytes in memory: the cost of the checksum alone
LOAD = "hpctrain load"
VERIFY = "hpctrain verify"
TORCH_LOAD = "torch.load"
DCP_LOAD = "torch DCP load"
READERS = (RAW_READ, CRC, LOAD, VERIFY, TORCH_LOAD, DCP_LOAD)

FOREGROUND = "hpctrain foreground"
BACKGROUND = "hpctrain background"
ASYNC = "torch DCP async"


def load_from(ranks: int) -> str:
    """Return the name of loading a file that ``ranks`` ranks wrote."""
    return f"{LOAD}, {ranks} wrote"
