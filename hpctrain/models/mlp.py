"""Multi-layer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from hpctrain.errors import SettingsError
from hpctrain.models.weights import allocate, draw_weights, initialise_as_torch, without_memory


class MultiLayerPerceptron(nn.Sequential):
    """Flattened input, then alternating linear layers and ReLU; a plain sequence, easy to split into stages.

    Maps ``[batch, *input_shape]`` to ``[batch, outputs]``.
    """

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

    def initialise(self, name: str, module: nn.Module) -> None:
        """Initialise the weights of one module in place, from torch's seed and the module's name in the model."""
        initialise_as_torch(name, module)


MLP = MultiLayerPerceptron  # earlier name, public as hpctrain.models.MLP
