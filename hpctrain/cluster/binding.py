"""CPUs that each rank may use, its fair number of threads, and the table of both."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from hpctrain.util.text import columns


@dataclass(frozen=True)
class Binding:
    """Host, CPUs, threads and device of one rank: a row of the binding table."""

    host: str
    rank: int
    local_rank: int
    cpus: tuple[int, ...]
    threads: int
    device: str


def cpu_affinity() -> tuple[int, ...]:
    """Return the CPUs on which this process may run, in order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def format_cpus(cpus: Iterable[int]) -> str:
    """Return CPU numbers in the format of ``taskset`` and ``lscpu``: ``0-2,7``."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def threads_for(my_cpus: Sequence[int], all_cpus_on_node: Sequence[Sequence[int]]) -> int:
    """Return the number of threads for a rank: its share of its CPUs, at least one.

    ``all_cpus_on_node`` contains the CPUs of every rank of the node, including this one. A CPU that
    k ranks may use counts 1/k for each of them. So bound ranks use all of their own CPUs, and
    unbound ranks divide the node. The threads of all ranks together never outnumber the CPUs,
    except for the minimum of one per rank.
    """
    users = Counter(cpu for cpus in all_cpus_on_node for cpu in set(cpus))
    share = sum(1 / max(users[cpu], 1) for cpu in set(my_cpus))
    return max(int(share + 1e-6), 1)  # thirds do not add up to one


def table(rows: Iterable[Binding]) -> str:
    """Return the binding table as text: a heading and one line per rank, numbers aligned right."""
    header = ("host", "rank", "local rank", "cpus", "threads", "device")
    lines = [header]
    for row in rows:
        host, rank, local_rank, cpus, threads, device = astuple(row)
        lines.append((host, str(rank), str(local_rank), format_cpus(cpus), str(threads), device))
    return "\n".join(columns(lines, right=(1, 2, 4)))
