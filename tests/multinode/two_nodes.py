"""Program whose ranks assert that the job sees the hosts on which it was started, and reduce over them.

    mpiexec ... python two_nodes.py HOST...
"""

from __future__ import annotations

import socket
import sys

import torch

import hpctrain

NUMEL = 2**20

if __name__ == "__main__":
    hosts = sys.argv[1:]
    comm = hpctrain.init(device="cpu").comm
    names = comm.all_gather_object(socket.gethostname())
    local = comm.size // len(hosts)
    assert names == [host for host in hosts for _ in range(local)], names
    assert (comm.nodes, comm.local_size) == (len(hosts), local), (comm.nodes, comm.local_size)
    tensor = comm.empty(NUMEL).fill_(comm.rank + 1)
    comm.all_reduce(tensor)
    assert torch.equal(tensor, torch.full_like(tensor, comm.size * (comm.size + 1) / 2)), tensor
    if comm.rank == 0:
        print(f"{comm.nodes} nodes ({', '.join(hosts)}), {comm.local_size} ranks on each")
