"""No damaged file loads: a sample of `make -C benchmarks corruption`, and proof that it would notice a failure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corruption
import pytest
from corruption import LARGER, DamagedFile, Mutation, at_random, changed, flip, large, small

from hpctrain.checkpoint.format.reader import Reader


@pytest.fixture
def damaged(tmp_path: Path) -> DamagedFile:
    return DamagedFile(small(tmp_path / "step_00000003.h5"))


def test_no_flipped_bit_loads(damaged: DamagedFile) -> None:
    """Flip every bit of tensors, superblock and seal, and a sample of the others."""
    bits = 8 * len(damaged.data)
    certain = {8 * at + bit for at in range(48) for bit in range(8)}
    for name in ("/model/a.weight", "/model/b"):
        start, count = damaged.extents[name]
        certain |= set(range(8 * start, 8 * (start + count)))
    numbers = sorted(certain | set(random.Random().sample(range(bits), 700)))
    assert [problem for number in numbers if (problem := damaged.complaint(flip(damaged.data, number))[1])] == []
    assert damaged.path.read_bytes() == damaged.data


@pytest.mark.parametrize("nbytes", LARGER)
def test_no_mutation_of_a_larger_file_loads(tmp_path: Path, nbytes: int) -> None:
    damaged = DamagedFile(large(tmp_path / "step_00000003.h5", nbytes))
    assert nbytes / 2 < len(damaged.data) < 2 * nbytes + 65536
    mutations = list(at_random(damaged.data, 90, random.randrange(1 << 32)))
    assert len({mutation.kind for mutation in mutations}) == 6
    assert [problem for mutation in mutations if (problem := damaged.complaint(mutation)[1])] == []


@pytest.mark.parametrize(
    ("blind", "where"),
    [("_check_crc", "/model/h.0.weight"), ("_check_seal", "structure"), ("_check_manifest", "/manifest")],
)
def test_a_reader_without_checks_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blind: str, where: str
) -> None:
    monkeypatch.setattr(Reader, blind, lambda *_: None)
    damaged = DamagedFile(large(tmp_path / "step_00000003.h5", 64 << 10))  # has unused bytes before each page
    bits = [8 * at + bit for at in range(len(damaged.data)) if damaged.owner(at) == where for bit in range(8)]
    some = [flip(damaged.data, number) for number in random.Random(1).sample(bits, 40)]
    assert any("was loaded without an error" in damaged.complaint(one)[1] for one in some)


def test_a_report_that_names_the_wrong_tensor_is_detected(damaged: DamagedFile) -> None:
    one = flip(damaged.data, 8 * damaged.extents["/model/a.weight"][0])
    assert damaged.complaint(one) == ("/model/a.weight", "")
    damaged.extents["/model/a"] = damaged.extents.pop("/model/a.weight")
    assert "named was structure" in damaged.complaint(one)[1]


def test_a_crash_of_the_reader_does_not_count_as_a_refusal(damaged: DamagedFile) -> None:
    def fail(*_: object) -> None:
        raise KeyError("x")

    assert "KeyError instead of a refusal" in DamagedFile(damaged.path, fail).complaint(Mutation("none"))[1]


def test_mutations_do_what_their_names_say(damaged: DamagedFile) -> None:
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


def test_damage_is_undone(damaged: DamagedFile) -> None:
    for mutation in at_random(damaged.data, 30, 3):
        with damaged.with_damage(mutation):
            assert damaged.path.read_bytes() != damaged.data
        assert damaged.path.read_bytes() == damaged.data


def test_the_benchmark_counts_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mutations", "6", "--bits", "8", "--jobs", "1", "--out", str(tmp_path)]
    args = corruption.parse(words)
    assert corruption.run(args) == 0
    assert "14 damaged files" in capsys.readouterr().out
    result = json.loads((tmp_path / "corruption.json").read_text())
    assert sum(each["times"] for each in result["counts"]) == 14 and result["wrong"] == []

    def submit(*_: object) -> Any:
        raise corruption.BrokenProcessPool

    @contextmanager
    def pool_that_dies(*_: object, **__: object) -> Iterator[Any]:
        yield SimpleNamespace(submit=submit)

    assert corruption.run(args, pool_that_dies) == 1
    assert "a process died while it read a damaged file" in capsys.readouterr().out
