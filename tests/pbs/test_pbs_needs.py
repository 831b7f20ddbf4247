"""Missing requirements of OpenPBS: one line that names them, and skipping only with ``--or-skip``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pbs_needs
import pytest
from user_environments import _name_interpreter, _passable

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("option, word, code", [(["--or-skip"], "skipped", 0), ([], "error", 1)])
def test_only_the_or_skip_option_skips(option: list[str], word: str, code: int) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "OPENPBS"}
    environment["PYTHONPATH"] = f"{HERE}{os.pathsep}{HERE.parents[1]}"
    command = [sys.executable, "run.py", *option]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=30)
    said = f"{word}: tests with OpenPBS: OPENPBS is not set and this machine has no PBS: it names a folder with OpenPBS"
    assert done.returncode == code and done.stdout.startswith(said) and done.stdout.count("\n") == 1, done


def test_missing_requirements_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENPBS", str(tmp_path))
    assert str(pbs_needs.obstacle()).startswith(f"there is no program {tmp_path}/cluster.sh")
    (tmp_path / "cluster.sh").touch(0o755)
    assert pbs_needs.obstacle(user=1000) == "a cluster of namespaces needs root"
    monkeypatch.setenv("PATH", "/nowhere")
    assert "iproute2 util-linux postgresql make" in str(pbs_needs.obstacle(user=0))


def test_renaming_the_interpreter_keeps_the_linked_original(tmp_path: Path) -> None:
    """Programs may be hard links to one file; each names the interpreter of its own environment."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    (first / "hpctrain").write_text(f"#!{first}/bin/python\nimport hpctrain\n")
    os.link(first / "hpctrain", second / "hpctrain")
    _name_interpreter(second / "hpctrain", first, second)
    assert (second / "hpctrain").read_text() == f"#!{second}/bin/python\nimport hpctrain\n"
    assert (first / "hpctrain").read_text() == f"#!{first}/bin/python\nimport hpctrain\n"
    assert os.access(second / "hpctrain", os.X_OK)


def test_a_folder_is_passable_if_others_may_enter_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert not _passable(tmp_path)
    tmp_path.chmod(0o711)
    assert _passable(tmp_path)
