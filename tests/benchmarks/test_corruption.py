"""No damaged file loads: a sample of `make -C benchmarks corruption`, and proof that it would notice a failure."""

from __future__ import annotations

import json
import random
from pathlib import Path

import corruption
import harness
import pytest
from corruption import LARGER, large, small
from damage import Mutation, Patient, at_random, every_bit

from hpctrain.checkpoint.format.reader import Reader


@pytest.fixture
def patient(tmp_path: Path) -> Patient:
    return Patient(small(tmp_path / "step_00000003.h5"))


def test_no_flipped_bit_loads(patient: Patient) -> None:
    """Flip every bit of tensors, superblock and seal, and a sample of the others."""
    flips = list(every_bit(patient.data))
    assert len(flips) == 8 * len(patient.data)
    certain = {8 * at + bit for at in range(48) for bit in range(8)}
    for name in ("/model/a.weight", "/model/b"):
        start, count = patient.extents[name]
        certain |= set(range(8 * start, 8 * (start + count)))
    numbers = sorted(certain | set(random.Random().sample(range(len(flips)), 700)))
    assert [problem for number in numbers if (problem := patient.complaint(flips[number])[1])] == []
    assert patient.path.read_bytes() == patient.data


@pytest.mark.parametrize("nbytes", LARGER)
def test_no_mutation_of_a_larger_file_loads(tmp_path: Path, nbytes: int) -> None:
    patient = Patient(large(tmp_path / "step_00000003.h5", nbytes))
    assert nbytes / 2 < len(patient.data) < 2 * nbytes + 65536
    mutations = list(at_random(patient.data, 90, random.randrange(1 << 32)))
    assert len({mutation.kind for mutation in mutations}) == 6
    assert [problem for mutation in mutations if (problem := patient.complaint(mutation)[1])] == []


@pytest.mark.parametrize(
    ("blind", "where"),
    [("_check_crc", "/model/h.0.weight"), ("_check_seal", "structure"), ("_check_manifest", "/manifest")],
)
def test_a_reader_without_checks_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blind: str, where: str
) -> None:
    monkeypatch.setattr(Reader, blind, lambda *_: None)
    patient = Patient(large(tmp_path / "step_00000003.h5", 64 << 10))  # has unused bytes before each page
    bits = [(at, bit) for at in range(len(patient.data)) if patient.owner(at) == where for bit in range(8)]
    some = [
        Mutation("flipped bit", ((at, bytes([patient.data[at] ^ 1 << bit])),))
        for at, bit in random.Random(1).sample(bits, 40)
    ]
    assert any("was loaded without an error" in patient.complaint(flip)[1] for flip in some)


def test_the_benchmark_counts_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corruption, "write", lambda name, content: harness.write(name, content, tmp_path))
    assert corruption.main(["--mutations", "6", "--bits", "8", "--jobs", "1"]) == 0
    assert "14 damaged files" in capsys.readouterr().out
    result = json.loads((tmp_path / "corruption.json").read_text())
    assert sum(each["times"] for each in result["counts"]) == 14 and result["wrong"] == []
    monkeypatch.setattr(corruption, "ProcessPoolExecutor", _OneThatDies)
    assert corruption.main(["--mutations", "6", "--bits", "8"]) == 1
    assert "a process died while it read a damaged file" in capsys.readouterr().out


class _OneThatDies:
    """Pool whose process was killed."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> _OneThatDies:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, *_: object) -> object:
        raise corruption.BrokenProcessPool()
