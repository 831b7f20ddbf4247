"""``hpctrain data pack`` of arrays, images and shards, and what ``data show`` says of the result."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpctrain.cli.main import main
from hpctrain.data import RaggedDataset
from hpctrain.data.describe import describe
from hpctrain.data.pack_samples import pack_samples
from hpctrain.data.sample_sources import kind_of
from hpctrain.errors import DataError, UsageError

DRAW = np.random.default_rng(0)


def arrays(folder: Path) -> dict[str, Any]:
    made = {f"{number:02}": DRAW.normal(size=(number % 5, 2)).astype(np.float32) for number in range(20)}
    for name, value in made.items():
        np.save(folder / f"{name}.npy", value)
    return {f"{folder.name}/{name}.npy": {"inputs": value} for name, value in made.items()}


def pictures(folder: Path) -> dict[str, Any]:
    wanted = {}
    for number in range(12):
        kind = ("cat", "dog", "emu")[number % 3]
        (folder / kind).mkdir(exist_ok=True)
        pixels = DRAW.integers(0, 256, (2 + number % 4, 3, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / kind / f"{number}.png")
        wanted[f"{folder.name}/{kind}/{number}.png"] = {"inputs": pixels.transpose(2, 0, 1), "targets": number % 3}
    return wanted


def records(folder: Path) -> dict[str, Any]:
    wanted = {}
    for number in range(9):
        values = {"hits": DRAW.normal(size=number), "energy": np.float32(number)}
        np.savez(folder / f"{number}.npz", **values)
        wanted[str(number)] = values
    return wanted


@pytest.mark.parametrize("make", (arrays, pictures))
def test_every_file_is_a_sample(tmp_path: Path, make: Callable[[Path], dict[str, Any]]) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    wanted = make(folder)
    (folder / "README.txt").write_text("not a sample")
    report = pack_samples([folder], tmp_path / "a.h5", kind_of([folder]), validation_fraction=0.3)
    assert report.train + report.validation == len(wanted) and report.validation
    found = [each for split in ("train", "validation") for each in RaggedDataset(tmp_path / "a.h5", split)]
    assert sorted(each["name"] for each in found) == sorted(wanted)
    for each in found:
        for name, value in wanted[each["name"]].items():
            assert np.array_equal(each[name].numpy(), value)
    again = pack_samples([folder], tmp_path / "b.h5", report.kind, validation_fraction=0.3)
    assert (again.train, again.validation) == (report.train, report.validation)


def test_records_keep_their_fields(tmp_path: Path) -> None:
    wanted = records(tmp_path)
    pack_samples([tmp_path], tmp_path / "a.h5", "npz", validation_fraction=0)
    dataset = RaggedDataset(tmp_path / "a.h5")
    assert dataset.fields == ("energy", "hits")
    for found, each in zip(dataset, wanted.values(), strict=True):
        assert np.array_equal(found["hits"].numpy(), each["hits"]) and float(found["energy"]) == each["energy"]


def test_grey_images_are_those_of_pillow(tmp_path: Path) -> None:
    wanted = pictures(tmp_path)
    pack_samples([tmp_path], tmp_path / "a.h5", "images", grey=True)
    for split in ("train", "validation"):
        for each in RaggedDataset(tmp_path / "a.h5", split):
            colours = Image.fromarray(wanted[each["name"]]["inputs"].transpose(1, 2, 0))
            assert np.abs(each["inputs"].numpy().astype(int) - np.asarray(colours.convert("L"))).max() <= 1


def test_samples_of_tar_files(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for number in range(7):
            contents = {"cls": str(number).encode(), "txt": b"a" * number, "json": json.dumps({"n": number}).encode()}
            for extension, content in contents.items():
                member = tarfile.TarInfo(f"{number:03}.{extension}")
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
    assert kind_of([tmp_path / "a.tar"]) == "tar"
    pack_samples([tmp_path / "a.tar"], tmp_path / "a.h5", "tar", validation_fraction=0)
    for number, each in enumerate(RaggedDataset(tmp_path / "a.h5")):
        assert (each["key"], int(each["cls"]), each["txt"]) == (f"{number:03}", number, "a" * number)
        assert json.loads(each["json"]) == {"n": number}


def test_the_command_and_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "set", tmp_path / "a.h5"
    folder.mkdir()
    pictures(folder)
    assert main(["data", "pack", str(folder), "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert "training and" in said and "validation samples (images) with the fields inputs, name, targets" in said
    assert "classes: 0 cat, 1 dog, 2 emu" in said
    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(folder / "top.png")
    (folder / "README.txt").write_text("other")
    assert main(["data", "pack", str(folder), "-o", str(tmp_path / "b.h5")]) == 0
    captured = capsys.readouterr()
    assert "files skipped (of other kinds): 1" in captured.out and "classes" not in captured.out
    assert "no targets: the classes would be the folders of the files, and set/top.png is in none" in captured.err
    assert main(["data", "pack", str(folder), "-o", str(out)]) == 2
    assert f"{out} exists: --force replaces it" in capsys.readouterr().err
    assert main(["data", "show", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "/train/inputs/values" in shown and "samples" in shown and "0 cat, 1 dog, 2 emu" in shown
    assert all(each["crc32"] == "ok" for each in describe(out)["datasets"])
    damaged = bytearray(out.read_bytes())
    with_bytes = RaggedDataset(out, fields=["inputs"])[0]["inputs"].numpy().tobytes()
    damaged[damaged.index(with_bytes)] ^= 1
    out.write_bytes(damaged)
    assert main(["data", "show", str(out)]) == 2
    assert "is damaged: wrong checksum of /train/inputs/values" in capsys.readouterr().err


def test_bad_sources_are_named_and_leave_no_file(tmp_path: Path) -> None:
    out, folder = tmp_path / "out" / "a.h5", tmp_path / "set"
    folder.mkdir()
    np.save(folder / "a.npy", np.ones(2))
    (folder / "b.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(DataError, match=r"b\.npy"):
        pack_samples([folder], out, "npy")
    np.save(folder / "b.npy", np.ones(2, np.float32))
    with pytest.raises(DataError, match=r"set/b\.npy: sample .*: inputs is float32 with 1 dims"):
        pack_samples([folder], out, "npy", validation_fraction=0)
    np.save(folder / "b.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"b\.npy"):
        pack_samples([folder], out, "npy")
    with pytest.raises(DataError, match="no images file in"):
        pack_samples([folder], out, "images")
    (folder / "b.npy").unlink()
    with pytest.raises(DataError, match="one sample cannot be divided"):
        pack_samples([folder], out, "npy")
    assert not out.exists() and not list(tmp_path.glob("out/*"))
    (folder / "c.npz").write_bytes(b"")
    with pytest.raises(UsageError, match="several kinds: 1 of npy, 1 of npz; name one by --from"):
        kind_of([folder])


def test_a_named_file_of_another_kind_is_not_skipped(tmp_path: Path) -> None:
    """Files of other kinds in a folder are counted; one that is named by itself is an error."""
    (tmp_path / "in").mkdir()
    records(tmp_path / "in")
    (tmp_path / "in/notes.md").write_text("x")
    with tarfile.open(tmp_path / "a.tar", "w"):
        pass
    with pytest.raises(DataError, match=r"a\.tar: not of the kind npz .*; pack each kind into its own file"):
        pack_samples([tmp_path / "in", tmp_path / "a.tar"], tmp_path / "out.h5", "npz")
    assert not (tmp_path / "out.h5").exists()
    assert pack_samples([tmp_path / "in"], tmp_path / "out.h5", "npz").left_out == 1
