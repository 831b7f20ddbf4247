"""Verb ``hpctrain plan``: forecasts a run, simulates a pipeline schedule, or shows the trace of a run.

``plan_run`` plans a run and needs torch. The rest needs neither torch nor MPI. Pictures need
matplotlib.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.cli.main import add_verb, quantity
from hpctrain.errors import UsageError
from hpctrain.parallel.pipeline.schedules import SCHEDULES, make
from hpctrain.parallel.pipeline.timeline import PASSES, Timeline, equal_costs, simulate
from hpctrain.util.plotting import check_suffix, save_figure
from hpctrain.util.text import columns, counted, printable_lines

_WHAT = (
    "Estimate the memory and time of a run before its job is submitted, and alternatives that fit; or show the order "
    "of microbatches in a pipeline schedule, the idle time of stages and their live microbatches."
)
_EPILOG = """\
examples:
  hpctrain plan jobs/gpt-tiny.toml --ranks 4                                   memory and time of the run
  hpctrain plan big.toml --ranks 64 --ranks-per-node 4 --device-memory 40GiB --host-memory 256GiB --strategies
  hpctrain plan big.toml --set parallel.data=fsdp --ranks 8 --json             as JSON, in bytes
  hpctrain plan big.toml --nodes 2-8 --ranks-per-node 4                        a job that takes 2 to 8 nodes
  hpctrain plan big.toml --ranks 8 -o memory.svg --scaling scaling.svg         pictures: .svg, .png or .pdf
  hpctrain plan --schedule 1f1b --pipe 4 --microbatches 8                      as text, one line per stage
  hpctrain plan --schedule 1f1b --pipe 4 --microbatches 8 -o schedule.svg      a picture: .svg, .png or .pdf
  hpctrain plan --schedule interleaved --pipe 4 --microbatches 8 --chunks 2
  hpctrain plan --schedule zb-h1 --pipe 4 --microbatches 8 --forward 1 --input 1.2 --weight 0.8 --send 0.1 --json
  hpctrain plan --measured runs/a -o measured.svg                              a run with train.trace = true

Exit code 1: the run does not fit into the given memory.

Times of a schedule are per stage and microbatch, in any unit. Letters: F forward, B backward, I
gradients of inputs, W gradients of weights, U update, each with the number of its microbatch; dots are idle time.
"""
_TIMES = {
    "forward": "time of a forward pass (default: 1)",
    "backward": "time of a backward pass (default: twice a forward pass)",
    "input": "the part for gradients of inputs (default: half of it)",
    "weight": "the part for gradients of weights (default: the rest)",
    "update": "time of an optimizer update, for pipedream (default: 0)",
    "send": "time of a message between two stages (default: 0)",
}
_WIDEST = 160  # maximum columns of text on a wider terminal

Live = list[tuple[str, int]]  # the name of each row of a timeline, and its live microbatches


def add_parser(subparsers: Any) -> None:
    parser = add_verb(subparsers, "plan", _WHAT, _EPILOG)
    _add_planned(parser)
    ideal = parser.add_argument_group("a schedule")
    ideal.add_argument("--schedule", metavar="NAME", help=", ".join(SCHEDULES))
    ideal.add_argument("--pipe", type=int, metavar="P", help="stages")
    ideal.add_argument("--microbatches", type=int, metavar="M", help="microbatches per step")
    ideal.add_argument("--chunks", type=int, metavar="C", help="model chunks per stage (interleaved: 2)")
    time = quantity("a time of at least 0", lambda number: number >= 0)
    for name, text in _TIMES.items():
        ideal.add_argument(f"--{name}", type=time, metavar="TIME", help=text)
    measured = parser.add_argument_group("a trace")
    measured.add_argument("--measured", type=Path, metavar="RUN", help="the folder of a run that wrote trace.json")
    measured.add_argument("--step", type=int, metavar="N", help="which of its steps (default: the last in it)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="draw a picture: .svg, .png or .pdf")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_planned(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="plan the run of these settings")
    planned = parser.add_argument_group("a planned run")
    setting, meaning = "SECTION.KEY=VALUE", "change a setting of the file (again for more)"
    planned.add_argument("--set", dest="assignments", metavar=setting, action="append", help=meaning)
    planned.add_argument("--ranks", type=int, metavar="N", help="ranks in all (default: 1)")
    nodes = "nodes, instead of --ranks; of a range such as 2-8, both ends"
    planned.add_argument("--nodes", metavar="N|MIN-MAX", help=nodes)
    planned.add_argument("--ranks-per-node", type=int, metavar="N", help="ranks of a full node (default: all)")
    planned.add_argument("--device-memory", metavar="SIZE", help="memory of a GPU, as in 40GiB; plans for GPUs")
    planned.add_argument("--host-memory", metavar="SIZE", help="memory of a node, as in 256GiB")
    allowing = "run the functions that CONFIG.toml names, from any author"
    planned.add_argument("--allow-code", action="store_true", default=None, help=allowing)
    planned.add_argument("--strategies", action="store_true", default=None, help="show all meshes that are possible")
    planned.add_argument("--machine", metavar="NAME", help="estimate time for A100, H100, H200 or MI250X")
    learning = "runs to correct the forecast by (default: those beside run.folder; none: no correction)"
    planned.add_argument("--earlier", metavar="FOLDER", help=learning)
    planned.add_argument("--scaling", type=Path, metavar="FILE", help="plot the time per step over the number of ranks")


_OF_RUN = (
    *("assignments", "ranks", "nodes", "ranks_per_node", "device_memory", "host_memory", "strategies", "machine"),
    *("scaling", "allow_code", "earlier"),
)


def run(args: argparse.Namespace) -> int:
    """Print the result, and draw it if requested; return the exit code."""
    from hpctrain.cluster.launcher import rank_from_environment

    if rank_from_environment():
        return 0  # rank 0 prints for all ranks
    _check(args)
    if args.config:
        from hpctrain.log import early_warnings
        from hpctrain.train.config import load

        settings = load(args.config, args.assignments or ())  # a mistake in them is told before torch is imported
        for text in early_warnings():
            print(printable_lines(f"warning: {text}"), file=sys.stderr)
        from hpctrain.cli.plan_run import plan

        return plan(args, settings)
    return _measured(args) if args.measured else _ideal(args)


def _check(args: argparse.Namespace) -> None:
    """Raise ``UsageError`` unless the arguments describe exactly one of: a run to plan, a schedule, a trace."""
    of_schedule = ("schedule", "pipe", "microbatches", "chunks", *_TIMES)
    given = [name for name in of_schedule if getattr(args, name) is not None]
    for path in (args.output, args.scaling):
        if path:
            check_suffix(path)
    if args.config:
        others = [name for name in (*of_schedule, "measured", "step") if getattr(args, name) is not None]
        if others:
            raise UsageError(f"--{others[0]} is for a schedule or a trace: remove it, or {args.config}")
        return
    planned = [name for name in _OF_RUN if getattr(args, name) is not None]
    if planned:
        word = "set" if planned[0] == "assignments" else planned[0].replace("_", "-")
        raise UsageError(f"--{word} is for planning a run: give its settings, as in hpctrain plan CONFIG.toml")
    if args.measured and given:
        raise UsageError(f"--measured shows a trace: remove --{given[0]}")
    if not args.measured:
        missing = [name for name in ("schedule", "pipe", "microbatches") if getattr(args, name) is None]
        if len(missing) == 3:
            else_ = "--schedule, --pipe and --microbatches, or --measured RUN"
            raise UsageError(f"nothing to show: give CONFIG.toml, or {else_}")
        if missing:
            raise UsageError(f"a picture of a schedule needs {' and '.join('--' + name for name in missing)}, too")
        if args.step is not None:
            raise UsageError("--step needs --measured")


# A schedule -----------------------------------------------------------------------------------------------------------


def _ideal(args: argparse.Namespace) -> int:
    chunks = args.chunks if args.chunks is not None else 2 if args.schedule == "interleaved" else 1
    schedule = make(args.schedule, args.pipe, args.microbatches, chunks)
    timeline = simulate(schedule, equal_costs(schedule.chunks, **_costs(args, chunks)))
    words = f"{args.schedule}, {counted(args.pipe, 'stage')}, {counted(args.microbatches, 'microbatch')}"
    title = words + (f", {chunks} chunks per stage" if chunks > 1 else "")
    facts = {"schedule": schedule.name, "chunks": schedule.chunks, "microbatches": schedule.microbatches}
    live = [(f"stage {rank}", schedule.live(rank)) for rank in range(schedule.ranks)]
    return _show(args, timeline, title, facts, live)


def _costs(args: argparse.Namespace, chunks: int) -> dict[str, float]:
    """Return the times of a chunk from those of a stage; the time of a message is not divided."""
    given = {name: getattr(args, name) for name in _TIMES if getattr(args, name) is not None}
    given.setdefault("forward", 1.0)
    if "backward" not in given:
        halves = given.get("input"), given.get("weight")
        whole = 2 * given["forward"]
        given["backward"] = sum(whole / 2 if half is None else half for half in halves)
    return {name: time if name == "send" else time / chunks for name, time in given.items()}


# A run ----------------------------------------------------------------------------------------------------------------


def _measured(args: argparse.Namespace) -> int:
    from hpctrain.train.profile.read import read

    found = read(args.measured, args.step)
    if not any(span.name in PASSES for row in found.timeline.rows for span in row):
        raise UsageError(
            f"{found.path} has no passes to draw: in a loop of your own, open a span around each of them, as in "
            'with hpctrain.trace.span("forward")'
        )
    facts = {"run": str(args.measured), "step": found.step, "unit": "ms"}
    live = [(name, found.timeline.most_live(row)) for row, name in enumerate(found.names)]
    return _show(args, found.timeline, f"{args.measured}, step {found.step}, measured", facts, live, "ms")


# Both -----------------------------------------------------------------------------------------------------------------


def _show(
    args: argparse.Namespace, timeline: Timeline, title: str, facts: dict[str, Any], live: Live, unit: str = ""
) -> int:
    """Draw and print a timeline, with a ``unit`` if it was measured."""
    from hpctrain.parallel.pipeline.render import figure

    if args.output:
        save_figure(figure(timeline, title, names=[name for name, _ in live] if unit else (), unit=unit), args.output)
    if args.json:
        _print_json(facts, timeline)
    else:
        _print_text(f"{title} in {unit}" if unit else title, timeline, live, args.output, measured=bool(unit))
    return 0


def _print_text(title: str, timeline: Timeline, live: Live, output: Path | None, *, measured: bool) -> None:
    """Print a table, and the timeline unless it was drawn."""
    from hpctrain.parallel.pipeline.render import fitted, lines

    whole = timeline.makespan
    print(printable_lines(f"{title}: takes {whole:.6g}, bubble {timeline.bubble:.1%}"))
    rows = [["", "live", "busy", "idle"]]
    for rank, (name, count) in enumerate(live):
        busy, idle = timeline.busy(rank), timeline.idle(rank)
        rows.append([name, str(count), f"{busy:.6g}", f"{idle / whole:.1%}" if whole else "0.0%"])
    print(printable_lines("\n".join(["", *columns(rows), ""])))
    if output:
        print(printable_lines(f"drawn into {output}"))
    else:
        draw = fitted if measured else lines
        print(printable_lines("\n".join(draw(timeline, min(shutil.get_terminal_size().columns, _WIDEST)))))


def _print_json(facts: dict[str, Any], timeline: Timeline) -> None:
    whole = timeline.makespan
    rows = [
        {
            "live": timeline.most_live(rank),
            "busy": timeline.busy(rank),
            "idle": timeline.idle(rank) / whole if whole else 0.0,
            "spans": [asdict(span) for span in row],
        }
        for rank, row in enumerate(timeline.rows)
    ]
    print(json.dumps({**facts, "makespan": whole, "bubble": timeline.bubble, "ranks": rows}, indent=2))
