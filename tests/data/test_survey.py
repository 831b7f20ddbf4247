"""Survey of a corpus: text is distinguished from other files, also across blocks, and a corpus has one fingerprint."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from hpctrain.data import corpus as survey_module
from hpctrain.data.corpus import Document, fingerprint, read_blocks, survey
from hpctrain.errors import DataError


def _document(folder: Path, name: str, content: bytes) -> Document:
    (folder / name).write_bytes(content)
    return Document(name, folder / name)


def test_text_is_measured_and_other_files_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "BLOCK", 3)  # so that characters extend across blocks
    text = "grüße, 世界\n".encode()
    documents = [
        _document(tmp_path, "good", text),
        _document(tmp_path, "empty", b""),
        _document(tmp_path, "nul", b"abcdefg\0h"),
        _document(tmp_path, "latin1", "grüße".encode("latin-1")),
        _document(tmp_path, "torn", text[:-2]),
    ]
    measured, skipped = survey(documents)
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
