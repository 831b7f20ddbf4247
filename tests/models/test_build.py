"""Construction of models from settings and data, and errors that name the fault of a wrong factory."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.errors import SettingsError
from hpctrain.models.build import ConvNet, MultiLayerPerceptron, build
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import ModelSettings
from hpctrain.settings import UserCodeError

SOURCE = """
import torch
from torch import nn

NUMBER = 3

class Nets:
    @staticmethod
    def linear(inputs, outputs=2):
        return nn.Linear(inputs, outputs)

def linear(inputs, outputs=2):
    return nn.Linear(inputs, outputs)

def keywords(**options):
    return nn.Linear(options["inputs"], 1)

def nothing():
    return None

def broken():
    return {}["key"]

def deep():
    return nn.Linear([1], 2)

def lines():
    raise ValueError("two\\nlines")

def ours():
    from hpctrain.models.build import MultiLayerPerceptron
    return MultiLayerPerceptron(input_shape=(3,), outputs=0)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with a user's modules, which is not on sys.path, as with a console script."""
    (tmp_path / "mynets_of_test.py").write_text(SOURCE)
    (tmp_path / "torn_of_test.py").write_text("def broken(:\n")
    (tmp_path / "needy_of_test.py").write_text("import no_such_package_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    return tmp_path


def test_models_by_name_fit_the_data() -> None:
    gpt = build(ModelSettings(layers=1), vocab_size=300)
    assert isinstance(gpt, GPT) and gpt.config.vocab_size == 300 and len(gpt.blocks) == 1
    mlp = build(ModelSettings(name="mlp", options={"hidden": [9]}), input_shape=(3, 2), outputs=4)
    assert isinstance(mlp, MultiLayerPerceptron) and [tuple(p.shape) for p in mlp.parameters()] == [
        (9, 6),
        (9,),
        (4, 9),
        (4,),
    ]
    convnet = build(ModelSettings(name="convnet"), input_shape=(8, 8), outputs=10)
    assert isinstance(convnet, ConvNet) and convnet(torch.zeros(2, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("path", ["linear", "Nets.linear", "keywords"])
def test_a_factory_is_called_with_the_options(project: Path, path: str) -> None:
    model = build(ModelSettings(factory=f"mynets_of_test:{path}", options={"inputs": 5}), vocab_size=256)
    assert isinstance(model, torch.nn.Linear) and model.in_features == 5


def test_a_class_is_a_factory() -> None:
    options = {"in_features": 3, "out_features": 2}
    assert isinstance(build(ModelSettings(factory="torch.nn:Linear", options=options)), torch.nn.Linear)


@pytest.mark.parametrize(
    "factory, options, message",
    [
        ("no_such_module_anywhere:f", {}, "cannot import no_such_module_anywhere: ModuleNotFoundError.*looked in"),
        ("torn_of_test:f", {}, "cannot import torn_of_test: SyntaxError"),
        ("needy_of_test:f", {}, "cannot import needy_of_test: .*no_such_package_anywhere"),
        ("mynets_of_test:gone", {}, "mynets_of_test has no gone"),
        ("mynets_of_test:NUMBER", {}, "NUMBER is int, expected a function or a class"),
        ("mynets_of_test:nothing", {}, "returned NoneType, expected a torch.nn.Module"),
        ("mynets_of_test:linear", {}, "missing a required argument: 'inputs'; it takes .inputs, outputs=2."),
        ("mynets_of_test:linear", {"inputs": 1, "depth": 2}, "unexpected keyword argument 'depth'"),
    ],
)
def test_a_wrong_factory_is_refused(project: Path, factory: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(SettingsError, match=f"model.factory {factory}.*{message}"):
        build(ModelSettings(factory=factory, options=options))


@pytest.mark.parametrize(
    "factory, said, line",
    [
        ("mynets_of_test:broken", "KeyError: 'key'", 'return {}["key"]'),
        ("mynets_of_test:deep", "TypeError: empty.*", "return nn.Linear([1], 2)"),
        ("mynets_of_test:lines", "ValueError: two lines", 'raise ValueError("two\\nlines")'),
    ],
)
def test_an_error_inside_a_factory_names_the_factory_the_error_and_the_line(
    project: Path, factory: str, said: str, line: str
) -> None:
    number = 1 + [one.strip() for one in SOURCE.splitlines()].index(line)
    with pytest.raises(UserCodeError) as found:
        build(ModelSettings(factory=factory))
    assert re.fullmatch(rf"model.factory {factory}: {said} \(/.*mynets_of_test.py:{number}\)", str(found.value))
    assert found.value.exit_code == 1 and isinstance(found.value.__cause__, (KeyError, TypeError, ValueError))


def test_an_error_of_ours_inside_a_factory_keeps_its_kind(project: Path) -> None:
    with pytest.raises(SettingsError, match="^model.factory mynets_of_test:ours: .*mynets_of_test.py:[0-9]+.$"):
        build(ModelSettings(factory="mynets_of_test:ours"))


def test_an_error_inside_an_installed_factory_names_the_line_that_was_called() -> None:
    options = {"in_features": "x", "out_features": 2}
    with pytest.raises(UserCodeError, match="^model.factory torch.nn:Linear: TypeError: .*linear.py:[0-9]+.$"):
        build(ModelSettings(factory="torch.nn:Linear", options=options))


def test_an_error_when_the_module_of_a_factory_is_imported_names_the_line(project: Path) -> None:
    (project / "late_of_test.py").write_text("x = 1\ny = x / 0\n")
    with pytest.raises(SettingsError, match="ZeroDivisionError: division by zero .*late_of_test.py:2. .looked in"):
        build(ModelSettings(factory="late_of_test:f"))


def test_wrong_options_and_data_are_refused() -> None:
    with pytest.raises(SettingsError, match="model mlp needs images or vectors .* data.format = 'arrays'"):
        build(ModelSettings(name="mlp"), vocab_size=256)
    with pytest.raises(SettingsError, match="model mlp cannot be called with model.options: .*'depth'; it takes"):
        build(ModelSettings(name="mlp", options={"depth": 3}), input_shape=(3,), outputs=2)
    with pytest.raises(SettingsError, match="model.options of mlp: "):
        build(ModelSettings(name="mlp", options={"hidden": ["wide"]}), input_shape=(3,), outputs=2)
    with pytest.raises(SettingsError, match="the data are images or vectors"):
        build(ModelSettings(), input_shape=(8, 8), outputs=10)


# Convolutional network: accepted image sizes, outputs, and learning ---------------------------------------------------


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


# Multilayer perceptron: matrix products with ReLU in between ----------------------------------------------------------


def test_outputs_equal_those_of_plain_products() -> None:
    torch.manual_seed(0)
    model = MultiLayerPerceptron((2, 3), outputs=4, hidden=[5, 7])
    x = torch.randn(6, 2, 3)
    parameters = list(model.parameters())
    assert [tuple(p.shape) for p in parameters] == [(5, 6), (5,), (7, 5), (7,), (4, 7), (4,)]
    y = x.reshape(6, 6)
    for weight, bias in zip(parameters[0:4:2], parameters[1:4:2]):
        y = torch.einsum("bi,oi->bo", y, weight).add(bias).clamp_min(0)
    torch.testing.assert_close(model(x), torch.einsum("bi,oi->bo", y, parameters[4]) + parameters[5])


def test_without_hidden_layers_it_is_a_linear_model() -> None:
    assert [tuple(p.shape) for p in MultiLayerPerceptron((3,), 2, hidden=()).parameters()] == [(2, 3), (2,)]


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"mlp with sizes \[3, 0, 2\]"):
        MultiLayerPerceptron((3,), 2, hidden=[0])
