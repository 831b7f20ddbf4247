"""Measurement and figures of the checkpoint benchmark: turns, rows, targets, tables and pictures."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint_candidates import READERS, WRITERS, Candidate, Name, WrongResult
from checkpoint_state import Setting
from harness.memory import STATUS, memory_fields
from harness.plot import GREEN, RED, Bar, bars, colour_of, save
from harness.ranks import wait_asleep
from harness.report import Target, at_least, at_most, table
from harness.stats import slowest
from harness.turns import interleave, no_garbage_collection

from hpctrain.util.text import format_bytes

RAW_TARGET, TORCH_TARGET, DCP_TARGET = 0.95, 3.0, 1.0  # times as fast
CORE = 2.0  # 10^9 bytes per second that a core can verify; the limit if the file is read faster
READ_TARGET = 0.9
RANKS_TARGET = 1.2  # times as long, with files that other numbers of ranks wrote
KILLS, MUTATIONS = 200, 10_000
MOST = 2.0  # multiple of the target at which bars are cut off, so that short ones stay visible
MIB = 2**20
TITLES = {
    "write": "Saving: bytes / time until all ranks are done",
    "read": "Loading: bytes per rank / time (page cache warm)",
}


# Turns ----------------------------------------------------------------------------------------------------------------


_CLEAR = Path("/proc/self/clear_refs")


class Growth:
    """Largest growth of resident memory since construction, if Linux allows resetting the peak."""

    def __init__(self) -> None:
        try:
            _CLEAR.write_text("5")  # proc(5): reset the peak resident set size
            self._start: int | None = memory_fields(STATUS)["VmRSS"]
        except OSError:
            self._start = None

    def bytes(self) -> int | None:
        """Return the growth up to the peak; ``None`` if unknown."""
        return None if self._start is None else max(memory_fields(STATUS)["VmHWM"] - self._start, 0)


class Turn(NamedTuple):
    """Timing of one turn on this rank, and the reason of a failure, which is the same on all ranks."""

    seconds: float
    growth: int | None
    problem: str = ""


def measure(
    setting: Setting, kind: str, candidates: Sequence[Candidate], rounds: int
) -> tuple[list[Row], dict[str, str]]:
    """Return a row per candidate, and why others could not take part. Collective."""
    # An untimed turn of each shows which can take part.
    unable = {each.name: problem for each in candidates if (problem := one_turn(setting, each).problem)}
    able = [each for each in candidates if each.name not in unable]
    turns = {each.name: partial(_later_turn, setting, each) for each in able}
    own = interleave(turns, rounds, warmup=0, comm=setting.comm, rotate=True, what="rounds")
    gathered = setting.comm.all_gather_object(own)
    rows = []
    for candidate in (each for each in able if own[each.name]):
        several: list[list[Turn]] = [rank[candidate.name] for rank in gathered]
        growth = [turn.growth for rank in several for turn in rank if turn.growth is not None]
        seconds = slowest([[turn.seconds for turn in rank] for rank in several])
        rows.append(row_of(kind, candidate.name, candidate.nbytes, seconds, max(growth, default=None)))
    return rows, unable


def _later_turn(setting: Setting, candidate: Candidate, _: int) -> Turn:
    turn = one_turn(setting, candidate)
    if turn.problem:
        raise WrongResult(f"{candidate.name}: {turn.problem}", everywhere=True)
    return turn


def one_turn(setting: Setting, candidate: Candidate) -> Turn:
    """Run a candidate once and compare the result; raises ``WrongResult`` on all ranks if it is wrong.

    The clock starts as the ranks leave a barrier, with an idle disk; it stops, on each rank, when
    that rank is done.
    """
    candidate.prepare()
    gc.collect()
    setting.quiet()
    with no_garbage_collection():
        turn = _timed(setting, candidate)
    wait_asleep(setting.comm)
    if problem := _first(setting, turn.problem):
        return turn._replace(problem=problem)
    if wrong := _first(setting, candidate.check()):
        raise WrongResult(f"{candidate.name}: {wrong}", everywhere=True)
    return turn


def _timed(setting: Setting, candidate: Candidate) -> Turn:
    growth, problem = Growth(), ""
    setting.world.Barrier()
    started = time.perf_counter()
    try:
        candidate.call()
    except (RuntimeError, OSError, ValueError, NotImplementedError) as error:
        if candidate.needed:
            raise
        problem = " ".join(str(error).split())[:200] or type(error).__name__
    return Turn(time.perf_counter() - started, growth.bytes(), problem)


def _first(setting: Setting, own: str) -> str:
    """Return the first rank's non-empty text."""
    said = setting.comm.all_gather_object(own)
    return next((f"{text} (rank {rank})" for rank, text in enumerate(said) if text), "")


# Figures and targets --------------------------------------------------------------------------------------------------


Row = dict[str, Any]  # of the table: seconds on the slowest rank, 10^9 bytes per second from the median
Figures = dict[str, Row]


def row_of(kind: str, name: str, nbytes: int, seconds: Sequence[float], growth: int | None) -> Row:
    """Return the row of a candidate's turns; ``kind`` is write or read.

    ``growth`` is the largest growth of a rank's memory in any turn, in bytes.
    """
    median = statistics.median(seconds)
    return {
        "kind": kind,
        "candidate": name,
        "size": nbytes,
        "min": min(seconds),
        "median": median,
        "max": max(seconds),
        "rate": nbytes / median / 1e9,
        "growth": growth,
        "repeats": len(seconds),
    }


def by_name(rows: Iterable[Row]) -> Figures:
    return {row["candidate"]: row for row in rows}


def speedup(figures: Figures, name: str, against: str) -> float | None:
    """Return how many times faster a candidate is than another, by medians; None if one of them is missing."""
    own, other = figures.get(name), figures.get(against)
    return float(other["median"] / own["median"]) if own and other else None


def targets(figures: Figures) -> Iterator[Target]:
    """Yield the targets of saving and loading for which the run has figures.

    Reading is compared with the read bandwidth or the rate of verification on a core, whichever is
    less; loading of files from other numbers of ranks with that of a file from the same number.
    """
    for name, times in ((Name.RAW, RAW_TARGET), (Name.TORCH, TORCH_TARGET), (Name.DCP, DCP_TARGET)):
        yield from at_least(f"write: speed / {name}", speedup(figures, Name.OURS, name), times)
    for what, name in (("load", Name.LOAD), ("verify", Name.VERIFY)):
        if name in figures and Name.RAW_READ in figures:
            rate = figures[name]["rate"] / min(figures[Name.RAW_READ]["rate"], CORE)
            yield Target(f"{what}: speed / min({Name.RAW_READ}, {CORE:g} GB/s per core)", rate, READ_TARGET)
    others = [other for other in figures if other.startswith(f"{Name.LOAD},") and Name.LOAD in figures]
    if others:
        value, other = max((figures[other]["median"] / figures[Name.LOAD]["median"], other) for other in others)
        what = f"load: time / same rank count, most ({other.removeprefix(f'{Name.LOAD}, ')})"
        yield from at_most(what, value, RANKS_TARGET)


def earlier_targets(folder: Path) -> Iterator[Target]:
    """Yield the targets of damaged files and killed runs, from the results that exist."""
    damage = _read(folder / "corruption.json")
    if damage:
        tried = sum(count["times"] for count in damage["counts"])
        yield Target("corruption: damaged files tried (corruption.json)", tried, MUTATIONS)
        yield from at_most("corruption: of them not refused, or misnamed", len(damage["wrong"]), 0)
    kill = _read(folder / "kill.json")
    if kill:
        # The file exists only if every resume found its file and the weights equal those of the
        # undisturbed run.
        survived = sum(found["kills"] for found in kill["forms"].values())
        yield Target(f"kill: survived, {' and '.join(kill['forms'])}", survived, KILLS)


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content


# Output ---------------------------------------------------------------------------------------------------------------


def ratio_tables(figures: Figures) -> Iterator[str]:
    """Yield how many times faster hpctrain is than each of the others, by medians."""
    rows = [["times as fast as", "saving", "loading"]]
    for name in (*WRITERS, Name.TORCH_LOAD, Name.DCP_LOAD):
        value = speedup(figures, Name.LOAD if name in READERS else Name.OURS, name)
        if value is not None and name != Name.OURS:
            rows.append([name, *(["", f"{value:.2f}"] if name in READERS else [f"{value:.2f}", ""])])
    if len(rows) > 1:
        yield table(rows) + "\n"


def row_table(figures: Figures) -> Iterator[str]:
    """Yield the table: seconds of the slowest rank, 10^9 bytes per second, and the largest growth of memory."""
    rows = [["", "median s", "min", "max", "GB/s", "memory +MiB", "rounds"]]
    for row in figures.values():
        times = [f"{row[key]:.3f}" for key in ("median", "min", "max")]
        growth = "" if row["growth"] is None or row["candidate"] == Name.CRC else f"{row['growth'] / MIB:.0f}"
        rows.append([row["candidate"], *times, f"{row['rate']:.2f}", growth, str(row["repeats"])])
    if figures:
        yield table(rows)


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw the rates of saving and loading, and the measured figures relative to their targets."""
    rows = {kind: [row for row in result["rows"] if row["kind"] == kind] for kind in TITLES}
    kinds = [kind for kind in TITLES if rows[kind]]
    panels = len(kinds) + bool(result["targets"])
    if not panels:
        return []

    def fill(figure: Any) -> None:
        axes = figure.subplots(1, panels, squeeze=False)[0]
        for each, kind in zip(axes, kinds):
            label = "GB/s (bar: median; line: slowest to fastest turn)"
            bars(each, [_bar(row) for row in rows[kind]], label, TITLES[kind])
        if result["targets"]:
            _draw_targets(axes[-1], result["targets"])
        title = f"A checkpoint of {format_bytes(result['size'])} on {result['ranks']} ranks"
        figure.suptitle(f"{title}, {result['filesystem']}, {result['mpi']}", fontsize=13, fontweight="bold")

    return save(path, (6 * panels, 4.4), fill)


def _bar(row: Mapping[str, Any]) -> Bar:
    slow, fast = (row["size"] / row[end] / 1e9 for end in ("max", "min"))
    colour = colour_of(row["candidate"], own=[Name.RAW, Name.RAW_ONE, Name.RAW_READ, Name.CRC])
    return Bar(row["candidate"], row["rate"], f"{row['rate']:.2f}", colour, (slow, fast))


def _draw_targets(axes: Any, targets: Sequence[dict[str, Any]]) -> None:
    """Draw the measured figures relative to their targets; bars beyond the line have reached them."""
    shares = [min(share_reached(target), MOST) for target in targets]
    places = range(len(targets))
    axes.barh(places, shares, color=[GREEN if target["met"] else RED for target in targets], height=0.66, zorder=2)
    for place, (target, share) in enumerate(zip(targets, shares)):
        value = target["value"]
        text = f"  {value:,}" if isinstance(value, int) else f"  {value:.2f}"
        axes.text(max(share, 1), place, f"{text} ({target['wanted']})", va="center", fontsize=9)
    axes.axvline(1, color="black", linewidth=1, zorder=3)
    axes.set_yticks(places, [target["what"].replace(": ", ":\n", 1) for target in targets], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * MOST)
    axes.set_xticks([0, 1, MOST])
    axes.set_xlabel(f"share of the target, at most {MOST:g}")
    axes.set_title("Measured figures relative to their targets", loc="left", fontsize=11)


def share_reached(target: dict[str, Any]) -> float:
    """Return the degree to which a target is reached: 1 if just reached, more if exceeded."""
    bound, value = float(target["wanted"].split()[1]), float(target["value"])
    if target["wanted"].startswith(">="):
        return value / bound
    return bound / value if value else float("inf") if bound else 1.0
