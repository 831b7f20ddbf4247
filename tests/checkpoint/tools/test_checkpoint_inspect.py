"""Inspection of checkpoints on a login node, without torch or MPI."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import step_file

from hpctrain import checkpoint
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.checkpoint.tools import inspect
from hpctrain.errors import CheckpointError, UsageError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    for step in (5, 15):
        train = {"step": step, "curves": {"step": [1, 2], "loss": [2.0, 1.0 / step]}}
        path = tmp_path / "checkpoints" / step_file(step)
        checkpoint.save(path, model=model, optimizer=optimizer, train=train, config="a = 1\n")
    return tmp_path


def test_ls_lists_a_run_and_a_folder_alike(run: Path) -> None:
    entries = inspect.ls(run)
    assert entries == inspect.ls(run / "checkpoints")
    assert [(entry.step, entry.world_size, entry.loss, entry.error) for entry in entries] == [
        (5, 1, 0.2, None),
        (15, 1, 1 / 15, None),
    ]
    assert entries[0].bytes == Path(entries[0].file).stat().st_size
    with pytest.raises(UsageError, match="is not a folder"):
        inspect.ls(run / "none")


def test_ls_shows_truncated_files(run: Path) -> None:
    path = run / "checkpoints" / "step_00000015.h5"
    path.write_bytes(path.read_bytes()[:-1])
    (torn,) = inspect.ls(run)[1:]
    assert torn.step == 15 and torn.error is not None and "truncated" in torn.error


def test_show_agrees_with_torch(run: Path) -> None:
    path = run / "checkpoints" / "step_00000005.h5"
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    checkpoint.load(path, model=model)
    contents = inspect.show(path)
    stats = {tensor.path: tensor for tensor in contents.tensors}
    assert list(stats)[:2] == ["/model/weight", "/model/bias"] and "/train/loss" not in stats
    weight, values = stats["/model/weight"], model.weight.detach().double()
    assert (weight.shape, weight.dtype, weight.bytes, weight.nonfinite) == ((2, 3), "bfloat16", 12, 0)
    assert (weight.minimum, weight.maximum) == (values.min().item(), values.max().item())
    assert weight.norm == pytest.approx(values.norm().item(), rel=1e-12)
    assert contents.curves == {"step": [1, 2], "loss": [2.0, 0.2]} and contents.config == "a = 1\n"
    assert contents.root["step"] == 5 and contents.provenance["torch"] == torch.__version__


def test_statistics_skip_nonfinite_values_and_are_computed_in_chunks(tmp_path: Path) -> None:
    values = np.linspace(-3, 5, layout.PIECE // 4 + 1001, dtype="<f4")  # two pieces
    values[[0, 500, -1]] = np.nan, np.inf, -np.inf
    write_file(tmp_path / "s.h5", [Source.of("/model/w", values), Source.of("/model/n", np.array([np.nan]))], {})
    finite = values[np.isfinite(values)].astype("f8")
    full, empty = inspect.show(tmp_path / "s.h5").tensors
    assert (full.minimum, full.maximum, full.nonfinite) == (finite.min(), finite.max(), 3)
    assert full.norm == pytest.approx(math.sqrt((finite**2).sum()), rel=1e-12)
    assert (empty.minimum, empty.norm, empty.nonfinite) == (None, None, 1)


def test_a_name_selects_tensors(run: Path) -> None:
    path = run / "checkpoints" / "step_00000005.h5"

    def chosen(name: str) -> list[str]:
        return [tensor.path for tensor in inspect.show(path, name).tensors]

    assert chosen("weight") == ["/model/weight", "/optimizer/weight/momentum_buffer"]
    assert chosen("/model/bias") == ["/model/bias"]
    assert chosen("model") == ["/model/weight", "/model/bias"]
    assert chosen("loss") == ["/train/loss"]
    assert inspect.show(path, "loss").tensors[0].values == [2.0, 0.2]
    with pytest.raises(UsageError, match="holds no tensor 'weigth': did you mean weight?"):
        chosen("weigth")


def test_damaged_values_are_reported_and_not_shown(run: Path) -> None:
    path = run / "checkpoints" / "step_00000005.h5"
    assert inspect.verify(path) == inspect.Verification(str(path), True)
    data = path.read_bytes()
    needle = np.array([2.0, 0.2]).tobytes()
    path.write_bytes(data.replace(needle, np.array([2.0, 0.1]).tobytes()))
    verdict = inspect.verify(path)
    assert not verdict.ok and verdict.error is not None and "/train/loss is damaged" in verdict.error
    with pytest.raises(CheckpointError, match="/train/loss is damaged"):
        inspect.show(path)
