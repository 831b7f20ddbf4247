"""Crafted files: they are refused, and inspecting them opens no other file and runs no code from them."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support.checksums import lookup3, object_headers, repair
from support.malformed_files import ATTACKS, VERSIONS, craft, sound_file

from hpctrain.checkpoint.format import structure
from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.checkpoint.tools import convert, inspect
from hpctrain.errors import CheckpointError

# Audit events (PEP 578) of a program that does more than read the file: run code, load code, use the network.
EVENTS = ("pickle.", "marshal.", "exec", "compile", "import", "os.", "subprocess.", "ctypes.", "socket.", "shutil.")

CHILD = """
import json, os, resource, sys
from hpctrain.checkpoint.tools import inspect
from hpctrain.errors import CheckpointError

try:
    inspect.show(sys.argv[1])  # all that is imported late is imported now
finally:
    found, events, busy = {}, [], False
    EVENTS = tuple(sys.argv[2].split())

def hook(event, arguments):
    if busy and (event == "open" or event.startswith(EVENTS)):
        events.append([event, str(arguments[0]) if arguments else ""])

sys.addaudithook(hook)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[3:]:
    try:
        os.stat(path + ".now")  # a mark in the record of system calls
    except OSError:
        pass
    busy = True
    try:
        inspect.show(path)
        said = "nothing"
    except CheckpointError as error:
        said = str(error)
    busy = False
    found[path] = {"said": said, "events": events[:]}
    events.clear()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"found": found, "grown": grown}))
"""


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Inspect every crafted file in one process, and return its messages and the files that it opened meanwhile."""
    folder = tmp_path_factory.mktemp("crafted")
    secret = sound_file(folder / "secret.h5")
    paths = [craft(name, folder, secret) for name in ATTACKS]
    command = [sys.executable, "-c", CHILD, sound_file(folder / "sound.h5"), " ".join(EVENTS), *paths]
    record = folder / "calls"
    if _strace():
        command = ["strace", "-f", "-e", "trace=file", "-o", record, *command]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    answer["calls"] = _calls(record.read_text()) if record.exists() else {}
    answer["folder"] = folder
    return answer


def _strace() -> bool:
    """Return whether strace can record system calls here; HDF5's own opens are visible only there."""
    if not shutil.which("strace"):
        return False
    return subprocess.run(["strace", "-f", "-e", "trace=file", "true"], capture_output=True).returncode == 0


def _calls(record: str) -> dict[str, set[str]]:
    """Return the files that were opened after each mark."""
    calls: dict[str, set[str]] = {}
    current: set[str] = set()
    for line in record.splitlines():
        mark = re.search(r'"([^"]+)\.now"', line)
        if mark:
            current = calls.setdefault(mark[1], set())
        opened = re.search(r'open(?:at)?\((?:[^"]*)"([^"]*)"', line)
        if opened and "+++" not in line:
            current.add(opened[1])
    return calls


@pytest.mark.parametrize("name", ATTACKS)
def test_a_crafted_file_is_refused_by_name(looked: dict[str, Any], name: str) -> None:
    path = str(looked["folder"] / f"{name}.h5")
    said = looked["found"][path]["said"]
    assert re.search(ATTACKS[name].refusal, said), said
    assert path in said and len(said) < 1000 and said.isprintable()


@pytest.mark.parametrize("name", ATTACKS)
def test_only_the_file_is_opened_and_no_code_is_run(looked: dict[str, Any], name: str) -> None:
    path = str(looked["folder"] / f"{name}.h5")
    assert {tuple(event) for event in looked["found"][path]["events"]} == {("open", path)}


@pytest.mark.skipif(not _strace(), reason="strace is not here or not allowed")
@pytest.mark.parametrize("name", ATTACKS)
def test_hdf5_opens_no_other_file(looked: dict[str, Any], name: str) -> None:
    path = str(looked["folder"] / f"{name}.h5")
    opened = looked["calls"][path]
    if list(ATTACKS)[-1] == name:  # what the interpreter does at exit follows the last mark
        opened = {each for each in opened if each.startswith(str(looked["folder"]))}
    assert opened == {path}


def test_memory_stays_bounded(looked: dict[str, Any]) -> None:
    assert looked["grown"] < 64 << 10, "KiB over all crafted files"


def test_strace_records_which_files_are_opened(tmp_path: Path) -> None:
    """Plain h5py follows an external link, and the record shows it: an empty record is therefore meaningful."""
    if not _strace():
        pytest.skip("strace is not here or not allowed")
    secret = sound_file(tmp_path / "secret.h5")
    path = craft("external_link", tmp_path, secret)
    code = "import h5py, sys; h5py.File(sys.argv[1])['/model/x'][()]"
    record = tmp_path / "calls"
    command = ["strace", "-f", "-e", "trace=file", "-o", record, sys.executable, "-c", code, path]
    subprocess.run(command, check=True, capture_output=True)
    assert f'"{secret}"' in record.read_text()


def test_the_corpus_is_large_and_made_from_a_valid_file(tmp_path: Path) -> None:
    assert len(ATTACKS) >= 16
    with Reader(sound_file(tmp_path / "s.h5")) as reader:
        reader.verify()


def test_structure_of_unbounded_size_is_refused(tmp_path: Path) -> None:
    """A sparse file may be terabytes large and pass every comparison with its size."""
    for name, groups in (
        ("many", {f"/train/{number}": {} for number in range(300)}),
        ("large", {"/train": {"x": "x" * 120_000}}),
        ("values", {"/train": {f"{number}": 1 for number in range(300)}}),
    ):
        path = tmp_path / f"{name}.h5"
        write_file(path, [], groups)
        with h5py.File(path) as file, pytest.raises(CheckpointError, match="besides the tensors|structure may take"):
            structure.walk(file, name, path.stat().st_size, most=100_000)


def test_a_sparse_file_of_a_terabyte_is_inspected_in_little_memory(tmp_path: Path) -> None:
    path = sound_file(tmp_path / "s.h5")
    with h5py.File(path, "r+", libver=VERSIONS) as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((1 << 37,))
        dataset = h5py.Dataset(h5py.h5d.create(file.id, b"/train/loss", h5py.h5t.IEEE_F64LE, space, dcpl=plist))
        dataset.attrs["crc32"] = np.uint32(0)
        dataset.attrs.create("torch_dtype", np.array(b"float64"), dtype="S7")
    assert path.stat().st_size > 1 << 40
    with pytest.raises(CheckpointError, match="dataset /train/loss was added"):
        inspect.show(path)


def test_a_pickle_in_a_value_is_text(tmp_path: Path) -> None:
    evil = "cos\nsystem\n(S'touch pwned'\ntR."
    write_file(tmp_path / "p.h5", [Source.of("/model/w", np.frombuffer(evil.encode(), "u1"))], {"/train": {"x": evil}})
    assert inspect.show(tmp_path / "p.h5").train == {"x": evil}


def test_the_package_imports_no_unpickler() -> None:
    sources = Path(structure.__file__).parents[1].rglob("*.py")
    bad = re.compile(r"^\s*(import|from) (dill|cloudpickle|joblib|marshal|shelve|pickle)|allow_pickle=True", re.M)
    # convert.py catches pickle's error by name; it loads with torch's own reader of weights.
    assert [path.name for path in sources if bad.search(path.read_text())] == ["convert.py"]
    assert "pickle.load" not in Path(convert.__file__).read_text()
    assert re.findall(r"torch\.load\(.*\)", Path(convert.__file__).read_text()) == [
        'torch.load(file, map_location="cpu", weights_only=True)'
    ]


def test_checksums_of_the_corpus_equal_those_of_hdf5(tmp_path: Path) -> None:
    """With wrong checksums the attacks that repair checksums would test nothing."""
    data = bytearray(sound_file(tmp_path / "s.h5").read_bytes())
    headers = object_headers(bytes(data))
    assert len(headers) >= 6
    for start, end in headers:
        assert lookup3(bytes(data[start:end])) == int.from_bytes(data[end : end + 4], "little")
    repaired = bytearray(data)
    repair(repaired)
    assert repaired == data


def test_altered_structure_with_valid_checksums_is_refused(tmp_path: Path) -> None:
    """Bytes of the object headers are altered at random and all checksums repaired, so that HDF5 accepts them."""
    path, draw = sound_file(tmp_path / "s.h5"), random.Random()
    good = path.read_bytes()
    headers = object_headers(good)
    for _ in range(300):
        data = bytearray(good)
        start, end = draw.choice(headers)
        at = draw.randrange(start + 8, end)
        data[at] = (data[at] + draw.choice((1, 127, 128, 255, draw.randrange(1, 256)))) % 256
        repair(data, headers)  # at the original offsets: an altered length would point outside the file
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            inspect.show(path)
