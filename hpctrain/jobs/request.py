"""Job request of a user, with every field checked at construction, and the tasks of a job array."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from hpctrain.errors import UsageError
from hpctrain.jobs.template import check, check_all, check_number, seconds
from hpctrain.settings import to_toml

Template = Literal["train", "benchmark", "array"]
TEMPLATES: tuple[Template, ...] = ("train", "benchmark", "array")
LARGEST_ARRAY = 1001  # Slurm's default bound (MaxArraySize) if a site has not set another
PROGRAM = ".py"
FOLDER = "HPCTRAIN_FOLDER"  # tells a program which folder the script watches
EARLY = 60  # seconds by which Slurm's signal may be early


@dataclass(frozen=True)
class Request:
    """Program, resources and time of a job; empty fields and 0 are filled in by the profile and the site."""

    # The run's settings, or the user's own program (.py), as a path relative to the folder of
    # submission.
    config: str
    # The run's folder, with output, start counter and checkpoints.
    folder: str
    # Walltime, as hours:minutes:seconds or days-hours:minutes:seconds.
    time: str
    template: Template = "train"
    name: str = "train"
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    account: str = ""
    # Partition (Slurm) or queue (PBS).
    partition: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""
    # Nodes to exclude (Slurm).
    exclude: str = ""
    # Memory per node.
    memory: str = ""
    # Container image; "none": no container, whatever the profile says.
    container: str = ""
    # A virtual environment to activate.
    venv: str = ""
    modules: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    # Changes of the config by --set.
    settings: tuple[str, ...] = ()
    # Arguments of the user's own program.
    words: tuple[str, ...] = ()
    # One list of settings per task of an array.
    sweep: tuple[tuple[str, ...], ...] = ()
    # Maximum number of concurrent tasks of an array; 0: all.
    at_once: int = 0
    # More directives, such as --mail-type=END.
    directives: tuple[str, ...] = ()
    # Seconds before the end at which the run is told to save.
    margin: int = 300
    # Maximum number of requeues in total, and in a row without a new checkpoint.
    restarts: int = 20
    retries: int = 2
    # Seconds of node measurements before each start; 0: none.
    preflight: int = 0

    def __post_init__(self) -> None:
        self._check_texts()
        self._check_numbers()
        for name, value in self.environment.items():
            check("environment", name, "variable")
            check(f"environment {name}", value, "text")
        if self.template not in TEMPLATES:
            raise UsageError(f"template = {self.template!r}: allowed are {', '.join(TEMPLATES)}")
        self._check_program()
        if (self.template == "array") != bool(self.sweep):
            raise UsageError("template = 'array' needs a sweep, and a sweep needs it: give both or neither")
        if self.gpus_per_node % self.ranks_per_node and self.ranks_per_node % self.gpus_per_node:
            raise UsageError(
                f"gpus_per_node = {self.gpus_per_node} and ranks_per_node = {self.ranks_per_node}: one must divide "
                "the other, so that every rank has as many"
            )

    def _check_texts(self) -> None:
        for name, kind in _TEXTS.items():
            value = getattr(self, name)
            if value or name in _NEEDED:
                check(name, value, kind)
        for name, kind in _LISTS.items():
            check_all(name, getattr(self, name), kind)
        for task in self.sweep:
            check_all("sweep", task, "setting")

    def _check_program(self) -> None:
        if self.words and not self.is_program:
            raise UsageError(
                f"arguments after -- are for a program, and {self.config} is not one: its name must end in {PROGRAM}"
            )
        if not self.is_program:
            return
        for name, given in {"settings go": self.settings, "sweep goes": self.sweep}.items():
            if given:
                raise UsageError(f"{name} with a config, and {self.config} is a program: it takes arguments after --")
        if self.template != "train":
            raise UsageError(f"template = {self.template!r} runs no program: allowed with {self.config} is train")

    def _check_numbers(self) -> None:
        for name, (least, most) in _NUMBERS.items():
            check_number(name, getattr(self, name), least, most)
        if len(self.sweep) > LARGEST_ARRAY - 1:
            raise UsageError(f"sweep has {len(self.sweep)} tasks: at most {LARGEST_ARRAY - 1} are allowed in one array")
        if self.preflight and self.template == "benchmark":
            raise UsageError("preflight: a benchmark measures by itself; remove preflight")
        measuring = f" and nodes are measured for {self.preflight} s" if self.preflight else ""
        if self.template != "benchmark" and self.walltime <= self.margin + EARLY + self.preflight:
            raise UsageError(
                f"time = {self.time}: the run is told to save {self.margin} s before the end, or up to {EARLY} s "
                f"earlier{measuring}: ask for more time, or give a smaller margin"
            )

    @property
    def is_program(self) -> bool:
        """Return whether the job runs the user's own program."""
        return self.config.endswith(PROGRAM)

    @property
    def walltime(self) -> int:
        """Return the walltime in seconds."""
        return seconds(self.time)

    @property
    def ranks(self) -> int:
        """Return the number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node


_NEEDED = ("config", "folder", "time", "name")
_TEXTS = {
    "config": "path",
    "folder": "path",
    "time": "time",
    "name": "job name",
    "account": "name",
    "partition": "names",
    "qos": "name",
    "reservation": "names",
    "constraint": "features",
    "exclude": "nodes",
    "memory": "memory",
    "container": "image",
    "venv": "path",
}
_LISTS = {"modules": "module", "settings": "setting", "words": "text", "directives": "option"}
_NUMBERS = {
    "nodes": (1, 65536),
    "ranks_per_node": (1, 4096),
    "gpus_per_node": (0, 64),
    "cpus_per_rank": (1, 4096),
    "at_once": (0, 1000),
    "margin": (10, 86400),
    "restarts": (0, 10000),
    "retries": (0, 100),
    "preflight": (0, 3600),
}


def run_folder(tree: Mapping[str, Any], config: str) -> str:
    """Return the run's folder from a config: ``run.folder``, else ``runs/`` and the file's name."""
    run = tree.get("run", {})
    folder = run.get("folder") if isinstance(run, Mapping) else None
    return check("setting run.folder", folder or f"runs/{PurePosixPath(config).stem}", "path")


# Tasks of a job array: every combination of the values to try ---------------------------------------------------------


def combine(sweeps: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the settings of each task, from texts such as ``train.seed=1,2,3``; the last one changes fastest."""
    if not sweeps:
        return ()
    lists = [_settings(text) for text in sweeps]
    return tuple(itertools.product(*lists))


def _settings(text: str) -> list[str]:
    key, equals, values = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")) or not values.strip():
        raise UsageError(f"cannot read --sweep {text!r}: write it as section.key=value,value,...")
    if key == "run.folder":
        raise UsageError("--sweep run.folder: every task has a folder of its own already, below the run's")
    return [f"{key}={value}" for value in _values(values)]


def _values(text: str) -> list[str]:
    """Return the values of a list: as TOML if it parses, else as texts between commas."""
    try:
        found: list[Any] = tomllib.loads(f"v = [{text}]")["v"]
    except tomllib.TOMLDecodeError:
        found = []
    if not found:
        return [part.strip() for part in text.split(",")]
    return [to_toml({"v": value}).removeprefix("v = ").strip() for value in found]
