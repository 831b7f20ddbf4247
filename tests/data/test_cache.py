"""Data in the memory of all nodes: the samples are those of the files, each byte is read once, whatever the nodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from hpctrain.data import DataSettings, open_dataset, write_arrays
from hpctrain.data.cache import hold
from hpctrain.data.pack import FORMAT, FORMAT_VERSION
from hpctrain.errors import DataError, SettingsError
from hpctrain.train.config import Settings

Make = Callable[[Path], DataSettings]


def arrays_of(kind: str) -> Make:
    def make(folder: Path) -> DataSettings:
        draw, files = np.random.default_rng(0), []
        for name, count in (("a", 23), ("b", 8)):
            pair = ((draw.random((count, 3, 5)) * 200).astype(kind), np.arange(count) % 7)
            write_arrays(folder / f"{name}.h5", train=pair, validation=(pair[0][:4], pair[1][:4]))
            files.append(str(folder / f"{name}.h5"))
        return DataSettings(files=tuple(files), format="arrays")

    return make


def tokens_of(kind: str) -> Make:
    def make(folder: Path) -> DataSettings:
        with h5py.File(folder / "t.h5", "w") as file:
            file.attrs.update({"format": FORMAT, "format_version": FORMAT_VERSION, "vocab_size": 200})
            for split, count in (("train", 1003), ("validation", 90)):
                file[f"{split}/tokens"] = np.random.default_rng(1).integers(0, 200, count).astype(kind)
        return DataSettings(files=(str(folder / "t.h5"),))

    return make


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("make", [arrays_of("uint8"), arrays_of("float64"), tokens_of("uint8"), tokens_of("int32")])
def test_samples_are_those_of_the_files(comm: Any, shared_tmp_path: Path, make: Make) -> None:
    settings: Any = make(shared_tmp_path) if comm.rank == 0 else None
    settings = comm.broadcast_object(settings)
    plain = [open_dataset(settings, split, 16) for split in ("train", "validation")]
    held = hold(comm, *(open_dataset(settings, split, 16) for split in ("train", "validation")))
    draw = np.random.default_rng(comm.rank)
    for dataset, wanted in zip(held, plain, strict=True):
        assert len(dataset) == len(wanted) and dataset.facts == wanted.facts and dataset.path == wanted.path
        for count in (0, 1, 7):  # every rank reads samples of its own, as often as the others
            indices = draw.integers(0, len(wanted), count)
            for found, other in zip(dataset.batch(indices), wanted.batch(indices), strict=True):
                assert torch.equal(found, other) and found.dtype == other.dtype
    read = sum(comm.all_gather_object(held[0].held.bytes_read))
    assert read == held[0].held.nbytes, "every byte is read once per job"
    held[0].held.free()


@pytest.mark.ranks(1, 2)
def test_a_file_that_becomes_shorter_is_named(comm: Any, shared_tmp_path: Path) -> None:
    settings: Any = tokens_of("uint8")(shared_tmp_path) if comm.rank == 0 else None
    settings = comm.broadcast_object(settings)
    dataset = open_dataset(settings, "train", 16)
    comm.barrier()
    if comm.rank == 0:
        with open(settings.files[0], "r+b") as file:
            file.truncate(100)
    comm.barrier()
    with pytest.raises(DataError, match=r"t\.h5 was truncated while it was read"):
        hold(comm, dataset)


@pytest.mark.ranks(1, 2)
def test_compressed_data_are_refused(comm: Any, shared_tmp_path: Path) -> None:
    if comm.rank == 0:
        with h5py.File(shared_tmp_path / "t.h5", "w") as file:
            file.attrs.update({"format": FORMAT, "format_version": FORMAT_VERSION, "vocab_size": 200})
            file.create_dataset("train/tokens", data=np.zeros(999, np.uint8), chunks=(99,), compression="gzip")
    comm.barrier()
    dataset = open_dataset(DataSettings(files=(str(shared_tmp_path / "t.h5"),)), "train", 16)
    with pytest.raises(DataError, match="chunked or compressed"):
        hold(comm, dataset)


def test_settings_that_exclude_it_are_refused() -> None:
    with pytest.raises(SettingsError, match='data.cache = "memory" with data.format = "ragged"'):
        DataSettings(cache="memory", format="ragged")
    with pytest.raises(SettingsError, match='data.cache = "memory" with data.prefetch = 1'):
        DataSettings(cache="memory", prefetch=1)
    from hpctrain.parallel.config import ParallelSettings
    from hpctrain.train.config import RunSettings

    data = DataSettings(cache="memory")
    with pytest.raises(SettingsError, match='with run.on_failure = "shrink": not possible'):
        Settings(data=data, run=RunSettings(on_failure="shrink", device="cpu"))
    with pytest.raises(SettingsError, match='with parallel.data = "easgd": not possible'):
        Settings(data=data, parallel=ParallelSettings(data="easgd"))


CONFIG = """
[data]
files = ["t.h5"]
cache = "CACHE"
validation_samples = 8
[model]
name = "gpt-tiny"
layers = 1
width = 16
heads = 2
context = 16
[train]
steps = 5
batch = 12
evaluate_every = 2
[run]
device = "cpu"
"""


@pytest.mark.limit(120)
def test_hpctrain_train_has_the_same_losses(launch: Any, tmp_path: Path) -> None:
    tokens_of("uint8")(tmp_path)
    rows = []
    for cache in ("none", "memory"):
        (tmp_path / "a.toml").write_text(CONFIG.replace("CACHE", cache))
        words = ["train", "a.toml", "--set", f"run.folder={cache}"]
        result = launch(2, f"from hpctrain.cli.main import main; raise SystemExit(main({words}))")
        assert result.returncode == 0 and "UCX" not in result.stderr, result
        assert ("data.cache: 1.07 KiB are in the memory of 1 node, read once" in result.stderr) is (cache == "memory")
        rows.append([json.loads(line) for line in (tmp_path / cache / "metrics.jsonl").read_text().splitlines()])
    for plain, held in zip(*rows, strict=True):
        assert plain["loss"] == held["loss"] and plain.get("validation_loss") == held.get("validation_loss")
    assert rows[0][-1]["fingerprint"] == rows[1][-1]["fingerprint"]
