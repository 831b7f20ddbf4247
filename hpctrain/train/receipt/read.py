"""Reader of run receipts: where every attempt's time was spent, and how much of it counted. No torch, no MPI."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster.accounting import JobAccount, ask_pbs, ask_slurm
from hpctrain.cluster.nodes import requested_range
from hpctrain.errors import UsageError
from hpctrain.train import lock, metrics
from hpctrain.train.control import INTERRUPTED
from hpctrain.train.receipt import write
from hpctrain.train.receipt.write import (
    LATEST,
    NAME,
    Row,
    began,
    catch_up,
    close_unfinished,
    drop,
    maybe,
    number,
    read_receipt,
    rows_of,
    seconds_in,
    seconds_since_epoch,
    text,
)
from hpctrain.util.reading import read_json
from hpctrain.util.text import shorten

# Job ids in the schedulers' formats: no other text is passed to their commands.
_JOBS = {
    "slurm": re.compile(r"[0-9]+(?:_[0-9]+)?", re.ASCII),
    "pbs": re.compile(r"[0-9]+(?:\[[0-9]*\])?(?:\.[A-Za-z0-9][A-Za-z0-9.-]*)?", re.ASCII),
}
Ask = Callable[[set[str]], Mapping[str, JobAccount]]
_ASKED: Mapping[str, Ask] = {"slurm": ask_slurm, "pbs": ask_pbs}


@dataclass(frozen=True)
class RunReceipt:
    """Receipt of a run, and its energy if it is known of all attempts, with the source of the number."""

    folder: Path
    status: str
    attempts: tuple[Attempt, ...]
    joules: float | None = None
    energy_source: str = ""  # counters such as rapl and nvml, or sacct


def load(folders: Sequence[str | Path], ask: Mapping[str, Ask] = _ASKED) -> list[RunReceipt]:
    """Return the receipts in some run folders. Raises ``UsageError`` if a folder has none.

    If the end of an attempt is not recorded, the files in the folder and the scheduler's answer
    show whether it is still running. ``ask`` maps a scheduler's name to its query function, which
    is called once for all jobs.
    """
    found = {Path(folder): list(read_receipt(Path(folder)).get("attempts", ())) for folder in folders}
    for folder, attempts in found.items():
        if not attempts:
            hint = "a run's folder has one from its first start on"
            if not folder.is_dir():
                hint = "it is a file" if folder.exists() else "there is no such folder"
                hint += "; name that of a run, as runs/gpt-tiny"
            raise UsageError(f"{folder} holds no {NAME} that can be read: {hint}")
    accounts: dict[str, JobAccount] = {}
    for scheduler, ask_scheduler in ask.items():
        if jobs := set().union(*(_jobs(attempts, scheduler) for attempts in found.values())):
            accounts |= ask_scheduler(jobs)
    return [_receipt(folder, attempts, accounts) for folder, attempts in found.items()]


def _receipt(folder: Path, attempts: list[dict[str, Any]], accounts: Mapping[str, JobAccount]) -> RunReceipt:
    unsettled = attempts[-1].get("status") in ("running", "failed")
    needed = unsettled or any(maybe(one, "step_seconds") is None for one in attempts)
    rows = metrics.read(folder / metrics.NAME) if needed else []
    _bring_up_to_date(folder, attempts, rows, accounts)
    counted, own_rows = _tokens(attempts, rows), rows_of(attempts, rows)
    accounted = tuple(_attempt(index + 1, one, own_rows[index], counted[index]) for index, one in enumerate(attempts))
    joules, source = _joules(accounted, [accounts[job] for job in _jobs(attempts, "slurm") if job in accounts])
    return RunReceipt(folder, accounted[-1].status, accounted, joules, source)


def _joules(attempts: Sequence[Attempt], accounts: Sequence[JobAccount]) -> tuple[float | None, str]:
    """Return the energy of a run: of its own counters if all attempts have read them, else of Slurm's accounting."""
    known = [(sum(one.energy.values()), one.energy) for one in attempts if one.energy]
    if len(known) == len(attempts):
        sources = dict.fromkeys(source for _, energy in known for source in energy)
        return sum(joules for joules, _ in known), ", ".join(sources)
    measured = [account.joules for account in accounts if account.joules is not None]
    return (sum(measured), "sacct") if measured else (None, "")


def _jobs(attempts: Sequence[Mapping[str, Any]], scheduler: str) -> set[str]:
    found = {text(one, "job_id") or "" for one in attempts if one.get("scheduler") == scheduler}
    return {job for job in found if _JOBS[scheduler].fullmatch(job)}


def runs_in(folder: str | Path) -> list[Path]:
    """Return the run folders in a folder: the folder itself, or the tasks of a job array below it."""
    folder = Path(folder)
    if (folder / NAME).is_file():
        return [folder]
    below = [path.parent for path in folder.glob(f"*/{NAME}")] if folder.is_dir() else []
    return sorted(below, key=_place) or [folder]


def _place(path: Path) -> tuple[int, str]:
    """Return a key that sorts tasks of a job array by number, before other runs by name."""
    return (int(path.name), "") if path.name.isdecimal() else (sys.maxsize, path.name)


def _bring_up_to_date(
    folder: Path, attempts: list[dict[str, Any]], rows: Sequence[Row], accounts: Mapping[str, JobAccount]
) -> None:
    """Apply the changes that the next start of the run would make: complete an attempt without an end."""
    last = attempts[-1]
    if last.get("status") == "running":
        failure = write.read_failure(folder)
        account = accounts.get(str(last.get("job_id")))
        has_failed = bool(failure) and not failure.get("recovering")
        if has_failed or is_over(folder, last) or (account is not None and account.has_ended):
            close_unfinished(attempts, rows, failure)
        else:
            catch_up(last, rows_of(attempts, rows)[-1])
    if last.get("status") in ("failed", "killed"):
        drop(attempts, rows, saved_step(last))


def is_over(folder: Path, attempt: Mapping[str, Any]) -> bool:
    """Return whether an attempt has ended: its lock is missing or another's, or its process on this host has ended."""
    try:
        holder = read_json(folder / lock.NAME)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    if not isinstance(holder, dict):
        return False
    host, pid = holder.get("host"), holder.get("pid")
    if (host, pid) != (attempt.get("host"), attempt.get("pid")):
        return True
    return lock.is_over(holder, lock.identity(None))


# Accounting of an attempt ---------------------------------------------------------------------------------------------

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Attempt:
    """Accounting of one start of a run; times in seconds, of the whole attempt.

    ``startup``, ``useful``, ``repeated``, ``saves`` and ``other`` add up to ``elapsed``.
    """

    index: int  # from 1
    status: str  # running, finished, stopped, failed or killed
    why: str  # in words
    started: float | None  # since the epoch
    nodes: int
    requested_nodes: str | None  # as in 2-8; None if the job requested a fixed number
    spare_nodes: int  # nodes of the job that idled, for use after the death of another
    ranks: int
    cpus: int | None
    gpus: int | None
    host: str
    job_id: str | None
    scheduler: str | None
    restart_count: int | None
    first_step: int
    last_step: int
    steps: int  # steps that counted
    repeated_steps: int
    memory_errors: int  # found and repaired (health.fingerprint_every)
    last_memory_errors: tuple[dict[str, Any], ...]  # step, rank, host, tensor and repair of the last of them
    slow_ranks: tuple[dict[str, Any], ...]  # rank, host, cause, first step, steps and seconds lost of the last of them
    energy: dict[str, float]  # joules by the counters' source, until the last checkpoint; empty if unknown
    peak_node_bytes: int | None  # host memory of the node that used most, until the last checkpoint
    peak_device_bytes: int | None  # the same of a GPU
    staged: str | None  # what hpctrain stage has copied to the nodes, in words
    recoveries: tuple[dict[str, Any], ...]  # dead ranks without which the run continued, their hosts, step, seconds
    tokens: int | None
    samples: int | None
    elapsed: float
    startup: float
    useful: float
    repeated: float
    saves: float

    @property
    def other(self) -> float:
        """Return the seconds in no other category: rollback after a NaN, hangs, shutdown."""
        return max(self.elapsed - self.startup - self.useful - self.repeated - self.saves, 0.0)

    @property
    def node_hours(self) -> float:
        """Return the node-hours of the job, including those of spare nodes."""
        return (self.nodes + self.spare_nodes) * self.elapsed / 3600


def saved_step(attempt: Facts) -> int:
    """Return the step of the newest checkpoint that an attempt has written, or the step from which it resumed."""
    before = number(attempt, "first_step", 1) - 1
    return int(number(attempt, "saved_step", number(attempt, "step", before)))


def _attempt(index: int, facts: Facts, rows: Sequence[Row], tokens: int | None) -> Attempt:
    first = int(number(facts, "first_step", 1))
    useful, steps = _counted(facts, rows)
    batch = maybe(facts, "batch")
    return Attempt(
        index=index,
        status=text(facts, "status") or "unknown",
        why=why_ended(facts),
        started=began(facts),
        nodes=int(number(facts, "nodes", 1)),
        requested_nodes=requested_range(text(facts, "requested_nodes")),
        spare_nodes=max(int(number(facts, "spare_nodes")), 0),
        ranks=int(number(facts, "size", 1)),
        cpus=_whole(facts, "cpus"),
        gpus=_whole(facts, "gpus"),
        host=text(facts, "host") or "",
        job_id=text(facts, "job_id"),
        scheduler=text(facts, "scheduler"),
        restart_count=_whole(facts, "restart_count"),
        first_step=first,
        last_step=int(number(facts, "step", first - 1)),
        steps=steps,
        repeated_steps=int(number(facts, "repeated_steps")),
        memory_errors=int(number(facts, "memory_errors")),
        last_memory_errors=tuple(_listed_errors(facts.get("last_memory_errors"))),
        slow_ranks=tuple(slow_ranks_in(facts.get("slow_ranks"))),
        energy=_energy(facts.get("energy")),
        peak_node_bytes=_whole(facts, "peak_node_bytes"),
        peak_device_bytes=_whole(facts, "peak_device_bytes"),
        staged=text(facts, "staged"),
        recoveries=tuple(recoveries_in(facts.get("recoveries"))),
        tokens=tokens,
        samples=None if batch is None else steps * int(batch),
        elapsed=_elapsed(facts, useful),
        startup=number(facts, "startup_seconds"),
        useful=useful,
        repeated=number(facts, "repeated_seconds"),
        saves=number(facts, "save_seconds"),
    )


def _energy(given: Any) -> dict[str, float]:
    """Return the valid entries of a table of joules by source."""
    table: dict[Any, Any] = given if isinstance(given, dict) else {}
    known = {name: maybe(table, name) for name in ("pm_counters", "rapl", "nvml", "amdsmi")}
    return {name: joules for name, joules in known.items() if joules is not None and joules >= 0}


def _listed_errors(given: Any) -> Iterator[dict[str, Any]]:
    """Yield the valid entries of a list of memory errors."""
    for each in given if isinstance(given, list) else ():
        if isinstance(each, dict):
            found = {name: text(each, name) for name in ("host", "tensor", "repair")}
            yield {"step": _whole(each, "step"), "rank": _whole(each, "rank"), **found}


def slow_ranks_in(given: Any) -> Iterator[dict[str, Any]]:
    """Yield the valid entries of a list of slow ranks."""
    for each in given if isinstance(given, list) else ():
        if isinstance(each, dict):
            found = {name: _whole(each, name) for name in ("rank", "first_step", "slow_steps")}
            named = {name: text(each, name) for name in ("host", "cause")}
            yield {**found, **named, "seconds_lost": maybe(each, "seconds_lost")}


def recoveries_in(given: Any) -> Iterator[dict[str, Any]]:
    """Yield the valid entries of a list of recoveries from the death of ranks."""
    for each in given if isinstance(given, list) else ():
        if isinstance(each, dict):
            found = {name: _whole(each, name) for name in ("step", "repeated_steps", "ranks_left")}
            lists: list[Any] = [each.get("ranks"), each.get("hosts")]
            ranks, hosts = (one if isinstance(one, list) else [] for one in lists)
            given_left: Any = each.get("left")
            left = given_left if isinstance(given_left, list) else []
            named = {
                rank: f"{rank} on {shorten(str(host), 100)}" for rank, host in zip(ranks, hosts) if type(rank) is int
            }
            died, others = ([named[rank] for rank in named if (rank in left) is gone] for gone in (False, True))
            yield {**found, "ranks": died, "left": others, "seconds": maybe(each, "seconds")}


def _counted(facts: Facts, rows: Sequence[Row]) -> tuple[float, int]:
    """Return the seconds in steps that counted, and the number of these steps.

    Receipts of an earlier version contain no times. For these, the times of the steps that were
    kept are taken from the metrics.
    """
    if maybe(facts, "step_seconds") is None:
        kept = [row for row in rows if row["step"] <= saved_step(facts)]
        return seconds_in(kept), len(kept)
    seconds = number(facts, "step_seconds") - number(facts, "repeated_seconds")
    return max(seconds, 0.0), max(int(number(facts, "steps") - number(facts, "repeated_steps")), 0)


def _elapsed(facts: Facts, useful: float) -> float:
    begun, ended = began(facts), seconds_since_epoch(facts.get("ended"))
    noted = ended - begun if begun is not None and ended is not None else 0.0
    return number(facts, "elapsed_seconds", max(noted, useful + number(facts, "repeated_seconds")))


def _whole(facts: Facts, name: str) -> int | None:
    found = maybe(facts, name)
    return None if found is None else int(found)


def _tokens(attempts: Sequence[Facts], rows: Sequence[Row]) -> list[int | None]:
    """Return the tokens of each attempt that counted: up to the point from which later attempts resumed."""
    last = attempts[-1]
    end = maybe(last, "tokens")
    if last.get("status") in ("failed", "killed"):
        kept = [maybe(row, "tokens") for row in rows if row["step"] <= saved_step(last)]
        saved = [tokens for tokens in kept if tokens is not None]
        end = saved[-1] if saved else maybe(last, "tokens_before")
    found: list[int | None] = []
    for attempt in reversed(attempts):
        before = maybe(attempt, "tokens_before")
        known = end is not None and before is not None and "tokens" in attempt
        found.append(max(int((end or 0) - (before or 0)), 0) if known else None)
        end = min((at for at in (before, end) if at is not None), default=None)
    return found[::-1]


def why_ended(facts: Facts) -> str:
    """Return in one line how an attempt ended."""
    reason, status = text(facts, "reason") or "", text(facts, "status")
    if status == "stopped":
        return f"saved: {reason}" if reason else "saved"
    if status == "failed":
        if reason.startswith(INTERRUPTED):
            return reason
        rank = text(facts, "failed_rank")
        by = "" if rank is None else f" on rank {rank}"
        return f"failed{by}: {reason}" if reason else f"failed{by}"
    if status == "killed":
        return f"killed (no exit record); last recorded step {number(facts, 'step', 0)}"
    if status == "running":
        return f"running, last recorded {_ago(facts)}"
    return status or "unknown"


def _ago(facts: Facts) -> str:
    begun = began(facts)
    if begun is None:
        return f"after step {number(facts, 'step', 0)}"
    at = min(max(begun + number(facts, "elapsed_seconds"), 0.0), LATEST)
    seen = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    return f"{seen} after step {number(facts, 'step', 0)}"
