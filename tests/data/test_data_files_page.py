"""Code of docs/data-files.md: it runs unchanged, and its files can be trained on."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support.training_fixtures import give_back_process, metrics_of

from hpctrain.cli.main import main
from hpctrain.data.dataset import ArrayDataset
from hpctrain.data.describe import describe
from hpctrain.train.control import SIGNALS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data-files.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in which the Python blocks of the page were run, one after the other."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(compile(block, str(PAGE), "exec"), names)
    return tmp_path


def test_a_file_of_write_arrays_has_all_attributes(written: Path) -> None:
    found = describe(written / "images.h5")
    assert (found["format"], found["format_version"]) == ("hpctrain-arrays", 1)
    assert {each["crc32"] for each in found["datasets"]} == {"ok"}
    assert [each["shape"] for each in found["datasets"]] == [[800, 8, 8], [800], [200, 8, 8], [200]]
    with h5py.File(written / "images.h5") as file:
        image = file["train/inputs"][3]
    inputs, _ = ArrayDataset(written / "images.h5", "train").batch(np.array([3]))
    assert np.array_equal(inputs[0].numpy(), image.astype("f4") / np.float32(255))


def test_a_file_of_h5py_is_read(written: Path) -> None:
    dataset = ArrayDataset(written / "vectors.h5", "validation")
    assert len(dataset) == 500 and dataset.facts == {"input_shape": (16,), "outputs": 3}
    inputs, targets = dataset.batch(np.array([499, 0]))
    assert np.allclose(targets.numpy(), inputs.numpy()[:, :3] ** 2)


def test_the_config_of_the_page_trains(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (config,) = blocks("toml")
    (written / "images.toml").write_text(config)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with give_back_process():
        assert main(["train", "images.toml"]) == 0
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert [row["samples"] for row in metrics_of(written / "runs/images")] == [40 * step for step in range(1, 21)]
    capsys.readouterr()
    assert main(["data", "show", "images.h5"]) == 0
    assert "800 x 8 x 8" in capsys.readouterr().out
