"""Measurement of one candidate's memory in its steps, in a fresh process."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from sharding.account import account
from sharding.addresses import give_back, resident
from sharding.candidates import Candidate, make
from sharding.formulas import facts
from sharding.names import CANDIDATES
from sharding.peers import Buckets
from sharding.task import Task
from sharding.watch import Watch
from torch import nn

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError

WARMUP, STEPS = 2, 2
MOMENTS = ("exp_avg", "exp_avg_sq")

Memory = dict[str, dict[str, Any]]


def measure(comm: Communicator, name: str, task: Task) -> dict[str, Any]:
    """Return the peak memory of a candidate's ranks, beyond their memory before. Collective.

    The first steps, which create optimizer states and record execution orders, are not sampled, and neither
    is the construction of the model.
    """
    if comm.nodes > 1:
        raise UsageError(f"memory is measured on one node, not on {comm.nodes}", everywhere=True)
    _rehearse()
    before = resident().total
    candidate = make([name], task.model, comm)[name]
    buckets, batches = Buckets(candidate.model), task.batches(comm.rank)
    for _ in range(WARMUP):
        candidate.step(*next(batches))
        buckets.found.clear()
    gc.collect()
    give_back()
    with Watch(candidate, buckets) as watch:
        for _ in range(STEPS):
            candidate.step(*next(batches), look=watch.look)
    samples, starts, moments = zip(*comm.all_gather_object((watch.samples, before, _moments(candidate))))
    found = {
        "candidate": name,
        "optimizer": candidate.optimizer_name,
        **account(samples, starts),
        "moments": list(moments),
        "facts": facts(candidate, task, comm.size),
    }
    candidate.close()
    return found


def _rehearse() -> None:
    """Run a tiny step first, so that one-time loads and allocations of torch are not counted."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(8, 8)).sum().backward()
    optimizer.step()


def _moments(candidate: Candidate) -> int:
    """Return the bytes of this rank's moments, without the optimizer's step counters."""
    states = candidate.optimizer.state.values()
    found = [getattr(state[name], "_local_tensor", state[name]) for state in states for name in MOMENTS]
    return sum(tensor.untyped_storage().nbytes() for tensor in found)


def save(folder: Path, found: dict[str, Any]) -> None:
    """Store a result for the run that reports."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{_word(found['candidate'])}.json").write_text(json.dumps(found))


def load(folder: Path | None, ranks: int, task: Task) -> Memory:
    """Return the stored results of a folder; raises ``UsageError`` if one has other ranks, model or batch."""
    found: Memory = {}
    for word, name in CANDIDATES.items():
        path = folder / f"{word}.json" if folder else None
        if path and path.exists():
            found[name] = json.loads(path.read_text())
            _check(path, found[name]["facts"], ranks, task)
    return found


def _check(path: Path, made: dict[str, Any], ranks: int, task: Task) -> None:
    wanted = {"ranks": ranks, "parameters": task.parameter_bytes, "batch": task.batch}
    for key, value in wanted.items():
        if made[key] != value:
            raise UsageError(f"{path} was measured with {key} = {made[key]}, not {value}", everywhere=True)


def _word(name: str) -> str:
    return next(word for word, other in CANDIDATES.items() if other == name)


def names_of(words: Iterable[str]) -> list[str]:
    """Return candidates' names for words of the command line; raises ``UsageError`` for an unknown one."""
    names = []
    for word in words:
        if word not in CANDIDATES:
            known = ", ".join(CANDIDATES)
            raise UsageError(f"no candidate is called {word!r}: known are {known}", everywhere=True)
        names.append(CANDIDATES[word])
    return names
