"""Sample on images: splitting and scaling of its data, and training by its config."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data.dataset import ArrayDataset
from hpctrain.models.build import build
from hpctrain.train.config import load

JOBS = Path(__file__).parent.parent / "jobs"
IMAGES = 50


def test_every_fifth_image_is_held_out_and_all_are_used() -> None:
    images = np.arange(IMAGES * 64, dtype=np.float64).reshape(IMAGES, 8, 8)
    classes = np.arange(IMAGES) % 10
    program = runpy.run_path(str(JOBS / "digits.py"))
    (train, train_classes), (held_out, held_out_classes) = program["splits"](images, classes)
    assert len(train) == 40 and len(held_out) == 10 and train.dtype == np.float32 and train_classes.dtype == np.int64
    both, their = np.concatenate([train, held_out]), np.concatenate([train_classes, held_out_classes])
    numbers = both[:, 0, 0] * 16 / 64  # the number of the image
    assert sorted(numbers) == list(range(IMAGES)) and np.array_equal(numbers % 10, their)
    assert not np.array_equal(np.sort(numbers), numbers)  # they are ordered by writer


def test_the_program_writes_the_data_of_the_config(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    path = tmp_path / "runs" / "digits.h5"
    done = subprocess.run([sys.executable, JOBS / "digits.py", path], capture_output=True, text=True)
    assert done.returncode == 0 and "1,437 images to train on and 360 to validate by" in done.stdout, done
    settings = load(JOBS / "digits.toml")
    assert settings.data.format == "arrays" and [Path(one).name for one in settings.data.files] == [path.name]
    data = ArrayDataset(path, "train")
    assert data.facts == {"input_shape": (8, 8), "outputs": 10}
    inputs, targets = data.batch(np.arange(len(data)))
    assert inputs.min() == 0 and inputs.max() == 1 and set(targets.tolist()) == set(range(10))
    assert build(settings.model, **data.facts)(inputs[:2]).shape == (2, 10)


def test_without_arguments_the_usage_is_printed() -> None:
    done = subprocess.run([sys.executable, JOBS / "digits.py"], capture_output=True, text=True)
    assert done.returncode == 1 and "usage: python jobs/digits.py FILE" in done.stderr
