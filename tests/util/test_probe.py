"""Programs run with a time limit, their output, and the facts that probes print."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from support.pace import scaled

from hpctrain.util.probe import facts_in, output_of, run_program

PYTHON = sys.executable


def test_output_of_a_program_is_returned() -> None:
    found = run_program([PYTHON, "-c", "print('hello')"])
    assert (found.text, found.error, found.missing, found.timed_out) == ("hello\n", "", False, False)


def test_a_missing_program_is_reported_as_missing() -> None:
    found = run_program(["hpctrain-no-such-program"])
    assert found.missing and found.error == "there is no hpctrain-no-such-program"


def test_a_program_without_execute_permission_cannot_be_run(tmp_path: Path) -> None:
    found = run_program([str(tmp_path)])
    assert not found.missing and "cannot run" in found.error


def test_a_failing_program_is_quoted() -> None:
    found = run_program([PYTHON, "-c", "import sys; print('out'); sys.exit('the last word')"])
    assert (found.error, found.text) == ("the last word", "out\n")
    assert run_program([PYTHON, "-c", "import os; os._exit(3)"]).error == "exit code 3"
    assert run_program([PYTHON, "-c", "import os; os.kill(os.getpid(), 11)"]).error == "killed by SIGSEGV"


def test_a_hanging_program_is_killed_with_all_its_children(tmp_path: Path) -> None:
    code = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(60)
"""
    begin = time.monotonic()
    found = run_program([PYTHON, "-c", code, str(tmp_path / "pid")], timeout=1.0)
    # The child holds the pipe open: reading it after killing the program alone would take a minute.
    assert time.monotonic() - begin < scaled(10)
    assert found.timed_out and found.error == "no answer in 1 s"
    child = Path("/proc") / (tmp_path / "pid").read_text() / "cmdline"
    deadline = time.monotonic() + 5
    while child.exists() and b"sleep" in child.read_bytes():  # a zombie has no command line
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_output_of_a_program_that_fails_is_empty() -> None:
    assert output_of([PYTHON, "-c", "print('hello')"]) == "hello\n"
    assert output_of([PYTHON, "-c", "print('hello'); raise SystemExit(1)"]) == ""
    assert output_of(["hpctrain-no-such-program"]) == ""


def test_facts_are_found_among_the_output_of_libraries() -> None:
    assert facts_in('warning: x\nFACTS {"a": 1}\nbye', "FACTS ") == {"a": 1}
    assert facts_in('warning without line breakFACTS {"a": 2}\n', "FACTS ") == {"a": 2}
    assert facts_in("nothing", "FACTS ") is None
    assert facts_in("FACTS {torn", "FACTS ") is None
    assert facts_in("FACTS 3", "FACTS ") is None
