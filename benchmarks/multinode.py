"""Time of all_reduce over several nodes, compared with the MPI library, gloo, and the bandwidth between the nodes.

    python tests/multinode/run.py -n 4 -- python benchmarks/multinode.py --sizes 16M

With N nodes, each of them must send 2 (N-1)/N S bytes for an all_reduce of S bytes: (N-1)/N S for
the reduction, and as much for the distribution of the result. The bandwidth limit is the time of
that transfer at the rate that plain sockets reach between two of the nodes. The rate is measured in
the same run, before and after, in both directions at once, while all other ranks sleep. The
candidates are interleaved, as in communication.py; each time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence

import torch
from bandwidth import receive_rate
from communication import measure_size
from communication_candidates import OPERATIONS, PEERS, Name, Setting, twin_name
from communication_figures import Figures, Row, by_size_and_name, row_table, speedup
from harness.ranks import process_group, refuse, start, wait_asleep
from harness.report import Target, left_out_lines, mpi_name, mpi_slug, table, target_table
from harness.run import finish, main, make_parser, parse_sizes
from harness.turns import announce, stop

from hpctrain.comm.communicator import Communicator
from hpctrain.util.text import format_bytes

LINK = "link"  # the time of the transfer at the rate of plain TCP
TARGETS = {LINK: 1.05, Name.LIBRARY: 1.0}  # maximum time of an all_reduce, relative to theirs
LARGE = 16 * 2**20  # bytes from which on the bandwidth dominates, and latency is negligible
SECONDS = 1.5  # of plain TCP, each time


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("multinode", __doc__, rounds=15, quick=False)
    parser.add_argument("--sizes", default="16M", help="bytes of the tensor, as in 1M,16M (16M)")
    args = parser.parse_args(argv)
    args.sizes = parse_sizes(args.sizes)
    return args


def run(args: argparse.Namespace) -> None:
    job = start("multinode", least=1)
    comm = job.comm
    if comm.nodes < 2:
        refuse("at least 2 nodes are needed: make -C benchmarks multinode simulates two")
    setting = Setting(comm, job.device, torch.float32)
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    rates = link_rates(comm)
    with process_group(comm):
        for nbytes in reversed(args.sizes):
            if not stop.number:
                announce(f"all_reduce {format_bytes(nbytes)}", comm)
                without = [twin_name(setting.dtype)]
                found, problems = measure_size(setting, OPERATIONS["all_reduce"], nbytes, args.rounds, without)
                rows, left_out = found + rows, left_out | problems
    rates += [] if stop.number else link_rates(comm)
    if job.rank:
        return
    figures = by_size_and_name(rows)
    ratios = {size: compare(figures, size, comm.nodes, rates) for size, name in figures if name == Name.OURS}
    reached = list(targets(ratios))
    content = {
        "nodes": comm.nodes,
        "ratios": ratios,
        "rows": rows,
        "link_bytes_per_second": rates,
    }
    times = [["time of hpctrain /", "size", "measured"]]
    times += [
        [name, format_bytes(size), f"{value:.3f}"] for size, each in ratios.items() for name, value in each.items()
    ]
    readings = ", ".join(f"{rate * 8 / 1e9:.3f}" for rate in rates)
    lines = [f"\nall_reduce, {job.size} ranks on {comm.nodes} nodes, {mpi_name()}\n", target_table(reached)]
    lines += [f"{table(times)}\n", row_table(figures)]
    lines += [f"\nthe link by plain TCP, both directions at once: {readings} Gbit/s, before and after"]
    lines += left_out_lines(left_out)
    file = f"multinode-nodes{comm.nodes}-np{job.size}-{mpi_slug()}"
    finish(args, "multinode", content, lines, job=job, file=file, found=reached)


def link_rates(comm: Communicator) -> list[float]:
    """Return the bytes per second of plain TCP between the first two nodes, one figure per direction. Collective.

    The second node's first rank connects to the address of rank 0's host name.
    """
    rate, server = None, None
    if comm.rank == 0:
        server = socket.create_server((socket.gethostbyname(socket.gethostname()), 0))
    address = comm.broadcast_object(server.getsockname() if server else None)
    if comm.local_rank == 0 and comm.node < 2:
        with server.accept()[0] if server else socket.create_connection(address) as line:
            rate = receive_rate(line, SECONDS)
    if server is not None:
        server.close()
    wait_asleep(comm)
    return [value for value in comm.all_gather_object(rate) if value is not None]


def limit(nbytes: int, nodes: int, rates: list[float]) -> float:
    """Return the seconds of an all_reduce at the highest bandwidth that was measured."""
    return 2 * (nodes - 1) / nodes * nbytes / max(rates)


def compare(figures: Figures, size: int, nodes: int, rates: list[float]) -> dict[str, float]:
    """Return the time of hpctrain relative to the bandwidth limit and to the others, by medians."""
    values = {name: speedup(figures, size, name, Name.OURS) for name in (*PEERS, Name.OUTSIDE)}
    own = figures[size, Name.OURS]["median"] / limit(size, nodes, rates)
    return {LINK: own, **{name: value for name, value in values.items() if value is not None}}


def targets(ratios: Mapping[int, Mapping[str, float]]) -> Iterator[Target]:
    for size, found in sorted(ratios.items()):
        for name, most in TARGETS.items():
            if name in found and (name != LINK or size >= LARGE):
                yield Target(f"{format_bytes(size)}: time of hpctrain / {name}", found[name], most, at_least=False)


if __name__ == "__main__":
    sys.exit(main(parse, run))
