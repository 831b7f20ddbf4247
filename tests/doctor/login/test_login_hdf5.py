"""Findings about HDF5: variables that change how it reads and locks files."""

from __future__ import annotations

import pytest
from support.doctoring import SILENT, facts, only, told

from hpctrain.doctor.login.hdf5 import check
from hpctrain.util.probe import Answer

FINE = facts(h5py="3.16.0", hdf5="2.0.0", mpi=False)


@pytest.mark.parametrize("value", [None, "TRUE", "BEST_EFFORT", "1"])
def test_default_locking_is_no_finding(value: str | None) -> None:
    assert told(check(FINE, {} if value is None else {"HDF5_USE_FILE_LOCKING": value})) == []


@pytest.mark.parametrize("variable, value", [("HDF5_USE_FILE_LOCKING", "FALSE"), ("HDF5_PLUGIN_PATH", "/opt/plugins")])
def test_variables_that_change_hdf5_are_noted(variable: str, value: str) -> None:
    found = only(check(FINE, {variable: value}))
    assert found.level == "note" and found.found == f"{variable}={value}"


@pytest.mark.parametrize("answer", [SILENT, Answer(error="No module named 'h5py'")])
def test_missing_h5py_is_an_error(answer: Answer) -> None:
    assert told(check(answer, {})) == [("error", "HDF5")]
