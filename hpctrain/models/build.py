"""Construction of the model that the settings name, and the two small models for images and vectors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from hpctrain.errors import SettingsError
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import ModelSettings
from hpctrain.models.weights import allocate, draw_weights, initialise_as_torch, without_memory
from hpctrain.settings import call_named, function_named


class MultiLayerPerceptron(nn.Sequential):
    """Flattened input, then alternating linear layers and ReLU; a plain sequence, easy to split into stages.

    Maps ``[batch, *input_shape]`` to ``[batch, outputs]``.
    """

    initialise = staticmethod(initialise_as_torch)

    def __init__(self, input_shape: Sequence[int], outputs: int, hidden: Sequence[int] = (128, 128)) -> None:
        sizes = [math.prod(input_shape), *hidden, outputs]
        if min(sizes) < 1:
            raise SettingsError(f"mlp with sizes {sizes}: allowed are whole numbers above 0")
        layers: list[nn.Module] = [nn.Flatten()]
        with without_memory():
            for size, next_size in zip(sizes, sizes[1:]):
                layers += [nn.Linear(size, next_size), nn.ReLU()]
        super().__init__(*layers[:-1])
        # Tensor parallelism: of each pair of linear layers, the first is split by outputs, the second by inputs.
        linear = [str(place) for place in range(1, len(layers), 2)]
        pairs = zip(linear[::2], linear[1::2])
        self.tensor_plan = {name: kind for pair in pairs for name, kind in zip(pair, ("column", "row"))}
        allocate(self)
        draw_weights(self, self.initialise)


MLP = MultiLayerPerceptron  # earlier name, public as hpctrain.models.MLP


class ConvNet(nn.Module):
    """Network for images: convolution, batch norm, ReLU, pooling per entry of ``channels``, then one linear layer.

    Images are ``(height, width)`` or ``(channels, height, width)``; every pooling halves height and
    width.
    """

    initialise = staticmethod(initialise_as_torch)

    def __init__(self, input_shape: Sequence[int], outputs: int, channels: Sequence[int] = (16, 32)) -> None:
        super().__init__()
        if len(input_shape) not in (2, 3):
            raise SettingsError(f"convnet on inputs of shape {tuple(input_shape)}: allowed are images of 2 or 3 dims")
        depth, height, width = input_shape if len(input_shape) == 3 else (1, *input_shape)
        shrink = 2 ** len(channels)
        if min(height, width) < shrink or min([*channels, outputs], default=1) < 1:
            raise SettingsError(
                f"convnet with channels {list(channels)} and {outputs} outputs on images of {height} x {width}: "
                f"needs numbers above 0 and at least {shrink} x {shrink} pixels"
            )
        pixels = (height // shrink) * (width // shrink)
        with without_memory():
            self.features = nn.Sequential(*_layers([depth, *channels]))
            self.head = nn.Linear([depth, *channels][-1] * pixels, outputs)
        allocate(self)
        draw_weights(self, self.initialise)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``[batch, outputs]`` for images ``[batch, (channels,) height, width]``."""
        return self.head(_flat(self.features(_with_channels(images))))  # type: ignore[no-any-return]

    def layers(self) -> list[Callable[[Tensor], Tensor]]:
        """Return the sequence of layers that make up the model; pipeline stages may begin at any of them."""
        return [_with_channels, *self.features, _flat, self.head]


def _with_channels(images: Tensor) -> Tensor:
    return images.unsqueeze(1) if images.ndim == 3 else images


def _flat(features: Tensor) -> Tensor:
    return features.flatten(1)


def _layers(channels: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for size, next_size in zip(channels, channels[1:]):
        layers += [
            nn.Conv2d(size, next_size, kernel_size=3, padding=1, bias=False),  # the norm has a bias
            nn.BatchNorm2d(next_size),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return layers


_BUILTIN: dict[str, Callable[..., nn.Module]] = {"convnet": ConvNet, "mlp": MultiLayerPerceptron}


def build(
    settings: ModelSettings,
    *,
    vocab_size: int | None = None,
    input_shape: Sequence[int] | None = None,
    outputs: int | None = None,
    separator: int | None = None,
) -> nn.Module:
    """Return the model, with weights drawn from torch's generator as the caller has seeded it.

    The keyword arguments describe the data (a dataset's ``facts``). ``separator`` is the token that
    ends a document if attention must stay within documents; a factory gets it as an argument. Raises
    ``SettingsError`` if the settings do not fit the data, or if a factory cannot be imported or called,
    or does not return a module.
    """
    if settings.pretrained is not None:
        from hpctrain.models.hugging_face import causal_lm

        if input_shape is not None:
            raise SettingsError(f"model.factory {settings.factory} reads tokens, the data are images or vectors")
        return causal_lm(settings.pretrained, settings.options, vocab_size=vocab_size, context=settings.context)
    if settings.factory is not None:
        return _from_factory(settings.factory, settings.options, separator)
    if settings.gpt_name is not None:
        if input_shape is not None:
            raise SettingsError(f"model {settings.name} reads tokens, the data are images or vectors: set model.name")
        return GPT(settings.gpt(vocab_size, separator))
    if separator is not None:
        raise SettingsError(
            f"data.document_masks = true: model {settings.name} reads no tokens; allowed are models of the GPT family "
            "and factories with a parameter separator; remove the setting, or set model.name"
        )
    if input_shape is None or outputs is None:
        raise SettingsError(f"model {settings.name} needs images or vectors with targets: set data.format = 'arrays'")
    make = _BUILTIN[settings.name]
    options = {"input_shape": input_shape, "outputs": outputs, **settings.options}
    _check_options(f"model {settings.name}", make, options)
    try:
        return make(**options)
    except TypeError as error:
        raise SettingsError(f"model.options of {settings.name}: {error}") from error


def _from_factory(path: str, options: dict[str, Any], separator: int | None) -> nn.Module:
    """Import and call a user's function. Raises ``UserCodeError`` for an error inside it."""
    function = function_named(path, "model.factory")
    if separator is not None:
        _check_takes_separator(path, function, options)
        options = {**options, "separator": separator}
    _check_options(f"model.factory {path}", function, options)
    model = call_named("model.factory", path, function, **options)
    if not isinstance(model, nn.Module):
        raise SettingsError(f"model.factory {path} returned {type(model).__name__}, expected a torch.nn.Module")
    return model


def _check_takes_separator(path: str, function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Raise ``SettingsError`` if a factory has no parameter ``separator``, or if the options set it.

    A factory with ``**keywords`` alone might ignore the separator, and train without masks.
    """
    try:
        names = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        names = ()  # a built-in callable without a signature
    if "separator" not in names:
        raise SettingsError(
            f"data.document_masks = true: model.factory {path} has no parameter separator (it has "
            f"{', '.join(names) or 'none'}); allowed are factories whose model masks attention by that token; "
            "add the parameter, or remove the setting"
        )
    if "separator" in options:
        raise SettingsError(
            f"model.options.separator = {options['separator']!r} with data.document_masks = true: the data files "
            "define the separator; remove one of the two"
        )


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
