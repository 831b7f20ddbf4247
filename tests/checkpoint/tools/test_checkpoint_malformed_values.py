"""Valid checkpoint files with values that no run writes: every verb shows them or prints one line of error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.cli.main import main

ODD: list[Any] = [
    *(-1, 2**63 - 1, 1.7e308, float("nan"), float("inf"), "", "$x^{", "x" * 5000, ("a", "b")),
]
ODD_JSON = ["null", "true", "[]", "{}", "[[1]]", '{"a": {"b": 1}}', "1" * 4000, "[" * 200 + "]" * 200, "NaN"]
ROOT = ("step", "world_size", "created", "creator", "NX_class")
TRAIN = ("step", "keep_best", "best", "logged", "tokens", "states", "lr", "batches")


def write(path: Path, root: Any, train: dict[str, Any], curves: dict[str, list[float]] | None = None) -> Path:
    sources = [Source.of("/model/w", np.arange(4, dtype="<f4"))]
    sources += [Source.of(f"/train/{name}", np.array(values)) for name, values in (curves or {}).items()]
    path.unlink(missing_ok=True)
    groups = {"/": {"step": 3, "world_size": 1, **root}, "/train": train, "/config": {"toml": "a = 1\n"}}
    write_file(path, sources, groups)
    return path


def told(path: Path, capsys: pytest.CaptureFixture[str], *more: list[str]) -> None:
    """Read the file with every verb."""
    name, run = str(path), str(path.parent)
    for words in (["ls", run], ["ls", run, "--json"], ["show", name], ["show", name, "--json"], ["best", run], *more):
        capsys.readouterr()
        code = main(["checkpoint", *words])
        out, err = capsys.readouterr()
        assert code in (0, 1, 2) and (out + err).replace("\n", "").isprintable()
        assert code != 2 or err.count("\n") <= 2


@pytest.mark.few(3)
@pytest.mark.parametrize("key", ROOT)
def test_unusual_root_attributes_are_shown_or_one_line_of_error(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(tmp_path / "other.h5", {}, {})
    for value in [{key: odd} for odd in ODD] + [{f"{key}.json": odd} for odd in ODD_JSON]:
        path = write(tmp_path / "step_00000003.h5", value, {})
        told(path, capsys, ["diff", str(path), str(other)])


@pytest.mark.few(2)
@pytest.mark.parametrize("key", TRAIN)
def test_unusual_values_of_the_training_loop_are_shown_or_one_line_of_error(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out.pt")
    for value in [{key: odd} for odd in ODD] + [{f"{key}.json": odd} for odd in ODD_JSON]:
        path = write(tmp_path / "step_00000003.h5", {}, value)
        told(path, capsys, ["export", str(path), "--to", "torch", "-o", out, "--force"])


CURVES = {
    "huge": {"loss": [1.7e308, -1.7e308, 1.7e308]},
    "mixed": {"loss": [1.7e308, 1.0, float("nan"), float("inf")], "grad_norm": [1e-320, 1.7e308, 0.0, 1.0]},
    "dollars": {"a$x^{": [1.0, 2.0], "b_loss$": [3.0, 4.0]},
    "steps": {"loss": [1.0, 2.0], "step": [1.7e308, -1.7e308]},
    "counts": {"loss": [1.0], "staleness_histogram": [1.7e308, -5.0, float("nan")]},
    "nothing": {"loss": []},
    "validation": {"loss": [1.0], "validation_loss": [float("nan"), 1.7e308], "validation_step": [float("nan"), 1.0]},
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CURVES)
def test_unusual_curves_are_plotted_or_one_line_of_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "step_$3^{.h5", {"step": "$x^{"}, {}, CURVES[name])
    for kind in ("svg", "png"):
        told(path, capsys, ["plot", str(path), "-o", str(tmp_path / f"out.{kind}")])
    assert (tmp_path / "out.svg").exists() or name == "nothing"
