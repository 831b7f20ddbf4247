"""Example inputs of a model from the first batch of a ``DataLoader``, without changing the loader's state."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from hpctrain.data.random_streams import OuterState
from hpctrain.data.split_loader import cut, generators_of, samples_in
from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings, microbatches_for, shape_of

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def example_inputs(example: Any, model: nn.Module, settings: ParallelSettings, size: int) -> Any:
    """Return the model inputs given by ``example``: itself, or a microbatch of a DataLoader's first batch.

    If the batch is a dict, its entries that ``forward`` has as parameters are used. If it is a
    tuple or list, its first items are used, as many as ``forward`` has positional parameters. No
    worker is started, and the generators are restored.
    """
    if not isinstance(example, DataLoader):
        if isinstance(example, (Tensor, tuple, list, Mapping)) or example is None:
            return example
        raise _refused(f"a {type(example).__name__}")
    if isinstance(example, IterableDataset) or isinstance(example.dataset, IterableDataset):
        raise _refused("a DataLoader of an IterableDataset, whose first samples would be lost")
    if settings.pipe == 1:
        return None  # nothing is partitioned
    batch = _first_batch(example)
    samples = samples_in(batch)
    share = max(samples // shape_of(settings, size).data, 1)
    count = settings.microbatches if settings.microbatches and share % settings.microbatches == 0 else 0
    return inputs_of_batch(cut(batch, 0, share // (count or microbatches_for(settings, share))), model)


def inputs_of_batch(batch: Any, model: nn.Module) -> Any:
    """Return the part of a batch that the model's ``forward`` takes, by its parameters."""
    parameters = inspect.signature(model.forward).parameters.values()
    if isinstance(batch, Mapping):
        every = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        names = {each.name for each in parameters}
        found = {name: value for name, value in batch.items() if every or name in names}
        if not found:
            raise UsageError(
                f"job.wrap(model, example=loader): {type(model).__name__}.forward takes none of the names of a batch, "
                f"{', '.join(map(str, batch))}; pass example= what the model is called with",
                everywhere=True,
            )
        return found
    if isinstance(batch, (tuple, list)):
        return tuple(batch[: max(sum(each.kind in _BY_POSITION for each in parameters), 1)])
    return batch


def _first_batch(loader: DataLoader[Any]) -> Any:
    """Return the first batch, loaded in this process, and restore all generators."""
    outer, own = OuterState.capture(), generators_of(loader)
    states = [generator.get_state() for generator in own]
    try:
        if loader.batch_sampler is None:
            index = next(iter(loader.sampler), None)
            return None if index is None else loader.collate_fn(loader.dataset[index])
        indices = next(iter(loader.batch_sampler), None)
        if indices is None:
            raise UsageError("job.wrap(model, example=loader): the loader has no batches", everywhere=True)
        dataset: Any = loader.dataset
        several = getattr(dataset, "__getitems__", None)
        samples = several(list(indices)) if several else [dataset[index] for index in indices]
        return loader.collate_fn(samples)
    finally:
        outer.restore()
        for generator, state in zip(own, states):
            generator.set_state(state)


def _refused(what: str) -> UsageError:
    return UsageError(
        f"job.wrap(model, example=...) is {what}; allowed are what the model is called with (a tensor, a tuple of "
        "positional arguments, a dict of keyword arguments) and a DataLoader whose dataset has __getitem__; pass a "
        "microbatch of inputs",
        everywhere=True,
    )
