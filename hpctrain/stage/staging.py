"""Staging of a job: one process per node, rank 0 reads each file of the shared file system once.

A node on which a copy fails uses the original, and the job is told why; it still passes all bytes on to others.
"""

from __future__ import annotations

import hashlib
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.comm.byte_tree import ByteTree, pieces_of
from hpctrain.errors import UsageError
from hpctrain.stage.archive import EnvironmentIndex, read_index, relocate
from hpctrain.stage.compression import BLOCK, decompressed
from hpctrain.stage.local import ArrivingCopy, FileCopy, NodeStorage, Piece, check_room, discard, script_of
from hpctrain.util.text import counted, format_bytes, format_seconds

_WAITING = 8  # pieces that wait to be unpacked
Progress = Callable[[str, int, int], None]  # what, bytes that have been read, their total


@dataclass(frozen=True)
class StageSource:
    """File of the shared file system that is to be copied; ``index`` is that of an archive."""

    path: str
    name: str  # of the copy
    nbytes: int
    index: EnvironmentIndex | None = None
    is_container: bool = False


@dataclass
class NodeResult:
    """Copies of one node, by the path of the original, and files without a copy, with the reason."""

    host: str
    script: str = ""
    copies: dict[str, str] = field(default_factory=dict)
    reused: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StageSummary:
    """Summary of a job's staging, for its record and for the log."""

    nodes: int
    seconds: float
    nbytes: int  # that were read from the shared file system
    files: tuple[str, ...]
    reused: int  # copies that nodes had before
    failed: tuple[tuple[str, str, str], ...]  # host, file and reason

    @property
    def text(self) -> str:
        """The summary in one line."""
        read = f"{format_bytes(self.nbytes)} read once" if self.nbytes else "nothing read"
        text = f"{counted(len(self.files), 'file')} on {counted(self.nodes, 'node')}"
        text += f" in {format_seconds(self.seconds)}, {read}"
        hosts = len({host for host, _, _ in self.failed})
        return text + (f", {counted(hosts, 'node')} without all copies" if hosts else "")


def sources_of(archives: Sequence[Path], data: Sequence[Path], container: Path | None = None) -> list[StageSource]:
    """Return what to copy. Raises ``UsageError`` for a file that cannot be read."""
    found = []
    for archive in archives:
        index = read_index(archive)
        found.append(StageSource(os.path.abspath(archive), index.name, index.nbytes, index))
    for path in (*data, *([] if container is None else [container])):
        try:
            status = os.stat(path)
        except OSError as error:
            raise UsageError(f"cannot stage {path}: {error.strerror}") from error
        if not os.path.isfile(path):
            raise UsageError(f"cannot stage {path}: only regular files can be staged; name the files of a folder")
        key = repr((os.path.abspath(path), status.st_size, status.st_mtime_ns)).encode("utf-8", "surrogateescape")
        name = f"data-{hashlib.sha256(key).hexdigest()[:16]}"
        found.append(StageSource(os.path.abspath(path), name, status.st_size, is_container=path is container))
    return found


class JobStaging:
    """Staging by the ranks of an mpi4py communicator, one per node. Every method is collective."""

    def __init__(self, comm: Any, place: Path, job: str, progress: Progress = lambda what, done, total: None) -> None:
        self._comm, self._job, self._progress = comm, job, progress
        self._result = NodeResult(socket.gethostname())
        self._storage: NodeStorage | None = None
        self._read = 0
        self.messages = 0  # that this rank has sent
        try:
            self._storage = NodeStorage(place)
        except OSError as error:
            self._why = f"cannot use {place}: {error.strerror or error}"

    def stage(self, sources: Sequence[StageSource] | None) -> tuple[NodeResult, StageSummary]:
        """Copy what rank 0 names to all nodes; return what this node has, and a summary. Raises ``UsageError``."""
        began = time.monotonic()
        environments: list[Path] = []
        container = ""
        for source in self._comm.bcast(sources, 0):
            path = self._copy(source)
            if path is not None and source.index is not None:
                environments.append(path / "env")
            elif path is not None and source.is_container:
                container = str(path)
        results: list[NodeResult] = self._comm.allgather(self._result)
        seconds = max(self._comm.allgather(time.monotonic() - began))
        failed = [(each.host, path, why) for each in results for path, why in each.failed.items()]
        files = tuple(dict.fromkeys(path for each in results for path in (*each.copies, *each.failed)))
        read = self._comm.bcast(self._read, 0)
        reused = sum(len(each.reused) for each in results)
        summary = StageSummary(len(results), seconds, read, files, reused, tuple(failed))
        if self._storage is not None:
            self._result.script = self._record(self._storage, environments, container, summary)
        return self._result, summary

    def _copy(self, source: StageSource) -> Path | None:
        """Return this node's copy; None if it has none, and must use the original."""
        path = self._existing(source)
        if all(self._comm.allgather(path is not None)):
            return self._note(source, path, reused=True)
        copy = self._begin(source) if path is None else None
        digest, tree = hashlib.sha256(), ByteTree(self._comm)
        failure: OSError | None = None
        try:
            for piece in tree.broadcast(self._pieces(source) if self._comm.Get_rank() == 0 else None):
                if self._comm.Get_rank() == 0 and source.index is None:  # an index has the archive's
                    digest.update(piece)
                if copy is not None and failure is None:
                    try:
                        copy.take(piece)
                    except OSError as error:
                        failure = error
        except OSError as error:  # rank 0 could not read
            failure = failure or error
        self.messages += tree.sent
        expected = self._comm.bcast(digest.hexdigest(), 0)
        if copy is not None:
            path = self._completed(source, copy, expected, failure)
        return self._note(source, path, reused=copy is None and path is not None)

    def _existing(self, source: StageSource) -> Path | None:
        if self._storage is None:
            return None
        try:
            found = self._storage.use(source.name, self._job)
        except OSError:
            return None
        return found if found is None or source.index else found / os.path.basename(source.path)

    def _begin(self, source: StageSource) -> ArrivingCopy | None:
        if self._storage is None:
            self._result.failed[source.path] = self._why
            return None
        try:
            if source.index is not None:
                return EnvironmentCopy(self._storage, source.index)
            return FileCopy(self._storage, source.name, os.path.basename(source.path), source.nbytes)
        except OSError as error:
            self._result.failed[source.path] = _text(error)
            return None

    def _completed(self, source: StageSource, copy: ArrivingCopy, digest: str, failure: OSError | None) -> Path | None:
        """Return the path of a copy that has arrived."""
        try:
            if failure is not None:
                raise failure
            return copy.complete(source.index.digest if source.index is not None else digest)
        except OSError as error:
            copy.abandon()
            self._result.failed[source.path] = _text(error)
            return None

    def _note(self, source: StageSource, path: Path | None, *, reused: bool) -> Path | None:
        if path is not None:
            self._result.copies[source.path] = str(path)
            self._result.reused += [source.path] if reused else []
        return path

    def _pieces(self, source: StageSource) -> Iterator[bytes]:
        """Yield the content of a file on rank 0. Raises ``OSError``, also if the file has changed."""
        done = 0
        for piece in pieces_of(source.path):
            done += len(piece)
            self._read += len(piece)
            yield piece
            self._progress(os.path.basename(source.path), done, source.nbytes)
        if done != source.nbytes or os.stat(source.path).st_size != source.nbytes:
            raise OSError(f"{source.path} has changed while it was staged")

    def _record(self, storage: NodeStorage, environments: Sequence[Path], container: str, summary: StageSummary) -> str:
        """Write the record of this node; return its script."""
        archives = {str(path.parent) for path in environments}
        data = {original: copy for original, copy in self._result.copies.items() if copy not in archives}
        facts = {**asdict(self._result), "job": self._job, "data": data, "summary": summary.text}
        record = str(storage.folder / f"job-{self._job}.json")
        script = script_of(record, environments[0] if environments else None, container)
        try:
            return str(storage.record(self._job, facts, script))
        except OSError as error:
            self._result.failed |= dict.fromkeys(self._result.copies, _text(error))
            self._result.copies.clear()
            return ""


def _text(error: OSError) -> str:
    """Return why a copy has failed."""
    return f"{error.strerror}: {error.filename}" if error.filename and error.strerror else error.strerror or str(error)


# Copies of environments -----------------------------------------------------------------------------------------------


class EnvironmentCopy:
    """Copy of an environment; a thread unpacks the archive."""

    def __init__(self, storage: NodeStorage, index: EnvironmentIndex) -> None:
        self._storage, self._index = storage, index
        check_room(storage, index.unpacked)
        self._folder = storage.begin(index.name)
        self._digest = hashlib.sha256()
        self._queue: queue.Queue[Piece] = queue.Queue(_WAITING)
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._unpack, name="unpack", daemon=True)
        self._thread.start()

    def take(self, piece: Piece) -> None:
        """Take the next bytes. Raises ``OSError`` if the copy has failed."""
        self._digest.update(piece)
        self._put(piece)

    def _put(self, piece: Piece) -> None:
        while True:
            if self._failure is not None:
                raise self._failure
            try:
                self._queue.put(piece, timeout=0.2)
                return
            except queue.Full:
                continue

    def complete(self, digest: str) -> Path:
        """Return the complete copy, in which scripts have its path. Raises ``OSError``."""
        self._put(b"")
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        if self._digest.hexdigest() != digest:
            raise OSError("the archive has arrived damaged, or has changed: its checksum is another one")
        place = self._storage.folder / self._index.name
        relocate(self._folder, self._index, place)
        return self._storage.put(self._folder, self._index.name)

    def abandon(self) -> None:
        """Remove what has been made."""
        self._failure = self._failure or OSError("given up")
        while True:  # the thread may wait for a piece
            try:
                self._queue.put(b"", timeout=0.2)
                break
            except queue.Full:
                if not self._thread.is_alive():
                    break
                self._queue.get()
        self._thread.join()
        discard(self._folder)

    def _unpack(self) -> None:
        try:
            with closing(decompressed(_until_empty(self._queue))) as blocks:
                _extract(blocks, self._folder)
        except OSError as error:
            self._failure = error
        except ValueError as error:
            self._failure = OSError(f"the archive is damaged: {error}")


def _until_empty(pieces: queue.Queue[Piece]) -> Iterator[Piece]:
    """Yield pieces as they arrive, until an empty one."""
    while piece := pieces.get():
        yield piece


def _extract(blocks: Iterator[bytes], folder: Path) -> None:
    """Write the files of an archive by ``tar``, in a process of its own: Python's ``tarfile`` takes longer."""
    command = ["tar", "-x", "-p", "-o", "-f", "-", "-C", str(folder)]
    environ = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    with os.fdopen(os.memfd_create("tar"), "w+b") as messages:
        tar = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=messages, stderr=messages, env=environ, pipesize=BLOCK
        )
        assert tar.stdin is not None
        try:
            with suppress(BrokenPipeError), tar.stdin:  # its message says why it has ended
                for block in blocks:
                    tar.stdin.write(block)
            for _ in blocks:  # else ``take`` could wait for room in the queue
                pass
        except BaseException:
            tar.kill()
            raise
        finally:
            code = tar.wait()
        if code:
            messages.seek(0)
            said = messages.readline(400).decode("utf-8", "replace").strip()
            raise OSError(f"cannot unpack the archive: {said or f'tar has ended with exit code {code}'}")
