"""Loss curves for viewers: HDF5's own tools show the NeXus attributes, units and text as UTF-8."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from hpctrain import checkpoint
from hpctrain.checkpoint.content import capture_rng, restore_rng
from hpctrain.errors import CheckpointError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    curves = {"step": [1, 2], "loss": [2.0, 1.0], "grad_norm": [0.5, 0.25]}
    path = tmp_path / "c.h5"
    train = {"step": 2, "note": "größer", "curves": curves}
    checkpoint.save(path, model=torch.nn.Linear(2, 1), train=train)
    return path


@pytest.mark.skipif(not shutil.which("h5dump"), reason="needs hdf5-tools")
def test_hdf5_tools_show_what_to_plot(saved: Path) -> None:
    tree = subprocess.run(["h5ls", "-r", saved], capture_output=True, text=True, check=True)
    assert re.search(r"^/train/loss +Dataset \{2\}$", tree.stdout, re.M) and not tree.stderr
    dump = subprocess.run(["h5dump", "-A", saved], capture_output=True, text=True, check=True)
    assert "plugin" not in dump.stdout + dump.stderr and not dump.stderr
    attributes = dict(re.findall(r'ATTRIBUTE "([^"]+)" \{.*?DATA \{\s*\(0\): "([^"]*)"', dump.stdout, re.DOTALL))
    expected = {"default": "train", "signal": "loss", "axes": "step", "units": "1"}
    assert {name: attributes[name] for name in expected} == expected
    assert dump.stdout.count('"NXdata"') == 1 and dump.stdout.count('"NXroot"') == 1
    assert "CSET H5T_CSET_ASCII" not in dump.stdout and '"grad norm"' in dump.stdout
    with h5py.File(saved, "r") as file:
        assert file["train"].attrs["note"].decode() == "größer"


def test_attributes_for_viewers_are_not_returned_as_the_runs_values(saved: Path) -> None:
    train = checkpoint.load(saved).train
    assert set(train) == {"step", "note", "curves"} and set(train["curves"]) == {"step", "loss", "grad_norm"}


def test_viewers_find_a_loss_of_another_name(tmp_path: Path) -> None:
    nan = float("nan")
    curves = {"step": [1, 2], "loss": [nan, nan], "accuracy_step": [1], "accuracy": [1.0]}
    curves |= {"g_loss_step": [2], "g_loss": [3.0]}
    checkpoint.save(tmp_path / "c.h5", model=torch.nn.Linear(1, 1), train={"step": 2, "curves": curves})
    with h5py.File(tmp_path / "c.h5") as file:
        attributes = file["train"].attrs
        assert (attributes["signal"], attributes["axes"].tolist()) == (b"g_loss", [b"g_loss_step"])


# Random number generators: after a restore they continue without a gap ------------------------------------------------


def draw() -> tuple[object, ...]:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_all_generators_continue_after_a_restore() -> None:
    random.gauss(0, 1), np.random.randn()  # both store a second number for the next call
    state = capture_rng()
    expected = draw()
    assert draw() != expected
    restore_rng(state)
    assert draw() == expected
    restore_rng({})


@pytest.mark.parametrize(
    "state",
    [
        {"torch": np.zeros(5056, "u1")},
        {"torch": np.full(5056, 255, "u1")},
        {"torch": np.zeros(3, "u1")},
        {"torch": np.zeros((2, 2), "f4")},
        {"torch": "x"},
        {"python": [3, [1] * 3, None]},
        {"python": [3, [2**40] * 625, None]},
        {"python": 7},
        {"numpy": {"kind": "MT19937", "key": [-1] * 624, "position": 0, "has_gauss": 0, "gauss": 0.0}},
        {"numpy": {"kind": "MT19937", "key": [1] * 624, "position": 10**9, "has_gauss": 0, "gauss": 0.0}},
        {"numpy": {"kind": "x"}},
        {"numpy": []},
    ],
)
def test_rng_states_are_checked_before_they_are_set(state: dict[str, Any]) -> None:
    before = capture_rng()
    with pytest.raises(CheckpointError, match="generators does not fit"):
        restore_rng(state)
    assert torch.equal(torch.get_rng_state(), torch.from_numpy(before["torch"]))
    restore_rng(before)
