"""Job request of a user, with every field checked at construction, and the tasks of a job array."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any, Literal

from hpctrain.cluster.nodes import REQUESTED
from hpctrain.errors import UsageError
from hpctrain.jobs.template import Raw, check, check_all, check_number, join, seconds
from hpctrain.settings import toml_value

Template = Literal["train", "benchmark", "array"]
TEMPLATES: tuple[Template, ...] = ("train", "benchmark", "array")
LARGEST_ARRAY = 1001  # Slurm's default bound (MaxArraySize) if a site has not set another
PROGRAM = ".py"
FOLDER = "HPCTRAIN_FOLDER"  # tells a program which folder the script watches
EARLY = 60  # seconds by which Slurm's signal may be early
MOST_NODES = 65536


# Progress of a program that writes other files than hpctrain's checkpoints: the newest model file and its time.
_ENDINGS = "bin|ckpt|distcp|h5|npz|pkl|pt|pth|safetensors"
NEWEST_FILE = (
    Raw("newest_file() {"),
    Raw(f"    find \"$folder\" -regextype posix-extended -type f -regex '.*\\.({_ENDINGS})' \\"),
    Raw("        -printf '%T@ %f@%TFT%TT\\n' 2>/dev/null | sort -n | tail -n 1 | cut -d ' ' -f 2- | tr ' ' _ | grep ."),
    Raw("}"),
)


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
    nodes: int = _number(1, MOST_NODES, least=1)
    most_nodes: int = _number(0, MOST_NODES)  # Slurm: the job takes up to as many nodes if they are free; 0: nodes
    spares: int = _number(0, MOST_NODES)  # further nodes, on which the run starts again if one dies
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
    container_options: tuple[str, ...] = _text("option", ())  # besides those of the profile
    venv: str = _text("path")  # a virtual environment to activate
    # Packed environment and data files that are copied to the nodes before each start (hpctrain stage).
    stage_env: str = _text("path")
    stage_program: str = _text("path")  # starts hpctrain stage from one file
    stage_data: tuple[str, ...] = _text("path", ())
    stage_container: bool = False  # the image, too
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
        if self.most_nodes and self.most_nodes <= self.nodes:
            raise UsageError(
                f"most_nodes = {self.most_nodes}: allowed are 0 and numbers above nodes = {self.nodes}; increase it"
            )
        self._check_spares()
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

    def _check_spares(self) -> None:
        if not self.spares:
            return
        if self.spares > self.nodes:
            raise UsageError(f"spares = {self.spares}: at most as many as nodes = {self.nodes} are allowed")
        if self.most_nodes:
            raise UsageError(
                f"spares = {self.spares} with nodes = {self.nodes_text}: a range takes what is free; give one number"
            )
        if self.template != "train":
            raise UsageError(
                f"spares = {self.spares} with template = {self.template!r}: allowed with train; remove spares"
            )

    @property
    def is_program(self) -> bool:
        """Return whether the job runs the user's own program."""
        return self.config.endswith(PROGRAM) or bool(self.runner)

    @property
    def stages(self) -> bool:
        """Return whether something is copied to the nodes before each start."""
        return bool(self.stage_env or self.stage_data or self.stage_container)

    @property
    def walltime(self) -> int:
        return seconds(self.time)

    @property
    def ranks(self) -> int:
        """Return the number of ranks, of a job with a range of nodes the smallest one."""
        return self.nodes * self.ranks_per_node

    @property
    def node_counts(self) -> range:
        """Return the numbers of nodes that the job may get."""
        return range(self.nodes, max(self.most_nodes, self.nodes) + 1)

    @property
    def nodes_text(self) -> str:
        """Return the nodes as Slurm and ``--nodes`` write them: 2, or 2-8."""
        return f"{self.nodes}-{self.most_nodes}" if self.most_nodes else str(self.nodes)

    @property
    def array(self) -> str:
        """Return the indices of the tasks of an array, and how many of them may run at once."""
        return f"0-{len(self.sweep) - 1}" + (f"%{self.at_once}" if self.at_once else "")


def granted_nodes(request: Request) -> tuple[Raw, ...]:
    """Return the lines of a script that set ``nodes`` and ``ranks`` from the nodes of this start.

    The receipt has the request from ``HPCTRAIN_NODES``.
    """
    return (
        Raw("nodes=${SLURM_JOB_NUM_NODES:-$SLURM_NNODES} # a restart may get another number"),
        Raw(f"ranks=$((nodes * {request.ranks_per_node}))"),
        Raw(f"export {REQUESTED}={request.nodes_text}"),
        Raw(f'echo "job $SLURM_JOB_ID has $nodes of {request.nodes_text} nodes: $ranks ranks"'),
    )


def node_range(text: str) -> tuple[int, int]:
    """Return the fields ``nodes`` and ``most_nodes`` of a text such as 2 or 2-8.

    Raises ``UsageError`` for any other text, such as Slurm's steps and lists (2-8:2, 2,4), which
    older versions of Slurm refuse.
    """
    shown = f"nodes = {text[:40]!r}"
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text, re.ASCII)
    if match is None and re.fullmatch(r"[0-9]+(-[0-9]+)?(:[0-9]+|(,[0-9]+)+)", text, re.ASCII):
        raise UsageError(f"{shown}: steps and lists are not supported; allowed is N or MIN-MAX; write it as 2-8")
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not (1 <= least <= MOST_NODES and 1 <= most <= MOST_NODES):
        raise UsageError(f"{shown}: allowed is N or MIN-MAX, from 1 to {MOST_NODES}; write it as 2 or 2-8")
    if most < least:
        raise UsageError(f"{shown}: allowed is MIN-MAX with MIN up to MAX; write it as {most}-{least}")
    return least, most if most > least else 0


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


def task_cases(sweep: Sequence[Sequence[str]]) -> tuple[Raw, ...]:
    """Return one line of shell per task of an array, with its settings."""
    lines = []
    for number, settings in enumerate(sweep):
        words = join([word for text in settings for word in ("--set", text)])
        lines.append(Raw(f"{number}) settings=({words}) ;;"))
    return tuple(lines)


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
