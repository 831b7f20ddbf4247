"""Reader of run receipts: where every attempt's time was spent, and how much of it counted. No torch, no MPI."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster.accounting import JobAccount, ask_pbs, ask_slurm
from hpctrain.errors import UsageError
from hpctrain.train import lock, metrics
from hpctrain.train.receipt import write
from hpctrain.train.receipt.attempt import (
    Attempt,
    Row,
    attempts_from,
    catch_up,
    close_unfinished,
    drop,
    maybe,
    rows_of,
    saved_step,
    text,
)
from hpctrain.train.receipt.write import NAME, attempts_of, read_receipt
from hpctrain.util.reading import read_json

# Job ids in the schedulers' formats: no other text is passed to their commands.
_JOBS = {
    "slurm": re.compile(r"[0-9]+(?:_[0-9]+)?", re.ASCII),
    "pbs": re.compile(r"[0-9]+(?:\[[0-9]*\])?(?:\.[A-Za-z0-9][A-Za-z0-9.-]*)?", re.ASCII),
}
Ask = Callable[[set[str]], Mapping[str, JobAccount]]
_ASKED: Mapping[str, Ask] = {"slurm": ask_slurm, "pbs": ask_pbs}


@dataclass(frozen=True)
class RunReceipt:
    """Receipt of a run, and its energy if known."""

    folder: Path
    status: str
    attempts: tuple[Attempt, ...]
    joules: float | None = None


def load(folders: Sequence[str | Path], ask: Mapping[str, Ask] = _ASKED) -> list[RunReceipt]:
    """Return the receipts in some run folders. Raises ``UsageError`` if a folder has none.

    If the end of an attempt is not recorded, the files in the folder and the scheduler's answer
    show whether it is still running. ``ask`` maps a scheduler's name to its query function, which
    is called once for all jobs.
    """
    found = {Path(folder): copy.deepcopy(attempts_of(read_receipt(Path(folder)))) for folder in folders}
    for folder, attempts in found.items():
        if not attempts:
            raise UsageError(f"{folder} holds no {NAME} that can be read: {_hint(folder)}")
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
    accounted = tuple(attempts_from(attempts, rows))
    joules = [accounts[job].joules for job in _jobs(attempts, "slurm") if job in accounts]
    measured = [each for each in joules if each is not None]
    return RunReceipt(folder, accounted[-1].status, accounted, sum(measured) if measured else None)


def _jobs(attempts: Sequence[Mapping[str, Any]], scheduler: str) -> set[str]:
    found = {text(one, "job_id") or "" for one in attempts if one.get("scheduler") == scheduler}
    return {job for job in found if _JOBS[scheduler].fullmatch(job)}


def runs_in(folder: str | Path) -> list[Path]:
    """Return the run folders in a folder: the folder itself, or the tasks of a job array below it."""
    folder = Path(folder)
    if (folder / NAME).is_file():
        return [folder]
    below = [path.parent for path in folder.glob(f"*/{NAME}")] if folder.is_dir() else []
    return sorted(below, key=lambda path: (not path.name.isdecimal(), len(path.name), path.name)) or [folder]


def _hint(folder: Path) -> str:
    if not folder.is_dir():
        return "there is no such folder; name that of a run, as runs/gpt-tiny"
    return "a run's folder has one from its first start on"


def _bring_up_to_date(
    folder: Path, attempts: list[dict[str, Any]], rows: Sequence[Row], accounts: Mapping[str, JobAccount]
) -> None:
    """Apply the changes that the next start of the run would make: complete an attempt without an end."""
    last = attempts[-1]
    if last.get("status") == "running":
        failure = write.read_failure(folder)
        account = accounts.get(str(last.get("job_id")))
        if failure or is_over(folder, last) or (account is not None and account.has_ended):
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
