"""Packed corpora: contents, identity, and files that appear complete or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.data import pack as pack_module
from hpctrain.data.corpus import BLOCK
from hpctrain.data.pack import _Sink, new_file, pack
from hpctrain.errors import DataError, SettingsError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"document {number}\n" * (number + 1))
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    return folder


def _documents(path: Path, split: str) -> dict[str, bytes]:
    """Read a split with h5py alone, as the format's description specifies."""
    with h5py.File(path) as file:
        tokens, offsets = file[split]["tokens"][()].tobytes(), file[split]["offsets"][()]
        names = file[split]["names"].asstr()[()]
        assert file[split]["tokens"].attrs["crc32"] == zlib.crc32(tokens)
    assert offsets[-1] == len(tokens) and len(names) == len(offsets) - 1
    assert all(tokens[end - 1] == 0 for end in offsets[1:])
    return {name: tokens[begin : end - 1] for name, begin, end in zip(names, offsets, offsets[1:])}


def test_every_document_is_in_one_split_byte_for_byte(corpus: Path, tmp_path: Path) -> None:
    report = pack([corpus], tmp_path / "out.h5", validation_fraction=0.2)
    train, validation = (_documents(report.path, split) for split in ("train", "validation"))
    assert not set(train) & set(validation)
    assert train | validation == {f"corpus/{path.name}": path.read_bytes() for path in corpus.glob("*.txt")}
    assert report.documents == {"train": len(train), "validation": len(validation)}
    assert report.skipped == 1 and report.written
    with h5py.File(report.path) as file:
        assert {split: len(file[split]["tokens"]) for split in report.tokens} == report.tokens
        expected = {"format": "hpctrain-tokens", "tokenizer": "bytes", "vocab_size": 256}
        assert {key: file.attrs[key] for key in expected} == expected
        assert file["train/tokens"].dtype == np.uint8 and file["train/tokens"].chunks is None
        assert file["sources"].asstr()[()].tolist() == [str(corpus)]


def test_packing_twice_gives_the_same_tokens(corpus: Path, tmp_path: Path) -> None:
    sources = sorted(corpus.iterdir())
    pack(sources, tmp_path / "a.h5", validation_fraction=0.2)
    pack(sources[::-1], tmp_path / "b.h5", validation_fraction=0.2)
    for split in ("train", "validation"):
        assert list(_documents(tmp_path / "a.h5", split).items()) == list(_documents(tmp_path / "b.h5", split).items())


def test_a_single_file_of_several_blocks_is_split(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_bytes(bytes(range(32, 127)) * 100_000)
    assert book.stat().st_size > 2 * BLOCK
    pack([book], tmp_path / "out.h5", validation_fraction=0.25)
    assert _documents(tmp_path / "out.h5", "train") == {"book.txt": book.read_bytes()[:7_125_000]}
    assert _documents(tmp_path / "out.h5", "validation") == {"book.txt": book.read_bytes()[7_125_000:]}


def test_an_unchanged_corpus_is_not_packed_again(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.h5"
    first = pack([corpus], out)
    before = out.stat()
    again = pack([corpus], out)
    assert (again.written, again.tokens, again.documents) == (False, first.tokens, first.documents)
    assert (out.stat().st_ino, out.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert pack([corpus], out, force=True).written
    assert out.stat().st_ino != before.st_ino


def test_a_source_is_never_replaced(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("some text " * 50)
    with pytest.raises(DataError, match="is one of the sources: choose another name to write"):
        pack([source], source, force=True)
    assert source.read_text() == "some text " * 50


def test_another_file_is_not_replaced_unless_forced(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.h5"
    pack([corpus], out)
    old = out.read_bytes()
    with pytest.raises(DataError, match="exists and was packed from another corpus .*--force"):
        pack([corpus], out, seed=1)
    (corpus / "00.txt").write_text("changed")
    with pytest.raises(DataError, match="exists and was packed from another corpus"):
        pack([corpus], out)
    assert out.read_bytes() == old
    assert pack([corpus], out, force=True).written
    out.write_text("my thesis")
    with pytest.raises(DataError, match="exists and is not a packed corpus"):
        pack([corpus], out)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = 1
    with pytest.raises(DataError, match="exists and is not a packed corpus"):
        pack([corpus], tmp_path / "other.h5")
    assert out.read_text() == "my thesis"


def test_a_corpus_that_changes_during_packing_is_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = pack_module.plan_splits

    def touch(*args: object) -> object:
        (corpus / "30.txt").write_text(new)
        return plan(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(pack_module, "plan_splits", touch)
    old = (corpus / "30.txt").read_text()
    for new in (old + "more", old[:-1], old.replace("3", "4")):
        (corpus / "30.txt").write_text(old)
        with pytest.raises(DataError, match="30.txt changed while it was packed"):
            pack([corpus], tmp_path / "out.h5")
        assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_a_file_that_reads_back_differently_is_removed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_module, "checksum", lambda dataset: 0)
    with pytest.raises(DataError, match="reads back differently"):
        pack([corpus], tmp_path / "out.h5")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_a_fraction_out_of_range_is_refused(corpus: Path, tmp_path: Path, fraction: float) -> None:
    with pytest.raises(SettingsError, match="validation fraction .*: allowed is more than 0 and less than 1"):
        pack([corpus], tmp_path / "out.h5", validation_fraction=fraction)


def test_a_corpus_without_text_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text found in .*picture.png: 1 skipped, not being UTF-8 text"):
        pack([corpus / "picture.png"], tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()


def test_the_progress_bar_is_shown_only_on_a_terminal(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack([corpus], tmp_path / "out.h5", progress=True)
    assert capsys.readouterr() == ("", "")


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "made" / "for" / "it.h5"
    with new_file(out, "kind", 3) as file:
        file["x"] = [1, 2, 3]
        assert not out.exists()
    assert [path.name for path in out.parent.iterdir()] == ["it.h5"]
    with h5py.File(out) as file:
        assert (file.attrs["format"], file.attrs["format_version"]) == ("kind", 3)
        assert file["x"][()].tolist() == [1, 2, 3]


@pytest.mark.parametrize("failure", [RuntimeError("flush failed"), OSError(28, "No space left on device")])
@pytest.mark.parametrize("place", ["body", "fsync", "rename"])
def test_an_error_leaves_only_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, failure: Exception
) -> None:
    out = tmp_path / "it.h5"
    out.write_text("old")

    def fail(*args: object) -> None:
        raise failure

    if place != "body":
        monkeypatch.setattr(os, place, fail)
    with pytest.raises(DataError, match="cannot write .*it.h5: (No space left on device|flush failed)"):
        with new_file(out, "kind", 1):
            if place == "body":
                fail()
    assert [path.name for path in tmp_path.iterdir()] == ["it.h5"]
    assert out.read_text() == "old"


def test_an_interrupt_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        with new_file(tmp_path / "it.h5", "kind", 1):
            raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


_FULL = """
import resource, sys
import numpy as np
from pathlib import Path
from hpctrain.data.pack import _Sink, new_file
from hpctrain.errors import DataError

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
try:
    with new_file(Path(sys.argv[1]), "kind", 1) as file:
        file["x"] = np.ones(int(sys.argv[2]), "u1")
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize("size, room", [(10, 10), (1 << 15, 3000), (1 << 15, 8192), (1 << 22, 1 << 20)])
def test_a_full_disk_leaves_no_file_and_the_process_continues(tmp_path: Path, size: int, room: int) -> None:
    command = [sys.executable, "-c", _FULL, str(tmp_path / "it.h5"), str(size), str(room)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"cannot write {tmp_path / 'it.h5'}: File too large\n", done.stderr
    assert done.returncode == 0 and not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="cannot write .*: it is a folder"):
        with new_file(tmp_path, "kind", 1):
            pass
    with pytest.raises(DataError, match="cannot write .*it.h5: "):
        with new_file(tmp_path / "file" / "it.h5", "kind", 1):
            pass


def test_bytes_that_could_not_be_written_read_as_zeros(tmp_path: Path) -> None:
    with _Sink(tmp_path / "x", "w+") as sink:
        sink.write(b"abc")
        sink.failure = OSError("full")
        assert sink.write(b"def") == 3
        sink.seek(0)
        chance = bytearray(b"\xff" * 8)
        assert sink.readinto(chance) == 8 and chance == b"abc" + bytes(5)
