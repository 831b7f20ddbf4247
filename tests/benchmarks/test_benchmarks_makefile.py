"""Makefile of the benchmarks: targets that it lists, programs that it starts, calls that it refuses."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest
from benchmark_helpers import FOLDER, jobs_of_make, make
from checkpoint import parse as parse_checkpoint
from communication import parse

OPERATIONS = ("pingpong", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "overlap")


def test_help_lists_every_benchmark_and_variable() -> None:
    text = (FOLDER / "Makefile").read_text()
    printed = make("help").stdout
    named = set(re.findall(r"^  make (\S+) +[A-Za-z]", printed, re.M))
    assert named >= {*OPERATIONS, "ddp-step", "startup", "checkpoint", "corruption", "compare"}
    assert set(re.findall(r"^([A-Z]+) +\?=", text, re.M)) == set(re.findall(r"^  ([A-Z]+) += ", printed, re.M))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_variables_become_valid_options_of_the_program(operation: str) -> None:
    variables = ["NP=3", "SIZES=4,64K", "ROUNDS=5", "DEVICE=cuda", "DTYPE=bfloat16", "ALGORITHMS=auto,ring"]
    words = jobs_of_make(operation, *variables, "WITHOUT=gloo,hpctrain outside", "MPI=openmpi")[-1]
    assert words[:2] == ["3", "benchmarks/communication.py"]
    args = parse(words[2:])
    assert (args.operation, args.sizes, args.rounds, args.device) == (operation, [4, 65536], 5, "cuda")
    assert (args.dtype, args.algorithms) == ("bfloat16", ["auto", "ring"])
    assert args.without == ["gloo", "hpctrain outside"]


def test_checkpoint_first_writes_on_other_rank_counts_and_then_measures(tmp_path: Path) -> None:
    variables = ["NP=3", "SIZE=16MiB", "ROUNDS=5", "WITHOUT=torch.save,torch DCP", f"FOLDER={tmp_path}"]
    *before, last = jobs_of_make("checkpoint", *variables)
    assert [line[0] for line in before] == ["1", "2", "4"] and last[0] == "3"
    folders = set()
    for line in (*before, last):
        assert line[1] == "benchmarks/checkpoint.py"
        args = parse_checkpoint(line[2:])
        assert (args.size, args.only_write) == (16 * 2**20, line is not last)
        folders.add(args.folder)
    assert (args.rounds, args.without) == (5, ["torch.save", "torch DCP"])
    (folder,) = folders
    assert folder.parent == tmp_path and not folder.exists()  # deleted again


PROGRAMS = {
    "fsdp-step": "fsdp_step",
    "ddp-step": "ddp_step",
    "plan": "planning",
    **dict.fromkeys(OPERATIONS, "communication"),
}


@pytest.mark.parametrize("target", sorted(set(re.findall(r"^([a-z_-]+): ##", (FOLDER / "Makefile").read_text(), re.M))))
def test_every_benchmark_takes_the_folder_of_its_results(target: str, tmp_path: Path) -> None:
    if target in ("help", "compare"):
        return
    program, *options = jobs_of_make(target, f"OUT={tmp_path}")[-1][1:]
    assert program == f"benchmarks/{PROGRAMS.get(target, target)}.py"
    module = importlib.import_module(Path(program).stem)
    assert module.parse(options).out == tmp_path
    assert module.parse([word for word in options if word not in ("--out", str(tmp_path))]).out == FOLDER / "results"


def test_a_relative_folder_begins_where_the_command_was_typed(tmp_path: Path) -> None:
    words = jobs_of_make("guard", "OUT=my folder")[-1]
    assert words[2:] == ["--out", f"{os.environ['PWD']}/my folder"]


def test_compare_needs_two_results() -> None:
    done = make("compare", "A=old.json")
    assert done.returncode == 2
    assert "make -C benchmarks compare A=old.json B=new.json" in done.stdout


def test_make_collects_every_file_with_benchmark_tests() -> None:
    """make collects only these files, because importing all of them takes long."""
    root = FOLDER.parent
    found = re.search(r"^\t\$\(PYTEST\) (.*) -m benchmark$", (root / "Makefile").read_text(), re.M)
    assert found
    places = [root / word for word in found[1].split()]
    marked = [path for path in root.glob("tests/**/test_*.py") if "pytest.mark.benchmark" in path.read_text()]
    assert len(marked) > 5 and all(any(map(path.is_relative_to, places)) for path in marked), marked
