"""Corpora: documents are found in a fixed order, and other files are left out."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from hpctrain.data.corpus import find_documents, name_sources
from hpctrain.errors import DataError


def _write(path: Path, text: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_default_is_the_standard_library_without_tests_tables_and_packages() -> None:
    documents = find_documents()
    names = [document.name for document in documents]
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert names == sorted(names) and len(set(names)) == len(names)
    assert all(name.endswith(".py") for name in names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test", "encodings"}
    folder = Path(sysconfig.get_paths()["stdlib"])
    assert all(document.path == folder / document.name for document in documents)


def test_documents_are_sorted_by_name_and_other_files_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    for name in ("b.txt", "a/z.txt", "a.txt", ".hidden", ".git/config", "__pycache__/x.pyc", "test/kept.txt"):
        _write(folder / name)
    os.mkfifo(folder / "pipe")
    (folder / "dangling").symlink_to(folder / "nowhere")
    book = _write(tmp_path / "elsewhere" / "book.txt")
    names = [document.name for document in find_documents([folder, book])]
    assert names == ["book.txt", "notes/a.txt", "notes/a/z.txt", "notes/b.txt", "notes/test/kept.txt"]
    assert [document.name for document in find_documents([book, folder])] == names


def test_a_file_found_twice_counts_once(tmp_path: Path) -> None:
    file = _write(tmp_path / "notes" / "a.txt")
    (tmp_path / "notes" / "same.txt").symlink_to(file)
    assert len(find_documents([tmp_path / "notes", file, file])) == 1


def test_names_do_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "notes" / "a.txt")
    far = [document.name for document in find_documents([tmp_path / "notes"])]
    monkeypatch.chdir(tmp_path / "notes")
    assert [document.name for document in find_documents(["."])] == far == ["notes/a.txt"]


def test_names_that_are_not_utf8_become_text(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "w") as file:
        file.write("text")
    (document,) = find_documents([tmp_path])
    assert document.name == f"{tmp_path.name}/caf\\xe9.txt"
    assert document.path.read_text() == "text"


def test_missing_and_empty_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read corpus .*/nowhere: No such file"):
        find_documents([tmp_path / "nowhere"])
    with pytest.raises(DataError, match=f"no file found in {tmp_path}"):
        find_documents([tmp_path])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        find_documents([tmp_path / "pipe"])


def test_an_unreadable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if os.fspath(path) == str(locked):  # chmod would not stop root
            raise PermissionError(13, "Permission denied", str(locked))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=f"cannot read corpus folder {locked}: Permission denied"):
        find_documents([tmp_path])


def test_sources_are_described_in_words(tmp_path: Path) -> None:
    assert name_sources([tmp_path / "x"]) == [str(tmp_path / "x")]
    assert name_sources([])[0].startswith("python 3.") and name_sources([])[0].endswith("standard library")
