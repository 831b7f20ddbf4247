"""Whole runs with pipeline and tensor parallelism: the loss curve of a plain loop, one file for all meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.train_runs import Legs, losses, shared_project

STEPS = 30
CLOSE = 1e-5
SMALL = """
from hpctrain.models import GPT, GPTConfig

def make(width=16, dropout=0.0, tied=True):
    return GPT(GPTConfig(vocab_size=256, context=16, width=width, heads=2, layers=3, dropout=dropout, tied=tied))
"""
WORDS = ["model.factory=small:make", "model.options.width=16"]
PIPE, TENSOR = ["parallel.pipe=2"], ["parallel.tensor=2"]


@pytest.fixture(scope="module")
def project(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus, a model that can be split and a config."""
    folder = shared_project(comm, Path(comm.broadcast_object(str(tmp_path_factory.mktemp("project")))))
    if comm.rank == 0:
        (folder / "small.py").write_text(SMALL)
    comm.barrier()
    return folder


@pytest.fixture
def leg(comm: Any, project: Path, monkeypatch: pytest.MonkeyPatch) -> Legs:
    """Return a function that runs one leg of a run."""
    leg = Legs(comm, project, monkeypatch)
    from small import make  # type: ignore[import-not-found]

    leg.make = make
    return leg


@pytest.mark.ranks(2, 4)
def test_a_run_may_resume_on_another_mesh(leg: Legs) -> None:
    words = [*WORDS, "optimizer.schedule=constant"]
    steps = 15  # the last digits of the meshes' norms diverge
    straight = leg("ddp", "straight", *words, f"train.steps={steps}")
    legs = [("ddp", PIPE), ("ddp", TENSOR), ("fsdp", []), ("zero1", PIPE), ("ddp", [])]
    for number, (variant, mesh) in enumerate(legs, 1):
        rows = leg(variant, "passed", *words, *mesh, f"train.steps={number * steps // len(legs)}")
    assert losses(rows) == pytest.approx(losses(straight), rel=CLOSE)
    assert rows[-1]["tokens"] == steps * 12 * 16
    assert rows[-1]["validation_loss"] == pytest.approx(straight[-1]["validation_loss"], rel=CLOSE)


@pytest.mark.few(2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "mesh",
    [PIPE, TENSOR, [*PIPE, "parallel.schedule=pipedream", "model.options.tied=false"]],
    ids=["pipe", "tensor", "pipedream"],
)
def test_a_stop_and_a_resume_change_no_bit(leg: Legs, mesh: list[str], request: pytest.FixtureRequest) -> None:
    """With dropout, which tensor ranks must draw equally outside of split layers and differently inside of them."""
    words = [*WORDS, *mesh, "model.options.dropout=0.2", "optimizer.schedule=constant"]
    name = request.node.callspec.id
    straight = leg("ddp", f"straight_{name}", *words, "train.steps=8")
    leg("ddp", f"stopped_{name}", *words, "train.steps=4")
    resumed = leg("ddp", f"stopped_{name}", *words, "train.steps=8")
    assert losses(resumed) == losses(straight) and losses(straight)[-1] < losses(straight)[0]
