"""Settings of a run: one dataclass per section, most of them defined next to the code that they configure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.checkpoint.retention import Best
from hpctrain.cluster.deadline import seconds_of
from hpctrain.cluster.nodes import number_ranges
from hpctrain.data.settings import DataSettings, check_cache
from hpctrain.errors import SettingsError, UsageError
from hpctrain.models.settings import ModelSettings
from hpctrain.parallel.asynchronous.config import AsynchronousSettings, is_asynchronous, rename_section
from hpctrain.parallel.config import ParallelSettings, microbatches_for, shape_of
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.settings import assign, build
from hpctrain.settings import check as check_fields
from hpctrain.settings import check_most, names_function, read_toml, suggestion, unknown
from hpctrain.train.failure_policy import OnFailure, check_replicate
from hpctrain.train.failure_policy import check_settings as check_failure
from hpctrain.train.health import HealthSettings, check_health
from hpctrain.train.metrics import TIMES
from hpctrain.util.text import short_repr

if TYPE_CHECKING:
    from hpctrain.comm.mesh import Shape

# The losses with a name. parallel.objective implements them, but it loads torch.
LOSSES = ("cross_entropy", "mse")
Only = Literal["all", "trained"]  # parameters that a checkpoint holds
_MOST_TOKENS = 2**36  # per step over all ranks: limits the computed sizes of activations in bytes
# Argument names of the classes of torch.optim for the optimizer settings.
OPTIMIZER_ARGUMENTS = {"learning_rate": "lr", "betas": "betas", "epsilon": "eps", "weight_decay": "weight_decay"}
# Values that a run from a file logs: in every step, and at evaluations. Any of them may select the best checkpoint.
LOGGED_EACH_STEP = ("loss", "learning_rate", "grad_norm")
LOGGED_EVALUATING = ("validation_loss", "centre_distance", "communication", "staleness", "staleness_most")
# Values of a step that cannot select the best checkpoint: a checkpoint contains them anyway, or
# they differ between two otherwise equal runs.
NOT_JUDGED = ("step", "tokens", "samples", "skipped", "lost_ranks", *TIMES)


@dataclass(frozen=True)
class RunSettings:
    """Location of a run and the device that it uses."""

    # Everything the run writes goes here.
    folder: str = "runs/run"
    # auto: resume from the newest valid checkpoint if there is one; never: start in a folder
    # without checkpoints; must: fail if there is no checkpoint.
    resume: Literal["auto", "never", "must"] = "auto"
    # Raise an error if the newest checkpoint is damaged, instead of a warning and the use of the one before.
    strict: bool = False
    # Time limit of the job from its start, as 04:00:00 or 4h; empty: HPCTRAIN_DEADLINE or the scheduler's limit.
    walltime: str = ""
    # Seconds before the end of the job at which the run saves and exits; 0: twice the slowest save,
    # plus the slowest step, plus one minute.
    margin: float = 0.0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Allow ranks to share a GPU.
    oversubscribe: bool = False
    # Reaction to the death of a rank. restart: the job ends, and a job script starts it again from the
    # last checkpoint. shrink: the other ranks continue with the same batches (Open MPI, mpiexec --with-ft
    # ulfm; parallel.data = ddp, zero1, zero2 or fsdp).
    on_failure: OnFailure = "restart"

    def __post_init__(self) -> None:
        check_fields(self, "run")
        if not self.folder.strip():
            raise SettingsError(f"setting run.folder = {short_repr(self.folder)}: name a folder")
        if self.walltime:
            seconds_of(self.walltime)
        if not 0 <= self.margin < math.inf:
            raise SettingsError(f"setting run.margin = {self.margin}: must be a number of seconds >= 0")


@dataclass(frozen=True)
class TrainSettings:
    """Length, precision and checks of the training."""

    # Optimizer updates in total, over all resumes.
    steps: int = 1000
    # Samples per step over all ranks.
    batch: int = 32
    # Backward passes per step; each takes batch / accumulate samples over all ranks.
    accumulate: int = 1
    # Samples per microbatch with parallel.reproducible; 0: an eighth of the batch, rounded up.
    microbatch: int = 0
    # Determines initial weights, order of samples and dropout.
    seed: int = 0
    # Refuse operations that may give different bits when repeated.
    deterministic: bool = False
    # Precision of forward and backward passes; parameters and updates stay in float32.
    precision: Literal["float32", "bfloat16"] = "float32"
    # Loss of the model's outputs and the targets: cross_entropy (targets are classes), mse (targets
    # are floats), or "package.module:function" for a user function, called with outputs and
    # targets, that returns the mean over the samples.
    loss: str = "cross_entropy"
    # Largest global norm of the gradients; 0: no clipping.
    clip: float = 1.0
    # Steps between evaluations on the validation split; 0: evaluate at the end only.
    evaluate_every: int = 100
    # Reaction to a NaN or infinite gradient: stop the job, skip the update, or roll back to the last checkpoint.
    on_nonfinite: Literal["abort", "skip", "rollback"] = "abort"
    # Checkpoint of another run from which the model is loaded; the optimizer starts with a new
    # state. Ignored when the run resumes.
    start_from: str = ""
    # Patterns (fnmatch) of tensor names that need not fit this checkpoint and keep their initial values.
    start_skip: tuple[str, ...] = ()
    # Write trace.json into the run folder: a timeline of every rank, for Perfetto and hpctrain plan --measured.
    trace: bool = False
    # First and last step to trace, counted from this start. Few steps keep the file small. The
    # first two steps are slower than all others.
    trace_steps: tuple[int, ...] = (3, 12)
    # Write trace-kernels.json.gz, too: the same timeline with the operators and GPU kernels of these
    # steps, recorded by torch.profiler. Steps take longer while it records.
    trace_kernels: bool = False
    # Ranks whose operators and kernels are recorded; empty: the first eight.
    kernel_ranks: tuple[int, ...] = ()
    # Write the metrics as events for TensorBoard, too, into the folder tensorboard of the run.
    tensorboard: bool = False
    # Prompt that a byte-level language model continues when training ends; empty: none.
    prompt: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "train")
        if self.loss not in LOSSES and not names_function(self.loss):
            known = f"{', '.join(LOSSES)}, or package.module:function"
            text = f"setting train.loss = {short_repr(self.loss)}: allowed are {known}"
            raise SettingsError(text + suggestion(self.loss, LOSSES))
        check_most(self, "train", steps=2**53, batch=2**31, accumulate=2**31, evaluate_every=2**53)
        positive = {"steps": self.steps, "batch": self.batch, "accumulate": self.accumulate}
        for name, value in positive.items():
            if value < 1:
                raise SettingsError(f"setting train.{name} = {value}: must be at least 1")
        for name, number in {
            "microbatch": self.microbatch,
            "clip": self.clip,
            "evaluate_every": self.evaluate_every,
            "seed": self.seed,
        }.items():
            if not number >= 0:
                raise SettingsError(f"setting train.{name} = {number}: must not be negative")
        check_trace_steps(self.trace_steps, "setting train.trace_steps")


def check_trace_steps(steps: Sequence[int], where: str) -> None:
    """Raise ``SettingsError`` unless the steps are a first and a last step."""
    if not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        raise SettingsError(f"{where} = {list(steps)}: give the first and the last step to trace, as in [3, 12]")


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimizer, and learning rate over the steps."""

    # A class of torch.optim, in upper or lower case: adamw (Loshchilov and Hutter, ICLR 2019), sgd, ...
    name: str = "adamw"
    # Custom optimizer: "package.module:function" or a class, called with the parameter groups and the options.
    factory: str | None = None
    # Additional keyword arguments of the class or the factory, as in {momentum = 0.9, nesterov = true}.
    options: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 1e-3
    # Steps of linear warmup from 0 to the learning rate.
    warmup: int = 0
    # After the warmup: half a cosine period down to learning_rate x final, or a constant rate.
    schedule: Literal["cosine", "constant"] = "cosine"
    final: float = 0.1
    # Defaults: 0.9 and 0.95, 1e-8 and 0.1 for adamw; torch's defaults for other optimizers.
    betas: tuple[float, ...] | None = None
    epsilon: float | None = None
    # Applied to matrices only, not to biases and norms.
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, "optimizer")
        if not self.name.strip():
            raise SettingsError(f"setting optimizer.name = {short_repr(self.name)}: name a class of torch.optim")
        if self.factory is not None and not names_function(self.factory):
            text = f"setting optimizer.factory = {short_repr(self.factory)}"
            raise SettingsError(f"{text}: write it as package.module:function")
        if self.betas is not None and not (len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)):
            raise SettingsError(f"setting optimizer.betas = {list(self.betas)}: must be two numbers in [0, 1)")
        for name in ("learning_rate", "epsilon", "weight_decay", "warmup", "final"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise SettingsError(f"setting optimizer.{name} = {value}: must be a finite number >= 0")
        for name, key in OPTIMIZER_ARGUMENTS.items():
            if key in self.options and (name == "learning_rate" or getattr(self, name) is not None):
                raise SettingsError(f"setting optimizer.options: {key} is set by optimizer.{name}")


@dataclass(frozen=True)
class CheckpointSettings:
    """When to save, and which checkpoints to keep."""

    # Steps between checkpoints; the last step is always saved.
    every: int = 100
    # Number of newest checkpoints to keep.
    keep: int = 2
    # Also keep checkpoints whose step is a multiple of this number; 0: no such checkpoints.
    keep_every: int = 0
    # Also keep the checkpoint of the step with the best value of this metric: any number that the
    # run logs; empty: none.
    keep_best: str = ""
    # Whether the lowest or the highest value is the best.
    best: Best = "lowest"
    # Parameters that checkpoints hold: all, or only those that require a gradient ("trained"), for LoRA. A
    # resume then takes the others from the model that is built, and checks that they are the same.
    only: Only = "all"
    # Reaction to a failed save: end the run, or warn, continue, and try again when the next
    # checkpoint is due. At the end of the run, a failed save is always an error.
    on_error: Literal["stop", "continue"] = "stop"
    # Copy the state, and write it in a separate process per rank while training continues.
    background: bool = False
    # Steps between copies of each rank's shards to another node, from which the run goes back if all ranks
    # of a node die (run.on_failure = "shrink"; zero1, zero2, fsdp); 0: none.
    replicate: int = 0
    # posix: every rank writes its shard independently; mpiio: collective MPI-IO calls, which receive the hints.
    io: Literal["posix", "mpiio"] = "posix"
    # Bytes: tensors of this size or larger start at multiples of it; a power of two, ideally the
    # filesystem's stripe size.
    alignment: int = 1 << 20  # layout.ALIGNMENT; its module would load NumPy
    # MPI-IO hints about the filesystem, as in ["striping_factor=16", "striping_unit=4194304", "cb_nodes=8"].
    hints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "checkpoint")
        for name, least in {"every": 1, "keep": 1, "keep_every": 0, "replicate": 0}.items():
            if (value := getattr(self, name)) < least:
                raise SettingsError(f"setting checkpoint.{name} = {value}: must be at least {least}")
        check_most(self, "checkpoint", every=2**53, keep=2**31, keep_every=2**53, replicate=2**53, alignment=2**40)
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise SettingsError(f"setting checkpoint.alignment = {self.alignment}: must be a power of two")
        if self.background and self.io == "mpiio":
            raise SettingsError('setting checkpoint.background = true: needs checkpoint.io = "posix"')
        if self.hints and self.io != "mpiio":
            raise SettingsError('setting checkpoint.hints: needs checkpoint.io = "mpiio"')
        for hint in self.hints:
            if not all(hint.partition("=")):
                raise SettingsError(f"setting checkpoint.hints: {short_repr(hint)} is not of the form name=value")
        # Other names than the known ones are accepted, because a strategy may log them, but no likely misspellings.
        known, name = [*LOGGED_EVALUATING, *LOGGED_EACH_STEP], self.keep_best
        if name in NOT_JUDGED:
            text = f"setting checkpoint.keep_best = {short_repr(name)}: not a value that a run logs"
            raise SettingsError(f"{text}; known are {', '.join(known)}")
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        if close and name not in known:
            raise SettingsError(unknown(f"checkpoint.keep_best {short_repr(name)}", name, known))


@dataclass(frozen=True)
class Settings:
    """All sections."""

    run: RunSettings = RunSettings()
    data: DataSettings = DataSettings()
    model: ModelSettings = field(default_factory=ModelSettings)
    train: TrainSettings = TrainSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    parallel: ParallelSettings = ParallelSettings()
    offload: OffloadSettings = OffloadSettings()
    asynchronous: AsynchronousSettings = AsynchronousSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    health: HealthSettings = HealthSettings()

    def __post_init__(self) -> None:
        check_fields(self, "")
        self._check_microbatch()
        check_health(self.health, self.parallel, self.offload)
        check_failure(self.run.on_failure, self.parallel, self.offload, self.run.device)
        check_cache(self.data.cache, self.run.on_failure, self.parallel.data)
        check_replicate(self.checkpoint.replicate, self.run.on_failure, "setting checkpoint.")
        window = self.model.window or 1
        if self.train.batch * window > _MOST_TOKENS:
            raise SettingsError(
                f"setting train.batch = {self.train.batch} with windows of {window} tokens: "
                f"must be at most {_MOST_TOKENS} tokens per step"
            )

    def _check_microbatch(self) -> None:
        train = self.train
        if train.microbatch and not self.parallel.reproducible:
            raise SettingsError(
                f"setting train.microbatch = {train.microbatch}: is for parallel.reproducible = true; use "
                "train.accumulate, or set both"
            )
        if train.accumulate > 1 and self.parallel.reproducible:
            raise SettingsError(
                f"setting train.accumulate = {train.accumulate} with parallel.reproducible = true: batches are divided "
                f"into microbatches of train.microbatch samples; remove it"
            )
        if train.microbatch > train.batch:
            raise SettingsError(
                f"setting train.microbatch = {train.microbatch}: must be at most train.batch = {train.batch}"
            )


def load(path: str | Path, assignments: Sequence[str] = ()) -> Settings:
    """Return the settings of a TOML file with ``section.key=value`` assignments on top.

    If neither sets the run folder, it is ``runs/`` plus the file's name. Raises ``SettingsError``.
    """
    tree: dict[str, Any] = read_toml(path)
    for assignment in assignments:
        assign(tree, assignment)
    rename_section(tree)
    run = tree.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("folder", f"runs/{Path(path).stem}")
    return build(Settings, tree)


def check_sizes(settings: Settings, ranks: int) -> Shape:
    """Return the mesh of the ranks; raise an error if the number of ranks or the batch does not fit."""
    from hpctrain.data.loader import check_batch  # loads torch

    shape = shape_of(settings.parallel, ranks)
    train, idle = settings.train, settings.asynchronous.ranks
    if idle >= ranks:
        raise SettingsError(f"setting asynchronous.ranks = {idle}: must be less than the number of ranks, {ranks}")
    if is_asynchronous(settings.asynchronous, settings.parallel) and settings.checkpoint.background:
        raise UsageError("checkpoint.background: not possible with asynchronous workers")
    if settings.parallel.reproducible:
        check_microbatches(train.batch, train.microbatch or default_microbatch(train.batch), ranks)
        return shape
    check_batch(train.batch, shape.data - idle, train.accumulate)
    if shape.pipe > 1:
        microbatches_for(settings.parallel, train.batch // shape.data // train.accumulate)
        if settings.parallel.schedule == "pipedream" and train.accumulate > 1:
            raise SettingsError(
                f'setting train.accumulate = {train.accumulate}: parallel.schedule = "pipedream" makes an update after '
                "every microbatch"
            )
    return shape


DEFAULT_MICROBATCHES = 8  # per batch, with parallel.reproducible


def default_microbatch(batch: int) -> int:
    """Return the size of the microbatches of a batch if the user has not given it."""
    return -(-batch // DEFAULT_MICROBATCHES)


def check_microbatches(batch: int, microbatch: int, ranks: int) -> None:
    """Raise ``SettingsError`` if there are more ranks than microbatches."""
    count = -(-batch // microbatch)
    if count < ranks:
        raise SettingsError(
            f"parallel.reproducible = true: a batch of {batch} samples in microbatches of {microbatch} has {count} of "
            f"them for {ranks} ranks; every rank needs one; start at most {count} rank{'s' * (count > 1)}, or "
            + (
                f"choose smaller microbatches at the beginning of the run (microbatch = {batch // ranks} or less)"
                if batch >= ranks
                else "take a larger batch"
            ),
            everywhere=True,
        )


_CHECKED_COUNTS = 1024  # of a longer range only both ends are checked


def check_node_counts(settings: Settings, counts: Sequence[int], ranks_per_node: int) -> None:
    """Raise ``SettingsError``, which names the numbers of nodes that do not work, unless a run works on all of them.

    ``counts`` ascend. Needs neither torch nor MPI.
    """
    checked = counts if len(counts) <= _CHECKED_COUNTS else (counts[0], counts[-1])
    reasons: dict[int, str] = {}
    for count in checked:
        try:
            check_sizes(settings, count * ranks_per_node)
        except UsageError as error:
            reasons[count] = str(error)
    if not reasons:
        return
    wrong, right = (number_ranges(str(each) for each in checked if (each in reasons) is bad) for bad in (True, False))
    ranks = f"{ranks_per_node} rank{'s' * (ranks_per_node > 1)} per node"
    first, reason = next(iter(reasons.items()))
    ends = "" if len(checked) == len(counts) else "of both ends "
    other = "" if settings.parallel.reproducible else ", or parallel.reproducible = true"
    raise SettingsError(
        f"nodes = {counts[0]}-{counts[-1]} with {ranks}: the run does not work on {wrong} nodes ({first}: {reason}); "
        f"allowed is {ends}{right or 'none'}; request these, or take another train.batch{other}"
    )
