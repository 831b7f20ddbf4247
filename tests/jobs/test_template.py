"""Templates of job scripts: their filling, and the values that each kind of field allows."""

from __future__ import annotations

import subprocess
from itertools import product

import pytest

from hpctrain.errors import UsageError
from hpctrain.jobs.template import (
    KINDS,
    Raw,
    check,
    check_number,
    clock,
    fill,
    package_templates,
    read_template,
    seconds,
)


def test_lines_without_a_value_are_dropped_and_lists_repeat_lines() -> None:
    template = "#!@shell@\n#% for readers: @nothing@\n#X a=@a@\n#X b=@b@\nmodule load @m@\nkeep\n"
    values = {"shell": "/bin/sh", "a": None, "b": 3, "m": ("x", "y z")}
    assert fill(template, values) == "#!/bin/sh\n#X b=3\nmodule load x\nmodule load 'y z'\nkeep\n"


def test_values_are_verbatim_in_comments_and_quoted_elsewhere() -> None:
    assert fill("#X @a@\nrun @a@ @b@\n", {"a": "$x @b@", "b": ["f", "g h", Raw('"$i"')]}) == (
        "#X $x @b@\nrun '$x @b@' f 'g h' \"$i\"\n"
    )


def test_values_with_line_ends_are_refused_in_comments() -> None:
    for end in "\n\r\u2028":
        with pytest.raises(ValueError, match="is not allowed in a comment"):
            fill("#X @a@\n", {"a": f"b{end}touch x"})


def test_quoted_values_survive_the_shell() -> None:
    hostile = ["$(echo no)", "`echo no`", "'; echo no; '", '"', "\\", "a b", "*", "~", "#", "!"]
    script = fill("for word in @words@; do printf '%s\\0' \"$word\"; done\n", {"words": hostile})
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == hostile


@pytest.mark.parametrize("name", ["train", "benchmark", "array"])
@pytest.mark.parametrize("scheduler, marker", [("slurm", "#SBATCH"), ("pbs", "#PBS")])
def test_shipped_templates_are_valid_shell(scheduler: str, marker: str, name: str) -> None:
    text = read_template(scheduler, name)
    assert marker in text and "#%" in text and max(map(len, text.splitlines())) <= 120
    filled_by_hand = text.replace("@cases@", "0) settings=() ;;").replace("#!@shell@", "#!/bin/bash")
    subprocess.run(["bash", "-n"], input=filled_by_hand, text=True, check=True)


def test_the_common_part_of_train_and_array_is_identical() -> None:
    # Each template can be read and used alone; a change in one must reach the other.
    for scheduler in ("slurm", "pbs"):
        train, array = (read_template(scheduler, name).partition("newest()")[2] for name in ("train", "array"))
        assert train.partition("trap - USR1")[0] == array.partition("trap - USR1")[0] and len(train) > 1000


def test_the_shipped_folder_has_templates_and_profiles() -> None:
    assert {entry.name for entry in package_templates().iterdir()} >= {"slurm", "pbs", "profiles"}


GOOD = {
    "job name": ["gpt-tiny", "a", "Run_2.b+c"],
    "name": ["m1234_g", "project_465000001", "user@site"],
    "names": ["gpu", "gpu,cpu"],
    "features": ["gpu&hbm80g", "[rack1|rack2]", "a,b"],
    "nodes": ["n[001-003,7],m5"],
    "memory": ["200G", "64000", "0"],
    "time": ["04:00:00", "1-12:00:00", "720:00:00"],
    "path": ["runs/a", "/scratch/me/run.1", "Müller/läufe", "a@b=c"],
    "image": ["docker://site/image:1.0", "/apps/torch.sif"],
    "module": ["hpctrain/1.0", "PrgEnv-gnu"],
    "version": ["1.0", "0.1.0-foss-2024a", "2.0rc1"],
    "variable": ["A", "_b2"],
    "text": ["", "a b $(c) `d` 'e' \"f\"", "-x"],
    "setting": ["a.b=c d", "train.prompt=$(x)", "a.b="],
    "option": ["--exclusive", "-k doe", "-l filesystems=home:eagle", "--mail-type=END,FAIL"],
    "resource": ["system=polaris", "mem=200gb"],
    "placement": ["scatter", "scatter:excl", "vscatter:shared:group=rack"],
    "interface": ["hsn0,hsn1", "^lo"],
    "address": ["https://example.org/a?b=c#d"],
}
# Characters that end a line in a shell, a scheduler, an editor or str.splitlines, and invisible ones.
INVISIBLE = "\n\r\0\t\x0b\x0c\x1b\x1c\x7f\x85\u2028\u2029\u200b\u202e\ufeff"


def test_every_kind_has_examples() -> None:
    assert GOOD.keys() == KINDS.keys()


def test_allowed_values_pass_unchanged() -> None:
    for kind, values in GOOD.items():
        for value in values:
            assert check("field", value, kind) == value


def test_no_kind_accepts_invisible_characters() -> None:
    for kind, character in product(KINDS, INVISIBLE):
        for good in GOOD[kind]:
            for value in (good + character, character + good, good[:1] + character + good[1:]):
                with pytest.raises(UsageError, match=rf"^the field .*U\+{ord(character):04X}"):
                    check("the field", value, kind)


def test_shell_and_scheduler_syntax_is_refused() -> None:
    hostiles = ("$(touch x)", "`touch x`", "a;b", "a b", "a'b", 'a"b', "a\\b", "a>b", "a<b", "a#b c", "-x", "--wrap=x")
    for kind, hostile in product(KINDS.keys() - {"text", "option", "setting"}, hostiles):
        with pytest.raises(UsageError, match="^the field = "):
            check("the field", hostile, kind)


OPTIONS = ["-x;touch y", "--a b c", "--wrap=a b", "x", "--a=$(b)", "--a='b'", "-N a #b"]
TIMES = "4 04:00 1-12 01:60:00 01:00:60 1:0:0 INFINITE ٠١:٠٠:٠٠".split()  # Slurm reads 04:00 as four minutes


@pytest.mark.parametrize(
    "kind, values, message",
    [
        ("setting", ["-x=1", "--wrap=touch=1"], "begins with -"),
        ("option", OPTIONS, "^field = "),  # a single option is allowed
        ("name", [None, 3, ["a"], b"a"], "expected text"),
        ("time", TIMES, "hours:minutes:seconds"),
    ],
)
def test_values_of_another_form_are_refused(kind: str, values: list[object], message: str) -> None:
    for value in values:
        with pytest.raises(UsageError, match=message):
            check("field", value, kind)


def test_long_values_are_refused_and_not_repeated() -> None:
    for kind in KINDS:
        with pytest.raises(UsageError, match="characters: at most") as caught:
            check("name", "a" * 20_000, kind)
        assert len(str(caught.value)) < 200
    with pytest.raises(UsageError) as caught:
        check("name", "a;" * 100, "name")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [0, 5, True, 1.5, "2", None])
def test_numbers_outside_of_the_range_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match=r"nodes = .*: must be a whole number from 1 to 4"):
        check_number("nodes", value, 1, 4)
    assert check_number("nodes", 4, 1, 4) == 4


@pytest.mark.parametrize(
    "time, number, text",
    [("04:00:00", 14400, "04:00:00"), ("1-12:00:01", 129601, "36:00:01"), ("100:01:00", 360060, "100:01:00")],
)
def test_times_are_parsed_and_written(time: str, number: int, text: str) -> None:
    assert seconds(check("time", time, "time")) == number
    assert clock(number) == text
