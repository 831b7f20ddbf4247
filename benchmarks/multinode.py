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
import time
from pathlib import Path
from typing import Any

import torch
from comm import peers
from comm.figures import Figures, Row, by_size_and_name, ratio, to_json
from comm.measure import measure_size
from comm.names import LIBRARY, OURS, OUTSIDE, PEERS
from comm.operations import OPERATIONS
from comm.ours import twin_name
from comm.place import Place
from comm.report import print_rows, print_unable
from comm.sizes import parse_sizes, size_text
from harness import RESULTS, mpi_name, mpi_slug, provenance, table, write
from wire import receive_rate

import hpctrain
from hpctrain.cli.main import report as report_error
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.train.exit import in_world

TARGETS = {"wire": 1.05, LIBRARY: 1.0}  # maximum time of an all_reduce, relative to theirs
LARGE = 16 * 2**20  # bytes from which on the bandwidth dominates, and latency is negligible
SECONDS = 1.5  # of plain TCP, each time


def main() -> int:
    """Run the benchmark; rank 0 prints and writes."""
    try:
        run(parse())
    except HpctrainError as error:
        if not error.everywhere and in_world():
            raise  # one rank of several failed: the guard ends the job
        return report_error(error)
    return 0


def run(args: argparse.Namespace) -> None:
    """Join the job, measure bandwidth and candidates, report."""
    job = hpctrain.init(device="cpu")
    place = Place(job.comm, job.device, torch.float32)
    if job.comm.nodes < 2:
        raise UsageError("at least 2 nodes are needed: make -C benchmarks multinode simulates two", everywhere=True)
    rows: list[Row] = []
    unable: dict[str, str] = {}
    rates = wire_rates(place)
    with peers.process_group(place):
        for nbytes in reversed(parse_sizes(args.sizes)):
            found, problems = measure_size(
                place, OPERATIONS["all_reduce"], nbytes, args.rounds, [twin_name(place.dtype)]
            )
            rows = found + rows
            unable |= problems
    rates += wire_rates(place)
    if place.rank == 0:
        figures = by_size_and_name(rows)
        ratios = {size: compare(figures, size, job.comm.nodes, rates) for size, name in figures if name == OURS}
        report(place, figures, ratios, rates)
        print_unable(unable)
        save(place, args.results, {"ratios": ratios, "rows": to_json(rows), "wire_bytes_per_second": rates})


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="16M", help="bytes of the tensor, as in 1M,16M (16M)")
    parser.add_argument("--rounds", type=int, default=15, help="timed repeats of each candidate")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args()


def wire_rates(place: Place) -> list[float]:
    """Return the bytes per second of plain TCP between the first two nodes, one figure per direction.

    The second node's first rank connects to the address of rank 0's host name.
    """
    comm, rate, server = place.comm, None, None
    if place.rank == 0:
        server = socket.create_server((socket.gethostbyname(socket.gethostname()), 0))
    address = comm.broadcast_object(server.getsockname() if server else None)
    if comm.local_rank == 0 and comm.node < 2:
        line = server.accept()[0] if server else socket.create_connection(address)
        with line:
            rate = receive_rate(line, SECONDS)
    if server is not None:
        server.close()
    asleep_until_all_come(place)
    return [value for value in comm.all_gather_object(rate) if value is not None]


def asleep_until_all_come(place: Place) -> None:
    """Wait for the other ranks without using a core, which the measuring ranks may need."""
    request = place.world.Ibarrier()
    while not request.Test():
        time.sleep(0.02)


def limit(nbytes: int, nodes: int, rates: list[float]) -> float:
    """Return the seconds of an all_reduce at the highest bandwidth that was measured."""
    return 2 * (nodes - 1) / nodes * nbytes / max(rates)


def compare(figures: Figures, size: int, nodes: int, rates: list[float]) -> dict[str, float]:
    """Return the time of hpctrain relative to the bandwidth limit and to the others, by medians."""
    found = {"wire": figures[size, OURS].median / limit(size, nodes, rates)}
    for name in (*PEERS, OUTSIDE):
        value = ratio(figures, size, name, OURS)
        if value is not None:
            found[name] = value
    return found


def report(place: Place, figures: Figures, ratios: dict[int, dict[str, float]], rates: list[float]) -> None:
    """Print ratios first, then times."""
    print(f"\nall_reduce, {place.size} ranks on {place.comm.nodes} nodes, {mpi_name()}\n")
    rows = [["time of hpctrain /", "size", "measured", "at most", ""]]
    for size, found in sorted(ratios.items()):
        for name, value in found.items():
            target = TARGETS.get(name) if name != "wire" or size >= LARGE else None
            verdict = "missed" if target and value > target else ""
            rows.append([name, size_text(size), f"{value:.3f}", f"{target:.2f}" if target else "", verdict])
    print(table(rows) + "\n")
    print_rows(figures)
    readings = ", ".join(f"{rate * 8 / 1e9:.3f}" for rate in rates)
    print(f"\nthe link by plain TCP, both directions at once: {readings} Gbit/s, before and after")


def save(place: Place, folder: Path, content: dict[str, Any]) -> None:
    """Write a result."""
    nodes = place.comm.nodes
    head = {"benchmark": "multinode", "ranks": place.size, "nodes": nodes, "targets": TARGETS, "mpi": mpi_name()}
    whole = {**head, **content, "provenance": provenance(place.size, mpi_name())}
    print(f"written to {write(f'multinode-nodes{nodes}-np{place.size}-{mpi_slug()}', whole, folder)}")


if __name__ == "__main__":
    sys.exit(main())
