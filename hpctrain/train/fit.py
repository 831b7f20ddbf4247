"""Consistency checks of data, model and loss before a run begins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpctrain.data.dataset import FileDataset
from hpctrain.errors import SettingsError, UsageError
from hpctrain.parallel.objective import LOSSES, loss_named
from hpctrain.train.config import Settings


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
    outputs = None if named or _lacks_values(model) else _outputs(model, inputs)
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


def _lacks_values(model: nn.Module) -> bool:
    """Return whether a model has parameters or buffers without values: meta tensors or lazy parameters."""
    held: Sequence[Tensor] = [*model.parameters(), *model.buffers()]
    return any(each.is_meta or is_lazy(each) for each in held)


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
