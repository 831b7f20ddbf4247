"""Figures of torch.distributed on several nodes: the link between them limits all_reduce, and gloo is the comparison.

All ranks of a node share its link, so the targets of ranks on one node do not apply. The rate of the
link is measured by plain TCP, as in multinode.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from communication_figures import Figures, sizes_of, speedup
from harness.report import Target, at_least, at_most, table
from harness.stats import ratio
from multinode import LARGE, LINK, TARGETS, limit
from torch_backend_candidates import Name
from torch_backend_steps import Step, Steps

from hpctrain.util.text import format_bytes

SIZES = "64K,1M,16M"  # smaller calls show the latency of the simulated link only; larger ones scale with the size
GLOO_TARGET = 1.0  # times gloo's
LIMITED = (Name.OURS, Name.EMPTY, Name.GLOO)


def link_ratios(figures: Figures, nodes: int, rates: Sequence[float]) -> dict[str, dict[str, float]]:
    """Return the time of an all_reduce relative to the limit of the link, by candidate and size; large sizes only."""
    found: dict[str, dict[str, float]] = {}
    for size in sizes_of(figures):
        for name in LIMITED:
            if size >= LARGE and (row := figures.get((size, name))):
                found.setdefault(name, {})[str(size)] = row["median"] / limit(size, nodes, list(rates))
    return found


def targets(figures: Figures, links: Mapping[str, Mapping[str, float]], steps: Mapping[int, Step]) -> Iterator[Target]:
    """Yield the targets of several nodes for which the run has figures."""
    for size in sizes_of(figures):
        if size >= LARGE:
            what = f"all_reduce of {format_bytes(size)}"
            yield from at_least(f"{what}: gloo / hpctrain", speedup(figures, size, Name.OURS, Name.GLOO), GLOO_TARGET)
            own = links.get(Name.EMPTY, {}).get(str(size))
            yield from at_most(f"{what}, comm.empty: time / limit of the link", own, TARGETS[LINK])
    for batch, step in steps.items():
        for kind, gloo, ours in (("DDP", Steps.DDP_GLOO, Steps.DDP), ("FSDP2", Steps.FSDP_GLOO, Steps.FSDP)):
            value = ratio(step.seconds, gloo, ours)
            yield from at_least(f"{kind} step, batch {batch}: gloo / hpctrain", value, GLOO_TARGET)


def link_lines(links: Mapping[str, Mapping[str, float]], rates: Sequence[float]) -> list[str]:
    """Return the table of times relative to the limit of the link, and its rates."""
    readings = ", ".join(f"{rate * 8 / 1e9:.3f}" for rate in rates)
    line = f"the link by plain TCP, both directions at once: {readings} Gbit/s, before and after\n"
    rows = [["time / limit of the link", "all_reduce of", "measured"]]
    rows += [
        [name, format_bytes(int(size)), f"{value:.3f}"] for name, each in links.items() for size, value in each.items()
    ]
    return [f"{table(rows)}\n", line] if links else [line]
