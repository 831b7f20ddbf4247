"""Runs with document masks: the losses of a plain loop that computes each document of a window alone."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.machine import join_quietly
from support.corpus import CONTEXT, plain_losses
from support.meshes import Trained, plain, small_gpt
from support.training_fixtures import metrics_of
from torch import Tensor, nn

from hpctrain.data import DataSettings
from hpctrain.data.pack import pack
from hpctrain.errors import HpctrainError
from hpctrain.forecast.run import facts_of
from hpctrain.models import GPT, GPTConfig
from hpctrain.parallel.config import ParallelSettings
from hpctrain.train.config import Settings, load
from hpctrain.train.recipe import train

STEPS = 5
SHAPE = ["model.width=16", "model.heads=2"]
CONFIG = """
[data]
files = ["corpus.h5"]
validation_samples = 8
document_masks = true
[model]
context = 16
[train]
batch = 12
seed = 3
clip = 0.5
evaluate_every = 0
[optimizer]
learning_rate = 0.01
warmup = 4
"""
FACTORY = """
from hpctrain.models import GPT, GPTConfig

def make(separator=None):
    return GPT(GPTConfig(layers=4, heads=2, width=16, context=16, vocab_size=256, tied=False, separator=separator))

def without():
    return make()

def any_options(**options):
    return make()
"""


class EachDocumentAlone(nn.Module):
    """GPT without masks that is called with one document at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(layers=4, heads=2, width=16, context=CONTEXT, vocab_size=256, tied=False))

    def forward(self, windows: Tensor) -> Tensor:
        rows = []
        for row in windows:
            documents: list[list[int]] = [[]]
            for place, token in enumerate(row.tolist()):
                documents[-1].append(place)
                if token == 0:
                    documents.append([])
            pieces = [self.gpt(row[None, places]) for places in documents if places]
            rows.append(torch.cat(pieces, dim=1))
        return torch.cat(rows)


@pytest.fixture(scope="module")
def shared(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus of short documents, a config and a factory, made by rank 0."""
    folder = Path(comm.broadcast_object(str(tmp_path_factory.mktemp("documents"))))
    if comm.rank == 0:
        (folder / "texts").mkdir()
        for number in range(80):
            (folder / f"texts/{number:02d}.txt").write_text("abcdefgh"[number % 8] * (1 + number * 7 % 23))
        pack([folder / "texts"], folder / "corpus.h5", validation_fraction=0.2, progress=False)
        (folder / "gpt.toml").write_text(CONFIG)
        (folder / "masked_gpt.py").write_text(FACTORY)
    comm.barrier()
    return folder


@pytest.fixture
def project(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this process work in the folder."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(shared)
    monkeypatch.syspath_prepend(str(shared))
    monkeypatch.delitem(sys.modules, "masked_gpt", raising=False)
    return shared


@cache
def _plain(folder: Path) -> list[float]:
    return plain_losses(folder, EachDocumentAlone, STEPS)


def _losses(comm: Any, words: list[str]) -> list[float]:
    folder = "-".join(["run", *words])
    shape = [] if any(word.startswith("model.factory") for word in words) else SHAPE
    train(load("gpt.toml", [f"train.steps={STEPS}", f"run.folder={folder}", *shape, *words]), init=join_quietly)
    comm.barrier()
    return [row["loss"] for row in metrics_of(Path(folder))]


CASES: dict[str, tuple[int, ...]] = {
    "parallel.data=ddp": (1, 2, 3),
    "parallel.data=ddp train.accumulate=2": (2,),
    "parallel.data=zero1": (2,),
    "parallel.data=zero2": (2,),
    "parallel.data=fsdp": (2, 4),
    "parallel.data=fsdp parallel.recompute=true": (2,),
    "parallel.data=fsdp parallel.units=['Block']": (2,),
    "offload.optimizer=true": (2,),
    "parallel.reproducible=true": (2,),
    "parallel.pipe=2": (2,),
    "parallel.pipe=2 parallel.recompute=true": (2,),
    "parallel.pipe=2 parallel.microbatches=3 parallel.schedule=zb-h1": (2,),
    "parallel.pipe=2 parallel.microbatches=4 parallel.schedule=interleaved": (2,),
    "parallel.tensor=2": (2,),
    "parallel.tensor=2 parallel.sequence=true": (2,),
    "parallel.tensor=2 parallel.sequence=true parallel.recompute=true": (2,),
    "parallel.pipe=2 parallel.tensor=2 parallel.sequence=true": (4,),
    "parallel.tensor=2 parallel.data=fsdp": (4,),
    "model.factory=masked_gpt:make parallel.pipe=2": (2,),
}


@pytest.mark.few(9)
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.ranks(*sizes)) for case, sizes in CASES.items()])
def test_losses_equal_those_of_each_document_alone(project: Path, comm: Any, case: str) -> None:
    found = _losses(comm, case.split())
    assert found == pytest.approx(_plain(project), rel=1e-5)


@pytest.mark.ranks(2)
def test_losses_without_masks_are_others(project: Path, comm: Any) -> None:
    found = _losses(comm, ["data.document_masks=false"])
    assert max(abs(a - b) for a, b in zip(found, _plain(project))) > 1e-3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words", ["parallel.data=ddp", "parallel.pipe=2", "parallel.tensor=2"])
def test_losses_in_bfloat16_are_close(project: Path, comm: Any, words: str) -> None:
    found = _losses(comm, [words, "train.precision=bfloat16"])
    assert found == pytest.approx(_plain(project), rel=2e-3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("settings", [{"data": "ddp"}, {"data": "fsdp"}, {"data": "fsdp", "recompute": True}], ids=str)
def test_compiled_blocks_train_as_a_plain_loop(comm: Any, settings: dict[str, Any]) -> None:
    model = small_gpt(layers=2, separator=0)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    trained = Trained.of(comm, ParallelSettings(**settings), model).learn(range(3))
    assert trained.losses == pytest.approx(plain(3, layers=2, separator=0), rel=1e-5)
    torch.compiler.reset()


def test_a_forecast_says_that_it_is_without_masks() -> None:
    facts = facts_of(Settings(data=DataSettings(document_masks=True)))
    assert facts.notes[0].startswith("the forecast is without document masks")
    assert not any("masks" in note for note in facts_of(Settings()).notes)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "words, said",
    [
        (["data.format=arrays"], "data.document_masks = true with data.format = 'arrays': only token files have"),
        (["model.name=mlp"], "model mlp reads no tokens"),
        (["model.factory=masked_gpt:without"], "masked_gpt:without has no parameter separator (it has none)"),
        (["model.factory=masked_gpt:any_options"], "any_options has no parameter separator (it has options)"),
        (["model.factory=masked_gpt:make", "model.options={separator=3}"], "model.options.separator = 3 with"),
    ],
)
def test_models_and_data_without_documents_are_refused(project: Path, comm: Any, words: list[str], said: str) -> None:
    before = sorted(project.iterdir())
    with pytest.raises(HpctrainError) as found:
        train(load("gpt.toml", ["train.steps=3", "run.folder=refused", *words]), init=join_quietly)
    comm.barrier()
    assert said in str(found.value) and found.value.exit_code == 2
    assert sorted(project.iterdir()) == before
