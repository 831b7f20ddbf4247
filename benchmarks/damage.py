"""Mutations of a file as by disk, network or user, check of a reader's answer, and restoration of the file."""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py

from hpctrain.checkpoint.format.reader import verify_file
from hpctrain.errors import CheckpointError

PAGE = 4096

Extents = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Mutation:
    """Change of a file: bytes to write at offsets, and a new length if it changes."""

    kind: str
    patches: tuple[tuple[int, bytes], ...] = ()
    length: int | None = None


def every_bit(data: bytes) -> Iterator[Mutation]:
    """Yield a flip of each bit of a file."""
    for number in range(8 * len(data)):
        yield _flip(data, number)


def at_random(data: bytes, count: int, seed: int) -> Iterator[Mutation]:
    """Yield ``count`` mutations, all kinds in turn; each really changes the file."""
    draw, made = random.Random(seed), 0
    for kind in itertools.cycle(_KINDS):
        if made == count:
            return
        mutation = kind(data, draw)
        if mutation.length is not None or any(data[at : at + len(new)] != new for at, new in mutation.patches):
            made += 1
            yield mutation


def _flip(data: bytes, number: int) -> Mutation:
    at, bit = divmod(number, 8)
    return Mutation("flipped bit", ((at, bytes([data[at] ^ 1 << bit])),))


def _random_flip(data: bytes, draw: random.Random) -> Mutation:
    return _flip(data, draw.randrange(8 * len(data)))


def _zeroed(data: bytes, draw: random.Random) -> Mutation:
    at = _page(data, draw)
    return Mutation("zeroed page", ((at, bytes(len(data[at : at + PAGE]))),))


def _swapped(data: bytes, draw: random.Random) -> Mutation:
    first, second = sorted((_page(data, draw), _page(data, draw)))
    length = len(data[second : second + PAGE])  # the last page may be short
    return Mutation("swapped pages", ((first, data[second : second + length]), (second, data[first : first + length])))


def _truncated(data: bytes, draw: random.Random) -> Mutation:
    return Mutation("truncation", length=draw.randrange(len(data)))


def _extended(data: bytes, draw: random.Random) -> Mutation:
    return Mutation("extension", length=len(data) + draw.randint(1, 2 * PAGE))


def _inverted(data: bytes, draw: random.Random) -> Mutation:
    """Replace zeros by ones or ones by zeros: checksums modulo 0xFFFF, such as fletcher32, do not distinguish them."""
    old, new = draw.choice(((b"\0\0", b"\xff\xff"), (b"\xff\xff", b"\0\0")))
    start = draw.randrange(len(data))
    at = data.find(old, start)
    if at < 0:
        return Mutation("0x0000 to 0xFFFF")  # not found from there on: drawn again
    return Mutation("0x0000 to 0xFFFF", ((at, new),))


def _page(data: bytes, draw: random.Random) -> int:
    return PAGE * draw.randrange((len(data) + PAGE - 1) // PAGE)


_KINDS: tuple[Callable[[bytes, random.Random], Mutation], ...] = (
    _random_flip,
    _zeroed,
    _swapped,
    _truncated,
    _extended,
    _inverted,
)


class Patient:
    """File that is repeatedly damaged and restored."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, path.read_bytes()
        self.extents = extents(path)
        self.extents.pop("/extents")  # the table is structure to a reader: the seal covers it

    @contextmanager
    def with_damage(self, mutation: Mutation) -> Iterator[None]:
        """Damage the file for the block."""
        with open(self.path, "r+b", buffering=0) as file:
            try:
                for at, new in mutation.patches:
                    os.pwrite(file.fileno(), new, at)
                if mutation.length is not None:
                    os.ftruncate(file.fileno(), mutation.length)
                yield
            finally:
                for at, new in mutation.patches:
                    os.pwrite(file.fileno(), self.data[at : at + len(new)], at)
                if mutation.length is not None:
                    os.ftruncate(file.fileno(), 0)
                    os.pwrite(file.fileno(), self.data, 0)

    def complaint(self, mutation: Mutation) -> tuple[str, str]:
        """Return the reported name (a tensor, structure), and the error in the reader's answer (empty if right)."""
        with self.with_damage(mutation):
            try:
                verify_file(self.path)
            except CheckpointError as error:
                return self._judge(mutation, str(error))
            except BaseException as error:
                return "nothing", f"{mutation.kind}: {type(error).__name__} instead of a refusal: {error}"
        return "nothing", f"{mutation.kind} at {[at for at, _ in mutation.patches]} was loaded without an error"

    def _judge(self, mutation: Mutation, said: str) -> tuple[str, str]:
        hit = {self.owner(at) for at in changed(self.data, mutation)}
        named = next((name for name in self.extents if re.search(rf"{re.escape(name)}(?![\w./])", said)), "structure")
        if str(self.path) not in said:
            return named, f"{mutation.kind}: the file is not named: {said}"
        if hit and "structure" not in hit and named not in hit:
            return named, f"{mutation.kind} in {sorted(hit)}, named was {named}: {said}"
        return named, ""

    def owner(self, offset: int) -> str:
        """Return the dataset that a byte belongs to, or "structure"."""
        for name, (start, count) in self.extents.items():
            if start <= offset < start + count:
                return name
        return "structure"


def changed(data: bytes, mutation: Mutation) -> Iterable[int]:
    """Return the offsets whose bytes a mutation changes."""
    return (at + i for at, new in mutation.patches for i, byte in enumerate(new) if data[at + i] != byte)


def extents(path: Path) -> Extents:
    """Return the location of each dataset, from plain h5py instead of the reader under test."""
    found: Extents = {}

    def note(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.id.get_offset() is not None:
            found[f"/{name}"] = (item.id.get_offset(), item.id.get_storage_size())

    with h5py.File(path, "r") as file:
        file.visititems(note)
    return found
