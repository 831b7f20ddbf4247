from __future__ import annotations

import random
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from hpctrain.errors import SettingsError
from hpctrain.settings import assign, build, check, flatten, read_toml, section_of, to_toml, to_tree, unknown


@dataclass(frozen=True)
class Data:
    files: tuple[str, ...] = ()
    fraction: float = 0.1
    workers: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self, "data")


@dataclass(frozen=True)
class Run:
    folder: str = "runs/a"
    steps: int = 10
    resume: bool = True
    mode: Literal["fast", "exact"] = "fast"
    data: Data = field(default_factory=Data)

    def __post_init__(self) -> None:
        check(self, "")
        if self.steps < 1:
            raise SettingsError(f"setting steps = {self.steps}: at least 1")


def test_a_tree_is_flattened_to_dotted_names() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": "x", "e": {}}) == {"a.b.c": 1, "d": "x"}


def test_a_file_becomes_a_dataclass(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('folder = "runs/b"\nresume = false\n[data]\nfiles = ["a.h5", "b.h5"]\nworkers = 2\n')
    assert build(Run, read_toml(path)) == Run("runs/b", resume=False, data=Data(("a.h5", "b.h5"), workers=2))


@pytest.mark.parametrize(
    "content, reason",
    [
        (None, "No such file"),
        (b"\xff\xfe", "not UTF-8"),
        (b"a = ", "not valid TOML"),
        (b"a = 1\na = 2\n", "not valid TOML"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=f"{path}.*{reason}"):
        read_toml(path)


@pytest.mark.parametrize(
    "assignment, tree",
    [
        ("steps=5", {"steps": 5}),
        ("data.fraction = 0.5", {"data": {"fraction": 0.5}}),
        ("resume=false", {"resume": False}),
        ("folder=runs/b", {"folder": "runs/b"}),
        ('folder="5"', {"folder": "5"}),
        ('data.files=["a", "b"]', {"data": {"files": ["a", "b"]}}),
        ("folder=a=b", {"folder": "a=b"}),
        ("folder=", {"folder": ""}),
    ],
)
def test_assignments_are_parsed(assignment: str, tree: dict[str, Any]) -> None:
    found: dict[str, Any] = {}
    assign(found, assignment)
    assert found == tree


def test_an_assignment_overrides_the_file_and_keeps_the_rest() -> None:
    tree: dict[str, Any] = {"steps": 1, "data": {"fraction": 0.2, "workers": 3}}
    assign(tree, "data.workers=4")
    assert tree == {"steps": 1, "data": {"fraction": 0.2, "workers": 4}}


@pytest.mark.parametrize("assignment", ["steps", "=5", "data.=5", ".steps=5", ""])
def test_a_malformed_assignment_is_refused(assignment: str) -> None:
    with pytest.raises(SettingsError, match="write it as section.key=value"):
        assign({}, assignment)


def test_an_assignment_into_a_value_is_refused() -> None:
    with pytest.raises(SettingsError, match="cannot set steps.x: steps is a value"):
        assign({"steps": 5}, "steps.x=1")


def test_an_unknown_setting_lists_known_names_and_a_suggestion() -> None:
    with pytest.raises(SettingsError) as caught:
        build(Run, {"data": {"fractoin": 0.5}})
    assert str(caught.value) == (
        "unknown setting data.fractoin: did you mean fraction? known are files, fraction, options, workers"
    )


def test_an_unknown_name_without_a_similar_one_has_no_suggestion() -> None:
    assert unknown("verb", "zzz", ["train", "plan"]) == "unknown verb: known are plan, train"


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"steps": "ten"}, "setting steps = 'ten': expected a whole number"),
        ({"steps": 1.5}, "setting steps = 1.5: expected a whole number"),
        ({"steps": True}, "setting steps = True: expected a whole number"),
        ({"resume": 1}, "setting resume = 1: expected true or false"),
        ({"folder": 3}, "setting folder = 3: expected text"),
        ({"folder": None}, "setting folder = None: expected text"),
        ({"mode": "slow"}, "setting mode = 'slow': allowed are fast, exact"),
        ({"mode": "FAST"}, "setting mode = 'FAST': allowed are fast, exact; did you mean 'fast'?"),
        ({"mode": "exakt"}, "setting mode = 'exakt': allowed are fast, exact; did you mean 'exact'?"),
        ({"mode": ["fast"]}, "setting mode = ['fast']: allowed are fast, exact"),
        ({"data": 3}, "setting data is a section, not the value 3"),
        ({"data": {"fraction": "x"}}, "setting data.fraction = 'x': expected a number"),
        ({"data": {"files": 3}}, "setting data.files = 3: expected a list"),
        ({"data": {"files": ["a", 3]}}, "setting data.files = 3: expected text"),
        ({"data": {"options": 3}}, "setting data.options = 3: expected a table"),
        ({"steps": 0}, "setting steps = 0: at least 1"),
    ],
)
def test_wrong_values_of_files_and_programs_are_named(tree: dict[str, Any], message: str) -> None:
    for make in (lambda: Run(**tree), lambda: build(Run, tree)):
        with pytest.raises(SettingsError) as caught:
            make()
        assert str(caught.value) == message


def test_values_from_python_are_converted_to_the_types_of_fields() -> None:
    made = Run(
        folder=Path("runs/b"),  # type: ignore[arg-type]
        steps=np.int64(3),  # type: ignore[arg-type]
        data=Data("one.h5", np.float32(0.5), workers=None),  # type: ignore[arg-type]
    )
    assert made == Run("runs/b", 3, data=Data(("one.h5",), 0.5))
    assert [type(value) for value in (made.folder, made.steps, made.data.fraction)] == [str, int, float]
    assert Run(data={"fraction": 1}).data == Data(fraction=1.0)  # type: ignore[arg-type]


def test_sections_may_be_given_by_a_program() -> None:
    assert section_of(Data, None, "data") == Data()
    assert section_of(Data, {"fraction": 0.5}, "data") == Data(fraction=0.5)
    own = Data(workers=3)
    assert section_of(Data, own, "data") is own
    with pytest.raises(SettingsError, match="unknown setting data.fractoin: did you mean fraction?"):
        section_of(Data, {"fractoin": 0.5}, "data")
    with pytest.raises(SettingsError, match=r"^data = 3: allowed are Data, a dict of its fields, or None$"):
        section_of(Data, 3, "data")


def test_convenient_forms_are_accepted() -> None:
    made = build(Run, {"data": {"files": "one.h5", "fraction": 1, "workers": 2}})
    assert made.data == Data(("one.h5",), 1.0, 2) and isinstance(made.data.fraction, float)


def test_settings_survive_a_round_trip_through_a_file(tmp_path: Path) -> None:
    before = Run(folder='a "b"\\\n\tc\x00é', data=Data(("x", "y"), 1e-9, None, {"deep er": {"k": [1, 2.5, "t", True]}}))
    path = tmp_path / "config.toml"
    path.write_text(to_toml(to_tree(before)), encoding="utf-8")
    assert build(Run, read_toml(path)) == before


KEYS = ["plain", "a-b_c", "dotted.key", "spaced key", "quote\"", "é", ""]


def random_tree(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(7 if depth < 3 else 4)
    if kind == 0:
        return chance.choice([True, False, chance.randint(-(10**12), 10**12)])
    if kind == 1:
        return chance.choice([chance.gauss(0, 1) * 10 ** chance.randint(-30, 30), 1e300, 0.0])
    if kind in (2, 3):
        return "".join(chance.choice("a.\"'\\\n\r\t\x00\x7f\u2028é #=[]🙂") for _ in range(chance.randint(0, 6)))
    if kind == 4:
        return [random_tree(chance, 3) for _ in range(chance.randint(0, 3))]
    return {f"{chance.choice(KEYS)}{n}": random_tree(chance, depth + 1) for n in range(chance.randint(0, 3))}


@pytest.mark.parametrize("seed", range(200))
def test_toml_reads_back_unchanged(seed: int) -> None:
    chance = random.Random(seed)
    tree = {f"key{n}": random_tree(chance) for n in range(4)}
    assert tomllib.loads(to_toml(tree)) == tree


@pytest.mark.limit(10)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a" + ".b" * 80_000 + " = 1", "a key has more than 32 parts"),
        ("[a" + ".b" * 80_000 + "]", "a key has more than 32 parts"),
        ("x = {a" + " . b" * 40_000 + " = 1}", "a key has more than 32 parts"),
        ("x = 'a'\n'y'" + ".'z'" * 40_000 + " = 1", "a key has more than 32 parts"),
        ("# x\n" * 100_000, "it has more than 262144 bytes"),
        ("x = " + "{a = " * 5_000, "it is nested too deeply"),
        ("x = " + "9" * 5_000, "it has a number with too many digits"),
    ],
)
def test_small_files_that_are_expensive_to_parse_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(SettingsError, match=reason) as found:
        read_toml(tmp_path / "x.toml")
    assert len(str(found.value)) < 300


def test_dots_in_strings_and_numbers_do_not_count_as_keys(tmp_path: Path) -> None:
    long = ".".join("abc" for _ in range(100))
    text = f'a = "{long}"  # {long}\nb = \'{long}\'\nc = """{long}\n{long}"""\nd = [{", ".join(["1.5"] * 100)}]\n'
    (tmp_path / "x.toml").write_text(text)
    assert read_toml(tmp_path / "x.toml")["c"] == f"{long}\n{long}"
