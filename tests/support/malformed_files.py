"""Malicious checkpoint files: each attack turns a valid file into one that must be refused.

``ATTACKS`` lists them by name: how the file is changed, and what the refusal must say. An attack gets the path of the
valid file and that of another file which it tries to reach; no reader may open that file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
from support.checksums import repair

from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.writer import write_file

VERSIONS = ("v110", "v110")  # as hpctrain writes them: older versions are refused for their age alone
X = "/model/x"

Change = Callable[[h5py.File, Path], object]


class Attack(NamedTuple):
    """One attack: the change of a valid file, and a regular expression that its refusal matches."""

    make: Callable[[Path, Path], object]
    refusal: str


def sound_file(path: Path) -> Path:
    """Write a file of a few kilobytes: three tensors, one of them empty, and attributes of every kind."""
    sources = [
        Source.of("/model/a.weight", np.arange(6, dtype="<f4").reshape(2, 3)),
        Source.of("/model/b", np.array(2.5, dtype="<f8")),
        Source.of("/model/empty", np.empty((0, 4), dtype="<i8")),
    ]
    write_file(path, sources, {"/": {"step": 3, "world_size": 1}, "/train": {"lr": 0.5, "name": "wörk"}})
    return path


def _edit(change: Change) -> Callable[[Path, Path], object]:
    """Return an attack that changes the file by means of HDF5 itself."""

    def make(path: Path, other: Path) -> None:
        with h5py.File(path, "r+", libver=VERSIONS) as file:
            change(file, other)

    return make


def _raw(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], object]:
    return lambda path, other: path.write_bytes(change(path.read_bytes()))


def _typed(dtype: object) -> Change:
    return lambda file, other: file.create_dataset(X, shape=(2,), dtype=dtype)


def _virtual(file: h5py.File, other: Path) -> None:
    source = h5py.VirtualSource(str(other), "/model/b", shape=(4,), maxshape=(None,))
    parts = h5py.VirtualLayout(shape=(4,), dtype="<f8", maxshape=(None,))
    parts[: h5py.h5s.UNLIMITED] = source[: h5py.h5s.UNLIMITED]
    file.create_virtual_dataset(X, parts)


def _created(**settings: object) -> Change:
    def change(file: h5py.File, other: Path) -> None:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        for name, value in settings.items():
            getattr(plist, name)(*value if isinstance(value, tuple) else (value,))
        h5py.h5d.create(file.id, X.encode(), h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((4,)), dcpl=plist)

    return change


def _tensor(torch_dtype: bytes, stored: str = "<f4") -> Change:
    def change(file: h5py.File, other: Path) -> None:
        file[X] = np.zeros(2, dtype=stored)
        file[X].attrs["crc32"] = np.uint32(0)
        file[X].attrs.create("torch_dtype", np.array(torch_dtype), dtype=f"S{len(torch_dtype)}")

    return change


def _two_in_one(path: Path, other: Path) -> None:
    """Make the second tensor refer to the bytes of the first, and repair the checksums."""
    with h5py.File(path, "r") as file:
        first, second = (file[f"/model/{name}"].id.get_offset() for name in ("a.weight", "b"))
    data = bytearray(path.read_bytes().replace(struct.pack("<Q", second), struct.pack("<Q", first)))
    repair(data)
    path.write_bytes(data)


def _foreign(**settings: object) -> Callable[[Path, Path], object]:
    """Return an attack that replaces the file by one of another program."""

    def make(path: Path, other: Path) -> None:
        path.unlink()
        with h5py.File(path, "w", **{"libver": VERSIONS, **settings}) as file:
            file["x"] = 1

    return make


def _json(text: str) -> Callable[[Path, Path], object]:
    """Return an attack that writes a text in place of JSON into an otherwise valid file."""

    def make(path: Path, other: Path) -> None:
        path.unlink()
        write_file(path, [], {"/train": {"states.json": text}})

    return make


NO_TYPE = f"{X} has a type that no checkpoint holds"
NO_ATTRIBUTE = "attribute 'x' of .* has a type that no checkpoint holds"
ATTACKS: dict[str, Attack] = {
    # Other files ----------------------------------------------------------------------------------
    "external_link": Attack(
        _edit(lambda file, other: file.__setitem__(X, h5py.ExternalLink(str(other), "/model/b"))), f"{X} is an external"
    ),
    "external_link_as_group": Attack(
        _edit(lambda file, other: file.__setitem__("/late", h5py.ExternalLink(str(other), "/"))), "/late is an external"
    ),
    "external_storage": Attack(
        _edit(lambda file, other: file.create_dataset(X, shape=(8,), dtype="u1", external=[(str(other), 0, 8)])),
        rf"{X} keeps its bytes in another file \(external storage\)",
    ),
    "external_storage_up": Attack(
        _edit(lambda file, other: file.create_dataset(X, (8,), "u1", external=[(f"../../{other.name}", 0, 8)])),
        rf"{X} keeps its bytes in another file",
    ),
    "virtual": Attack(_edit(_virtual), f"{X} is a virtual dataset"),
    # Links ----------------------------------------------------------------------------------------
    "soft_link": Attack(_edit(lambda file, other: file.__setitem__(X, h5py.SoftLink("/model/b"))), f"{X} is a soft"),
    "soft_link_out": Attack(
        _edit(lambda file, other: file.__setitem__(X, h5py.SoftLink(f"../../{other.name}"))), f"{X} is a soft link"
    ),
    "hard_link": Attack(_edit(lambda file, other: file.__setitem__(X, file["/model/b"])), f"{X} is a second name"),
    "circle": Attack(_edit(lambda file, other: file.__setitem__(X, file["/"])), f"{X} is a second name of another"),
    "circle_below": Attack(
        _edit(lambda file, other: file.create_group("/a/b").__setitem__("c", file["/a"])), "/a/b/c is a second name"
    ),
    "depth": Attack(_edit(lambda file, other: file.create_group("/a" * 100)), "is more than 8 groups deep"),
    "two_in_one": Attack(_two_in_one, "two datasets share the bytes"),
    # How bytes are stored -------------------------------------------------------------------------
    "deflate": Attack(
        _edit(lambda file, other: file.create_dataset(X, data=np.zeros(1000), compression="gzip")), f"{X} passes thro"
    ),
    "filter_bomb": Attack(
        _edit(lambda file, other: file.create_dataset(X, (1 << 24,), "<f8", chunks=(1 << 24,), compression="gzip")),
        f"{X} passes through a filter",
    ),
    "unknown_filter": Attack(
        _edit(_created(set_chunk=((4,),), set_filter=(32000, h5py.h5z.FLAG_OPTIONAL))), f"{X} passes through a filter"
    ),
    "chunked": Attack(_edit(lambda file, other: file.create_dataset(X, data=np.zeros(4), chunks=(2,))), "is stored ch"),
    "compact": Attack(_edit(_created(set_layout=h5py.h5d.COMPACT)), f"{X} is stored compact"),
    "never_written": Attack(_edit(lambda file, other: file.create_dataset(X, (4,), "<f4")), f"{X} was never written"),
    # Sizes ----------------------------------------------------------------------------------------
    "absurd_shape": Attack(
        _edit(lambda file, other: file.create_dataset(X, (1 << 50,), "<f4")), f"{X} claims 4503599627370496 bytes"
    ),
    "overflowing_shape": Attack(
        _edit(lambda file, other: file.create_dataset(X, (1 << 20, 1 << 20, 1 << 18), "u1")),
        f"{X} claims 288230376151711744 bytes",
    ),
    "empty_but_huge": Attack(
        _edit(lambda file, other: file.create_dataset(X, (0, 1 << 31, 1 << 31), "<f4")), f"{X} claims the shape"
    ),
    "no_space": Attack(
        _edit(lambda file, other: file.__setitem__(X, h5py.Empty("f4"))), f"{X} (has no extent|is stored compact)"
    ),
    "truncated": Attack(_raw(lambda data: data[:-100]), "is truncated"),
    "extended": Attack(_raw(lambda data: data + bytes(4096)), "has grown"),
    # Types ----------------------------------------------------------------------------------------
    "compound": Attack(_edit(_typed(np.dtype([("a", "i4"), ("b", "f8")]))), NO_TYPE),
    "big_endian": Attack(_edit(_typed(">f4")), NO_TYPE),
    "sequence": Attack(_edit(_typed(h5py.vlen_dtype("f4"))), NO_TYPE),
    "references": Attack(_edit(_typed(h5py.ref_dtype)), NO_TYPE),
    "region_references": Attack(_edit(_typed(h5py.regionref_dtype)), NO_TYPE),
    "opaque": Attack(_edit(_typed(h5py.opaque_dtype(np.dtype("V8")))), NO_TYPE),
    "enumeration": Attack(_edit(_typed(h5py.enum_dtype({"a": 1}))), NO_TYPE),
    "committed_type": Attack(_edit(lambda file, other: file.__setitem__(X, np.dtype("f8"))), "is neither a group nor"),
    "text_attribute": Attack(_edit(lambda file, other: file.attrs.__setitem__("x", "of any length")), NO_ATTRIBUTE),
    "reference_attribute": Attack(
        _edit(lambda file, other: file.attrs.__setitem__("x", file["/model/b"].ref)), NO_ATTRIBUTE
    ),
    "no_crc": Attack(_edit(lambda file, other: file.__setitem__(X, np.zeros(2, "<f4"))), "lacks the attribute crc32"),
    "unknown_dtype": Attack(_edit(_tensor(b"__import__('os')")), f"{X} has the dtype"),
    "unknown_float64": Attack(_edit(_tensor(b"float6", "<f8")), f"{X} has the dtype 'float6', stored as <f8"),
    "wrong_pair": Attack(_edit(_tensor(b"bfloat16")), f"{X} has the dtype 'bfloat16', stored as <f4"),
    # Names ----------------------------------------------------------------------------------------
    "dot_dot": Attack(_edit(lambda file, other: file["/model"].create_group("..")), r"the name '\.\.' in /model"),
    "terminal_codes": Attack(_edit(lambda file, other: file.create_group("/model/\x1b[2J")), r"the name '\\x1b\[2J'"),
    "no_utf8": Attack(
        _edit(lambda file, other: h5py.h5g.create(file.id, b"/model/\xff\xfe")), "cannot be stored: it is not UTF-8"
    ),
    "long_name": Attack(_edit(lambda file, other: file.create_group("n" * 5000)), "longer than 1024 bytes"),
    # Text -----------------------------------------------------------------------------------------
    "deep_json": Attack(_json("[" * 200_000), "states.json is not valid JSON"),
    "huge_number": Attack(_json("9" * 100_000), "states.json is not valid JSON"),
    # Other kinds of file --------------------------------------------------------------------------
    "user_block": Attack(_foreign(userblock_size=512), "is not an HDF5 file"),
    "old_format": Attack(_foreign(libver=("earliest", "v108")), "is an HDF5 file, but not one that hpctrain wrote"),
    "foreign": Attack(_foreign(), "is an HDF5 file, but not a checkpoint"),
    "pickle": Attack(_raw(lambda data: b"cos\nsystem\n(S'touch pwned'\ntR."), "is not an HDF5 file"),
    "pickle_before": Attack(_raw(lambda data: b"cos\nsystem\n(S'touch x'\ntR.".ljust(512) + data), "is not an HDF5"),
}


def craft(name: str, folder: Path, other: Path) -> Path:
    """Create the crafted file of that name in a folder and return its path."""
    path = sound_file(folder / f"{name}.h5")
    ATTACKS[name].make(path, other)
    return path
