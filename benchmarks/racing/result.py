"""Conversion of a task's measurements to plain values, for JSON, tables and plots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from racing.exchange import Cost
from racing.marks import Mark, mark_of, reached
from racing.names import DDP
from racing.pace import Pace
from racing.race import Lane
from racing.task import Task


def task_of(task: Task) -> dict[str, Any]:
    """Return the sizes of a task, with only the name of its file."""
    return {**asdict(task), "file": Path(task.file).name}


def members_of(task: Task, lanes: Mapping[str, Lane], workers: int) -> dict[str, Any]:
    """Return the mark, if ddp has set one, and every member's record."""
    mark = mark_of(lanes[DDP].points) if DDP in lanes else None
    found: dict[str, Any] = {"members": {name: _member(task, lane, mark, workers) for name, lane in lanes.items()}}
    return {**({"mark": asdict(mark)} if mark else {}), **found}


def _member(task: Task, lane: Lane, mark: Mark | None, workers: int) -> dict[str, Any]:
    last = lane.points[-1]
    point = reached(lane.points, mark) if mark else None
    bars = [lane.staleness[stale] for stale in range(max(lane.staleness, default=-1) + 1)]
    return {
        "learning_rate": lane.member.rate(task.name, workers),
        "best_accuracy": max(one.accuracy for one in lane.points),
        "samples_over_ddp": point.samples / mark.samples if point and mark else None,
        "samples_to_mark": point.samples if point else None,
        "seconds_to_mark": point.seconds if point else None,
        "updates_a_second": lane.updates / last.seconds,
        "samples_a_second": last.samples / last.seconds,
        "staleness_histogram": bars,
        "points": [asdict(one) for one in lane.points],
    }


def costs_of(found: Mapping[str, Cost]) -> dict[str, Any]:
    """Return the costs of exchanging, in seconds."""
    return {"exchange": {name: asdict(one) for name, one in found.items()}}


def paces_of(found: Mapping[str, Pace]) -> dict[str, Any]:
    """Return updates per second of one worker and of all."""
    return {"pace": {name: asdict(one) for name, one in found.items()}}
