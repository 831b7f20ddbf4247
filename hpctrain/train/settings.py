"""Hold the settings of a run: one section a room, each beside what it sets."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpctrain.checkpoint.keep import Best
from hpctrain.cluster.deadline import seconds_of
from hpctrain.data.settings import DataSettings
from hpctrain.errors import SettingsError
from hpctrain.models.settings import ModelSettings
from hpctrain.parallel.offload.settings import OffloadSettings
from hpctrain.parallel.server.settings import ServerSettings
from hpctrain.parallel.settings import ParallelSettings
from hpctrain.settings import assign, build
from hpctrain.settings import check as check_fields
from hpctrain.settings import check_most, meant, names_function, read_toml, unknown
from hpctrain.util.text import shown

# The losses that have a name; train.step's are those of parallel.objective, which loads torch.
LOSSES = ("cross_entropy", "mse")
_MOST_TOKENS = 2**36  # per step over all ranks: so that bytes of activations can be counted
# What the settings of an optimizer are called by the classes of torch.optim.
OPTIMIZER_ARGUMENTS = {"learning_rate": "lr", "betas": "betas", "epsilon": "eps", "weight_decay": "weight_decay"}
# What a run from a file logs: in every step, and where it evaluates. A checkpoint may be kept for any of it.
LOGGED_EACH_STEP = ("loss", "learning_rate", "grad_norm")
LOGGED_EVALUATING = ("validation_loss", "centre_distance", "communication", "staleness", "staleness_most")
# Of the numbers of a step, what a checkpoint has by itself, and what differs between two runs that are otherwise equal.
NOT_JUDGED = ("step", "tokens", "samples", "skipped", "step_seconds", "communication_seconds")


@dataclass(frozen=True)
class RunSettings:
    """Say where a run lives and on what it runs."""

    # Everything the run writes goes here.
    folder: str = "runs/run"
    # auto: go on from the newest valid checkpoint if there is one; never: start anew in an empty folder; must: refuse
    # to start anew.
    resume: Literal["auto", "never", "must"] = "auto"
    # A damaged newest checkpoint is an error instead of a warning and the one before.
    strict: bool = False
    # How long the job may take, from its start, as 04:00:00 or 4h; empty: as HPCTRAIN_DEADLINE or the scheduler says.
    walltime: str = ""
    # Seconds before the end of the job at which the run saves and leaves; 0: two of the slowest saves, the slowest step
    # and a minute.
    margin: float = 0.0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Let ranks share a GPU.
    oversubscribe: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "run")
        if self.walltime:
            seconds_of(self.walltime)
        if not 0 <= self.margin < math.inf:
            raise SettingsError(f"setting run.margin = {self.margin}: must be a number of seconds from 0 on")


@dataclass(frozen=True)
class TrainSettings:
    """Say how long and how carefully to train."""

    # Optimizer updates in all, over all resumes.
    steps: int = 1000
    # Samples a step over all ranks.
    batch: int = 32
    # Backward passes a step; each takes batch / accumulate samples over all ranks.
    accumulate: int = 1
    # Decides initial weights, order of samples and dropout.
    seed: int = 0
    # Refuse operations that may give other bits on a rerun.
    deterministic: bool = False
    # Precision of forward and backward; parameters and updates stay in float32.
    precision: Literal["float32", "bfloat16"] = "float32"
    # What the model's output and the targets are compared by: cross_entropy (targets are classes), mse (targets are
    # floats), or a function of yours, "package.module:function": of outputs and targets, returning the mean over the
    # samples.
    loss: str = "cross_entropy"
    # Largest global norm of the gradients; 0 does not clip.
    clip: float = 1.0
    # Steps between evaluations on the validation split; 0 evaluates at the end only.
    evaluate_every: int = 100
    # A NaN or infinite gradient: stop the job, leave out the update, or go back to the last checkpoint.
    on_nonfinite: Literal["abort", "skip", "rollback"] = "abort"
    # A checkpoint of another run whose model this one begins with; the optimizer starts fresh. A run that resumes does
    # not look at it.
    start_from: str = ""
    # Patterns (fnmatch): names of tensors that need not fit it, and stay as they were built.
    start_skip: tuple[str, ...] = ()
    # Write trace.json into the run's folder: what every rank did when, for Perfetto and hpctrain plan --measured.
    trace: bool = False
    # The first and the last step to trace, counted from this start; few, so that the file stays small. The first two
    # take longer than all others.
    trace_steps: tuple[int, ...] = (3, 12)
    # What a byte-level language model goes on from when training ends; empty for none.
    prompt: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "train")
        if self.loss not in LOSSES and not names_function(self.loss):
            known = f"{', '.join(LOSSES)}, or package.module:function"
            text = f"setting train.loss = {shown(self.loss)}: allowed are {known}"
            raise SettingsError(text + meant(self.loss, LOSSES))
        check_most(self, "train", steps=2**53, batch=2**31, accumulate=2**31, evaluate_every=2**53)
        positive = {"steps": self.steps, "batch": self.batch, "accumulate": self.accumulate}
        for name, value in positive.items():
            if value < 1:
                raise SettingsError(f"setting train.{name} = {value}: must be at least 1")
        for name, number in {"clip": self.clip, "evaluate_every": self.evaluate_every, "seed": self.seed}.items():
            if not number >= 0:
                raise SettingsError(f"setting train.{name} = {number}: must not be negative")
        check_trace_steps(self.trace_steps, "setting train.trace_steps")


def check_trace_steps(steps: Sequence[int], where: str) -> None:
    """Raise ``SettingsError`` unless these are a first and a last step."""
    if not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        raise SettingsError(f"{where} = {list(steps)}: give the first and the last step to trace, as in [3, 12]")


@dataclass(frozen=True)
class OptimizerSettings:
    """Name the optimizer, and set the learning rate over the steps."""

    # A class of torch.optim, in any case: adamw (Loshchilov and Hutter, ICLR 2019), sgd, ...
    name: str = "adamw"
    # Your own optimizer: "package.module:function" or a class, called with the parameter groups and the options.
    factory: str | None = None
    # More keyword arguments of the class or the factory, as in {momentum = 0.9, nesterov = true}.
    options: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 1e-3
    # Steps of linear rise from 0 to the learning rate.
    warmup: int = 0
    # What follows: half a cosine down to learning_rate x final, or no change.
    schedule: Literal["cosine", "constant"] = "cosine"
    final: float = 0.1
    # Where these are not set, adamw takes 0.9 and 0.95, 1e-8, and 0.1; others have torch's defaults.
    betas: tuple[float, ...] | None = None
    epsilon: float | None = None
    # Applied to matrices only, not to biases and norms.
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, "optimizer")
        if self.factory is not None and not names_function(self.factory):
            text = f"setting optimizer.factory = {shown(self.factory)}"
            raise SettingsError(f"{text}: write it as package.module:function")
        if self.betas is not None and not (len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)):
            raise SettingsError(f"setting optimizer.betas = {list(self.betas)}: must be two numbers in [0, 1)")
        for name in ("learning_rate", "epsilon", "weight_decay", "warmup", "final"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise SettingsError(f"setting optimizer.{name} = {value}: must not be negative")
        for name, key in OPTIMIZER_ARGUMENTS.items():
            if key in self.options and (name == "learning_rate" or getattr(self, name) is not None):
                raise SettingsError(f"setting optimizer.options: {key} is set by optimizer.{name}")


@dataclass(frozen=True)
class CheckpointSettings:
    """Say when to save and what to keep."""

    # Steps between checkpoints; the last step is always saved.
    every: int = 100
    # The newest ones that stay.
    keep: int = 2
    # Steps: a checkpoint whose step is a multiple stays, too; 0: none for that.
    keep_every: int = 0
    # The checkpoint in whose step this number was the best stays, too: any number that the run logs; empty: none for
    # that.
    keep_best: str = ""
    # Which value is the best.
    best: Best = "lowest"
    # One cannot be written: end the run, or warn, go on, and try again when the next is due. At the end of the run it
    # is an error in any case.
    on_error: Literal["stop", "continue"] = "stop"
    # Copy the state and let a process beside each rank write it while training goes on.
    background: bool = False
    # posix: every rank writes its share by itself; mpiio: by collective calls of MPI, which get the hints.
    io: Literal["posix", "mpiio"] = "posix"
    # Bytes: tensors of that size and more start at multiples of it; a power of two, at best the filesystem's stripe.
    alignment: int = 1 << 20  # layout.ALIGNMENT, whose module loads NumPy
    # What MPI is told about the filesystem, as in ["striping_factor=16", "striping_unit=4194304", "cb_nodes=8"].
    hints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "checkpoint")
        for name, least in {"every": 1, "keep": 1, "keep_every": 0}.items():
            if (value := getattr(self, name)) < least:
                raise SettingsError(f"setting checkpoint.{name} = {value}: must be at least {least}")
        check_most(self, "checkpoint", every=2**53, keep=2**31, keep_every=2**53, alignment=2**40)
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise SettingsError(f"setting checkpoint.alignment = {self.alignment}: must be a power of two")
        if self.background and self.io == "mpiio":
            raise SettingsError('setting checkpoint.background = true: needs checkpoint.io = "posix"')
        if self.hints and self.io != "mpiio":
            raise SettingsError('setting checkpoint.hints: they are for checkpoint.io = "mpiio"')
        for hint in self.hints:
            if not all(hint.partition("=")):
                raise SettingsError(f"setting checkpoint.hints: {shown(hint)} is not of the form name=value")
        self._check_judge()

    def _check_judge(self) -> None:
        """Refuse what no checkpoint is judged by, and a probable misspelling; a strategy may log other names."""
        known, name = [*LOGGED_EVALUATING, *LOGGED_EACH_STEP], self.keep_best
        if name in NOT_JUDGED:
            text = f"setting checkpoint.keep_best = {shown(name)}: no checkpoint is judged by that"
            raise SettingsError(f"{text}; known are {', '.join(known)}")
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        if close and name not in known:
            raise SettingsError(unknown(f"checkpoint.keep_best {shown(name)}", name, known))


@dataclass(frozen=True)
class Settings:
    """Hold all sections."""

    run: RunSettings = RunSettings()
    data: DataSettings = DataSettings()
    model: ModelSettings = field(default_factory=ModelSettings)
    train: TrainSettings = TrainSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    parallel: ParallelSettings = ParallelSettings()
    offload: OffloadSettings = OffloadSettings()
    server: ServerSettings = ServerSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()

    def __post_init__(self) -> None:
        check_fields(self, "")
        window = self.model.window or 1
        if self.train.batch * window > _MOST_TOKENS:
            raise SettingsError(
                f"setting train.batch = {self.train.batch} with windows of {window} tokens: "
                f"allowed are at most {_MOST_TOKENS} tokens per step"
            )


def load(path: str | Path, assignments: Sequence[str] = ()) -> Settings:
    """Return the settings of a TOML file with ``section.key=value`` assignments on top.

    Where nothing names the run's folder, it is ``runs/`` and the file's name. Raises ``SettingsError``.
    """
    tree: dict[str, Any] = read_toml(path)
    for assignment in assignments:
        assign(tree, assignment)
    run = tree.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("folder", f"runs/{Path(path).stem}")
    return build(Settings, tree)
