"""A Python that is too old, or that takes packages from elsewhere, is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.doctoring import told

from hpctrain.doctor.login.interpreter import Interpreter, check, gather

FINE = Interpreter((3, 12, 1), "/home/me/venv", True, "/home/me/hpctrain", "")


def test_a_good_one_is_well() -> None:
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
def test_a_bad_one_is_named(python: Interpreter, environ: dict[str, str], level: str) -> None:
    assert told(check(python, environ)) == [(level, "Python")]


def test_conda_is_an_environment_too() -> None:
    assert told(check(replace(FINE, venv=False), {"CONDA_PREFIX": "/opt/conda"})) == []


def test_this_one() -> None:
    import sys

    found = gather()
    assert found.version == sys.version_info[:3] and found.prefix == sys.prefix
