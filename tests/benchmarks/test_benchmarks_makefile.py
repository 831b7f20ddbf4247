"""Makefile of the benchmarks: targets that it lists, programs that it starts, calls that it refuses."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from checkpoint import parse as parse_checkpoint
from communication import parse

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
OPERATIONS = ("pingpong", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "overlap")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", "-C", str(FOLDER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_help_lists_every_benchmark_and_variable() -> None:
    text = (FOLDER / "Makefile").read_text()
    printed = make("help").stdout
    named = set(re.findall(r"^  make (\S+) +[A-Za-z]", printed, re.M))
    assert named >= {*OPERATIONS, "ddp-step", "startup", "checkpoint", "corruption", "compare"}
    assert set(re.findall(r"^([A-Z]+) +\?=", text, re.M)) == set(re.findall(r"^  ([A-Z]+) += ", printed, re.M))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_variables_become_valid_options_of_the_program(operation: str) -> None:
    variables = ["NP=3", "SIZES=4,64K", "ROUNDS=5", "DEVICE=cuda", "DTYPE=bfloat16", "ALGORITHMS=auto,ring"]
    (line,) = make("-n", operation, *variables, "WITHOUT=gloo,hpctrain outside", "MPI=openmpi").stdout.splitlines()[:1]
    assert line.endswith("NP=3 MPI=openmpi")
    program = re.search(r'PROGRAM="benchmarks/communication.py (.*)"', line)
    assert program
    words = subprocess.run(["sh", "-c", f"printf '%s\\n' {program[1]}"], capture_output=True, text=True).stdout
    args = parse(words.splitlines())
    assert (args.operation, args.sizes, args.rounds, args.device) == (operation, [4, 65536], 5, "cuda")
    assert (args.dtype, args.algorithms) == ("bfloat16", ["auto", "ring"])
    assert args.without == ["gloo", "hpctrain outside"]


def test_checkpoint_first_writes_on_other_rank_counts_and_then_measures(tmp_path: Path) -> None:
    variables = ["NP=3", "SIZE=16MiB", "ROUNDS=5", "WITHOUT=torch.save,torch DCP", f"FOLDER={tmp_path}"]
    script = make("-n", "checkpoint", *variables).stdout
    # Each call of make prints one line: the program and the ranks that it would start.
    script = re.sub(r"\bmake --no-print-directory -C \.\. _ranks", "show", script)
    show = """show() { for word; do export "$word"; done; eval "printf '%s|' $NP $PROGRAM"; echo; }\n"""
    done = subprocess.run(["sh", "-c", show + script], cwd=FOLDER, capture_output=True, text=True)
    *before, last = [line.rstrip("|").split("|") for line in done.stdout.splitlines()]
    assert [line[0] for line in before] == ["1", "2", "4"] and last[0] == "3", done
    folders = set()
    for line in (*before, last):
        assert line[1] == "benchmarks/checkpoint.py"
        args = parse_checkpoint(line[2:])
        assert (args.size, args.only_write) == (16 * 2**20, line is not last)
        folders.add(args.folder)
    assert (args.rounds, args.without) == (5, ["torch.save", "torch DCP"])
    (folder,) = folders
    assert folder.parent == tmp_path and not folder.exists()  # deleted again


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
