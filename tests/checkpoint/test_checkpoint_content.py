"""Loss curves for viewers: HDF5's own tools show the NeXus attributes, units and text as UTF-8."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import h5py
import pytest
import torch

from hpctrain import checkpoint
from hpctrain.errors import UsageError


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
    with pytest.raises(UsageError, match="the name signal in train is taken"):
        checkpoint.save(saved, model=torch.nn.Linear(2, 1), train={"signal": "x"})


def test_viewers_find_a_loss_of_another_name(tmp_path: Path) -> None:
    nan = float("nan")
    curves = {"step": [1, 2], "loss": [nan, nan], "accuracy_step": [1], "accuracy": [1.0]}
    curves |= {"g_loss_step": [2], "g_loss": [3.0]}
    checkpoint.save(tmp_path / "c.h5", model=torch.nn.Linear(1, 1), train={"step": 2, "curves": curves})
    with h5py.File(tmp_path / "c.h5") as file:
        attributes = file["train"].attrs
        assert (attributes["signal"], attributes["axes"].tolist()) == (b"g_loss", [b"g_loss_step"])
