"""Screen of ``hpctrain watch``: many runs as a table, one run in detail. It adapts to the size of the terminal."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpctrain.errors import UsageError
from hpctrain.train.receipt.render import duration
from hpctrain.train.receipt.write import maybe, text
from hpctrain.util.text import counted, printable
from hpctrain.watch.curves import Curve, best_of, drawn, read_curves, shown_together
from hpctrain.watch.state import RunState, is_validation, read_state, unreadable

STYLES = {"running": "green", "finished": "cyan", "stopped": "yellow", "failed": "bold red", "killed": "bold red"}
PLOT_HEIGHT, MOST_HEIGHT, MOST_WIDTH = 8, 20, 160  # lines of a picture at least and at most, columns at most
_COLUMNS = ("done", "loss", "ETA", "valid.", "step", "rate", "job ends", "note")  # the most important ones first
_SHOWN = ("step", "done", "loss", "valid.", "rate", "ETA", "job ends", "note")
_LEAST = 12  # columns of a note


def states_of(folders: Sequence[Path]) -> list[RunState]:
    """Return the states of runs; a folder that cannot be read, or no longer exists, has such a state."""
    found = []
    for folder in folders:
        try:
            found.append(read_state(folder))
        except UsageError as error:
            found.append(unreadable(folder, str(error)))
    return found


def curves_of(state: RunState) -> dict[str, Curve]:
    """Return the curves of a run, none if they cannot be read."""
    try:
        return read_curves(state.folder)
    except UsageError:
        return {}


def picture(states: Sequence[RunState], console: Console) -> RenderableType:
    """Return what ``--once`` prints: one run in detail, or a table of several."""
    width, height, colour = console.width, console.height, console.color_system is not None
    if len(states) == 1:
        return detail(states[0], curves_of(states[0]), width, max(height, 24), colour=colour)
    return table(states, width, height)


def table(states: Sequence[RunState], width: int, height: int, selected: int | None = None) -> RenderableType:
    """Return a table with a line for each run; of many runs, those around the ``selected`` one."""
    room = max(height - 4, 1)
    first = 0 if selected is None else min(max(selected - room // 2, 0), max(len(states) - room, 0))
    shown = states if selected is None else states[first : first + room]
    above = _above([state.folder for state in states])
    names = [printable(state.folder.relative_to(above) if above else state.folder) for state in shown]
    cells = [_cells(state) for state in shown]
    grid = Table(box=None, padding=(0, 1, 0, 0), show_edge=False)
    for name, taken in _widths(names, cells, width).items():
        right = name not in ("run", "status", "note")
        grid.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis", width=taken)
    for number, (name, state, row) in enumerate(zip(names, shown, cells), first):
        # Text, because Rich would interpret brackets in strings.
        texts = {column: Text(said) for column, said in {**row, "run": name}.items()}
        texts["status"].stylize(STYLES.get(state.status, ""))
        style = "reverse" if number == selected else ""
        grid.add_row(*(texts[str(column.header)] for column in grid.columns), style=style)
    rest = len(states) - len(shown)
    below = [Text(f"{rest} more runs", style="dim")] if rest else []
    head = [Text(f"runs in {printable(above)}", style="dim", overflow="ellipsis", no_wrap=True)] if above else []
    return Group(*head, grid, *below)


def _widths(names: Sequence[str], cells: Sequence[Mapping[str, str]], width: int) -> dict[str, int]:
    """Return the columns that fit into the width, and their widths, in the order in which they are shown."""
    longest = {name: max(map(len, (name, *(row[name] for row in cells)))) for name in ("status", *_COLUMNS)}
    run = min(max(map(len, ("run", *names))), max((width - longest["status"] - 2) // 2, 6), width - 1)
    found, left = {"run": run}, width - run - 1
    for name in ("status", *_COLUMNS):
        taken = min(longest[name], left - 1) if name == "note" else longest[name]
        if any(row[name] for row in cells) and taken < left and taken >= min(longest[name], _LEAST):
            found[name] = taken
            left -= taken + 1
    return {name: found[name] for name in ("run", "status", *_SHOWN) if name in found}


def _cells(state: RunState) -> dict[str, str]:
    """Return the text of each column but the first two."""
    return {
        "status": "silent" if state.silent else state.status,
        "step": f"{state.step:,}",
        "done": "" if state.fraction is None else f"{state.fraction:.0%}",
        "loss": _value(state, lambda name: name == "loss"),
        "valid.": _value(state, is_validation),
        "rate": "" if state.rate is None else f"{state.rate[0]:,.0f} {state.rate[1]}/s",
        "ETA": "" if state.left is None else duration(state.left),
        "job ends": "" if state.job_left is None else duration(state.job_left),
        "note": printable(next(iter(_warnings(state)), "" if state.why == state.status else state.why)),
    }


def _above(folders: Sequence[Path]) -> Path | None:
    """Return the folder that all runs are in, if it is worth to be named once."""
    found = Path(os.path.commonpath([folder.parent for folder in folders]))
    return found if len(folders) > 1 and found != Path() else None


def _value(state: RunState, wanted: Callable[[str], bool]) -> str:
    return next((f"{value:.4g}" for name, value in state.values.items() if wanted(name)), "")


def detail(
    state: RunState, curves: Mapping[str, Curve], width: int, height: int, *, curve: int = 0, colour: bool = True
) -> RenderableType:
    """Return one run in detail; ``curve`` is the number of the curve to draw."""
    width = min(width, MOST_WIDTH)
    name = printable(state.folder)  # the end of a long path says more than its beginning
    head = Text(name if len(name) <= width else "…" + name[len(name) - width + 1 :], style="bold", no_wrap=True)
    parts: list[RenderableType] = [head, *_facts(state, curves, width)]
    lines = sum(1 for _ in parts) + 2
    room = min(height - lines, MOST_HEIGHT)
    drawable = [name for name, (steps, _) in curves.items() if len(steps) > 1]
    if drawable and width >= 30 and room >= PLOT_HEIGHT:
        names = shown_together(drawable[curve % len(drawable)], curves)
        title = ", ".join(names) + f" over {curves[names[0]][0][-1]:,} steps"
        parts.append(Text(printable(title), style="dim", overflow="ellipsis", no_wrap=True))
        parts.append(Text.from_ansi(drawn(names, curves, width - 1, room, colour=colour)))
    return Group(*parts)


def _facts(state: RunState, curves: Mapping[str, Curve], width: int) -> list[RenderableType]:
    """Return the lines about a run: how it is, how far, how fast, what for, and what is unusual."""
    found: list[RenderableType] = []

    def line(*texts: str, style: str = "") -> None:
        for said in _lines([printable(one) for one in texts if one], width):
            found.append(Text(said, style=style, overflow="ellipsis", no_wrap=True))

    attempt = state.attempt
    job = text(attempt, "job_id")
    ranks, nodes = int(maybe(attempt, "size") or 1), int(maybe(attempt, "nodes") or 1)
    where = f"{counted(ranks, 'rank')} on {text(attempt, 'host') or 'an unknown host'}"
    where += f" and {counted(nodes - 1, 'other node')}" if nodes > 1 else ""
    kind = ", ".join(filter(None, (text(attempt, "parallel"), text(attempt, "device"))))
    starts = f"start {state.starts}" if state.starts > 1 else ""
    line(state.status, state.why if state.why != state.status else "", style=STYLES.get(state.status, ""))
    line(where, kind, f"{text(attempt, 'scheduler') or 'job'} {job}" if job else "", starts)
    total = f" of {state.target:,}" if state.target else ""
    done = "" if state.fraction is None else f"{state.fraction:.1%}"
    speed = "" if state.steps_a_second is None else f"{_rate(state.steps_a_second)} steps/s"
    rate = "" if state.rate is None else f"{state.rate[0]:,.0f} {state.rate[1]}/s"
    eta = "" if state.left is None else f"ETA {duration(state.left)}"
    ends = "" if state.job_left is None else f"job ends in {duration(state.job_left)}"
    line(f"step {state.step:,}{total}", done, speed, rate)
    line(eta, ends)
    if state.fraction is not None:
        cells = min(width, 60)
        line("█" * round(state.fraction * cells) + "░" * (cells - round(state.fraction * cells)))
    values = [f"{name} {value:.5g}" for name, value in list(state.values.items())[:6]]
    line(*values)
    best = [f"{name} {one[1]:.5g} at step {one[0]:,}" for name, one in _best(curves)]
    line("best", *best) if best else None
    line(*(f"{name} {share:.0%}" for name, share in state.shares.items()), style="dim")
    for said in _times(state):
        line(said, style="dim")
    for note in _warnings(state):
        line(note, style="yellow")
    return found


def _lines(texts: Sequence[str], width: int) -> list[str]:
    """Return lines that contain the texts, each as many as fit."""
    found: list[str] = []
    for one in texts:
        if found and len(found[-1]) + 2 + len(one) <= width:
            found[-1] += "  " + one
        else:
            found += textwrap.wrap(one, width)
    return found


def _best(curves: Mapping[str, Curve]) -> list[tuple[str, tuple[int, float]]]:
    return [(name, best_of(name, curve)) for name, curve in curves.items() if is_validation(name) and curve[0]][:2]


def _times(state: RunState) -> Iterator[str]:
    """Yield how the time of this start was used, and its newest checkpoint."""
    elapsed = maybe(state.attempt, "elapsed_seconds")
    saved, first = maybe(state.attempt, "saved_step"), maybe(state.attempt, "first_step") or 1
    if elapsed and maybe(state.attempt, "step_seconds"):  # a start of a finished run makes no steps
        names = {"start-up": "startup_seconds", "steps": "step_seconds", "checkpoints": "save_seconds"}
        shares = [f"{name} {(maybe(state.attempt, key) or 0.0) / elapsed:.0%}" for name, key in names.items()]
        yield f"of {duration(elapsed)} until the last checkpoint: {', '.join(shares)}"
    if saved is not None and saved >= first:
        took = maybe(state.attempt, "last_save_seconds")
        yield f"newest checkpoint: step {int(saved):,}" + (f", written in {duration(took)}" if took else "")


def _warnings(state: RunState) -> list[str]:
    found = [] if state.silent is None else [f"no step for {duration(state.silent)}"]
    if state.left is not None and state.job_left is not None and state.left > state.job_left:
        found.append("the job ends before the last step: the run saves, and must be started again")
    return [*found, *state.notes]


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def framed(part: RenderableType, keys: str) -> RenderableType:
    """Return a part of the screen with a line of keys below it."""
    frame = Table(box=box.SIMPLE_HEAD, show_header=False, show_edge=False, padding=0, expand=True)
    frame.add_row(part)
    return Group(frame, Text(keys, style="dim", overflow="ellipsis", no_wrap=True))
