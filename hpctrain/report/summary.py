"""Sections of a report on runs as a whole: overview, starts and their cost, failures, differences in settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bokeh.models import HoverTool

from hpctrain.report.figures import MOST_ROWS, add_legend, new_figure, plain, rows_of_bars
from hpctrain.report.page import Section, Table
from hpctrain.report.runs import ReportedRun, differences, work_per_second
from hpctrain.report.times import MOST_DETAILED
from hpctrain.train.receipt.render import PARTS, duration, text, totals, unit_of
from hpctrain.train.receipt.write import maybe
from hpctrain.train.receipt.write import text as fact
from hpctrain.util.text import counted, format_number, printable, printable_lines
from hpctrain.watch.curves import best_of
from hpctrain.watch.state import is_validation

_ATTEMPT = {"startup": "#e69f00", "useful": "#009e73", "saves": "#0072b2", "other": "#c9c9c9", "repeated": "#d55e00"}


def overview(runs: Sequence[ReportedRun]) -> Section:
    """Return the first section of a page: the most important facts of each run, and what could not be read."""
    return Section("Runs", lines=list(_said(runs)), tables=[_overview(runs)])


def sections(runs: Sequence[ReportedRun]) -> Iterator[Section]:
    """Yield the last sections of a page: starts and their cost, failures, settings and environments."""
    yield Section(
        "Starts, node-hours and energy",
        figures=[attempt_figure(runs)],
        columns=printable_lines("\n".join(text([run.receipt for run in runs]))),
    )
    if events := list(_events(runs)):
        yield Section("Failures", tables=[Table(("run", "start", "what happened"), events)])
    yield from _differences(runs)


def _said(runs: Sequence[ReportedRun]) -> Iterator[str]:
    for run in runs:
        of = f"{run.name}: " if len(runs) > 1 else ""
        yield from (f"{of}{note}" for note in run.notes)
    if len(runs) > MOST_DETAILED:
        yield f"Figures of single runs are those of the first {MOST_DETAILED} of {len(runs)}."


def _overview(runs: Sequence[ReportedRun]) -> Table:
    """Return the most important facts of each run: one column for a single run, one line each for several."""
    facts = [_facts(run) for run in runs]
    names = list(dict.fromkeys(name for each in facts for name in each))
    if len(runs) == 1:
        return Table((), [(name, value) for name, value in facts[0].items() if value])
    shown = [name for name in names if any(each.get(name) for each in facts)]
    return Table(
        ("run", *shown), [(run.name, *(each.get(name, "") for name in shown)) for run, each in zip(runs, facts)]
    )


def _facts(run: ReportedRun) -> dict[str, str]:
    state, attempt = run.state, run.state.attempt
    together = totals([run.receipt])
    rate = work_per_second(run)
    found = {
        "status": state.status,
        "step": f"{state.step:,}" + (f" of {state.target:,}" if state.target else ""),
        "ranks": str(int(maybe(attempt, "size") or 1)),
        "nodes": str(int(maybe(attempt, "nodes") or 1)),
        "device": fact(attempt, "device") or "",
        "strategy": fact(attempt, "parallel") or "",
        "loss": f"{state.values['loss']:.4g}" if "loss" in state.values else "",
        "best validation": _best(run),
        "median rate": "" if rate is None else f"{rate[0]:,.1f} {rate[1]}/s",
        "node-hours": format_number(together.node_hours),
        "useful": f"{together.share('useful'):.0%}",
        "energy": "" if together.joules is None else f"{format_number(together.joules / 3.6e6)} kWh",
    }
    return found | {"ended": printable(state.why) if state.why not in ("", state.status) else ""}


def _best(run: ReportedRun) -> str:
    """Return the best validation value, and its step."""
    name = next((name for name in run.curves if is_validation(name)), None)
    if name is None:
        return ""
    step, value = best_of(name, run.curves[name])
    return f"{name} {value:.4g} in step {step:,}"


def attempt_figure(runs: Sequence[ReportedRun]) -> Any:
    """Return the starts of runs over time, each in parts. A part's place within its start has no meaning."""
    rows = [
        (f"{run.name}: {one.index}" if len(runs) > 1 else f"start {one.index}", one)
        for run in runs
        for one in run.receipt.attempts
    ][:MOST_ROWS]
    zero = min((one.started for _, one in rows if one.started is not None), default=0.0)
    last = max((one.started or zero) - zero + one.elapsed for _, one in rows)
    unit, scale = unit_of(last)
    names = [name for name, _ in rows]
    drawn = new_figure("starts over time", f"{unit} since the first start", "", **rows_of_bars(names))
    begins = [((one.started or zero) - zero) / scale for _, one in rows]
    items = []
    for part, colour in _ATTEMPT.items():
        widths = [getattr(one, part) / scale for _, one in rows]
        source: dict[str, list[Any]] = {
            "start": [plain(name) for name in names],
            "left": list(begins),
            "right": [begin + width for begin, width in zip(begins, widths)],
            "width": widths,
            "ended": [one.why for _, one in rows],
        }
        begins = list(source["right"])
        bars = drawn.hbar(y="start", left="left", right="right", height=0.7, color=colour, source=source)
        tips = [("", "@start"), (PARTS[part], f"@width{{0.00}} {unit}"), ("ended", "@ended")]
        drawn.add_tools(HoverTool(renderers=[bars], tooltips=tips, visible=False))
        if any(widths):
            items.append((PARTS[part], [bars]))
    add_legend(drawn, items)
    return drawn


# Failures and differences ---------------------------------------------------------------------------------------------


def _events(runs: Sequence[ReportedRun]) -> Iterator[Sequence[str]]:
    """Yield run, start and a sentence for each failure that the files record."""
    for run in runs:
        for one in run.receipt.attempts:
            start = str(one.index)
            for death in one.recoveries:
                took = "" if death["seconds"] is None else f" after {duration(death['seconds'])}"
                died = ", ".join(death["ranks"]) or "unknown"
                left = "fewer" if death["ranks_left"] is None else str(death["ranks_left"])
                yield run.name, start, f"rank {died} died in step {death['step']}; {left} ranks continued{took}"
            for slow in one.slow_ranks:
                lost = "" if slow["seconds_lost"] is None else f", {duration(slow['seconds_lost'])} lost"
                where = f"rank {slow['rank']} on {slow['host']}"
                yield run.name, start, f"{where} was slow from step {slow['first_step']} on: {slow['cause']}{lost}"
            if one.memory_errors:
                yield run.name, start, f"{counted(one.memory_errors, 'memory error', ',')} found and repaired"
            failed = int(maybe(run.state.attempts[one.index - 1], "failed_saves") or 0)
            if failed:
                yield run.name, start, f"{counted(failed, 'checkpoint', ',')} could not be written"
            if one.status in ("failed", "killed"):
                yield run.name, start, printable(one.why)


def _differences(runs: Sequence[ReportedRun]) -> Iterator[Section]:
    """Yield the sections on settings and environments: what differs, and all of one run."""
    if len(runs) == 1:
        (run,) = runs
        rows = [(name, *values) for name, values in differences(run.environments).items()]
        if rows:
            head = ("", *(f"start {number}" for number in range(1, len(run.environments) + 1)))
            yield Section("Differences between starts", tables=[Table(head, rows)], closed=len(run.environments) > 10)
        yield Section("Environment", tables=[Table((), list(run.environments[-1].items()))], closed=True)
        if run.settings:
            yield Section("Settings", tables=[Table((), list(run.settings.items()))], closed=True)
        return
    for title, facts in (
        ("Different settings", [run.settings for run in runs]),
        ("Different environments", [run.environments[-1] for run in runs]),
    ):
        found = {name: values for name, values in differences(facts).items() if name != "run.folder"}
        if found:
            head = ("run", *found)
            rows = [(run.name, *(found[name][number] for name in found)) for number, run in enumerate(runs)]
            yield Section(title, tables=[Table(head, rows)])
