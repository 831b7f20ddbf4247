"""Training recipe for a run from a settings file: all steps in the order in which they happen."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpctrain.checkpoint.tools.hugging_face import origin as origin_of
from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.data.cache import held
from hpctrain.data.dataset import FileDataset
from hpctrain.data.loader import Batch, Loader, evaluation_batches
from hpctrain.data.settings import open_dataset
from hpctrain.errors import SettingsError, UsageError
from hpctrain.log import logger
from hpctrain.models.build import build
from hpctrain.models.gpt import GPT, generate
from hpctrain.parallel.config import SHARDED, generator_number
from hpctrain.parallel.objective import LOSSES, Objective, loss_named
from hpctrain.parallel.reproducible.gradients import local_passes
from hpctrain.parallel.strategy import Strategy, consensus_view, metrics_of
from hpctrain.settings import to_toml, to_tree
from hpctrain.train import optimizer as optimizers
from hpctrain.train.config import LOGGED_EACH_STEP, Settings, TrainSettings, check_sizes, default_microbatch
from hpctrain.train.init import init
from hpctrain.train.job import Job
from hpctrain.train.metrics import SAMPLES
from hpctrain.train.microbatches import ReproducibleBackward, exact_sum, microbatch_of
from hpctrain.train.process import ALLOCATOR, command_name
from hpctrain.train.receipt import render
from hpctrain.train.run import Run
from hpctrain.util.text import printable_lines

LENGTH = 300  # bytes of generated text
BYTES = 256  # vocabulary of a byte-level model


class Stepper:
    """Callable that runs a batch forward and backward in ``accumulate`` microbatches."""

    def __init__(self, strategy: Strategy, settings: TrainSettings, device: torch.device) -> None:
        self.strategy, self.device = strategy, device
        self.accumulate, self.batch = settings.accumulate, settings.batch
        self.microbatches: ReproducibleBackward | None = None
        self.objective = Objective(
            loss_named(settings.loss),
            torch.bfloat16 if settings.precision == "bfloat16" else None,
            settings.clip or float("inf"),
        )

    def __call__(self, batch: Batch) -> Tensor:
        """Leave the averaged gradients in the parameters; return this rank's weighted loss, a scalar.

        With ``microbatches`` it is the loss of all ranks.
        """
        if self.microbatches is not None:
            return self.microbatches(self.batch, partial(self._loss, batch.to(self.device)))
        total = torch.zeros((), device=self.device)
        pieces = batch.to(self.device).split(self.accumulate)
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            syncs = last or self.strategy.reduces_early
            if last:
                self.strategy.announce_update()
            if piece.samples:
                with nullcontext() if syncs else self.strategy.no_sync():
                    total += self.strategy.forward_backward(
                        piece.inputs, piece.targets, self.objective, weight=piece.weight
                    )
            elif syncs:
                self.strategy.join_empty()
        return total

    def _loss(self, batch: Batch, begin: int, end: int) -> Tensor:
        """Return the mean loss of some samples of this rank's share."""
        inputs, targets = microbatch_of((batch.inputs, batch.targets), begin, end)
        with self.objective.computing(inputs.device):
            outputs = self.strategy.model(inputs)
        return self.objective.compare(outputs, targets)


@dataclass(frozen=True)
class Corpus:
    """Training and validation splits of the data."""

    train: FileDataset
    validation: FileDataset


def train(settings: Settings, *, verbose: bool = False, init: Callable[..., Job] = init) -> None:
    """Train to the last step or until a stop request; resume from the run folder. ``init`` joins the ranks.

    Raises an ``HpctrainError`` on all ranks for any wrong input, before anything is written.
    """
    settings = with_microbatch(settings)
    sections = {"parallel": settings.parallel, "offload": settings.offload, "asynchronous": settings.asynchronous}
    run_settings = {"device": settings.run.device, "oversubscribe": settings.run.oversubscribe}
    with init(**run_settings, **sections, settings=to_tree(settings), verbose=verbose) as job, ExitStack() as opened:
        # All input is checked before the folder is modified.
        shape = agreed(job.comm, lambda: check_sizes(settings, job.size))
        corpus = opened.enter_context(open_corpus(settings, job.comm))
        agreed(job.comm, lambda: optimizers.resolve(settings.optimizer))
        ALLOCATOR.start()
        model = agreed(job.comm, lambda: make_model(settings, corpus, job.size))
        agreed(job.comm, lambda: check_loss(settings, model, corpus.train))

        # All ranks have the same weights, but each its own generator: dropout must differ.
        parameters = sum(parameter.numel() for parameter in model.parameters())
        job.wrap(model, example=corpus.train.batch(np.arange(1))[0])
        if settings.model.pretrained is not None:
            job.load_pretrained(model, settings.model.pretrained)
        strategy = job.strategy(model)
        seed_generators(settings.train.seed + 1 + generator_number(shape, job.rank))
        optimizer = agreed(job.comm, lambda: optimizers.make(model, settings.optimizer))
        if may_update_early(settings, job.device):
            strategy.update_early(optimizer)
        step = Stepper(strategy, settings.train, job.device)
        data = strategy.data
        one, rank, size = settings.train, data.rank, data.size
        options: dict[str, Any] = {"seed": one.seed, "microbatch": one.microbatch, "prefetch": settings.data.prefetch}
        loader = Loader(corpus.train, batch=one.batch, rank=rank, size=size, **options)

        with open_run(settings, job, model, optimizer, loader) as run:
            step.microbatches = run.microbatches
            done_before = run.step >= settings.train.steps
            announce(job, run, parameters, corpus)
            for number, batch in run:
                if run.microbatches is None:
                    run.health.replay = partial(step, batch)
                rate = optimizers.learning_rate(number, settings.train.steps, settings.optimizer)
                optimizers.set_learning_rate(optimizer, rate)
                loss = step(batch)
                run.clip(settings.train.clip)
                optimizer.step()
                optimizer.zero_grad()
                # All values are logged before the step ends, because its checkpoint may be kept for one of them.
                tokens, samples = trained_on(number, batch, settings, data)
                run.log(loss=loss, tokens=tokens, same={"learning_rate": rate, **samples})
                if is_due(number, settings):
                    found = run.health.verified(lambda: validate(settings, step, corpus))
                    run.log(same={"validation_loss": found, **metrics_of(strategy)})

        # All ranks generate the same text, because a forward pass of a sharded model needs all ranks.
        multiple = shape.tensor if settings.parallel.sequence else 1
        with consensus_view(strategy):
            text = sample_text(model, settings.train.prompt, job.device, multiple)
        if job.rank == 0:
            summarise(run, corpus.train.facts, text, done_before=done_before, loss=settings.train.loss)


def may_update_early(settings: Settings, device: torch.device) -> bool:
    """Return whether updates may be made within the backward pass: no check of the gradients could hold one back."""
    inspects = settings.train.clip or settings.train.on_nonfinite == "skip" or settings.parallel.reproducible
    return device.type != "cpu" and not inspects


def with_microbatch(settings: Settings) -> Settings:
    """Return settings with the size of microbatches that a reproducible run uses, to be stored with the run."""
    if not settings.parallel.reproducible or settings.train.microbatch:
        return settings
    return replace(settings, train=replace(settings.train, microbatch=default_microbatch(settings.train.batch)))


def open_run(settings: Settings, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader) -> Run:
    origin = agreed(job.comm, lambda: origin_of(settings.model.pretrained))
    return job.run(
        model,
        optimizer,
        loader,
        checkpoints=settings.run.folder,
        steps=settings.train.steps,
        **vars(settings.checkpoint),  # the options have the same names
        **vars(settings.health),
        resume=settings.run.resume,
        strict=settings.run.strict,
        walltime=settings.run.walltime,
        margin=settings.run.margin,
        on_failure=settings.run.on_failure,
        on_nonfinite=settings.train.on_nonfinite,
        start_from=settings.train.start_from,
        start_skip=settings.train.start_skip,
        microbatch=settings.train.microbatch,
        trace=settings.train.trace,
        trace_steps=settings.train.trace_steps,
        trace_kernels=settings.train.trace_kernels,
        kernel_ranks=settings.train.kernel_ranks,
        tensorboard=settings.train.tensorboard,
        config=to_toml(to_tree(settings)),
        provenance={"parallel": settings.parallel.summary, "batch": settings.train.batch, **origin},
    )


@contextmanager
def open_corpus(settings: Settings, comm: Communicator) -> Iterator[Corpus]:
    """Open both splits of the data, on all ranks alike; bring them to memory if the settings say so. Collective."""
    opened = partial(open_dataset, settings.data, context=settings.model.window)
    corpus = agreed(comm, lambda: Corpus(opened("train"), opened("validation")))
    if settings.data.cache != "memory":
        yield corpus
        return
    with held(comm, corpus.train, corpus.validation) as datasets:
        yield Corpus(*datasets)


def make_model(settings: Settings, corpus: Corpus, ranks: int) -> nn.Module:
    """Build the model for the data; its weights are drawn from the run's seed.

    A model that is sharded over the ranks, or offloaded to the host, is built on the meta device.
    ``job.wrap`` then draws the same weights, but never all of them on one rank or on the device.
    """
    if settings.train.deterministic is not torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(settings.train.deterministic)  # loads torch's compiler, which takes seconds
    seed_generators(settings.train.seed)
    divides = settings.parallel.data in SHARDED or settings.parallel.splits_model
    divided = settings.model.factory is None and (divides and ranks > 1 or settings.offload.any_update)
    with torch.device("meta") if divided or settings.model.meta else nullcontext():
        return build(settings.model, **corpus.train.facts)


def seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def trained_on(number: int, batch: Batch, settings: Settings, data: Communicator) -> tuple[int, dict[str, int]]:
    """Return the tokens of a step over all data ranks; for arrays 0, and the samples since the beginning of the run."""
    if settings.data.format == "tokens":
        return batch.targets[0].numel() * settings.train.batch, {}  # all samples have equal numbers of tokens
    return 0, {SAMPLES: number * settings.train.batch}


def is_due(number: int, settings: Settings) -> bool:
    """Return whether an evaluation follows a step: periodically, and if it selects the best checkpoint."""
    every, saved = settings.train.evaluate_every, settings.checkpoint
    judged = saved.keep_best not in ("", *LOGGED_EACH_STEP) and number % saved.every == 0
    return number == settings.train.steps or judged or bool(every) and number % every == 0


def validate(settings: Settings, step: Stepper, corpus: Corpus) -> float:
    """Return the mean loss over the validation split, or its first samples, in float32. Collective."""
    strategy, objective, data = step.strategy, replace(step.objective, dtype=None), step.strategy.data
    share: dict[str, Any] = {"rank": data.rank, "size": data.size, "limit": settings.data.validation_samples or None}
    training, size = strategy.model.training, settings.train.microbatch
    terms: list[tuple[float, int]] = []  # sums of losses, and their numbers of samples
    with consensus_view(strategy), local_passes([strategy]), torch.no_grad():
        strategy.model.eval()
        for part in evaluation_batches(corpus.validation, batch=settings.train.batch, microbatch=size or 1, **share):
            if not part.samples:
                strategy.join_empty(backward=False)
                continue
            part = part.to(step.device)
            for begin in range(0, part.samples, size or part.samples):
                samples = part.inputs, part.targets
                inputs, targets = microbatch_of(samples, begin, begin + size) if size else samples
                terms.append((float(strategy.measure(inputs, targets, objective)) * len(inputs), len(inputs)))
        strategy.model.train(training)
        everyone = [term for found in data.all_gather_object(terms) for term in found]
    return exact_sum(total for total, _ in everyone) / exact_sum(samples for _, samples in everyone)


def announce(job: Job, run: Run, parameters: int, corpus: Corpus) -> None:
    """Log the model size, data, ranks and folder of the run."""
    if job.rank or run.finished:
        return
    ranks = "1 rank" if job.size == 1 else f"{job.size} ranks on {job.nodes} node{'s' if job.nodes > 1 else ''}"
    logger.info(
        "%s parameters, %s training samples, %s, %s, %d threads per rank; writing into %s",
        f"{parameters:,}",
        f"{len(corpus.train):,}",
        ranks,
        job.device,
        torch.get_num_threads(),
        run.folder,
    )


# Checks of data, model and loss before the run begins -----------------------------------------------------------------


def check_loss(settings: Settings, model: nn.Module, dataset: FileDataset) -> None:
    """Raise ``SettingsError`` if the loss cannot compare the model's outputs with the targets.

    Targets are checked by dtype. A model from a factory, and a loss function of the user, are
    called on one sample in evaluation mode if the whole model is on this rank. If that forward pass
    fails, the error is left to the run.
    """
    inputs, targets = dataset.batch(np.arange(1))
    name = settings.train.loss
    if name in LOSSES:
        _check_dtype(name, targets, dataset.path)
    compare = loss_named(name)
    named = settings.model.factory is None and name in LOSSES
    held: Sequence[Tensor] = [*model.parameters(), *model.buffers()]
    lacks_values = any(each.is_meta or is_lazy(each) for each in held)
    outputs = None if named or lacks_values else _outputs(model, inputs)
    if outputs is None:
        return
    try:
        with torch.no_grad():
            compare(outputs, targets)
    except UsageError:
        raise
    except Exception as error:
        raise SettingsError(
            f"train.loss = {name!r} cannot compare the model's output, {_described(outputs)}, with the targets, "
            f"{_described(targets)}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error


def _check_dtype(name: str, targets: Tensor, path: str) -> None:
    classes = not targets.is_floating_point()
    if name == "cross_entropy" and not classes:
        raise SettingsError(
            f"train.loss = 'cross_entropy' takes classes (whole numbers), the targets of {path} are floats: set "
            'train.loss = "mse", or a function of yours'
        )
    if name == "mse" and classes:
        raise SettingsError(
            f"train.loss = 'mse' takes floats, the targets of {path} are whole numbers: set "
            'train.loss = "cross_entropy", or write the targets as floats'
        )


def _outputs(model: nn.Module, inputs: Tensor) -> Tensor | None:
    """Return the model's output for one sample; None if it is not a tensor or the model cannot run here."""
    training = model.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = model.eval()(inputs)
    except Exception:
        return None
    finally:
        model.train(training)
    return outputs if isinstance(outputs, Tensor) else None


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


# Summary printed at the end of a run: losses, a text sample, and the run folder ---------------------------------------


def sample_text(model: nn.Module, prompt: str, device: torch.device, multiple: int = 1) -> str | None:
    """Return the text that a byte-level GPT generates after the prompt; None without a prompt or such a model.

    Sequence lengths must be multiples of ``multiple``, because sequences may be split over ranks.
    """
    if not prompt or not isinstance(model, GPT) or model.config.vocab_size != BYTES:
        return None
    tokens = torch.tensor(list(prompt.encode()), dtype=torch.int64, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    written = generate(model, tokens, LENGTH, temperature=0.7, top_k=40, generator=generator, multiple=multiple)
    return bytes(written.tolist()).decode(errors="replace")


def _in_bits(value: float, facts: Mapping[str, Any], loss: str) -> str:
    """Return a loss with its unit; only the cross entropy has one."""
    if loss != "cross_entropy":
        return f"{value:.4f}"
    unit = " per byte" if facts.get("vocab_size") == BYTES else ""
    return f"{value:.4f} nats{unit} = {value / math.log(2):.4f} bits{unit}"


def summarise(run: Run, facts: Mapping[str, Any], text: str | None, *, done_before: bool, loss: str) -> None:
    """Print the last losses, the sample, and where to find more; ``loss`` names the loss function."""
    lines = []
    if done_before:
        lines.append(f"{run.folder} is finished: {run.step} steps are done; increase train.steps to continue")
    losses = run.state.curves.columns
    if losses.get("loss"):
        nats = " nats" if loss == "cross_entropy" else ""
        lines.append(f"training loss    {losses['loss'][-1]:.4f}{nats} after step {run.step}")
    if losses.get("validation_loss"):
        lines.append(f"validation loss  {_in_bits(losses['validation_loss'][-1], facts, loss)}")
    if text is not None:
        lines += ["", "The model continues the prompt:", "", *(f"    {line}" for line in text.splitlines()), ""]
    lines.append(f"run folder       {run.folder}")
    if run.fingerprint is not None:
        lines.append(f"fingerprint      {run.fingerprint} (of all weights and moments)")
    if (best := run.state.retention.best()) is not None:
        lines.append(f"best checkpoint  {best} (by {run.options.keep_best})")
    if (consumed := render.summary(run.folder)) is not None:
        lines.append(f"efficiency       {consumed}")
    lines.append(f"inspect          {command_name()} checkpoint show {run.state.path(run.step)}")
    print(printable_lines("\n".join(lines)), flush=True)
