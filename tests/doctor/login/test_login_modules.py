"""Findings about environment modules: the loaded ones, and those that conflict with a virtual environment."""

from __future__ import annotations

from support.doctoring import told

from hpctrain.doctor.login.modules import check

LMOD = {"LMOD_VERSION": "8.6.19", "LOADEDMODULES": "gcc/12.2:openmpi/5.0:pytorch/2.4"}


def test_a_machine_without_modules_is_reported() -> None:
    assert [finding.found for finding in check({}, True)] == ["no environment modules here"]


def test_a_module_that_conflicts_with_the_environment_is_noted() -> None:
    first, *rest = check(LMOD, venv=True)
    assert first.found == "Lmod 8.6.19; loaded: gcc/12.2, openmpi/5.0, pytorch/2.4"
    assert told(rest) == [("note", "modules")] and rest[0].advice.startswith("module unload pytorch/2.4")


def test_a_module_without_an_environment_is_no_conflict() -> None:
    assert told(check(LMOD, venv=False)) == []


def test_environment_modules_is_recognized() -> None:
    (found,) = check({"MODULESHOME": "/usr/share/modules", "MODULES_VERSION": "5.2.0"}, True)
    assert found.found == "Environment Modules 5.2.0; loaded: none"
