from __future__ import annotations

import subprocess

import pytest

from hpctrain.jobs.template import Raw, fill, package_templates, read_template


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
