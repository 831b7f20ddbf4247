"""Findings of a diagnosis: severity, observation, reason and advice, and their table."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hpctrain.errors import EXIT_FAILURE

Level = Literal["ok", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """One finding; an ``ok`` finding needs neither a reason nor advice."""

    level: Level
    topic: str
    found: str
    why: str = ""
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ok(topic: str, found: str) -> Finding:
    """Return a finding without a problem."""
    return Finding("ok", topic, found)


def note(topic: str, found: str, why: str, advice: str = "") -> Finding:
    """Return a finding for information."""
    return Finding("note", topic, found, why, advice)


def warning(topic: str, found: str, why: str, advice: str) -> Finding:
    """Return a finding of a problem that costs time, or may make a job fail."""
    return Finding("warning", topic, found, why, advice)


def error(topic: str, found: str, why: str, advice: str) -> Finding:
    """Return a finding of a problem that prevents a job from working."""
    return Finding("error", topic, found, why, advice)


def counts(findings: Iterable[Finding]) -> dict[str, int]:
    found = Counter(finding.level for finding in findings)
    return {level: found[level] for level in LEVELS}


def exit_code(findings: Iterable[Finding], *, strict: bool = False) -> int:
    """Return the exit code of a diagnosis: 1 if there is an error (with ``strict`` also for a warning)."""
    bad = {"error", "warning"} if strict else {"error"}
    return EXIT_FAILURE if any(finding.level in bad for finding in findings) else 0


# Table of findings: level, topic and observation in one line; reason and advice below it ------------------------------


_MIN_WIDTH = 40  # minimum columns of a text, however narrow the terminal is


def table(findings: Sequence[Finding], width: int = 120) -> list[str]:
    """Return the lines of the table, at most ``width`` columns wide if the words permit."""
    topics = max((len(finding.topic) for finding in findings), default=0)
    lines = []
    for finding in findings:
        head = f"{finding.level:8}{finding.topic:{topics}}  "
        lines += _wrapped(head, finding.found, len(head), width)
        for label, text in (("why", finding.why), ("do", finding.advice)):
            if text:
                lines += _wrapped(f"{'':{len(head)}}{label + ':':5}", text, len(head) + 5, width)
    return lines


def summary(findings: Iterable[Finding]) -> str:
    """Return the counts as text: ``11 ok, 1 note, 2 warnings, 0 errors``."""
    found = counts(findings)
    words = [f"{count} {level}{'' if count == 1 else 's'}" for level, count in found.items() if level != "ok"]
    return ", ".join([f"{found['ok']} ok", *words])


def _wrapped(head: str, text: str, indent: int, width: int) -> list[str]:
    return textwrap.wrap(
        head + text,
        max(width, indent + _MIN_WIDTH),
        subsequent_indent=" " * indent,
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
    )


# Advice with the options of the scheduler in use, which differ between Slurm and PBS ----------------------------------


# Advice by scheduler; without a job the advice is Slurm's.
_WORDS = {
    "memory": {"slurm": "--mem=SIZE in the job's script", "pbs": "mem=SIZE in the job's select (hpctrain: --memory)"},
    "cores": {
        "slurm": "--cpus-per-task=N on the line of srun, for N cores per rank",
        "pbs": "ncpus in the job's select (hpctrain: --cpus-per-rank), for N cores per rank",
    },
    "more cores": {
        "slurm": "--cpus-per-task=N on the line of srun, too",
        "pbs": "ncpus in the job's select (hpctrain: --cpus-per-rank)",
    },
    "GPUs": {"slurm": "--gpus-per-node=N", "pbs": "ngpus=N in the job's select (hpctrain: --gpus-per-node)"},
    "leave out": {
        "slurm": "submit again with --exclude={}",
        "pbs": "report them to the site, which can take them offline (pbsnodes -o); PBS has no option to exclude nodes",
    },
}


def advice(what: str, scheduler: str | None, *values: str) -> str:
    """Return the advice on a topic for this scheduler; Slurm's outside of a job."""
    words = _WORDS[what]
    return words.get(scheduler or "slurm", words["slurm"]).format(*values)
