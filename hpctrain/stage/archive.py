"""Archive of an environment: one file with a checksum as its name, and an index beside it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.errors import UsageError
from hpctrain.stage.compression import BLOCK, BlockCompressor
from hpctrain.stage.environment import CONFIG, Environment, Member, members, programs_with_paths, texts_with_paths
from hpctrain.stage.rpath import local_text, search_paths
from hpctrain.util import atomic
from hpctrain.util.reading import read_json

FORMAT = "hpctrain-environment-2"
PREFIX, SUFFIX, INDEX, STARTER = "env-", ".tar.gz", ".json", ".run"
_DIGITS = 16  # of the checksum, in names


@dataclass(frozen=True)
class EnvironmentIndex:
    """Facts of an archive; ``texts`` are the members that contain the paths of the environment."""

    digest: str  # SHA-256 of the archive
    nbytes: int  # of the archive
    unpacked: int  # bytes of all files
    files: int
    prefix: str
    base: str | None
    kind: str
    signature: str  # of names, sizes and times of all members
    texts: tuple[str, ...]
    programs: tuple[str, ...]  # members that search for libraries by these paths

    @property
    def roots(self) -> dict[str, str]:
        """The folders in the archive, and where they were when it was packed."""
        return {"env": self.prefix, **({} if self.base is None else {"base": self.base})}

    @property
    def name(self) -> str:
        """The name of the archive and of its copies."""
        return PREFIX + self.digest[:_DIGITS]


def pack(environment: Environment, into: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Path:
    """Pack an environment and return the archive; one of the same files is not packed again.

    ``progress`` is called with the bytes that are packed, and their total. Raises ``UsageError``, also if the disk
    or the quota is full.
    """
    try:
        return _pack(environment, into, progress)
    except OSError as error:
        what = f": {error.filename}" if error.filename else ""
        raise UsageError(f"cannot pack {environment.prefix} into {into}: {error.strerror or error}{what}") from error


def _pack(environment: Environment, into: Path, progress: Callable[[int, int], None]) -> Path:
    into.mkdir(parents=True, exist_ok=True)
    found = list(members(environment))
    signature = _signature(environment, found)
    for path in sorted(into.glob(f"{PREFIX}*{INDEX}")):
        known = _index_or_none(path)
        if known is not None and known.signature == signature and _archive_of(path).exists():
            return _archive_of(path)
    texts = tuple(texts_with_paths(environment, iter(found)))
    programs = tuple(programs_with_paths(environment, iter(found)))
    sizes = [member.status.st_size for member in found if _has_content(member)]
    private = atomic.private_name(into / "env")
    try:
        with open(atomic.create(private), "r+b", buffering=0) as file:
            sink = _Hashed(file)
            _write(found, sink, lambda done: progress(done, sum(sizes)))
            os.fsync(file.fileno())
        index = EnvironmentIndex(
            digest=sink.digest.hexdigest(),
            nbytes=sink.nbytes,
            unpacked=sum(sizes),
            files=len(sizes),
            prefix=str(environment.prefix),
            base=None if environment.base is None else str(environment.base),
            kind=environment.kind,
            signature=signature,
            texts=texts,
            programs=programs,
        )
        archive = into / (index.name + SUFFIX)
        atomic.put(private, archive)
    except BaseException:
        atomic.discard(private)
        raise
    facts = {"format": FORMAT, **asdict(index)}
    atomic.write_text(index_path(archive), json.dumps(facts, indent=1) + "\n")
    return archive


def index_path(archive: Path) -> Path:
    return archive.with_name(archive.name.removesuffix(SUFFIX) + INDEX)


def starter_of(archive: Path) -> Path:
    """Return the name of the program that belongs to an archive; it need not exist."""
    return archive.with_name(archive.name.removesuffix(SUFFIX) + STARTER)


def _archive_of(index: Path) -> Path:
    return index.with_name(index.name.removesuffix(INDEX) + SUFFIX)


def read_index(archive: Path) -> EnvironmentIndex:
    """Return the index of an archive. Raises ``UsageError`` if there is none, or if it does not fit the archive."""
    try:
        index = _index(index_path(archive))
        size = os.stat(archive).st_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"not an index of {FORMAT}"
        what = f"{index_path(archive)}, which belongs beside it: " if archive.is_file() else ""
        raise UsageError(f"cannot use the archive {archive}: {what}{why}; hpctrain stage pack makes one") from error
    if size != index.nbytes:
        raise UsageError(f"cannot use the archive {archive}: it has {size} bytes, not {index.nbytes}; pack it again")
    return index


def _index(path: Path) -> EnvironmentIndex:
    facts: Any = read_json(path)
    if facts["format"] != FORMAT:
        raise ValueError("another format")
    names = EnvironmentIndex.__dataclass_fields__
    lists = {name: tuple(map(str, facts[name])) for name in ("texts", "programs")}
    found = EnvironmentIndex(**{name: facts[name] for name in names} | lists)
    numbers = (found.nbytes, found.unpacked, found.files)
    if not all(type(number) is int and number >= 0 for number in numbers) or len(found.digest) != 64:
        raise ValueError("wrong facts")
    bytes.fromhex(found.digest)  # it becomes a part of names
    return found


def _index_or_none(path: Path) -> EnvironmentIndex | None:
    try:
        return _index(path)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _has_content(member: Member) -> bool:
    return stat.S_ISREG(member.status.st_mode) and not member.target


def _signature(environment: Environment, found: Iterable[Member]) -> str:
    digest = hashlib.sha256(repr(sorted(environment.roots.items())).encode())
    for member in found:
        status = member.status
        content = (status.st_size, status.st_mtime_ns) if _has_content(member) else ()
        digest.update(repr((member.name, member.target, stat.S_IFMT(status.st_mode), content)).encode())
    return digest.hexdigest()


class _Hashed:
    """File of an archive in progress, with its checksum."""

    def __init__(self, file: BinaryIO | Any) -> None:
        self._file = file
        self.digest, self.nbytes = hashlib.sha256(), 0

    def write(self, content: bytes) -> None:
        self.digest.update(content)
        view = memoryview(content)
        while view:
            view = view[self._file.write(view) :]
        self.nbytes += len(content)


class _Counted:
    """File object that tells how many bytes it has got."""

    def __init__(self, out: BlockCompressor, progress: Callable[[int], None]) -> None:
        self._out, self._progress, self._done = out, progress, 0

    def write(self, content: bytes) -> int:
        self._out.write(content)
        self._done += len(content)
        self._progress(self._done)
        return len(content)


def _write(found: Iterable[Member], sink: _Hashed, progress: Callable[[int], None]) -> None:
    """Write the members: equal files give equal bytes. Times are kept, by which Python knows compiled files."""
    compressor = BlockCompressor(sink.write)
    try:
        counted: Any = _Counted(compressor, progress)
        with tarfile.open(fileobj=counted, mode="w|", format=tarfile.PAX_FORMAT, bufsize=BLOCK) as archive:
            for member in found:
                _add(archive, member)
        compressor.finish()
    finally:
        compressor.close()


def _add(archive: tarfile.TarFile, member: Member) -> None:
    info = tarfile.TarInfo(member.name)
    info.mtime = int(member.status.st_mtime)
    executable = member.status.st_mode & 0o111
    if member.target:
        info.type, info.linkname = tarfile.SYMTYPE, member.target
        archive.addfile(info)
    elif stat.S_ISDIR(member.status.st_mode):
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(info)
    else:
        info.size, info.mode = member.status.st_size, 0o755 if executable else 0o644
        with open(member.path, "rb") as content:
            archive.addfile(info, content)


# Paths in a copy ------------------------------------------------------------------------------------------------------


def relocate(unpacked: Path, index: EnvironmentIndex, place: Path) -> None:
    """Write the paths that an environment will have at ``place`` into scripts and configuration, and into programs."""
    new = {path: str(place / root) for root, path in index.roots.items()}
    for name in index.texts:
        path = unpacked / name
        content: Any = path.read_bytes()
        for old in sorted(new, key=len, reverse=True):
            content = content.replace(os.fsencode(old), os.fsencode(new[old]))
        if name == f"env/{CONFIG}" and index.base is not None:
            content = _with_home(content, os.fsencode(place / "base" / "bin"))
        _replace(path, content)
    for name in index.programs:
        _write_search_paths(unpacked / name, name, index.roots)


def _write_search_paths(path: Path, name: str, roots: Mapping[str, str]) -> None:
    content = bytearray(path.read_bytes())
    for found in search_paths(memoryview(content)):
        text = local_text(found.text, name, roots)
        if len(text) <= len(found.text):
            content[found.offset : found.offset + len(found.text)] = text.ljust(len(found.text), b"\0")
    _replace(path, content)


def _replace(path: Path, content: bytes | bytearray) -> None:
    status = path.stat()
    with atomic.replacing(path, mode=status.st_mode & 0o777) as file:
        file.write(content)
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))


def _with_home(content: bytes, home: bytes) -> bytes:
    """Return a configuration in which Python's folder is another one; its path may contain links."""
    lines = [b"home = " + home if line.partition(b"=")[0].strip() == b"home" else line for line in content.splitlines()]
    return b"\n".join(lines) + b"\n"
