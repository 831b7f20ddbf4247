"""Nodes of the job: parsing of PBS node files and of Slurm's compressed lists, and writing of the latter."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from hpctrain.errors import LaunchError
from hpctrain.util.reading import read_text, reason

MAX_NODES = 65536  # more than any Slurm supports; a typo such as n[1-99999999] must not fill the memory

REQUESTED = "HPCTRAIN_NODES"  # set by job scripts with a range of nodes: the range, as in 2-8
SPARES = "HPCTRAIN_SPARES"  # set by job scripts with spare nodes: the number of those that idle
_REQUEST = re.compile(r"[1-9][0-9]{0,8}-[1-9][0-9]{0,8}", re.ASCII)

_NAME = re.compile(r"(?:[^\s,\[\]]|\[[0-9,-]+\])+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})([^0-9]*)", re.DOTALL)
_COUNT = re.compile(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?")


def requested_range(text: str | None) -> str | None:
    """Return a requested range of nodes such as 2-8; ``None`` for any other text."""
    return text if text is not None and _REQUEST.fullmatch(text) else None


def spare_nodes(text: str | None) -> int | None:
    """Return a number of spare nodes from 1 on; ``None`` for any other text."""
    return int(text) if text is not None and re.fullmatch(r"[1-9][0-9]{0,8}", text, re.ASCII) else None


@dataclass(frozen=True)
class Allocation:
    """Hosts of a job in the scheduler's order, and if known, the number of ranks requested per host."""

    hosts: tuple[str, ...]
    slots: tuple[int, ...] | None


def allocation(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """Return the nodes of this job; ``None`` outside of a job.

    Slurm's variables take precedence over those of PBS: if both are set, Slurm emulates PBS. Inside
    a step of ``srun`` the slots are unknown: there ``SLURM_TASKS_PER_NODE`` describes the step,
    which may be that of ``mpirun``'s daemons.
    """
    if nodes := environ.get("SLURM_JOB_NODELIST"):
        hosts = expand_node_list(nodes)
        counts = environ.get("SLURM_TASKS_PER_NODE")
        if counts is None or "SLURM_STEP_ID" in environ:
            return Allocation(hosts, None)
        slots = expand_counts(counts)
        if len(slots) != len(hosts):
            raise LaunchError(f"SLURM_TASKS_PER_NODE={counts} does not fit the {len(hosts)} nodes of {nodes}")
        return Allocation(hosts, slots)
    if path := environ.get("PBS_NODEFILE"):
        found = Counter(read_node_file(path))
        return Allocation(tuple(found), tuple(found.values()))
    return None


def read_node_file(path: str | Path) -> tuple[str, ...]:
    """Return the host of every slot in a PBS node file, which has one per line."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise LaunchError(f"cannot read the node file {path} (PBS_NODEFILE): {reason(error)}") from error
    slots = tuple(line.strip() for line in lines if line.strip())
    if not slots:
        raise LaunchError(f"the node file {path} (PBS_NODEFILE) names no node")
    return slots


def expand_node_list(text: str) -> tuple[str, ...]:
    """Return the hosts of a Slurm node list: ``n[001-002,7],m5`` is n001, n002, n7, m5.

    The syntax is that of ``scontrol show hostnames``; numbers keep their leading zeros.
    """
    names = re.split(r",(?![^\[]*\])", text.strip())
    hosts: list[str] = []
    for name in names:
        if not _NAME.fullmatch(name):
            raise _bad(text)
        pieces = [_choices(piece, text) for piece in re.split(r"(\[[^\]]*\])", name)]
        if len(hosts) + math.prod(map(len, pieces)) > MAX_NODES:
            raise _too_many(text)
        hosts += map("".join, product(*pieces))
    return tuple(hosts)


def compress_node_list(hosts: Iterable[str]) -> str:
    """Return hosts as a Slurm node list: n001, n002, n7, m5 are ``m5,n[001-002,7]``; duplicates are removed.

    ``expand_node_list`` of the result gives the same hosts.
    """
    series: dict[tuple[str, str], list[str]] = defaultdict(list)
    plain = []
    for host in sorted(set(hosts)):
        if match := _NUMBERED.fullmatch(host):
            series[match[1], match[3]].append(match[2])
        else:
            plain.append(host)
    for (before, after), numbers in series.items():
        text = number_ranges(numbers)
        plain.append(before + (text if text.isdecimal() else f"[{text}]") + after)
    return ",".join(sorted(plain))


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of a Slurm count list: ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise LaunchError(f"cannot read the task counts {text!r}: expected a list such as 2(x3),1")
        repeat = int(match[2] or 1)
        if len(counts) + repeat > MAX_NODES:
            raise LaunchError(f"task counts {text!r} are for more than {MAX_NODES} nodes")
        counts += [int(match[1])] * repeat
    return tuple(counts)


def number_ranges(numbers: Iterable[str]) -> str:
    """Return numbers as ranges of consecutive ones: ``001-002,7``."""
    runs: list[list[str]] = []
    for number in sorted(numbers, key=lambda text: (int(text), len(text))):
        if runs and number == str(int(runs[-1][1]) + 1).zfill(len(runs[-1][0])):
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(first if first == last else f"{first}-{last}" for first, last in runs)


def _choices(piece: str, text: str) -> list[str]:
    """Return the expansions of one piece of a name: the piece itself, or every number in its brackets."""
    if not piece.startswith("["):
        return [piece]
    numbers: list[str] = []
    for part in piece[1:-1].split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _bad(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _bad(text)
        if last - first + len(numbers) >= MAX_NODES:
            raise _too_many(text)
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers


def _bad(text: str) -> LaunchError:
    return LaunchError(f"cannot read the node list {text!r}: expected names such as n[001-003,7],m5")


def _too_many(text: str) -> LaunchError:
    return LaunchError(f"node list {text!r} names more than {MAX_NODES} nodes")
