"""Damage of files: mutations match their names, are judged correctly, and are undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import damage
import pytest
from corruption import small
from damage import Mutation, Patient, at_random, changed


@pytest.fixture
def patient(tmp_path: Path) -> Patient:
    return Patient(small(tmp_path / "step_00000003.h5"))


def test_a_report_that_names_the_wrong_tensor_is_detected(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    start = patient.extents["/model/a.weight"][0]
    flip = Mutation("flipped bit", ((start, bytes([patient.data[start] ^ 1])),))
    assert patient.complaint(flip) == ("/model/a.weight", "")
    patient.extents["/model/a"] = patient.extents.pop("/model/a.weight")
    assert "named was structure" in patient.complaint(flip)[1]


def test_a_crash_of_the_reader_does_not_count_as_a_refusal(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(damage, "verify_file", fail)
    assert "KeyError instead of a refusal" in patient.complaint(Mutation("none"))[1]


def test_mutations_do_what_their_names_say(patient: Patient) -> None:
    data = bytes(range(256)) * 40 + b"\0\0\xff\xff"
    checks: dict[str, Callable[[Mutation], bool]] = {
        "flipped bit": lambda m: len(list(changed(data, m))) == 1,
        "zeroed page": lambda m: not any(m.patches[0][1]) and m.patches[0][0] % 4096 == 0,
        "swapped pages": lambda m: {data[at : at + len(new)] for at, new in m.patches} == {new for _, new in m.patches},
        "truncation": lambda m: m.length is not None and m.length < len(data),
        "extension": lambda m: m.length is not None and m.length > len(data),
        "0x0000 to 0xFFFF": lambda m: m.patches[0][1] in (b"\0\0", b"\xff\xff"),
    }
    mutations = list(at_random(data * 3, 60, 2))
    assert {mutation.kind for mutation in mutations} == set(checks)
    for mutation in at_random(data, 60, 2):
        assert checks[mutation.kind](mutation), mutation
        assert mutation.length is not None or list(changed(data, mutation))


def test_damage_is_undone(patient: Patient) -> None:
    for mutation in at_random(patient.data, 30, 3):
        with patient.with_damage(mutation):
            assert patient.path.read_bytes() != patient.data
        assert patient.path.read_bytes() == patient.data
