"""Examine PBS."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpctrain.doctor.finding import Finding, note, ok
from hpctrain.doctor.login.ask import Answer, ask


@dataclass(frozen=True)
class Pbs:
    """Hold what PBS's commands say."""

    version: Answer

    @property
    def release(self) -> str:
        """Return the version; empty where these are not PBS's own commands."""
        found = re.search(r"(?:pbs_version\s*=|^Version:)\s*([\w.]+)", self.version.text, re.MULTILINE)
        return found[1] if found else ""


def gather() -> Pbs:
    """Ask PBS's commands."""
    return Pbs(ask(["qstat", "--version"], both=True))


def check(pbs: Pbs, environ: Mapping[str, str], slurm: bool) -> Iterator[Finding]:
    """Yield what is to be said of PBS; with ``slurm`` its commands may be Slurm's stand-ins."""
    if pbs.version.missing:
        return
    if not pbs.release:
        if not slurm:
            yield note("PBS", "qstat is here and does not tell its version", "PBS may not answer")
        return
    yield ok("PBS", f"{pbs.release}; jobs know their own end, since PBS sends no signal before it")
    if prefix := environ.get("PBS_DPREFIX"):
        yield note(
            "PBS",
            f"PBS_DPREFIX={prefix}",
            "qsub takes lines that begin so for directives, and passes over #PBS",
            "unset PBS_DPREFIX; hpctrain submit does",
        )
