"""The Makefile of the benchmarks: what it lists, what it starts, what it refuses."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from communication import parse

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
OPERATIONS = ("pingpong", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "overlap")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", "-C", str(FOLDER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_help_lists_every_benchmark_and_variable() -> None:
    text = (FOLDER / "Makefile").read_text()
    printed = make("help").stdout
    assert {*OPERATIONS, "ddp-step", "startup", "compare"} <= set(re.findall(r"^  make (\S+) +[a-z]", printed, re.M))
    assert set(re.findall(r"^([A-Z]+) +\?=", text, re.M)) == set(re.findall(r"^  ([A-Z]+) += ", printed, re.M))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_variables_become_options_that_the_program_takes(operation: str) -> None:
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


def test_compare_needs_two_results() -> None:
    done = make("compare", "A=old.json")
    assert done.returncode == 2
    assert "make -C benchmarks compare A=old.json B=new.json" in done.stdout
