"""Collection of facts, in concurrent subprocesses, and their evaluation."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster.launcher import detect
from hpctrain.doctor.findings import Finding, note, ok
from hpctrain.doctor.login import environment, libraries, mpi, resources, schedulers, script
from hpctrain.errors import LaunchError
from hpctrain.util.probe import Answer


@dataclass(frozen=True)
class LoginFacts:
    """All collected facts."""

    environ: Mapping[str, str]
    host: str
    interpreter: environment.Interpreter
    torch: Answer
    gpus: libraries.Gpus
    mpi: mpi.Mpi
    hdf5: Answer
    slurm: schedulers.Slurm
    pbs: schedulers.Pbs
    limits: resources.ProcessLimits
    storage: list[resources.FolderFacts]

    def to_json(self) -> dict[str, Any]:
        """Return the facts as plain values, without environment variables, as those may contain secrets."""
        parts = {name: getattr(self, name) for name in ("interpreter", "limits")}
        probes = {"torch": self.torch, "mpi": self.mpi.probe, "hdf5": self.hdf5, "cupy": self.gpus.cupy}
        return {
            "host": self.host,
            **{name: asdict(part) for name, part in parts.items()},
            **{name: {**answer.facts, "trouble": answer.error} for name, answer in probes.items()},
            "gpus": self.gpus.names,
            "mpiexec": self.mpi.mpiexec,
            "srun_mpi": mpi.needed_type(self.mpi),
            "storage": {folder.role: {"path": folder.path, **folder.answer.facts} for folder in self.storage},
        }


def gather(environ: Mapping[str, str] = os.environ) -> LoginFacts:
    """Collect all facts concurrently; the slowest probe, which has a time limit, determines the duration."""
    tasks: dict[str, Callable[[], Any]] = {
        "torch": libraries.load_torch,
        "gpus": libraries.query_gpus,
        "mpi": mpi.query_mpi,
        "hdf5": libraries.load_hdf5,
        "slurm": schedulers.query_slurm,
        "pbs": schedulers.query_pbs,
        "storage": lambda: resources.query_storage(environ),
    }
    with ThreadPoolExecutor(len(tasks)) as pool:
        running: dict[str, Future[Any]] = {name: pool.submit(task) for name, task in tasks.items()}
        local = environment.read_interpreter(), resources.read_limits()
        answers = {name: future.result() for name, future in running.items()}
    return LoginFacts(environ, socket.gethostname(), interpreter=local[0], limits=local[1], **answers)


def check(facts: LoginFacts, text: str | None = None) -> list[Finding]:
    """Return the findings from the facts, for jobs in general and for the job script with this text."""
    environ = facts.environ
    scheduler = "slurm" if "SLURM_JOB_ID" in environ else "pbs" if "PBS_JOBID" in environ else None
    found = [
        *_check_node(facts),
        *environment.check_interpreter(facts.interpreter, environ),
        *libraries.check_torch(facts.torch),
        *libraries.check_gpus(facts.gpus, facts.torch, environ),
        *mpi.check_mpi(facts.mpi),
        *libraries.check_hdf5(facts.hdf5, environ),
        *environment.check_modules(environ, facts.interpreter.venv),
        *schedulers.check_slurm(facts.slurm, environ),
        *mpi.check_srun(facts.mpi, facts.slurm, environ),
        *schedulers.check_pbs(facts.pbs, environ, facts.slurm.installed),
        *environment.check_variables(environ, facts.limits.cores),
        *resources.check_limits(facts.limits, scheduler),
        *resources.check_storage(facts.storage),
    ]
    return found if text is None else [*found, *script.check_script(text, facts.mpi, facts.slurm, environ)]


def examine(
    script_path: Path | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[LoginFacts, list[Finding]]:
    """Return the facts and the findings."""
    text = None if script_path is None else script.read_script(script_path)  # before any program is run
    facts = gather(environ)
    return facts, check(facts, text)


def _check_node(facts: LoginFacts) -> Iterator[Finding]:
    """Yield the node and the job, and whether this process is one of several ranks."""
    try:
        launch = detect(facts.environ)
    except LaunchError as failure:
        yield note("node", f"{facts.host}: {failure}", "variables of a launcher are left over in this shell")
        return
    job = f"in job {launch.job_id} of {_NAMES[launch.scheduler]}" if launch.scheduler else "outside of any job"
    yield ok("node", f"{facts.host}, {job}")
    if (launch.size or 1) > 1:
        yield note(
            "node",
            f"started as {launch.size} ranks, of which only rank 0 runs these checks",
            "the binding and communication of the ranks were not checked",
            "add --preflight for that",
        )


_NAMES = {"slurm": "Slurm", "pbs": "PBS"}
