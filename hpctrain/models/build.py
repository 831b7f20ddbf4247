"""Construction of the model that the settings name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hpctrain.errors import SettingsError
from hpctrain.models.convnet import ConvNet
from hpctrain.models.gpt import GPT
from hpctrain.models.mlp import MultiLayerPerceptron
from hpctrain.models.settings import ModelSettings
from hpctrain.settings import call_named, function_named

_BUILTIN: dict[str, Callable[..., nn.Module]] = {"convnet": ConvNet, "mlp": MultiLayerPerceptron}


def build(
    settings: ModelSettings,
    *,
    vocab_size: int | None = None,
    input_shape: Sequence[int] | None = None,
    outputs: int | None = None,
) -> nn.Module:
    """Return the model, with weights drawn from torch's generator as the caller has seeded it.

    The keyword arguments describe the data (a dataset's ``facts``). Raises ``SettingsError`` if the
    settings do not fit them, or if a factory cannot be imported or called, or does not return a
    module.
    """
    if settings.factory is not None:
        return _from_factory(settings.factory, settings.options)
    if settings.gpt_name is not None:
        if input_shape is not None:
            raise SettingsError(f"model {settings.name} reads tokens, the data are images or vectors: set model.name")
        return GPT(settings.gpt(vocab_size))
    if input_shape is None or outputs is None:
        raise SettingsError(f"model {settings.name} needs images or vectors with targets: set data.format = 'arrays'")
    make = _BUILTIN[settings.name]
    options = {"input_shape": input_shape, "outputs": outputs, **settings.options}
    _check_options(f"model {settings.name}", make, options)
    try:
        return make(**options)
    except TypeError as error:
        raise SettingsError(f"model.options of {settings.name}: {error}") from error


def _from_factory(path: str, options: dict[str, Any]) -> nn.Module:
    """Import and call a user's function. Raises ``UserCodeError`` for an error inside it."""
    function = function_named(path, "model.factory")
    _check_options(f"model.factory {path}", function, options)
    model = call_named("model.factory", path, function, **options)
    if not isinstance(model, nn.Module):
        raise SettingsError(f"model.factory {path} returned {type(model).__name__}, expected a torch.nn.Module")
    return model


def _check_options(what: str, function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Raise ``SettingsError`` if a function does not accept the options, or needs others."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-in callables have no signature; calling them reports the error
    try:
        signature.bind(**options)
    except TypeError as error:
        raise SettingsError(f"{what} cannot be called with model.options: {error}; it takes {signature}") from error
