"""Text and timeline chart of run receipts: a table of the attempts, the totals, and where the time was spent."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.errors import UsageError
from hpctrain.train.receipt.read import Attempt, RunReceipt, load
from hpctrain.util.plotting import INK, add_grid, check_suffix, new_figure, save_figure
from hpctrain.util.text import columns, counted, format_number, without_math

SPARE = "spare"
# Categories of an attempt's time: the name in JSON, and the label in text.
PARTS = {
    "useful": "useful steps",
    "startup": "start-up",
    "repeated": "repeated steps",
    "saves": "waiting for checkpoints",
    "other": "other",
    SPARE: "spare nodes",  # not of an attempt's time: the nodes that idled meanwhile
}
_WH = 3600.0  # joules
MOST_LISTED = 10  # memory errors, and slow ranks, in the text
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Totals:
    """Totals over several attempts; ``node_seconds`` is by category."""

    attempts: int
    node_seconds: dict[str, float]
    steps: int
    repeated_steps: int
    memory_errors: int
    tokens: int | None
    samples: int | None
    cpu_hours: float | None
    gpu_hours: float | None
    joules: float | None
    energy_source: str

    @property
    def node_hours(self) -> float:
        return sum(self.node_seconds.values()) / 3600

    def share(self, part: str) -> float:
        """Return the fraction of the node-hours in a category, from 0 to 1."""
        return self.node_seconds[part] / (sum(self.node_seconds.values()) or 1.0)


def totals(receipts: Sequence[RunReceipt]) -> Totals:
    """Return the totals over all attempts of some runs; a count that is unknown for one attempt is unknown in total."""
    attempts = [attempt for receipt in receipts for attempt in receipt.attempts]
    joules = [receipt.joules for receipt in receipts if receipt.joules is not None]
    stepped = [attempt for attempt in attempts if attempt.steps]
    return Totals(
        attempts=len(attempts),
        node_seconds=_node_seconds(attempts),
        steps=sum(one.steps for one in attempts),
        repeated_steps=sum(one.repeated_steps for one in attempts),
        memory_errors=sum(one.memory_errors for one in attempts),
        tokens=_sum(one.tokens for one in stepped),
        samples=_sum(one.samples for one in stepped),
        cpu_hours=_sum(None if one.cpus is None else one.cpus * one.elapsed / 3600 for one in attempts),
        gpu_hours=_sum(None if one.gpus is None else one.gpus * one.elapsed / 3600 for one in attempts),
        joules=sum(joules) if len(joules) == len(receipts) else None,
        energy_source=", ".join(
            dict.fromkeys(receipt.energy_source for receipt in receipts if receipt.joules is not None)
        ),
    )


def _node_seconds(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Return the seconds of all nodes by category."""
    used = {part: sum(one.nodes * getattr(one, part) for one in attempts) for part in PARTS if part != SPARE}
    return {**used, SPARE: sum(one.spare_nodes * one.elapsed for one in attempts)}


def _sum(numbers: Iterable[N | None]) -> N | None:
    found = list(numbers)
    known = [number for number in found if number is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(found) else None


def text(receipts: Sequence[RunReceipt]) -> list[str]:
    """Return the text output: the attempts of one run, or one line per run if there are several, and the totals."""
    together = totals(receipts)
    if len(receipts) == 1:
        (receipt,) = receipts
        last = receipt.attempts[-1]
        attempts = counted(together.attempts, "attempt", ",")
        head = f"{receipt.folder}: {attempts}, {receipt.status} after step {last.last_step}"
        rows = [_HEAD, *(_row(attempt) for attempt in receipt.attempts)]
        staged = [f"staged: {attempt.staged}" for attempt in receipt.attempts if attempt.staged][-1:]
        listed = [line for attempt in receipt.attempts for line in _memory_errors(attempt)][-MOST_LISTED:]
        listed += [line for attempt in receipt.attempts for line in _slow_ranks(attempt)][-MOST_LISTED:]
        listed += [line for attempt in receipt.attempts for line in _recoveries(attempt)][-MOST_LISTED:]
    else:
        staged = listed = []
        head = f"{len(receipts)} runs, {counted(together.attempts, 'attempt', ',')}"
        rows = [_RUNS_HEAD, *(_run_row(receipt) for receipt in receipts)]
    return [head, "", *columns(rows), "", *_totals(together), *staged, *listed]


def _memory_errors(attempt: Attempt) -> Iterator[str]:
    """Yield a line for each memory error that the receipt describes."""
    for one in attempt.last_memory_errors:
        where = "unknown rank" if one["rank"] is None else f"rank {one['rank']} on {one['host']}"
        step, tensor = ("unknown" if one[name] is None else one[name] for name in ("step", "tensor"))
        yield f"memory error in step {step}: {tensor} of {where}"


def _slow_ranks(attempt: Attempt) -> Iterator[str]:
    """Yield a line for each slow rank that the receipt describes."""
    for one in attempt.slow_ranks:
        rank, host, cause, first, steps, lost = (
            "unknown" if one[name] is None else one[name]
            for name in ("rank", "host", "cause", "first_step", "slow_steps", "seconds_lost")
        )
        shown = lost if isinstance(lost, str) else duration(lost)
        yield f"slow: rank {rank} on {host} in {steps} steps from step {first} on, cause {cause}, {shown} lost"


def _recoveries(attempt: Attempt) -> Iterator[str]:
    """Yield a line for each time that the run continued without ranks that had died."""
    for one in attempt.recoveries:
        step = "unknown" if one["step"] is None else one["step"]
        left = "fewer ranks" if one["ranks_left"] is None else counted(one["ranks_left"], "rank")
        repeated = one["repeated_steps"] or 0
        lost = f", {counted(repeated, 'step')} repeated" if repeated else ""
        lost += "" if one["seconds"] is None else f", {duration(one['seconds'])} lost"
        same = f" (rank {', '.join(one['left'])} of the same replica left)" if one["left"] else ""
        died = ", ".join(one["ranks"]) or "unknown"
        yield f"died: rank {died} in step {step}{same}, continued with {left}{lost}"


def sentence(together: Totals) -> str:
    """Return a sentence on the fraction of the time that counted."""
    return f"{together.share('useful'):.0%} of {format_number(together.node_hours)} node-hours went into useful steps"


def summary(folder: Path) -> str | None:
    """Return a run's receipt in one line, None if there is none; the scheduler is not queried."""
    try:
        together = totals(load([folder], {}))
    except UsageError:
        return None  # the disk was full, and the run continued without a receipt
    return f"{sentence(together)}, in {counted(together.attempts, 'attempt', ',')}"


def to_json(receipts: Sequence[RunReceipt]) -> dict[str, Any]:
    """Return the receipts as plain values; times in seconds, energy in joules."""
    together = totals(receipts)
    facts = asdict(together)
    parts = facts.pop("node_seconds")
    runs = [
        {
            "folder": str(receipt.folder),
            "status": receipt.status,
            "joules": receipt.joules,
            "energy_source": receipt.energy_source,
            "attempts": [{**asdict(one), "other": one.other, "node_hours": one.node_hours} for one in receipt.attempts],
        }
        for receipt in receipts
    ]
    hours = {"node_hours": together.node_hours, "node_hours_of": {part: each / 3600 for part, each in parts.items()}}
    return {"runs": runs, "totals": {**facts, **hours, "useful_share": together.share("useful")}}


def duration(seconds: float) -> str:
    """Return a duration in readable form: 12.3 s, 4:05, 12:04:05."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


_HEAD = ("", "started", "job", "nodes", "ranks", "steps", "elapsed", "start-up", "useful", "repeated", "saves", "ended")
_RUNS_HEAD = ("run", "attempts", "steps", "node-hours", "useful", "status")


def _row(one: Attempt) -> tuple[str, ...]:
    started = "" if one.started is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.started))
    times = (one.elapsed, one.startup, one.useful, one.repeated, one.saves)
    steps = f"{one.first_step}-{one.last_step}" if one.last_step >= one.first_step else "none"
    nodes = f"{one.nodes} of {one.requested_nodes}" if one.requested_nodes else str(one.nodes)
    nodes += f" + {one.spare_nodes} spare" if one.spare_nodes else ""
    facts = (one.job_id or "-", nodes, str(one.ranks), steps)
    return (str(one.index), started, *facts, *(duration(each) if each else "-" for each in times), one.why)


def _run_row(receipt: RunReceipt) -> tuple[str, ...]:
    own = totals([receipt])
    last = receipt.attempts[-1]
    facts = (str(own.attempts), str(last.last_step), format_number(own.node_hours), f"{own.share('useful'):.0%}")
    return (str(receipt.folder), *facts, last.why)


def _totals(together: Totals) -> list[str]:
    parts = [part for part in PARTS if part != "useful" and (part != SPARE or together.node_seconds[SPARE])]
    lost = [f"{PARTS[part]} {together.share(part):.1%}" for part in parts]
    done = [counted(together.steps, "useful step", ",")]
    done += [f"{together.tokens:,} tokens"] if together.tokens else []
    done += [f"{together.samples:,} samples"] if together.samples else []
    done += [counted(together.repeated_steps, "repeated step", ",")] if together.repeated_steps else []
    done += [f"{counted(together.memory_errors, 'memory error', ',')} repaired"] if together.memory_errors else []
    hours = [f"{format_number(together.node_hours)} node-hours"]
    hours += [f"{format_number(together.gpu_hours)} GPU-hours"] if together.gpu_hours else []
    hours += [f"{format_number(together.cpu_hours)} CPU-hours"] if together.cpu_hours else []
    hours += list(_energy(together))
    return [sentence(together), f"lost: {', '.join(lost)}", ", ".join(done), ", ".join(hours)]


def _energy(together: Totals) -> Iterator[str]:
    """Yield the energy, and its part per token or sample, if it is known."""
    if together.joules:
        yield f"{format_number(together.joules / _WH / 1000)} kWh ({together.energy_source})"
        for count, name in ((together.tokens, "token"), (together.samples, "sample")):
            if count:
                yield f"{format_number(together.joules / count)} J per {name}"


# Timeline chart of the attempts of runs: where the time of each was spent. Needs neither torch nor MPI ----------------

_COLOURS = {
    "startup": "#e0812b",
    "useful": "#5fa55a",
    "saves": "#3b6fb6",
    "other": "#c9c9c9",
    "repeated": "#c0504d",
}  # in drawing order: repeated steps were the last ones of an attempt
_BAR = 0.7
_ROW, _TALLEST = 0.34, 20.0  # inches


def draw(receipts: Sequence[RunReceipt], path: str | Path) -> None:
    """Draw the attempts into a file; the suffix selects the format. Raises ``UsageError`` if this fails."""
    path = Path(path)
    check_suffix(path)
    save_figure(figure(receipts), path)


def figure(receipts: Sequence[RunReceipt]) -> Any:
    """Return the chart as a matplotlib figure. Raises ``UsageError`` if matplotlib is not installed.

    Within an attempt, the categories are drawn one after another. Each bar has the category's total
    length; its position does not show when the time was spent.
    """
    rows = [(_label(receipts, receipt, one), one) for receipt in receipts for one in receipt.attempts]
    zero = min((one.started for _, one in rows if one.started is not None), default=0.0)
    ends = [(one.started or zero) - zero + one.elapsed for _, one in rows]
    unit, scale = unit_of(max(ends))
    found = new_figure(10, min(_ROW * len(rows) + 1.6, _TALLEST))
    axis = found.subplots()
    for index, (_, one) in enumerate(rows):
        _draw_attempt(axis, index, one, zero, scale)
    axis.set_yticks(range(len(rows)), [label for label, _ in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlabel(f"{unit} since the first start")
    axis.set_title(sentence(totals(receipts)), loc="left", fontsize=11, color=INK)
    _draw_frame(axis)
    return found


def unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit for an axis of this length, and its seconds."""
    units = {"days": 86400.0, "hours": 3600.0, "minutes": 60.0}
    return next(((name, length) for name, length in units.items() if seconds >= 2 * length), ("seconds", 1.0))


def _label(receipts: Sequence[RunReceipt], receipt: RunReceipt, one: Attempt) -> str:
    of = f"{without_math(receipt.folder.name)} " if len(receipts) > 1 else "attempt "
    return f"{of}{one.index}"


def _draw_attempt(axis: Any, index: int, one: Attempt, zero: float, scale: float) -> None:
    at = ((one.started or zero) - zero) / scale
    for part, colour in _COLOURS.items():
        width = getattr(one, part) / scale
        axis.broken_barh([(at, width)], (index - _BAR / 2, _BAR), facecolor=colour, linewidth=0)
        at += width
    axis.text(at, index, f"  {without_math(one.status)}", va="center", fontsize=8, color=INK)


def _draw_frame(axis: Any) -> None:
    from matplotlib.patches import Patch

    axis.margins(x=0.08)
    axis.set_xlim(left=0)
    add_grid(axis, "x")
    patches = [Patch(facecolor=colour, label=PARTS[part]) for part, colour in _COLOURS.items()]
    axis.figure.legend(handles=patches, frameon=False, fontsize=9, ncols=len(patches), loc="outside lower center")
