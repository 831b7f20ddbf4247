"""Advice of the doctor if PyTorch is imported slowly."""

from __future__ import annotations

import pytest

from hpctrain.doctor.login.libraries import check_torch
from hpctrain.util.probe import Answer

BUILD = {"version": "2.13.0", "cuda": None, "hip": None, "available": False, "devices": 0, "nccl": None, "threads": 1}


@pytest.mark.parametrize(
    ("seconds", "load", "level", "stages"),
    [(2.0, 0.1, "ok", False), (34.0, 0.1, "warning", True), (34.0, 5.0, "note", False)],
)
def test_a_slow_import_advises_to_copy_the_environment(seconds: float, load: float, level: str, stages: bool) -> None:
    (finding,) = check_torch(Answer(facts={**BUILD, "seconds": seconds, "load": load}))
    assert finding.level == level and ("hpctrain submit --stage env" in finding.advice) == stages
