"""Tar datasets: members as tarfile reads them, from any header format; damaged and changed files are refused."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tar_sets import numbered, samples_in_order, write_tar
from torch.utils.data import DataLoader

from hpctrain.data.shards.files import ShardFiles, find_files
from hpctrain.data.shards.tar import TarDataset
from hpctrain.errors import DataError

CHANCE = np.random.default_rng(0)
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
BLOCK = 512


def _members(longest: int) -> list[tuple[str, bytes]]:
    """Return members with names of up to ``longest`` bytes and contents of many sizes."""
    folders = ["", "a/", "a.b/c/", "ä/", "d" * 90 + "/", *(f"{'e' * 80}/{'f' * 80}/" for _ in range(longest > 150))]
    stems = ["x", "0001", "ß" * 20, *(["g" * (longest - 200)] if longest > 250 else [])]
    sizes = [0, 1, 511, 512, 513, 5000, 40_000, 200_000]
    names = [f"{folder}{stem}{number}" for folder in folders for stem in stems for number in range(2)]
    return [
        (f"{name}.{extension}", CHANCE.bytes(sizes[(3 * number + at) % len(sizes)]))
        for number, name in enumerate(names)
        for at, extension in enumerate(("JPG", "cls", "bin"))
    ]


def _differing(found: Iterable[Any], expected: Iterable[Any]) -> list[int]:
    """Return the places at which two lists of equal length differ: the contents are too long for a report."""
    return [place for place, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]


# Members --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("attributes", [{}, {"mtime": 1234567890.125, "uname": "ü", "uid": 3_000_000}])
def test_samples_are_those_of_tarfile(tmp_path: Path, kind: str, attributes: dict[str, Any]) -> None:
    if kind == "ustar":
        attributes = {key: value for key, value in attributes.items() if key != "uid"}
    path = write_tar(tmp_path / "a.tar", _members(140 if kind == "ustar" else 1200), FORMATS[kind], **attributes)
    plain = samples_in_order(path)
    dataset = TarDataset(path, decode=False)
    assert len(dataset) == len(plain) and not _differing(dataset, plain)
    assert [list(sample) for sample in dataset] == [["__key__", "jpg", "cls", "bin"]] * len(plain)
    order = [*CHANCE.permutation(len(plain)).tolist(), 3, 3, 0]
    assert not _differing(dataset.__getitems__(order), [plain[number] for number in order])
    assert not _differing([dataset[number] for number in order], [plain[number] for number in order])
    assert [dataset.keys(number) for number in range(len(plain))] == [sample["__key__"] for sample in plain]
    assert dataset.extensions == ("jpg", "cls", "bin")
    assert dataset.sizes("bin").tolist() == [len(sample["bin"]) for sample in plain]


@pytest.mark.skipif(shutil.which("tar") is None, reason="no program tar")
@pytest.mark.parametrize("kind", ["v7", "ustar", "gnu", "oldgnu", "posix"])
def test_samples_are_those_that_the_program_tar_stores(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "in" / ("d" * 60)
    folder.mkdir(parents=True)
    long = "n" * (30 if kind == "v7" else 90 if kind == "ustar" else 230)
    contents = {f"{long}{number}.{name}": CHANCE.bytes(37 * number) for number in range(40) for name in ("a", "b")}
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    path = tmp_path / "a.tar"
    subprocess.run(["tar", f"--format={kind}", "--sort=name", "-cf", path, "-C", tmp_path / "in", "."], check=True)
    dataset = TarDataset(path, decode=False)
    assert not _differing(dataset, samples_in_order(path))
    assert {f"{Path(s['__key__']).name}.{name}": s[name] for s in dataset for name in "ab"} == contents


def test_members_are_grouped_as_webdataset_does(tmp_path: Path) -> None:
    names = "a.b/x.jpg a.b/x.Seg.PNG a.b/x2.jpg x.jpg ./x.jpg a/.hidden a.b/._x.jpg noext a/noext.d/y.jpg __meta__ "
    names += "__index__/z.jpg y.jpg y.txt z.tar.gz"
    path = write_tar(tmp_path / "a.tar", [(name, name.encode()) for name in names.split()])
    assert [(sample.pop("__key__"), sample) for sample in TarDataset(path, decode=False)] == [
        ("a.b/x", {"jpg": b"a.b/x.jpg", "seg.png": b"a.b/x.Seg.PNG"}),
        ("a.b/x2", {"jpg": b"a.b/x2.jpg"}),
        ("x", {"jpg": b"x.jpg"}),
        ("./x", {"jpg": b"./x.jpg"}),
        ("a/noext.d/y", {"jpg": b"a/noext.d/y.jpg"}),
        ("y", {"jpg": b"y.jpg", "txt": b"y.txt"}),
        ("z", {"tar.gz": b"z.tar.gz"}),
    ]


def test_values_are_decoded_by_their_extension(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(6).reshape(2, 3))
    members = [("a/1.cls", b"3"), ("a/1.json", b'{"x": 1}'), ("a/1.emb.npy", array.getvalue()), ("a/1.bin", b"\0")]
    (sample,) = TarDataset(write_tar(tmp_path / "a.tar", members))
    assert torch.equal(sample.pop("emb.npy"), torch.arange(6).reshape(2, 3))
    assert sample == {"__key__": "a/1", "cls": 3, "json": {"x": 1}, "bin": b"\0"}


def test_files_may_differ_in_their_extensions(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("0.x", b"a"), ("0.y", b"b")])
    write_tar(tmp_path / "b.tar", [])
    write_tar(tmp_path / "c.tar", [("1.z", b"c"), ("1.y", b"d"), ("1.x", b"e"), ("2.x", b"f")])
    dataset = TarDataset(tmp_path / "{a,b,c}.tar")
    expected = [{"x": b"a", "y": b"b"}, {"z": b"c", "y": b"d", "x": b"e"}, {"x": b"f"}]
    assert list(dataset) == [{"__key__": str(number), **values} for number, values in enumerate(expected)]
    assert list(TarDataset(tmp_path / "{a,b,c}.tar", fields="x"))[1] == {"__key__": "1", "x": b"e"}


def test_a_member_that_does_not_decode_is_named_with_its_place(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.cls", b"1"), ("1.cls", b"one")])
    assert TarDataset(path)[0]["cls"] == 1
    with pytest.raises(DataError, match=r"a.tar: member 1.cls at offset 1536: cannot decode .cls: b'one' is not"):
        TarDataset(path)[1]


def test_offsets_beyond_8_gib_are_read(tmp_path: Path) -> None:
    path, size = tmp_path / "a.tar", 9 * 2**30 + 5
    with path.open("wb") as file:
        info = tarfile.TarInfo("a.bin")
        info.size = size
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.seek(-(-size // BLOCK) * BLOCK, os.SEEK_CUR)
        info = tarfile.TarInfo("b.bin")
        info.size = 3
        file.write(info.tobuf() + b"end".ljust(3 * BLOCK, b"\0"))
    dataset = TarDataset(path)
    assert dataset.sizes("bin").tolist() == [size, 3] and dataset[1] == {"__key__": "b", "bin": b"end"}


# Fields ---------------------------------------------------------------------------------------------------------------


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def test_other_members_are_neither_read_nor_decoded(tmp_path: Path) -> None:
    members = [(f"{n}.{name}", data) for n in range(9) for name, data in (("pkl", b"p" * 300_000), ("cls", b"%d" % n))]
    path = write_tar(tmp_path / "a.tar", members)
    before = _bytes_read()
    dataset = TarDataset(path, fields="cls")
    assert dataset.__getitems__([8, 0]) == [{"__key__": "8", "cls": 8}, {"__key__": "0", "cls": 0}]
    assert _bytes_read() - before < 300_000
    assert dataset.extensions == ("cls",)
    with pytest.raises(DataError, match="member 3.pkl at offset .* is refused, because unpickling executes code"):
        TarDataset(path)[3]
    assert list(TarDataset(path, fields=["CLS", ".pkl"], decode=False)[1]) == ["__key__", "cls", "pkl"]


def test_samples_without_a_field_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", numbered(3))
    write_tar(tmp_path / "b.tar", [*numbered(2), ("x/7.txt", b"")])
    with pytest.raises(DataError, match="b.tar: the sample x/7 has no .cls, as 1 sample of 6; allowed"):
        TarDataset(tmp_path / "*.tar", fields=("txt", "cls"))
    dataset = TarDataset(tmp_path / "*.tar")
    assert dataset[5] == {"__key__": "x/7", "txt": ""} and dataset.sizes("cls").tolist() == [1, 1, 1, 1, 1, 0]
    with pytest.raises(DataError, match="a.tar and 1 more has no member with extension 'png'; it has cls, txt"):
        TarDataset(tmp_path / "*.tar", fields="png")
    with pytest.raises(DataError, match="no member with extension 'png'"):
        dataset.sizes("png")
    for fields in ([], ["cls", "cls"]):
        with pytest.raises(DataError, match="allowed are one or several extensions, each once"):
            TarDataset(tmp_path / "a.tar", fields=fields)


@pytest.mark.parametrize("wrong", [-1, 6, 10**12, 1.5, "a", slice(0, 1), True])
def test_wrong_numbers_are_refused(tmp_path: Path, wrong: Any) -> None:
    dataset = TarDataset(write_tar(tmp_path / "a.tar", numbered(6)))
    for action in (lambda: dataset[wrong], lambda: dataset.__getitems__([0, wrong] if wrong is not True else [wrong])):
        with pytest.raises(DataError, match="samples are numbered 0 to 5|allowed are whole numbers"):
            action()
    assert dataset.__getitems__([]) == []


# Names of files -------------------------------------------------------------------------------------------------------


def test_files_are_found_by_paths_globs_and_braces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = "s-008 s-009 s-010 s-011 t-8 t-9 t-10 a-x b-x a-y b-y {z}".split()
    for name in names:
        Path(name).touch()
    Path("q[1]").touch()
    for pattern, expected in {
        "s-{008..011}": "s-008 s-009 s-010 s-011",
        "s-{008..011..2}": "s-008 s-010",
        "t-{8..10}": "t-8 t-9 t-10",
        "{a,b}-{x,y}": "a-x a-y b-x b-y",
        "{t,s}-*": "t-10 t-8 t-9 s-008 s-009 s-010 s-011",
        "{z}": "{z}",
        "q[1]": "q[1]",
        "?-x": "a-x b-x",
    }.items():
        assert find_files(pattern) == expected.split(), pattern
    assert find_files([Path("t-9"), "t-8", "a-*"]) == ["t-9", "t-8", "a-x", "a-y"]


@pytest.mark.parametrize(
    "files, message",
    [
        ("s-{0..3}.tar", r"2 of 4 files missing: s-2.tar, s-3.tar; correct the name"),
        (["s-0.tar", "pipe:cat x"], "1 of 2 files missing: pipe:cat x; .* URLs and pipes are not"),
        ("no/*.tar", "no file matches no/.*.tar"),
        ([], "no files are named"),
        (["s-0.tar", "s-{0..1}.tar"], "s-0.tar is named twice"),
        ("s-{3..0}.tar", "range {3..0} is empty, descends"),
        ("s-{0..99999999}.tar", "more than 1,000,000 numbers"),
        ("s-{000..999}-{000..999}-{0..9}.tar", "more than 1,000,000 files"),
        ("s-{0,{1,2}}.tar", "braces within braces"),
        (".", "cannot open .: is a directory"),
    ],
)
def test_wrong_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Any, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        write_tar(Path(f"s-{number}.tar"), numbered(1))
    with pytest.raises(DataError, match=message):
        TarDataset(files)


# Damaged files --------------------------------------------------------------------------------------------------------


def test_every_changed_byte_of_a_header_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    whole = write_tar(path, numbered(2)).read_bytes()
    offset = 2 * BLOCK  # the second header
    missed = []
    for at in range(BLOCK):
        damaged = bytearray(whole)
        damaged[offset + at] ^= 0x11
        path.write_bytes(damaged)
        try:
            TarDataset(path)
            missed.append(at)
        except DataError as error:
            assert str(error).startswith(f"{path} is damaged: the header at offset 1024 has a wrong checksum")
    assert missed == [155]  # follows the NUL that ends the checksum


@pytest.mark.parametrize("kind", FORMATS)
def test_every_truncation_is_noticed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.tar"
    name = "d" * (80 if kind == "ustar" else 300)
    members = [(f"{name}.a", b"1" * 700), (f"{name}.b", b""), ("y.a", b"3" * 1500)]
    whole = write_tar(path, members, FORMATS[kind]).read_bytes()
    end = len(whole.rstrip(b"\0"))
    end = -(-end // BLOCK) * BLOCK
    assert len(TarDataset(path)) == 2
    for size in [*range(0, end + BLOCK, 64), *range(BLOCK - 1, end + BLOCK, BLOCK)]:
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match="is truncated"):
            TarDataset(path)
    path.write_bytes(whole[: end + BLOCK])  # one block of zeros follows the members, which are whole
    assert len(TarDataset(path)) == 2


def _header(name: str, kind: bytes = b"0", size: bytes = b"%011o\0" % 0) -> bytes:
    """Return a header with a valid checksum."""
    info = tarfile.TarInfo(name)
    info.type = kind
    header = bytearray(info.tobuf(tarfile.USTAR_FORMAT)[:BLOCK])
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


@pytest.mark.parametrize(
    "contents, message",
    [
        (_header("a.b", size=b"77777777777\0"), "the member at offset 512 has 8589934591 bytes, the file 1536"),
        (_header("a.b", size=b"\xff" * 12), "the member at offset 512 has -1 bytes"),
        (_header("a.b", size=b"\x80" + b"\x7f" * 11), "is truncated or damaged"),
        (_header("a.b", size=b"12x45678901\0"), "the member at offset 512 has -1 bytes"),
        (_header("a.b", b"1"), "a.b at offset 512 is a hard link; allowed are files .* tar --dereference"),
        (_header("a.b", b"2"), "a.b at offset 512 is a symbolic link"),
        (_header("a.b", b"S"), "a.b at offset 512 is a sparse file"),
        (_header("a.b", b"6"), "a.b at offset 512 is a member of type b'6'"),
        (_header("x", b"x", b"%011o\0" % 9) + _padded(b"99 path=x\n"), "the pax header at offset 512 has no valid"),
        (_header("x", b"x", b"%011o\0" % 9) + _padded(b"path=x\n  "), "the pax header at offset 512 has no valid"),
        (_header("x", b"x", b"%011o\0" % 24) + _padded(b"24 GNU.sparse.major=1  \n"), "is sparse; write the tar with"),
        (_header("x", b"x", b"%011o\0" % 11) + _padded(b"11 size=9x\n") + _header("a.b"), "has -1 bytes"),
        (_header("x", b"g", b"%011o\0" % 10) + _padded(b"10 path=x\n"), "names one path or size for all members"),
        (_header("x", b"L", b"%011o\0" % 3) + _padded(b"abc"), "members end at offset 1024 of 2048 without"),
        (_header("a.b") + _header("a.B"), "a.B at offset 1024 occurs twice in its sample"),
        (_header("a.b") + _header("c.b") + _header("a.c"), "a.c at offset 1536 is apart from other members of its"),
        (_header("a.b") + bytes(2 * BLOCK) + _header("b.b"), "data after its end at offset 512, as tars .* cat"),
        (_header("noext"), "a.tar has no samples"),
        (b"", "a.tar has no samples"),
        (b"x" * 512, "is not a tar file"),
        (gzip.compress(_header("a.b") * 9, mtime=0), "is compressed: .*; decompress it with gunzip"),
        (b"BZh9" + bytes(600), "decompress it with bunzip2"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), "decompress it with unzstd"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, contents: bytes, message: str) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(contents + bytes(2 * BLOCK))
    with pytest.raises(DataError, match=message):
        TarDataset(path)


def test_a_key_may_come_again_with_the_same_extensions(tmp_path: Path) -> None:
    dataset = TarDataset(write_tar(tmp_path / "a.tar", [*numbered(2), *numbered(2)]))
    assert [sample["cls"] for sample in dataset] == [0, 1, 0, 1]


def test_pax_records_replace_size_and_name(tmp_path: Path) -> None:
    records = b"13 size=1000\n" + b"23 path=a/" + b"n" * 9 + b".bi\n"
    path = tmp_path / "a.tar"
    contents = _header("g", b"g", b"%011o\0" % 11) + _padded(b"11 a=b=cde\n")
    contents += _header("x", b"x", b"%011o\0" % len(records)) + _padded(records)
    path.write_bytes(contents + _header("short.b") + _padded(b"7" * 1000) + _header("c.bi") + bytes(2 * BLOCK))
    assert list(TarDataset(path)) == [{"__key__": "a/" + "n" * 9, "bi": b"7" * 1000}, {"__key__": "c", "bi": b""}]


# Changed files --------------------------------------------------------------------------------------------------------


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(BLOCK))


def _rewrite(path: Path) -> None:
    time = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes().replace(b"sample", b"SAMPLE"))
    os.utime(path, ns=(time + 1, time + 1))


def _replace(path: Path) -> None:
    write_tar(path.with_suffix(".new"), numbered(5, first=7)).replace(path)


def _cut(path: Path) -> None:
    os.truncate(path, 1024)


@pytest.mark.parametrize("change", [_append, _rewrite, _replace, _cut])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_changed_file_is_refused(tmp_path: Path, change: Callable[[Path], None], is_open: bool) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(5))
    dataset = TarDataset(path)
    if is_open:
        assert dataset[2]["txt"] == "sample 2"
    change(path)
    if is_open and change is _replace:  # the open file is still that of the index
        assert dataset[3]["txt"] == "sample 3"
        dataset = pickle.loads(pickle.dumps(dataset))
    with pytest.raises(DataError, match="a.tar has changed since its index was made"):
        dataset[3]


def test_a_removed_file_is_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(5))
    dataset = TarDataset(path)
    path.unlink()
    with pytest.raises(DataError, match="cannot open .*a.tar: no such file"):
        dataset[0]


def test_staged_copies_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, record = write_tar(tmp_path / "a.tar", numbered(5)), tmp_path / "record.json"
    dataset = TarDataset(path)
    copy = shutil.copy(path, tmp_path / "copy.tar")
    record.write_text('{"data": {"%s": "%s"}}' % (path, copy))
    monkeypatch.setenv("HPCTRAIN_STAGED", str(record))
    for each in (dataset, TarDataset(path)):
        assert each[1]["txt"] == "sample 1"
        assert str(copy) in _open_files(tmp_path)
        del each
    _rewrite(Path(copy))
    with pytest.raises(DataError, match="a.tar has changed"):
        dataset[1]


# Descriptors, processes, threads --------------------------------------------------------------------------------------


def _open_files(folder: Path) -> list[str]:
    found = []
    for handle in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{handle}"))
        except OSError:  # that of the listing
            continue
    return [path for path in found if path.startswith(str(folder))]


class FewOpen(ShardFiles):
    most_open = 4


def _few_open(folder: Path) -> FewOpen:
    paths = [folder / f"{number}.bin" for number in range(20)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 5000)
    return FewOpen(list(map(str, paths)), [5000] * 20, [path.stat().st_mtime_ns for path in paths])


def _read(files: ShardFiles, numbers: list[int], offset: int = 17, size: int = 100) -> list[bytes]:
    count = len(numbers)
    return files.read(np.asarray(numbers), np.full(count, offset), np.full(count, size))


def test_few_files_are_open_and_none_after_the_dataset(tmp_path: Path) -> None:
    files = _few_open(tmp_path)
    for _ in range(3):
        order = CHANCE.permutation(20).tolist()
        assert _read(files, order) == [bytes([number]) * 100 for number in order]
        assert len(_open_files(tmp_path)) == 4
    copy = pickle.loads(pickle.dumps(files))
    assert len(_open_files(tmp_path)) == 4
    assert _read(copy, [3]) == [b"\3" * 100] and len(_open_files(tmp_path)) == 5
    del files, copy
    assert not _open_files(tmp_path)


def test_threads_never_read_another_file(tmp_path: Path) -> None:
    files, wrong = _few_open(tmp_path), list[Any]()

    def work(seed: int) -> None:
        chance = np.random.default_rng(seed)
        for _ in range(150):
            order = chance.integers(0, 20, 8).tolist()
            if _read(files, order) != [bytes([number]) * 100 for number in order]:
                wrong.append(order)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(_open_files(tmp_path)) <= 8


def test_close_parts_are_read_at_once_and_cut_correctly(tmp_path: Path) -> None:
    data = CHANCE.bytes(3 << 20)
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    files = ShardFiles([str(path)], [len(data)], [path.stat().st_mtime_ns])
    for largest in (10, 3000, 200_000):
        offsets = CHANCE.integers(0, len(data) - largest, 300)
        sizes = CHANCE.integers(0, largest, 300)
        found = files.read(np.zeros(300, np.int64), offsets, sizes)
        assert not _differing(found, [data[offset : offset + size] for offset, size in zip(offsets, sizes)])
    with pytest.raises(DataError, match="a.bin is truncated: it has no 11 bytes at offset 3145718"):
        files.read(np.zeros(1, np.int64), np.asarray([len(data) - 10]), np.asarray([11]))


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_data_loader_return_the_same(tmp_path: Path, workers: int) -> None:
    for number in range(3):
        write_tar(tmp_path / f"{number}.tar", numbered(10, first=10 * number))
    dataset = TarDataset(tmp_path / "{0..2}.tar")
    assert dataset[0]["cls"] == 0  # with a file that is open before the workers are forked
    loader: Any = DataLoader(dataset, batch_size=7, num_workers=workers)  # type: ignore[arg-type]
    batches = list(loader)
    assert torch.cat([batch["cls"] for batch in batches]).tolist() == list(range(30))
    assert sum((batch["txt"] for batch in batches), []) == [f"sample {number}" for number in range(30)]
    assert sum((batch["__key__"] for batch in batches), [])[29] == "00029"


# Ranks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_ranks_divide_the_files_and_have_the_same_index(comm: Any, shared_tmp_path: Path) -> None:
    if comm.rank == 0:
        for number in range(5):
            write_tar(shared_tmp_path / f"{number}.tar", numbered(200 + number, first=1000 * number))
    comm.barrier()
    before = _bytes_read()
    dataset = TarDataset(shared_tmp_path / "*.tar", comm=comm)
    read = _bytes_read() - before
    assert read < 0.8 * sum(path.stat().st_size for path in shared_tmp_path.glob("*.tar"))
    alone = TarDataset(shared_tmp_path / "*.tar")
    assert list(dataset) == list(alone) and len(dataset) == 1010


@pytest.mark.ranks(2, 3)
def test_an_error_of_one_rank_is_raised_by_all(comm: Any, shared_tmp_path: Path) -> None:
    if comm.rank == 0:
        for number in range(3):
            write_tar(shared_tmp_path / f"{number}.tar", numbered(2))
        os.truncate(shared_tmp_path / "1.tar", 1024)
    comm.barrier()
    with pytest.raises(DataError, match="rank 1: .*1.tar is truncated") as caught:
        TarDataset(shared_tmp_path / "*.tar", comm=comm)
    assert caught.value.everywhere
    with pytest.raises(DataError, match="1 of 4 files missing: .*3.tar"):
        TarDataset(shared_tmp_path / "{0..3}.tar", comm=comm)
