"""Tar files of WebDataset and shards of MosaicML Streaming: hpctrain reads the values that their own readers return."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.data import MdsDataset, TarDataset

pytestmark = [pytest.mark.ecosystem, pytest.mark.limit(300)]
CHANCE = np.random.default_rng(0)


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, torch.Tensor):
        return np.array_equal(found.numpy(), np.asarray(expected))
    if isinstance(expected, np.generic):
        return bool(found == expected.item())
    return type(found) is type(expected) and bool(found == expected)


def _picture() -> Any:
    height, width = CHANCE.integers(1, 40, 2)
    return CHANCE.integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_tar_files_of_webdataset_have_the_same_samples(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    paths = [str(tmp_path / f"x-{number:06d}.tar") for number in range(2)]
    for number, path in enumerate(paths):
        with webdataset.TarWriter(path) as writer:
            for sample in range(30):
                values = {"__key__": f"a.b/{number}{sample:04d}", "cls": sample, "json": {"x": sample}, "txt": "süß"}
                arrays = {"jpg": _picture(), "seg.png": _picture(), "npy": CHANCE.normal(size=(3, 2))}
                writer.write({**values, **arrays, "pth": torch.arange(sample), "bin": CHANCE.bytes(5)})
    theirs = list(webdataset.WebDataset(paths, shardshuffle=False).decode("rgb8"))
    gc.collect()  # WebDataset leaves its files open
    ours = TarDataset(tmp_path / "x-{000000..000001}.tar")
    assert len(theirs) == len(ours) == 60
    for one, other in zip(theirs, ours):
        names = [name for name in one if name not in ("__url__", "__local_path__")]
        assert names == list(other) and all(_same(other[name], one[name]) for name in names)


def test_shards_of_streaming_have_the_same_samples(tmp_path: Path) -> None:
    # Not in the extra "ecosystem": its limits for NumPy and Transformers contradict those of the other packages.
    streaming = pytest.importorskip("streaming")
    image = pytest.importorskip("PIL.Image")
    columns = {"i": "int", "b": "bytes", "s": "str", "j": "json", "n": "ndarray", "m": "ndarray:float32:3,5"}
    columns |= {"u": "uint64", "h": "float16", "si": "str_int", "jpg": "jpeg", "png": "png", "pil": "pil"}
    folder = str(tmp_path / "mds")
    with streaming.MDSWriter(columns=columns, out=folder, size_limit=20_000, hashes=["sha1"]) as writer:
        for number in range(50):
            plain = {"i": -number, "b": CHANCE.bytes(number), "s": "süß" * number, "j": {"x": [number]}, "u": 2**64 - 1}
            arrays = {"n": CHANCE.normal(size=(number + 1, 2)), "m": CHANCE.normal(size=(3, 5)).astype("f4")}
            pictures = {name: image.fromarray(_picture()) for name in ("jpg", "png", "pil")}
            writer.write({**plain, **arrays, **pictures, "h": number / 8, "si": 10**number})
    theirs, ours = streaming.LocalDataset(folder), MdsDataset(folder, verify=True)
    assert len(theirs) == len(ours) == 50 and len(ours.files) > 3
    for number, sample in enumerate(ours):
        assert list(sample) == list(theirs[number])
        assert all(_same(sample[name], value) for name, value in theirs[number].items())
