"""Documents of a corpus: which files they are, the survey of their text, and the held-out split."""

from __future__ import annotations

import os
import sysconfig
import zlib
from pathlib import Path

import pytest
from support.users import without_rights

from hpctrain.data.corpus import (
    Document,
    DocumentSize,
    find_documents,
    fingerprint,
    is_held_out,
    name_sources,
    plan_splits,
    read_blocks,
    survey,
)
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


def test_an_unreadable_folder_is_refused() -> None:
    with without_rights() as folder:
        locked = folder / "locked"
        locked.mkdir(0)
        with pytest.raises(DataError, match=f"cannot read corpus folder {locked}: Permission denied"):
            find_documents([folder])
        locked.rmdir()


def test_sources_are_described_in_words(tmp_path: Path) -> None:
    assert name_sources([tmp_path / "x"]) == [str(tmp_path / "x")]
    assert name_sources([])[0].startswith("python 3.") and name_sources([])[0].endswith("standard library")


def _document(folder: Path, name: str, content: bytes) -> Document:
    (folder / name).write_bytes(content)
    return Document(name, folder / name)


def test_text_is_measured_and_other_files_are_skipped(tmp_path: Path) -> None:
    text = "grüße, 世界\n".encode()
    documents = [
        _document(tmp_path, "good", text),
        _document(tmp_path, "empty", b""),
        _document(tmp_path, "nul", b"abcdefg\0h"),
        _document(tmp_path, "latin1", "grüße".encode("latin-1")),
        _document(tmp_path, "torn", text[:-2]),
    ]
    measured, skipped = survey(documents, block=3)  # characters extend across blocks
    assert [(found.document.name, found.length, found.crc32) for found in measured] == [
        ("good", len(text), zlib.crc32(text))
    ]
    assert skipped == 3


def test_fingerprint_changes_with_name_and_content(tmp_path: Path) -> None:
    def of(**files: bytes) -> str:
        return fingerprint(survey([_document(tmp_path, name, content) for name, content in files.items()])[0])

    assert of(a=b"x", b=b"y") == of(a=b"x", b=b"y")
    assert len({of(a=b"x", b=b"y"), of(a=b"x", c=b"y"), of(a=b"x", b=b"z"), of(a=b"x")}) == 4


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read .*gone: No such file"):
        list(read_blocks(tmp_path / "gone"))


def _measured(name: str, length: int = 100) -> DocumentSize:
    return DocumentSize(Document(name, Path(name)), length, 0)


def test_the_held_out_share_equals_the_fraction() -> None:
    held = sum(is_held_out(f"file{number}.txt", 0.05, seed=0) for number in range(20_000))
    assert abs(held / 20_000 - 0.05) < 0.005


def test_a_document_stays_in_its_split_if_others_are_added_removed_or_reordered() -> None:
    many = [_measured(f"{number}.txt") for number in range(400)]
    few = many[::-3]

    def held(measured: list[DocumentSize]) -> set[str]:
        return {piece.source.document.name for piece in plan_splits(measured, 0.1, 0)["validation"]}

    assert held(few) == held(many) & {found.document.name for found in few}
    assert held(many) == held(many[::-1])


def test_splits_are_disjoint_complete_and_follow_the_seed() -> None:
    many = [_measured(f"{number}.txt") for number in range(400)]
    splits = plan_splits(many, 0.1, 0)
    names = {side: {piece.source.document.name for piece in pieces} for side, pieces in splits.items()}
    assert not names["train"] & names["validation"]
    assert len(names["train"]) + len(names["validation"]) == 400
    assert all((piece.start, piece.stop) == (0, 100) for pieces in splits.values() for piece in pieces)
    other = {piece.source.document.name for piece in plan_splits(many, 0.1, 1)["validation"]}
    assert other != names["validation"]


def test_a_single_document_is_split_near_its_end() -> None:
    splits = plan_splits([_measured("book.txt", 1000)], 0.1, 0)
    assert [(piece.start, piece.stop) for piece in splits["train"]] == [(0, 900)]
    assert [(piece.start, piece.stop) for piece in splits["validation"]] == [(900, 1000)]


def test_the_longest_document_is_split_if_a_split_would_be_empty() -> None:
    documents = [_measured("a", 10), _measured("b", 1000), _measured("c", 20)]
    tiny = plan_splits(documents, 1e-9, 0)
    assert [(piece.source.document.name, piece.start, piece.stop) for piece in tiny["train"]] == [
        ("a", 0, 10),
        ("b", 0, 999),
        ("c", 0, 20),
    ]
    huge = plan_splits(documents, 1 - 1e-9, 0)
    assert [(piece.source.document.name, piece.start, piece.stop) for piece in huge["train"]] == [("b", 0, 1)]
    assert [piece.start for piece in huge["validation"]] == [0, 1, 0]


@pytest.mark.parametrize("documents", [[], [_measured("a", 1)]])
def test_too_small_a_corpus_is_refused(documents: list[DocumentSize]) -> None:
    with pytest.raises(DataError, match="too small to hold out"):
        plan_splits(documents, 0.5, 0)
