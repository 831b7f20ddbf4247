"""Fixtures of run folders, of a traced run, and of a browser without a screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.watched_runs import MakeRun, make_run  # noqa: F401


@pytest.fixture
def traced(make_run: MakeRun) -> Path:  # noqa: F811
    """Return a run whose trace has two steps of two ranks, with known times."""
    folder = make_run("traced")
    (folder / "trace.json").write_text(json.dumps({"traceEvents": list(_events())}))
    return folder


def _events() -> list[dict[str, object]]:
    """Return the events of steps of 10 ms: rank 1 waits 3 ms inside of the backward pass, rank 0 1 ms."""
    found: list[dict[str, object]] = []
    for rank, wait in ((0, 1.0), (1, 3.0)):
        found.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        for step in (3, 4):
            begin = 20_000.0 * step
            spans = [("step", 0.0, 10.0), ("forward", 1.0, 2.0), ("backward", 3.0, 5.0), ("reduce", 4.0, wait)]
            for name, after, lasts in [*spans, ("optimizer", 8.0, 1.5)]:
                facts = {"rank": rank, "step": step} if name == "step" else {"rank": rank}
                event = {"name": name, "ph": "X", "pid": 0, "tid": rank, "args": facts}
                found.append(event | {"ts": begin + 1000 * after, "dur": 1000 * lasts})
        found.append(  # of another thread, at the same time
            {
                "name": "checkpoint",
                "ph": "X",
                "pid": 0,
                "tid": 2 + rank,
                "args": {"rank": rank},
                "ts": 60_500.0,
                "dur": 9e3,
            }
        )
    return found
