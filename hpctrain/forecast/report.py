"""Reports of memory and time of a planned run, as text and as plain values, and the recommended configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.forecast import scaling
from hpctrain.forecast.candidates import Configuration
from hpctrain.forecast.memory import CATEGORIES, TENSORS, Memory, Need
from hpctrain.forecast.run import PlannedRun
from hpctrain.forecast.scaling import MARGIN, START, Curve, RunTime, run_time
from hpctrain.forecast.time_forecasts import Forecasts
from hpctrain.forecast.time_step import StepTime
from hpctrain.util.text import counted, format_bytes, format_number, format_seconds


def heading(run: PlannedRun) -> str:
    """Return a one-line description of the planned run."""
    facts, train = run.facts, run.settings.train
    ranks = f"{counted(run.ranks, 'rank', ',')} on {counted(run.nodes, 'node', ',')}"
    where = "CPUs" if run.device == "cpu" else "GPUs"
    mesh = f" ({run.shape})" if run.parallel.splits_model else ""
    row = f" in {counted(len(facts.layers), 'layer', ',')}" if facts.is_sequential else ""
    passes = f" in {train.accumulate} passes" if train.accumulate > 1 else ""
    pieces = f" in {run.microbatches} microbatches" if run.microbatches > 1 else ""
    samples = run.samples * train.accumulate
    return (
        f"{facts.name}, {facts.numel:,} parameters{row}; {ranks}{mesh}, on {where}; batch {train.batch}: "
        f"{counted(samples, 'sample', ',')} per {'pipeline' if run.shape.pipe > 1 else 'rank'}{passes}{pieces}"
    )


def rows_of(run: PlannedRun, memory: Memory) -> list[list[str]]:
    """Return the memory table: one row per category, and columns for a rank and a node."""
    rank, node = memory.rank, memory.node
    if run.device == "cpu":
        columns = {"per rank": rank.host, "per node": node.host}
    else:
        columns = {"GPU per rank": rank.device, "host per rank": rank.host, "host per node": node.host}
    rows = [["", *columns]]
    for category in CATEGORIES if run.device == "cpu" else TENSORS:
        cells = (format_bytes(split[category], 2) if split[category] else "-" for split in columns.values())
        rows.append([category, *cells])
    return [*rows, ["at the peak", *(format_bytes(sum(split.values()), 2) for split in columns.values())]]


def peak_line(run: PlannedRun, memory: Memory) -> str:
    """Return a line that names the moment of the peak, or the fullest stage."""
    if run.parallel.pipe == 1:
        return f"the peak is in the {memory.rank.when}" if memory.rank.when != "update" else "the peak is in the update"
    layers = memory.layers[memory.fullest]
    span = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
    totals = ", ".join(format_bytes(need.device_total or need.host_total, 2) for need in memory.stages)
    return f"the fullest stage is {memory.fullest} ({span}); stages need {totals}"


def verdict(one: Configuration) -> str:
    """Return whether a configuration fits, or by how much it exceeds its limits."""
    if not one.limits.known:
        return ""
    device, host = one.excess
    if one.fits:
        return "fits"
    lacking = [f"{format_bytes(device, 2)} too much for a GPU"] if device else []
    lacking += [f"{format_bytes(host, 2)} too much for a node"] if host else []
    return ", ".join(lacking)


def lines_of(found: Sequence[Configuration]) -> list[list[str]]:
    """Return one row per configuration: a star at the chosen one, its name, its memory needs, and whether it fits."""
    cpu = found[0].run.device == "cpu"
    rows = [["", "", "per rank", "per node", ""] if cpu else ["", "", "GPU per rank", "host per node", ""]]
    for one in found:
        rank = one.memory.rank.host_total if cpu else one.memory.rank.device_total
        star = "*" if one.chosen else ""
        rows.append([star, one.name, format_bytes(rank, 2), format_bytes(one.memory.node.host_total, 2), verdict(one)])
    return rows


def as_dict(one: Configuration) -> dict[str, Any]:
    """Return a configuration as plain values, in bytes."""
    return {
        "name": one.name,
        "chosen": one.chosen,
        "fits": one.fits if one.limits.known else None,
        "excess": dict(zip(("device", "host"), one.excess)),
        "mesh": {axis: one.run.shape.length(axis) for axis in ("pipe", "data", "tensor")},
        "rank": _plain(one.memory.rank),
        "node": _plain(one.memory.node),
        "fullest_stage": one.memory.fullest,
        "stages": [
            {**_plain(need), "layers": list(layers)} for need, layers in zip(one.memory.stages, one.memory.layers)
        ],
    }


def _plain(need: Need) -> dict[str, Any]:
    return {name: value for name, value in asdict(need).items() if value or name != "when"}


# Forecasts of step time and walltime, and the recommendation of one of several configurations -------------------------


@dataclass(frozen=True)
class Advice:
    """Recommended configuration (None if none fits), the reason in one sentence, and the step time of all that fit."""

    name: str | None
    reason: str
    seconds: dict[str, float]


@dataclass(frozen=True)
class TimeReport:
    """Forecast of a run: step time, walltime, scaling curve and recommendation."""

    run: PlannedRun
    step: StepTime
    whole: RunTime
    curve: Curve
    assumptions: tuple[str, ...]
    advice: Advice | None = None
    spread: tuple[float, float] = (1.0, 1.0)  # range of the step time, as multiples of the forecast

    def lines(self) -> list[str]:
        advised = [f"recommended: {self.advice.reason}"] if self.advice is not None else []
        table = scaling.lines(self.curve)
        assumed = ["assumed", *(f"  {one}" for one in self.assumptions)]
        return [*self._step_lines(), *advised, "", *self._run_lines(), "", *table, "", *assumed]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "step": {**self.step.as_dict(), "range_seconds": [one * self.step.seconds for one in self.spread]},
            "run": {**asdict(self.whole), "seconds": self.whole.seconds, "walltime": self.whole.walltime},
            "scaling": self.curve.as_dict(),
            "recommended": asdict(self.advice) if self.advice is not None else None,
            "assumptions": list(self.assumptions),
        }

    def draw(self, path: str | Path) -> None:
        """Plot the scaling curve into a file; raises ``UsageError`` if that is not possible."""
        from hpctrain.forecast.plots import draw

        draw(self.curve, self.run, path)

    def _step_lines(self) -> list[str]:
        step = self.step
        rates = [f"{format_number(step.samples_per_second)} samples/s"]
        rates += [f"{format_number(step.tokens / step.seconds)} tokens/s"] if step.tokens else []
        rates.append(f"{step.flops_a_rank * step.ranks / 1e12:.3g} TFLOP/s")
        if step.share_of_peak is not None:
            rates.append(f"{step.share_of_peak:.0%} of the peak")
        shown = sorted(((name, part) for name, part in step.parts.items() if part > 0), key=lambda one: -one[1])
        parts = ", ".join(f"{name} {part / step.seconds:.0%}" for name, part in shown if part >= 0.005 * step.seconds)
        hidden = (
            f", and {format_seconds(step.hidden)} of communication overlapped with the passes" if step.hidden else ""
        )
        low, high = (format_seconds(one * step.seconds) for one in self.spread)
        between = f" ({low} to {high})" if low != high else ""
        return [f"a step takes {format_seconds(step.seconds)}{between}: {', '.join(rates)}", f"  of it {parts}{hidden}"]

    def _run_lines(self) -> list[str]:
        whole, train = self.whole, self.run.settings.train
        names = ("steps", "evaluations", "checkpoints", "start")
        steps, evaluations, checkpoints, start = (format_seconds(getattr(whole, name)) for name in names)
        return [
            f"{train.steps:,} steps {steps}, evaluations {evaluations}, checkpoints {checkpoints} "
            f"({format_bytes(whole.checkpoint_bytes, 2)} each), start {start}",
            f"walltime to request: {whole.walltime} (with a margin of {MARGIN - 1:.0%}, rounded up)",
        ]


def time_report(run: PlannedRun, machine: str | None = None, others: Sequence[Configuration] = ()) -> TimeReport:
    """Return the time forecast of a run, on the machine of that name or, without a name, on this machine.

    ``others`` are the configurations to recommend one from. Raises ``UsageError`` if the machine is
    unknown.
    """
    forecasts = Forecasts(run, machine)
    step = forecasts.step(run)
    start = f"start and first weights take {START:g} s"
    return TimeReport(
        run,
        step,
        run_time(run, step, forecasts.machine),
        scaling.scale(run, forecasts),
        (*forecasts.assumptions(run), start),
        recommend(others, forecasts) if others else None,
        forecasts.spread(),
    )


def recommend(options: Sequence[Configuration], forecasts: Forecasts) -> Advice:
    """Return the fastest configuration that fits, and the reason; all configurations run the same model."""
    fitting = [one for one in options if one.fits]
    if not fitting:
        least = min(options, key=lambda one: one.scarcest[0])
        needs, limit = least.scarcest
        more = f": {least.name} needs least, {format_bytes(needs, 2)} of {format_bytes(limit, 2)}" if limit else ""
        return Advice(None, f"none of {len(options)} fits{more}", {})
    seconds = {one.name: forecasts.step(one.run).seconds for one in fitting}
    best = min(fitting, key=lambda one: seconds[one.name])
    return Advice(best.name, reason(best, options, seconds), seconds)


def reason(best: Configuration, options: Sequence[Configuration], seconds: Mapping[str, float]) -> str:
    """Return the reason for the best configuration: its need, the second best, and one that is too large."""
    others = [name for name in seconds if name != best.name]
    needs, limit = best.scarcest
    if limit:
        rank = f"is the fastest of {len(seconds)} that fit" if others else "is the only one that fits"
        text = f"{best.name} fits in {format_bytes(needs, 2)} of {format_bytes(limit, 2)} and {rank}"
    else:
        text = f"{best.name} is the fastest of {len(seconds)}" if others else f"{best.name} is the only configuration"
    text += f": {format_seconds(seconds[best.name])} per step"
    if others:
        second = min(others, key=lambda name: seconds[name])
        text += f", {second} {format_seconds(seconds[second])}"
    too_large = [one for one in options if not one.fits and one.scarcest[1]]
    if too_large:
        nearest = min(too_large, key=lambda one: one.scarcest[0])
        text += f"; {nearest.name} would need {format_bytes(nearest.scarcest[0], 2)}"
    return text
