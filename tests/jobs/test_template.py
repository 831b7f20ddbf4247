from __future__ import annotations

import subprocess

import pytest

from hpctrain.jobs.template import Raw, fill, read_template, shipped


def test_lines_without_a_value_fall_away_and_lists_repeat() -> None:
    template = "#!@shell@\n#% for readers: @nothing@\n#X a=@a@\n#X b=@b@\nmodule load @m@\nkeep\n"
    values = {"shell": "/bin/sh", "a": None, "b": 3, "m": ("x", "y z")}
    assert fill(template, values) == "#!/bin/sh\n#X b=3\nmodule load x\nmodule load 'y z'\nkeep\n"


def test_a_value_stands_as_it_is_in_a_comment_and_quoted_elsewhere() -> None:
    assert fill("#X @a@\nrun @a@ @b@\n", {"a": "$x @b@", "b": ["f", "g h", Raw('"$i"')]}) == (
        "#X $x @b@\nrun '$x @b@' f 'g h' \"$i\"\n"
    )


def test_a_comment_cannot_be_left() -> None:
    for end in "\n\r\u2028":
        with pytest.raises(ValueError, match="cannot stand in a comment"):
            fill("#X @a@\n", {"a": f"b{end}touch x"})


def test_the_shell_reads_back_what_was_put_in() -> None:
    hostile = ["$(echo no)", "`echo no`", "'; echo no; '", '"', "\\", "a b", "*", "~", "#", "!"]
    script = fill("for word in @words@; do printf '%s\\0' \"$word\"; done\n", {"words": hostile})
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == hostile


@pytest.mark.parametrize("name", ["train", "benchmark", "array"])
@pytest.mark.parametrize("scheduler, marker", [("slurm", "#SBATCH"), ("pbs", "#PBS")])
def test_templates_come_with_the_package_and_are_shell(scheduler: str, marker: str, name: str) -> None:
    text = read_template(scheduler, name)
    assert marker in text and "#%" in text and max(map(len, text.splitlines())) <= 120
    filled_by_hand = text.replace("@cases@", "0) settings=() ;;").replace("#!@shell@", "#!/bin/bash")
    subprocess.run(["bash", "-n"], input=filled_by_hand, text=True, check=True)


def test_what_train_and_array_have_in_common_is_the_same() -> None:
    # Each template can be read and used alone; a change in one must reach the other.
    for scheduler in ("slurm", "pbs"):
        train, array = (read_template(scheduler, name).partition("newest()")[2] for name in ("train", "array"))
        assert train.partition("trap - USR1")[0] == array.partition("trap - USR1")[0] and len(train) > 1000


def test_the_folder_holds_templates_and_profiles() -> None:
    assert {entry.name for entry in shipped().iterdir()} >= {"slurm", "pbs", "profiles"}
