"""Staging on several nodes: what each of them has, what is read, what happens if a node cannot hold a copy."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from support.environments import packed, write_environment

from hpctrain.errors import UsageError
from hpctrain.stage.local import VARIABLE, FileCopy, NodeStorage, staged, staged_summary
from hpctrain.stage.staging import EnvironmentCopy, JobStaging, StageSource, sources_of


@pytest.fixture
def comm() -> Any:
    """Return all ranks; each of them is one node here."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


def shared_files(comm: Any, folder: Path) -> list[Path]:
    """Write an archive and a data file on rank 0; return their names on all ranks."""
    files: list[Path] = []
    if comm.rank == 0:
        (folder / "data.bin").write_bytes(random.Random(0).randbytes(9_000_001))
        files = [packed(write_environment(folder / "shared"), folder / "archives"), folder / "data.bin"]
    return list(comm.bcast(files, 0))


def of_rank(comm: Any, files: list[Path]) -> list[StageSource] | None:
    return sources_of(files[:1], files[1:]) if comm.rank == 0 else None


def node(comm: Any, folder: Path) -> Path:
    """Return the own storage of a rank."""
    place = folder / f"node{comm.rank}"
    place.mkdir(exist_ok=True)
    return place


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_node_has_the_files_and_the_original_is_read_once(comm: Any, shared_tmp_path: Path) -> None:
    files, place = shared_files(comm, shared_tmp_path), node(comm, shared_tmp_path)
    staging = JobStaging(comm, place, "job1")
    result, summary = staging.stage(of_rank(comm, files))
    archive, data = map(str, files)
    assert not result.failed and not result.reused and set(result.copies) == {archive, data}
    assert Path(result.copies[archive], "env/bin/tool").read_text().startswith(f"#!{place}/hpctrain-stage-")
    copied = Path(result.copies[data]).read_bytes()
    assert hashlib.sha256(copied).digest() == hashlib.sha256(files[1].read_bytes()).digest()
    sizes = [os.path.getsize(file) for file in files]
    assert summary.nbytes == sum(sizes) and summary.nodes == comm.size and summary.reused == 0
    # A rank sends each piece, and the end, to at most two others.
    pieces = sum(-(-size // (4 * 1024 * 1024)) + 1 for size in sizes)
    assert comm.allreduce(staging.messages) == (comm.size - 1) * pieces and staging.messages <= 2 * pieces
    comm.Barrier()  # a copy that is there needs no original
    if comm.rank == 0:
        os.chmod(data, 0)
    comm.Barrier()
    again, second = JobStaging(comm, place, "job2").stage(of_rank(comm, files))
    assert again.copies == result.copies and set(again.reused) == set(result.copies)
    assert second.nbytes == 0 and second.reused == 2 * comm.size


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("bad", [0, 1])
def test_a_node_without_storage_uses_the_original(comm: Any, shared_tmp_path: Path, bad: int) -> None:
    files, place = shared_files(comm, shared_tmp_path), node(comm, shared_tmp_path)
    if comm.rank == bad:
        place = place / "missing"
    result, summary = JobStaging(comm, place, "job").stage(of_rank(comm, files))
    assert len(result.copies) == (0 if comm.rank == bad else 2) and bool(result.script) == (comm.rank != bad)
    assert len(result.failed) == (2 if comm.rank == bad else 0)
    assert summary.text.startswith(f"2 files on {comm.size} nodes in ")
    assert summary.text.endswith(" read once, 1 node without all copies")
    if comm.rank != bad:
        record = json.loads(Path(result.script).with_suffix(".json").read_text())
        assert record["summary"] == summary.text and record["data"] == {str(files[1]): result.copies[str(files[1])]}
    assert len(summary.failed) == 2 and all("No such file" in why for _, _, why in summary.failed)


@pytest.mark.ranks(2, 4)
def test_nodes_that_have_a_copy_pass_on_what_others_need(comm: Any, shared_tmp_path: Path) -> None:
    files, place = shared_files(comm, shared_tmp_path), node(comm, shared_tmp_path)
    JobStaging(comm, place, "first").stage(of_rank(comm, files))
    if comm.rank == comm.size - 1:
        NodeStorage(place).remove(None)
    result, summary = JobStaging(comm, place, "second").stage(of_rank(comm, files))
    assert len(result.copies) == 2 and len(result.reused) == (0 if comm.rank == comm.size - 1 else 2)
    assert summary.nbytes > 0 and summary.reused == 2 * (comm.size - 1)


@pytest.mark.ranks(1, 2, 3)
def test_a_file_that_changes_meanwhile_is_not_used(comm: Any, shared_tmp_path: Path) -> None:
    files, place = shared_files(comm, shared_tmp_path), node(comm, shared_tmp_path)
    sources = of_rank(comm, files)
    if comm.rank == 0:
        with files[1].open("ab") as file:
            file.write(b"more")
        content = bytearray(files[0].read_bytes())
        content[len(content) // 2] ^= 1
        files[0].write_bytes(content)
    result, summary = JobStaging(comm, place, "job").stage(sources)
    assert not result.copies and set(result.failed) == set(map(str, files))
    assert "has changed while it was staged" in result.failed[str(files[1])]
    assert "damaged" in result.failed[str(files[0])]
    assert [name for name in os.listdir(place / f"hpctrain-stage-{os.geteuid()}") if name[0] == "."] == []
    assert len(summary.failed) == 2 * comm.size


# One node -------------------------------------------------------------------------------------------------------------


def test_a_copy_is_removed_with_the_last_job(tmp_path: Path) -> None:
    storage = NodeStorage(tmp_path)
    for job in ("a", "b"):
        storage.use("data-0123456789abcdef", job)
    storage.put(storage.begin("data-0123456789abcdef"), "data-0123456789abcdef")
    storage.record("a", {}, "")
    assert storage.remove("a") == [] and storage.use("data-0123456789abcdef", "b") is not None
    assert storage.remove("a") == [] and storage.remove("other") == []
    assert storage.remove("b") == ["data-0123456789abcdef"]
    assert list(storage.folder.iterdir()) == []


def test_copies_of_killed_processes_are_removed(tmp_path: Path) -> None:
    storage = NodeStorage(tmp_path)
    own = storage.begin("env-0123456789abcdef")
    head, _, number = own.name.rpartition("-")
    left = storage.folder / f"{head.rpartition('-')[0]}-99999999-{number}"
    other = storage.folder / f".env-0123456789abcdef-elsewhere-99999999-{number}"
    for each in (left, other):
        each.mkdir()
        (each / "file").write_text("x")
    storage.begin("env-0123456789abcdef")
    assert own.exists() and not left.exists() and other.exists(), "that of another node may be in progress"


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    storage = NodeStorage(tmp_path)
    storage.folder.chmod(0o777)
    with pytest.raises(OSError, match="is not a folder that only this user can write"):
        NodeStorage(tmp_path)
    storage.folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    storage.folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is not a folder that only this user can write"):
        NodeStorage(tmp_path)


def test_an_archive_cannot_write_elsewhere(tmp_path: Path) -> None:
    import io
    import tarfile
    from dataclasses import replace

    from hpctrain.stage.archive import read_index
    from hpctrain.stage.compression import BlockCompressor

    index = read_index(packed(write_environment(tmp_path / "shared"), tmp_path / "archives"))
    (tmp_path / "node").mkdir()
    storage = NodeStorage(tmp_path / "node")
    link = tarfile.TarInfo("env/link")
    link.type, link.linkname = tarfile.SYMTYPE, "../../../.."
    for names in ([tarfile.TarInfo("env/../../../escaped")], [link, tarfile.TarInfo("env/link/escaped")]):
        content, hostile = io.BytesIO(), io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as archive:
            for name in names:
                archive.addfile(name)
        compressor = BlockCompressor(hostile.write)
        compressor.write(content.getvalue())
        compressor.finish()
        digest = hashlib.sha256(hostile.getvalue()).hexdigest()
        copy = EnvironmentCopy(storage, replace(index, digest=digest))
        copy.take(hostile.getvalue())
        with pytest.raises(OSError, match="cannot unpack the archive: tar: .*env/"):
            copy.complete(digest)
        copy.abandon()
    assert not list(tmp_path.rglob("escaped")) and list(storage.folder.iterdir()) == []


def test_a_copy_that_does_not_fit_is_refused_before_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="has room for .* bytes, 1,152,921,504,606,846,976 are needed"):
        FileCopy(NodeStorage(tmp_path), "data-0123456789abcdef", "x", 2**60)


def test_programs_find_the_copies_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, record = tmp_path / "copy.h5", tmp_path / "job-1.json"
    copy.write_text("x")
    record.write_text(json.dumps({"data": {"/shared/a.h5": str(copy), "/shared/b.h5": str(tmp_path / "gone")}}))
    assert staged("/shared/a.h5") == "/shared/a.h5"
    monkeypatch.setenv(VARIABLE, str(record))
    assert staged("/shared/a.h5") == str(copy) == staged("/shared/x/../a.h5")
    assert staged("/shared/b.h5") == "/shared/b.h5", "the copy has been removed"
    assert staged("/shared/c.h5") == "/shared/c.h5"
    assert staged_summary() is None
    record.write_text(json.dumps({"summary": "1 file on 2 nodes"}))
    assert staged_summary() == "1 file on 2 nodes"
    record.unlink()
    assert staged("/shared/a.h5") == "/shared/a.h5" and staged_summary() is None
    record.write_text("{")
    assert staged_summary() is None
    with pytest.raises(UsageError, match="which HPCTRAIN_STAGED names: .*unset it to use the originals"):
        staged("/shared/a.h5")


def test_data_files_are_read_from_their_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import h5py

    from hpctrain.data.hdf5 import open_file

    for name, value in (("shared.h5", 1), ("copy.h5", 2)):
        with h5py.File(tmp_path / name, "w") as file:
            file["value"] = value
    record = tmp_path / "job-1.json"
    record.write_text(json.dumps({"data": {str(tmp_path / "shared.h5"): str(tmp_path / "copy.h5")}}))
    monkeypatch.setenv(VARIABLE, str(record))
    with open_file(tmp_path / "shared.h5") as file:
        assert file["value"][()] == 2


@pytest.mark.parametrize(("name", "said"), [("missing", "No such file"), ("", "only regular files")])
def test_what_cannot_be_staged_is_named(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"cannot stage {tmp_path}.*{said}"):
        sources_of([], [tmp_path / name])
