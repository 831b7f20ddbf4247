"""Convolutional network: accepted image sizes, outputs, and learning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpctrain.errors import SettingsError
from hpctrain.models.build import ConvNet


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 8), (3, 28, 28), (9, 13)])
def test_images_of_any_size_give_one_row_each(shape: tuple[int, ...]) -> None:
    model = ConvNet(shape, outputs=10)
    assert model(torch.zeros(5, *shape)).shape == (5, 10)
    assert sum(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules()) == 2


def test_outputs_equal_those_of_plain_functions() -> None:
    torch.manual_seed(0)
    model = ConvNet((2, 9, 8), outputs=3, channels=(4, 5)).eval()
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            torch.nn.init.uniform_(tensor, 0.1, 1) if tensor.ndim == 1 else torch.nn.init.normal_(tensor)
    weights, x = model.state_dict(), torch.randn(6, 2, 9, 8)
    y = x
    for conv in (0, 4):
        y = torch.nn.functional.conv2d(y, weights[f"features.{conv}.weight"], padding=1)
        w = {key: weights[f"features.{conv + 1}.{key}"][:, None, None] for key in ("running_mean", "weight", "bias")}
        deviation = (weights[f"features.{conv + 1}.running_var"] + 1e-5).sqrt()[:, None, None]
        y = ((y - w["running_mean"]) / deviation * w["weight"] + w["bias"]).clamp_min(0)
        height, width = y.shape[2] // 2, y.shape[3] // 2
        y = y[:, :, : 2 * height, : 2 * width].reshape(6, -1, height, 2, width, 2).amax((3, 5))
    torch.testing.assert_close(model(x), y.flatten(1) @ weights["head.weight"].T + weights["head.bias"])


def test_it_learns_the_position_of_a_square() -> None:
    torch.manual_seed(0)
    model = ConvNet((8, 8), outputs=4)
    classes = torch.arange(64) % 4
    images = 0.3 * torch.randn(64, 8, 8)
    for image, where in zip(images, classes.tolist()):
        image[4 * (where // 2) :, 4 * (where % 2) :][:4, :4] += 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(25):
        loss = torch.nn.functional.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model(images).argmax(1) == classes).float().mean() > 0.95


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"input_shape": (8,)}, r"inputs of shape \(8,\): allowed are images of 2 or 3 dims"),
        ({"input_shape": (3, 8)}, "at least 4 x 4 pixels"),
        ({"channels": (16, 0)}, "needs numbers above 0"),
        ({"outputs": 0}, "needs numbers above 0"),
    ],
)
def test_invalid_shapes_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ConvNet(**{"input_shape": (8, 8), "outputs": 10, **arguments})
