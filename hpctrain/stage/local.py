"""Storage of a node for staged copies: a private folder with environments, data files, and the jobs that use them.

A copy is made under a private name and renamed when it is complete. It stays while a job uses it, and is removed with
the last one. A lock of the folder orders jobs that share a node.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from hpctrain.errors import UsageError
from hpctrain.util import atomic
from hpctrain.util.reading import read_json

Piece = bytes | memoryview

VARIABLE = "HPCTRAIN_STAGED"  # path of the record of this job on this node
CONTAINER = "HPCTRAIN_CONTAINER"  # path of the image's copy on this node
FOLDER = "HPCTRAIN_STAGE_FOLDER"  # where to stage, if not named otherwise
_PLACES = (FOLDER, "SLURM_TMPDIR", "TMPDIR")
_MEMORY = "/dev/shm"
PACKED = "~/.hpctrain"  # for archives, on the shared file system
_NAME = re.compile(r"(env|data)-[0-9a-f]{16}")
_USERS = ".users"
_SPARE = 64 * 1024 * 1024  # bytes that are left free


def default_place(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for staged copies on each node of a job."""
    named = next((environ[name] for name in _PLACES if environ.get(name)), None)
    return Path(named or _MEMORY)


class NodeStorage:
    """Private folder of this user in a folder of a node. Raises ``OSError`` if it cannot be used."""

    def __init__(self, place: Path, *, create: bool = True) -> None:
        self.folder = place / f"hpctrain-stage-{os.geteuid()}"
        if create:
            self.folder.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(self.folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise OSError(f"{self.folder} is not a folder that only this user can write")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def room(self) -> int:
        """Return the free bytes."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def use(self, name: str, job: str) -> Path | None:
        """Note that a job uses a copy; return the copy, None if there is none."""
        with self._locked():
            self._note(name, job)
            path = self.folder / name
            return path if path.is_dir() else None

    def _note(self, name: str, job: str) -> None:
        users = self.folder / (name + _USERS)
        users.mkdir(mode=0o700, exist_ok=True)
        atomic.write_text(users / job, "")

    def begin(self, name: str) -> Path:
        """Return a new folder in which a copy is made; ``put`` gives it its name, ``discard`` removes it."""
        owner = _owner()
        for left in self.folder.glob(f".{name}-{owner}-*-*"):
            if not Path("/proc", left.name.rsplit("-", 2)[1]).exists():  # its process was killed
                discard(left)
        private = self.folder / f".{name}-{owner}-{os.getpid()}-{secrets.token_hex(8)}"
        private.mkdir(mode=0o700)
        return private

    def put(self, private: Path, name: str) -> Path:
        """Give a complete copy its name; of two jobs that made the same copy, the first one's is used."""
        path = self.folder / name
        with self._locked():
            if path.is_dir():
                discard(private)
            else:
                os.rename(private, path)
        return path

    def record(self, job: str, facts: Mapping[str, Any], script: str) -> Path:
        """Write what a job has on this node, and the shell script that makes programs use it; return the script."""
        path = self.folder / f"job-{job}.json"
        atomic.write_text(path, json.dumps(facts, indent=1) + "\n", mode=0o600)
        atomic.write_text(path.with_suffix(".sh"), script, mode=0o600)
        return path.with_suffix(".sh")

    def remove(self, job: str | None) -> list[str]:
        """Remove what only this job uses, or everything (None); return the names of the copies that were removed."""
        removed = []
        with self._locked():
            for path in sorted(self.folder.iterdir()):
                name = path.name
                if job is None or name in (f"job-{job}.json", f"job-{job}.sh"):
                    removed += [name] if _NAME.fullmatch(name) else []
                    discard(path)
                elif name.endswith(_USERS):
                    removed += self._leave(path, job)
        return removed

    def _leave(self, users: Path, job: str) -> list[str]:
        """Note that a job no longer uses a copy; remove one without users."""
        if not (users / job).exists():
            return []
        (users / job).unlink()
        if any(users.iterdir()):
            return []
        name = users.name.removesuffix(_USERS)
        discard(users)
        if not (self.folder / name).exists():
            return []
        discard(self.folder / name)
        return [name]


def _owner() -> str:
    """Return this host and its numbering of processes: nodes may share a folder, against all advice."""
    host = socket.gethostname()[:40].replace("-", "_")
    try:
        return host + "_" + re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    except OSError:
        return host


def discard(path: Path) -> None:
    """Remove a file or a folder with its contents, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        atomic.discard(path)


# Copies that are being made -------------------------------------------------------------------------------------------
#
# Every copy takes the whole stream, also after an error: the other nodes depend on it.


class ArrivingCopy(Protocol):
    """Copy in progress."""

    def take(self, piece: Piece) -> None:
        """Take the next bytes. Raises ``OSError`` if the copy has failed."""

    def complete(self, digest: str) -> Path:
        """Return the complete copy; ``digest`` is the checksum of the bytes. Raises ``OSError``."""

    def abandon(self) -> None:
        """Remove what has been made."""


def check_room(storage: NodeStorage, nbytes: int) -> None:
    """Raise ``OSError`` if a copy does not fit."""
    if (room := storage.room()) < nbytes + _SPARE:
        raise OSError(f"{storage.folder} has room for {max(room - _SPARE, 0):,} bytes, {nbytes:,} are needed")


class FileCopy:
    """Copy of a file, in a folder of its own."""

    def __init__(self, storage: NodeStorage, name: str, file_name: str, nbytes: int) -> None:
        self._storage, self._name, self._file_name, self._nbytes = storage, name, file_name, nbytes
        check_room(storage, nbytes)
        self._folder = storage.begin(name)
        self._handle = atomic.create(self._folder / file_name, 0o400)
        self._digest, self._taken = hashlib.sha256(), 0

    def take(self, piece: Piece) -> None:
        """Take the next bytes. Raises ``OSError`` if the copy has failed."""
        view = memoryview(piece)
        self._digest.update(view)
        self._taken += len(view)
        while view:
            view = view[os.write(self._handle, view) :]

    def complete(self, digest: str) -> Path:
        """Return the complete copy. Raises ``OSError``."""
        if self._digest.hexdigest() != digest or self._taken != self._nbytes:
            raise OSError(f"the copy has arrived damaged: {self._taken:,} of {self._nbytes:,} bytes, or other ones")
        self._close()
        return self._storage.put(self._folder, self._name) / self._file_name

    def abandon(self) -> None:
        """Remove what has been made."""
        self._close()
        discard(self._folder)

    def _close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


# Of programs ----------------------------------------------------------------------------------------------------------


def staged(path: str | os.PathLike[str]) -> str:
    """Return the path of a file's copy on this node, or the path itself if the job has staged none.

    ``hpctrain stage copy`` makes copies. Data files of ``hpctrain train`` are found without this function.
    """
    original = os.fspath(path)
    record = os.environ.get(VARIABLE)
    if not record:
        return original
    copies = facts_of(record).get("data")
    copy = copies.get(os.path.abspath(original)) if isinstance(copies, dict) else None
    return copy if isinstance(copy, str) and os.path.exists(copy) else original


def staged_summary() -> str | None:
    """Return in one line what this job has staged, None if nothing, or if the record is damaged."""
    try:
        found = facts_of(os.environ[VARIABLE]).get("summary") if os.environ.get(VARIABLE) else None
    except UsageError:
        return None
    return found if isinstance(found, str) else None


def facts_of(record: str) -> dict[str, Any]:
    """Return what a job has staged on this node. Raises ``UsageError`` if the record is damaged."""
    try:
        facts = read_json(record)
    except FileNotFoundError:
        return {}  # removed at the end of the job
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {record}, which {VARIABLE} names: {error}; unset it to use the originals"
        ) from error
    return facts if isinstance(facts, dict) else {}


def script_of(record: str, environment: Path | None, container: str = "") -> str:
    """Return a script that makes a shell and its programs use what is staged."""
    lines: Sequence[str] = (f"export {VARIABLE}={_quoted(record)}",)
    if container:
        lines = (*lines, f"export {CONTAINER}={_quoted(container)}")
    if environment is not None:
        folder = _quoted(str(environment))
        lines = (*lines, f"export VIRTUAL_ENV={folder}", f"PATH={folder}/bin:$PATH", "export PATH", "unset PYTHONHOME")
    return "\n".join(("# Read by the ranks of a job: . FILE", *lines, ""))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
