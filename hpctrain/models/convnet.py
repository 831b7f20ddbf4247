"""Small convolutional network for images, such as digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from hpctrain.errors import SettingsError
from hpctrain.models.weights import allocate, draw_weights, initialise_as_torch, without_memory


class ConvNet(nn.Module):
    """Convolution, batch norm, ReLU and pooling for each entry of ``channels``, then one linear layer.

    Images are ``(height, width)`` or ``(channels, height, width)``; every pooling halves height and
    width.
    """

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

    def initialise(self, name: str, module: nn.Module) -> None:
        """Initialise the weights of one module in place, from torch's seed and the module's name in the model."""
        initialise_as_torch(name, module)


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
