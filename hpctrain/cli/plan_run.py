"""Planning of a run from its settings: prints and draws the memory and time that it will need."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import EXIT_FAILURE, UsageError
from hpctrain.forecast import report
from hpctrain.forecast.candidates import Configuration, MemoryLimits, candidates
from hpctrain.forecast.earlier import Experience, check_functions, learn
from hpctrain.forecast.machine import preset
from hpctrain.forecast.run import Device, PlannedRun, facts_of
from hpctrain.forecast.time_forecasts import Forecasts
from hpctrain.jobs.request import node_range
from hpctrain.train.config import Settings, check_node_counts
from hpctrain.util.text import columns, format_bytes, parse_bytes, printable_lines


def plan(args: argparse.Namespace, settings: Settings) -> int:
    """Print what a run needs, on both ends of a range of nodes; return 0 if it fits, 1 otherwise."""
    if args.machine:
        preset(args.machine)  # refuses an unknown name before the forecast starts
    limits = MemoryLimits(_bytes(args.device_memory, "--device-memory"), _bytes(args.host_memory, "--host-memory"))
    ends = [args] if args.nodes is None else _both_ends(args, settings)
    runs = [planned_run(end, settings, limits) for end in ends]
    earlier = experience(args, settings, runs[0])
    if sys.stderr.isatty():
        print("estimating; measuring this machine takes seconds ...", file=sys.stderr)
    fits, facts = True, []
    for number, planned in enumerate(runs):
        found = candidates(planned, limits, everything=bool(args.strategies))
        times = report.time_report(planned, args.machine, found)
        fits = fits and bool(found[0].fits) and _fits(planned, found[0], earlier)
        _draw(args, planned, found, times)
        learned = (found[0].memory, planned.device, times.step.seconds, times.whole)
        facts.append({**_as_dict(planned, found, times), "earlier": earlier.as_dict(*learned)})
        if not args.json:
            if number:
                print()
            _print(args, planned, found, times)
            print(printable_lines("\n".join(earlier.lines(*learned))), end="\n" if earlier.folders else "")
    if args.json:
        print(json.dumps(facts[0] if len(runs) == 1 else {"nodes": args.nodes, "plans": facts}, indent=2))
    return 0 if fits else EXIT_FAILURE


def _both_ends(args: argparse.Namespace, settings: Settings) -> list[argparse.Namespace]:
    """Return the arguments for the ends of ``--nodes``, with their ranks. Raises ``UsageError`` for invalid ones."""
    if args.ranks is not None:
        raise UsageError(f"--ranks {args.ranks} and --nodes: both determine the ranks; allowed is one; remove one")
    least, most = node_range(args.nodes)
    per_node = 1 if args.ranks_per_node is None else args.ranks_per_node
    if most and (args.output or args.scaling):
        raise UsageError(f"--nodes {args.nodes}: a picture is of one number of nodes; plan each end by itself")
    if per_node < 1:
        return [args]  # planned_run refuses it
    if most:
        check_node_counts(settings, range(least, most + 1), per_node)
    ends = [least, most] if most else [least]
    each = vars(args)
    return [argparse.Namespace(**{**each, "ranks": end * per_node, "ranks_per_node": per_node}) for end in ends]


def experience(args: argparse.Namespace, settings: Settings, planned: PlannedRun) -> Experience:
    """Return how far forecasts were off for earlier runs, by default those beside the folder of this run."""
    if args.earlier == "none":
        return Experience()
    folder = Path(settings.run.folder).parent if args.earlier is None else Path(args.earlier)
    if not folder.is_dir():
        if args.earlier is not None:
            raise UsageError(f"--earlier {folder}: there is no such folder; name a folder of runs, or none")
        return Experience()
    known: list[Forecasts] = []  # this machine is measured once

    def step_seconds(run: PlannedRun) -> float:
        here = known[0].machine if known and not args.machine else None
        known.append(Forecasts(run, args.machine, here=here))
        return known[-1].step(run).seconds

    return learn(folder, planned.device, step_seconds)


def _fits(planned: PlannedRun, chosen: Configuration, earlier: Experience) -> bool:
    """Return whether the corrected memory fits too; a correction to less memory is not relied on."""
    limit = chosen.limits.device if planned.device == "cuda" else chosen.limits.host
    return limit is None or earlier.memory_factor <= 1 or earlier.corrected(chosen.memory, planned.device) <= limit


def planned_run(args: argparse.Namespace, settings: Settings, limits: MemoryLimits) -> PlannedRun:
    """Return the run that the arguments describe. Raises ``UsageError`` for invalid arguments."""
    if not args.allow_code:
        check_functions(settings)
    ranks, per_node = args.ranks, args.ranks_per_node
    for option, number, most in (("--ranks", ranks, 2**24), ("--ranks-per-node", per_node, 2**16)):
        if number is not None and not 1 <= number <= most:
            bound = "least 1" if number < 1 else f"most {most}"
            raise UsageError(f"{option} {number}: must be at {bound}")
    facts, per_node = facts_of(settings), per_node or ranks or 1
    return PlannedRun(settings, facts, ranks or 1, per_node, device_of(settings, limits, args.machine))


def device_of(settings: Settings, limits: MemoryLimits, machine: str | None = None) -> Device:
    """Return the device of the ranks: with ``auto``, GPUs if the arguments describe any or this machine has some."""
    wanted = settings.run.device
    if wanted == "cpu" and limits.device is not None:
        raise UsageError('--device-memory is for GPUs: the settings have run.device = "cpu"; give --host-memory')
    if wanted == "auto":
        import torch

        return "cuda" if limits.device is not None or machine or torch.cuda.is_available() else "cpu"
    return "cuda" if wanted == "cuda" else "cpu"


def _bytes(word: str | None, option: str) -> int | None:
    try:
        return None if word is None else parse_bytes(word)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


# Output ---------------------------------------------------------------------------------------------------------------


def _draw(
    args: argparse.Namespace, planned: PlannedRun, found: Sequence[Configuration], times: report.TimeReport
) -> None:
    if args.output:
        from hpctrain.forecast.plots import memory_figure
        from hpctrain.util.plotting import save_figure

        save_figure(memory_figure(report.heading(planned), found), args.output)
    if args.scaling:
        times.draw(args.scaling)


def _as_dict(planned: PlannedRun, found: Sequence[Configuration], times: report.TimeReport) -> dict[str, Any]:
    limits = found[0].limits
    return {
        "model": planned.facts.name,
        "parameters": planned.facts.numel,
        "ranks": planned.ranks,
        "ranks_per_node": planned.ranks_per_node,
        "device": planned.device,
        "limits": {"device": limits.device, "host": limits.host},
        "notes": list(planned.facts.notes),
        "memory": report.as_dict(found[0]),
        "strategies": [report.as_dict(one) for one in found],
        "time": times.as_dict(),
    }


def _print(
    args: argparse.Namespace, planned: PlannedRun, found: Sequence[Configuration], times: report.TimeReport
) -> None:
    chosen = found[0]
    print(printable_lines(report.heading(planned)))
    for note in planned.facts.notes:
        print(printable_lines(f"note: {note}"))
    print(printable_lines("\n".join(["", *columns(report.rows_of(planned, chosen.memory)), ""])))
    print(printable_lines(report.peak_line(planned, chosen.memory)))
    print(printable_lines("\n".join(["", *columns(report.lines_of(found)), ""])))
    if chosen.limits.known:
        print(printable_lines(_sentence(found)))
    print(printable_lines("\n".join(["", *times.lines()])))
    for path in (args.output, args.scaling):
        if path:
            print(printable_lines(f"drawn into {path}"))


def _sentence(found: Sequence[Configuration]) -> str:
    """Return a sentence on whether the chosen strategy fits, and otherwise which strategies fit."""
    chosen, fitting = found[0], [one.name for one in found if one.fits]
    if chosen.fits:
        return f"{chosen.name} fits"
    if fitting:
        return f"{chosen.name} does not fit: {report.verdict(chosen)}; {fitting[0]} fits"
    nearest = min(found, key=lambda one: sum(one.excess))
    missing = format_bytes(sum(nearest.excess), 2)
    return f"nothing fits: {chosen.name} has {report.verdict(chosen)}, {nearest.name} {missing}"
