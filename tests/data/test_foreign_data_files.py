"""Crafted data files: no other file is read through them, and no verb hangs or ends with a signal."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.cli.main import main
from hpctrain.data.dataset import ArrayDataset, TokenDataset, write_arrays
from hpctrain.data.hdf5 import dataset_of, open_file
from hpctrain.data.pack import pack
from hpctrain.errors import DataError

SECRET = b"a text of somebody else, which must not become tokens"


def _external_storage(file: h5py.File, secret: Path) -> None:
    file.create_dataset("train/tokens", shape=(40,), dtype="u1", external=[(str(secret), 0, 40)])


def _external_link(file: h5py.File, secret: Path) -> None:
    with h5py.File(secret.with_suffix(".h5"), "w") as other:
        other["tokens"] = np.frombuffer(SECRET, "u1")
    file["train/tokens"] = h5py.ExternalLink(str(secret.with_suffix(".h5")), "tokens")


def _external_group(file: h5py.File, secret: Path) -> None:
    with h5py.File(secret.with_suffix(".h5"), "w") as other:
        other["tokens"] = np.frombuffer(SECRET, "u1")
    file["train"] = h5py.ExternalLink(str(secret.with_suffix(".h5")), "/")


def _soft_to_external(file: h5py.File, secret: Path) -> None:
    _external_storage(file, secret)
    file.move("train/tokens", "there")
    file["train/tokens"] = h5py.SoftLink("/there")


def _virtual(file: h5py.File, secret: Path) -> None:
    with h5py.File(secret.with_suffix(".h5"), "w") as other:
        other["tokens"] = np.frombuffer(SECRET, "u1")
    layout = h5py.VirtualLayout((40,), "u1")
    layout[:] = h5py.VirtualSource(str(secret.with_suffix(".h5")), "tokens", shape=(len(SECRET),))[:40]
    file.create_virtual_dataset("train/tokens", layout)


def _loop(file: h5py.File, secret: Path) -> None:
    file["train/tokens"] = h5py.SoftLink("/train/tokens")


def _never_written(file: h5py.File, secret: Path) -> None:
    file.create_dataset("train/tokens", shape=(1 << 60,), dtype="u1", chunks=(1 << 20,))


@pytest.mark.limit(10)
@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (_external_storage, "keeps its bytes in another file"),
        (_external_link, "is a link to another file"),
        (_external_group, "is a link to another file"),
        (_soft_to_external, "keeps its bytes in another file"),
        (_virtual, "is a virtual dataset"),
        (_loop, "leads to too many others"),
        (_never_written, "it was never written"),
    ],
)
def test_no_other_file_is_read_as_tokens(
    tmp_path: Path,
    make: Callable[[h5py.File, Path], None],
    refusal: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    secret, path = tmp_path / "secret", tmp_path / "x.h5"
    secret.write_bytes(SECRET)
    with h5py.File(path, "w") as file:
        file.attrs.update({"format": "hpctrain-tokens", "format_version": 1, "vocab_size": 256})
        make(file, secret)
    with pytest.raises(DataError, match=refusal):
        TokenDataset(path, "train", 8)
    assert main(["data", "show", str(path)]) == 2
    assert refusal in capsys.readouterr().err


def test_links_within_the_file_are_followed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["all"] = np.arange(4)
        file["train/deep"] = h5py.SoftLink("/all")
        file["train/tokens"] = h5py.SoftLink("deep")
    with open_file(tmp_path / "x.h5") as file:
        assert dataset_of(file, "train/tokens")[()].tolist() == [0, 1, 2, 3]


def test_attributes_of_other_types_are_an_error(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs["format"] = [1, 2]
    with pytest.raises(DataError, match="the attribute format holds ndarray; expected one value"):
        TokenDataset(tmp_path / "x.h5", "train", 8)


def test_links_out_of_a_corpus_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret.txt").write_bytes(SECRET)
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("a text of the corpus, long enough to be cut")
    (folder / "b.txt").write_text("another one")
    (folder / "sub" / "inside.txt").symlink_to("../a.txt")
    (folder / "sub" / "outside.txt").symlink_to("../../secret.txt")
    (folder / "etc.txt").symlink_to("/etc/hostname")
    report = pack([folder], tmp_path / "x.h5", progress=False)
    assert report.links == 2 and report.skipped == 0
    assert SECRET[:20] not in (tmp_path / "x.h5").read_bytes()
    assert main(["data", "pack", str(folder), "-o", str(tmp_path / "y.h5")]) == 0
    assert "links skipped (target outside their folder): 2" in capsys.readouterr().out
    (tmp_path / "named.txt").symlink_to("secret.txt")
    assert pack([tmp_path / "named.txt"], tmp_path / "z.h5", progress=False).links == 0, "named by the user"


def test_a_file_truncated_while_it_is_mapped_is_an_error(tmp_path: Path) -> None:
    """Without a check, access to a truncated page would end the process with SIGBUS."""
    (tmp_path / "a.txt").write_text("text " * 100_000)
    pack([tmp_path / "a.txt"], tmp_path / "t.h5", progress=False)
    tokens = TokenDataset(tmp_path / "t.h5", "train", 64)
    rows = np.zeros((1000, 256), "f4")
    write_arrays(tmp_path / "a.h5", train=(rows, np.arange(1000)), validation=(rows, np.arange(1000)))
    arrays = ArrayDataset(tmp_path / "a.h5", "train")
    for name in ("t.h5", "a.h5"):
        os.truncate(tmp_path / name, 4096)
    last = np.array([len(tokens) - 1])
    with pytest.raises(DataError, match="t.h5 was truncated while it was read"):
        tokens.batch(last)
    with pytest.raises(DataError, match="a.h5 was truncated while it was read"):
        arrays.batch(np.array([999]))
