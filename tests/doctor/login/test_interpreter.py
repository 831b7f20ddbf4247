"""Findings about the Python interpreter: too old, or with packages from outside its environment."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.doctoring import told

from hpctrain.doctor.login.interpreter import Interpreter, check, gather

FINE = Interpreter((3, 12, 1), "/home/me/venv", True, "/home/me/hpctrain", "")


def test_a_supported_interpreter_is_no_finding() -> None:
    assert told(check(FINE, {})) == []


@pytest.mark.parametrize(
    "python, environ, level",
    [
        (replace(FINE, version=(3, 10, 9)), {}, "error"),
        (replace(FINE, venv=False), {}, "note"),
        (replace(FINE, user_site="/home/me/.local/lib"), {}, "note"),
        (FINE, {"PYTHONPATH": "/opt/python/site-packages"}, "warning"),
        (FINE, {"PYTHONHOME": "/opt/python"}, "error"),
    ],
)
def test_an_unsuitable_interpreter_is_a_finding(python: Interpreter, environ: dict[str, str], level: str) -> None:
    assert told(check(python, environ)) == [(level, "Python")]


def test_a_conda_environment_counts_as_an_environment() -> None:
    assert told(check(replace(FINE, venv=False), {"CONDA_PREFIX": "/opt/conda"})) == []


def test_gather_describes_the_running_interpreter() -> None:
    import sys

    found = gather()
    assert found.version == sys.version_info[:3] and found.prefix == sys.prefix
