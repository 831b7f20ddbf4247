"""Job request of a user, with every field checked at construction, and the tasks of a job array."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any, Literal

from hpctrain.errors import UsageError
from hpctrain.jobs.template import check, check_all, check_number, seconds
from hpctrain.settings import toml_value

Template = Literal["train", "benchmark", "array"]
TEMPLATES: tuple[Template, ...] = ("train", "benchmark", "array")
LARGEST_ARRAY = 1001  # Slurm's default bound (MaxArraySize) if a site has not set another
PROGRAM = ".py"
FOLDER = "HPCTRAIN_FOLDER"  # tells a program which folder the script watches
EARLY = 60  # seconds by which Slurm's signal may be early


def _text(kind: str, default: Any = "") -> Any:
    """Return a field of text, or of a list, of a kind in ``template.KINDS``; it may be empty only if its default is."""
    return field(default=default, metadata={"kind": kind, "needed": default != "" and default != ()})


def _number(default: int, most: int, *, least: int = 0) -> Any:
    return field(default=default, metadata={"least": least, "most": most})


@dataclass(frozen=True)
class Request:
    """Program, resources and time of a job; empty fields and 0 are filled in by the profile and the site."""

    # The run's settings, or the user's own program (.py), as a path relative to the folder of
    # submission.
    config: str = field(metadata={"kind": "path", "needed": True})
    # The run's folder, with output, start counter and checkpoints.
    folder: str = field(metadata={"kind": "path", "needed": True})
    # Walltime, as hours:minutes:seconds or days-hours:minutes:seconds.
    time: str = field(metadata={"kind": "time", "needed": True})
    template: Template = "train"
    name: str = _text("job name", "train")
    nodes: int = _number(1, 65536, least=1)
    ranks_per_node: int = _number(1, 4096, least=1)
    gpus_per_node: int = _number(0, 64)
    cpus_per_rank: int = _number(1, 4096, least=1)
    account: str = _text("name")
    partition: str = _text("names")  # partition (Slurm) or queue (PBS)
    qos: str = _text("name")
    reservation: str = _text("names")
    constraint: str = _text("features")
    exclude: str = _text("nodes")  # nodes to exclude (Slurm)
    memory: str = _text("memory")  # memory per node
    container: str = _text("image")  # container image; "none": no container, whatever the profile says
    venv: str = _text("path")  # a virtual environment to activate
    modules: tuple[str, ...] = _text("module", ())
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = _text("setting", ())  # changes of the config by --set
    words: tuple[str, ...] = _text("text", ())  # arguments of the user's own program
    # Options of hpctrain run, beginning with "run", if that starts the program: config is a file or a module.
    runner: tuple[str, ...] = _text("text", ())
    sweep: tuple[tuple[str, ...], ...] = ()  # one list of settings per task of an array
    at_once: int = _number(0, 1000)  # maximum number of concurrent tasks of an array; 0: all
    directives: tuple[str, ...] = _text("option", ())  # more directives, such as --mail-type=END
    margin: int = _number(300, 86400, least=10)  # seconds before the end at which the run is told to save
    restarts: int = _number(20, 10000)  # maximum number of requeues in total
    retries: int = _number(2, 100)  # maximum number of requeues in a row without a new checkpoint
    preflight: int = _number(0, 3600)  # seconds of node measurements before each start; 0: none

    def __post_init__(self) -> None:
        self._check_fields()
        self._check_sizes()
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

    def _check_fields(self) -> None:
        """Check each field by its kind, or as a number within its bounds."""
        for item in fields(self):
            value, rule = getattr(self, item.name), item.metadata
            if "most" in rule:
                check_number(item.name, value, rule["least"], rule["most"])
            elif "kind" in rule and isinstance(value, tuple):
                check_all(item.name, value, rule["kind"])
            elif "kind" in rule and (value or rule["needed"]):
                check(item.name, value, rule["kind"])
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

    def _check_sizes(self) -> None:
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
        return self.config.endswith(PROGRAM) or bool(self.runner)

    @property
    def walltime(self) -> int:
        return seconds(self.time)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


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
    return [toml_value(value) for value in found]
