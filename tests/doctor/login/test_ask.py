"""Programs run with a time limit and their output; probes and the facts that they return."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from support.pace import scaled

from hpctrain.doctor.login.ask import MARK, ask, ask_probe

PYTHON = sys.executable


def test_output_of_a_program_is_returned() -> None:
    found = ask([PYTHON, "-c", "print('hello')"])
    assert (found.text, found.trouble, found.missing, found.hangs) == ("hello\n", "", False, False)


def test_a_missing_program_is_reported_as_missing() -> None:
    found = ask(["hpctrain-no-such-program"])
    assert found.missing and found.trouble == "there is no hpctrain-no-such-program"


def test_a_program_without_execute_permission_cannot_be_run(tmp_path: Path) -> None:
    found = ask([str(tmp_path)])
    assert not found.missing and "cannot run" in found.trouble


def test_a_failing_program_is_quoted() -> None:
    found = ask([PYTHON, "-c", "import sys; print('out'); sys.exit('the last word')"])
    assert (found.trouble, found.text) == ("the last word", "out\n")
    assert ask([PYTHON, "-c", "import os; os._exit(3)"]).trouble == "exit code 3"
    assert ask([PYTHON, "-c", "import os; os.kill(os.getpid(), 11)"]).trouble == "killed by SIGSEGV"


def test_a_hanging_program_is_killed_with_all_its_children(tmp_path: Path) -> None:
    code = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(60)
"""
    begin = time.monotonic()
    found = ask([PYTHON, "-c", code, str(tmp_path / "pid")], seconds=1.0)
    # The child holds the pipe open: reading it after killing the program alone would take a minute.
    assert time.monotonic() - begin < scaled(10)
    assert found.hangs and found.trouble == "no answer in 1 s"
    child = Path("/proc") / (tmp_path / "pid").read_text() / "cmdline"
    deadline = time.monotonic() + 5
    while child.exists() and b"sleep" in child.read_bytes():  # a zombie has no command line
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_probe_returns_facts(tmp_path: Path) -> None:
    found = ask_probe("space", str(tmp_path), bare=True)
    assert found.facts["there"] and found.facts["writable"] and 0 < found.facts["free"] <= found.facts["size"]


def test_output_of_libraries_does_not_disturb_a_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hpctrain.doctor.login import ask as module

    (tmp_path / "noisy.py").write_text(f"print('warning: x')\nprint('{MARK}{{\"a\": 1}}')\nprint('bye')")
    (tmp_path / "silent.py").write_text("print('nothing')")
    monkeypatch.setattr(module, "_PROBES", tmp_path)
    assert ask_probe("noisy").facts == {"a": 1}
    assert ask_probe("silent").trouble == "it printed nothing" and not ask_probe("silent").facts


def test_a_probe_has_no_rank_variables_of_this_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hpctrain.doctor.login import ask as module

    (tmp_path / "own.py").write_text(
        f"import json, os\nprint('{MARK}' + json.dumps([os.environ.get(name) for name in ('PMI_RANK', 'KEPT')]))"
    )
    monkeypatch.setattr(module, "_PROBES", tmp_path)
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("KEPT", "yes")
    assert ask_probe("own").facts == [None, "yes"]
