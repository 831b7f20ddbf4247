"""Training recipe for a run from a settings file: all steps in the order in which they happen."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.mesh import Shape
from hpctrain.data.dataset import Dataset, FileDataset
from hpctrain.data.loader import Batch, Loader, check_batch, evaluation_batches
from hpctrain.data.settings import open_dataset
from hpctrain.errors import SettingsError, UsageError
from hpctrain.log import logger
from hpctrain.models.build import build
from hpctrain.parallel.asynchronous.config import is_asynchronous
from hpctrain.parallel.config import SHARDED, generator_number, microbatches_for, shape_of
from hpctrain.parallel.objective import Objective, loss_named
from hpctrain.parallel.strategy import Strategy
from hpctrain.settings import to_toml, to_tree
from hpctrain.train import optimizer as optimizers
from hpctrain.train.allocator import ALLOCATOR
from hpctrain.train.config import LOGGED_EACH_STEP, Settings, TrainSettings
from hpctrain.train.fit import check_loss
from hpctrain.train.init import init
from hpctrain.train.job import Job
from hpctrain.train.metrics import SAMPLES
from hpctrain.train.run import Run
from hpctrain.train.summary import sample_text, summarise


@torch.no_grad()
def evaluate(
    strategy: Strategy,
    objective: Objective,
    dataset: Dataset,
    *,
    batch: int,
    limit: int | None,
    device: torch.device,
) -> float:
    """Return the mean loss over at most ``limit`` samples of the split. Collective."""
    model, data = strategy.model, strategy.data
    training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for part in evaluation_batches(dataset, batch=batch, rank=data.rank, size=data.size, limit=limit):
        if part.samples:
            part = part.to(device)
            mean = strategy.measure(part.inputs, part.targets, objective)
            sums += torch.tensor([float(mean) * part.samples, part.samples], dtype=torch.float64)
        else:
            strategy.join_empty(backward=False)
    model.train(training)
    data.all_reduce(sums)
    return float(sums[0] / sums[1])


# Forward and backward passes of one training step ---------------------------------------------------------------------


class Stepper:
    """Callable that runs a batch forward and backward in ``accumulate`` microbatches."""

    def __init__(self, strategy: Strategy, settings: TrainSettings, device: torch.device) -> None:
        self.strategy, self.device = strategy, device
        self.accumulate = settings.accumulate
        self.objective = Objective(
            loss_named(settings.loss),
            torch.bfloat16 if settings.precision == "bfloat16" else None,
            settings.clip or float("inf"),
        )

    def __call__(self, batch: Batch) -> Tensor:
        """Leave the averaged gradients in the parameters; return this rank's weighted loss, a scalar."""
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


# Training recipe for a run from a settings file: all steps in the order in which they happen --------------------------


@dataclass(frozen=True)
class Corpus:
    """Training and validation splits of the data."""

    train: FileDataset
    validation: FileDataset


def train(settings: Settings, *, verbose: bool = False) -> None:
    """Train to the last step or until a stop request; resume from the run folder.

    Raises an ``HpctrainError`` on all ranks for any wrong input, before anything is written.
    """
    job = init(
        device=settings.run.device,
        oversubscribe=settings.run.oversubscribe,
        parallel=settings.parallel,
        offload=settings.offload,
        asynchronous=settings.asynchronous,
        settings=to_tree(settings),
        verbose=verbose,
    )
    with job:
        # All input is checked before the folder is modified.
        shape = agreed(job.comm, lambda: check_sizes(settings, job.size))
        corpus = agreed(job.comm, lambda: open_corpus(settings))
        agreed(job.comm, lambda: optimizers.resolve(settings.optimizer))
        ALLOCATOR.start()
        model = agreed(job.comm, lambda: make_model(settings, corpus, job.size))
        agreed(job.comm, lambda: check_loss(settings, model, corpus.train))

        # All ranks have the same weights, but each its own generator: dropout must differ.
        parameters = sum(parameter.numel() for parameter in model.parameters())
        job.wrap(model, example=corpus.train.batch(np.arange(1))[0])
        strategy = job.strategy(model)
        seed_generators(settings.train.seed + 1 + generator_number(shape, job.rank))
        optimizer = agreed(job.comm, lambda: optimizers.make(model, settings.optimizer))
        if job.device.type != "cpu" and not settings.train.clip and settings.train.on_nonfinite != "skip":
            strategy.update_early(optimizer)  # no check of the gradients could hold an update back
        step = Stepper(strategy, settings.train, job.device)
        data = strategy.data
        loader = Loader(
            corpus.train, batch=settings.train.batch, rank=data.rank, size=data.size, seed=settings.train.seed
        )

        with open_run(settings, job, model, optimizer, loader) as run:
            resumed_at = run.step
            announce(job, run, parameters, corpus)
            for number, batch in run:
                run.health.replay = partial(step, batch)
                rate = optimizers.learning_rate(number, settings.train.steps, settings.optimizer)
                optimizers.set_learning_rate(optimizer, rate)
                loss = step(batch)
                run.clip(settings.train.clip)
                optimizer.step()
                optimizer.zero_grad()
                # All values are logged before the step ends, because its checkpoint may be kept for one of them.
                run.log(loss=loss, tokens=tokens_in(batch.targets, settings, data), same={"learning_rate": rate})
                if not settings.data.has_tokens:
                    run.log(same={SAMPLES: number * settings.train.batch})
                if is_due(number, settings):
                    run.log(same={"validation_loss": validate(settings, step, corpus), **strategy.metrics()})

        # All ranks generate the same text, because a forward pass of a sharded model needs all ranks.
        multiple = shape.tensor if settings.parallel.sequence else 1
        with strategy.consensus_view():
            text = sample_text(model, settings.train.prompt, job.device, multiple)
        if job.rank == 0:
            done_before = resumed_at >= settings.train.steps
            summarise(run, corpus.train.facts, text, resumed=done_before, loss=settings.train.loss)


def open_run(settings: Settings, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader) -> Run:
    """Return the run that the settings describe."""
    return job.run(
        model,
        optimizer,
        loader,
        checkpoints=settings.run.folder,
        steps=settings.train.steps,
        **vars(settings.checkpoint),  # the options have the same names
        resume=settings.run.resume,
        strict=settings.run.strict,
        walltime=settings.run.walltime,
        margin=settings.run.margin,
        on_nonfinite=settings.train.on_nonfinite,
        start_from=settings.train.start_from,
        start_skip=settings.train.start_skip,
        trace=settings.train.trace,
        trace_steps=settings.train.trace_steps,
        config=to_toml(to_tree(settings)),
        provenance={"parallel": settings.parallel.data, "batch": settings.train.batch},
    )


def open_corpus(settings: Settings) -> Corpus:
    """Open both splits of the data."""
    window = settings.model.window
    return Corpus(open_dataset(settings.data, "train", window), open_dataset(settings.data, "validation", window))


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
    """Seed the generators of torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def check_sizes(settings: Settings, ranks: int) -> Shape:
    """Return the mesh of the ranks; raise an error if the number of ranks or the batch does not fit."""
    shape = shape_of(settings.parallel, ranks)
    train, idle = settings.train, settings.asynchronous.ranks
    if idle >= ranks:
        raise SettingsError(f"setting asynchronous.ranks = {idle}: must be less than the number of ranks, {ranks}")
    if is_asynchronous(settings.asynchronous, settings.parallel) and settings.checkpoint.background:
        raise UsageError("checkpoint.background: not possible with asynchronous workers")
    check_batch(train.batch, shape.data - idle, train.accumulate)
    if shape.pipe > 1:
        microbatches_for(settings.parallel, train.batch // shape.data // train.accumulate)
        if settings.parallel.schedule == "pipedream" and train.accumulate > 1:
            raise SettingsError(
                f'setting train.accumulate = {train.accumulate}: parallel.schedule = "pipedream" makes an update after '
                "every microbatch"
            )
    return shape


def tokens_in(targets: torch.Tensor, settings: Settings, data: Communicator) -> int:
    """Return the tokens per step over all data ranks, which have equal numbers of them; 0 for arrays."""
    return targets.numel() * data.size if settings.data.has_tokens else 0


def is_due(number: int, settings: Settings) -> bool:
    """Return whether an evaluation follows a step: periodically, and if it selects the best checkpoint."""
    every, saved = settings.train.evaluate_every, settings.checkpoint
    judged = saved.keep_best not in ("", *LOGGED_EACH_STEP) and number % saved.every == 0
    return number == settings.train.steps or judged or bool(every) and number % every == 0


def validate(settings: Settings, step: Stepper, corpus: Corpus) -> float:
    """Return the loss on the validation split, computed in float32."""
    with step.strategy.consensus_view():
        return evaluate(
            step.strategy,
            replace(step.objective, dtype=None),
            corpus.validation,
            batch=settings.train.batch,
            limit=settings.data.validation_limit,
            device=step.device,
        )


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
