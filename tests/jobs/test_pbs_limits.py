"""Warnings at submission about limits of the PBS server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from hpctrain.jobs.submit import pbs_warnings


def pbs(server: dict[str, Any], queue: dict[str, Any]) -> Any:
    def ask(command: Sequence[str]) -> str:
        if "-B" in command:
            return json.dumps({"pbs_version": "23", "Server": {"h": {"default_queue": "workq", **server}}})
        return json.dumps({"pbs_version": "23", "Queue": {command[-1]: queue}})

    return ask


FLAT = {"flatuid": "True"}


@pytest.mark.parametrize(
    "seconds, queue, told", [(9.0, {}, False), (11.0, {}, True), (11.0, {"kill_delay": 60}, False)]
)
def test_saves_longer_than_kill_delay_are_warned_about(seconds: float, queue: dict[str, Any], told: bool) -> None:
    found = pbs_warnings("", "runs/a", seconds, pbs(FLAT, queue))
    if told:
        (text,) = found
        assert "has taken 11.0 s, and qdel leaves 10 s (kill_delay of queue workq)" in text
        assert text.endswith("touch runs/a/STOP")
    else:
        assert found == []


def test_a_server_that_refuses_submission_by_jobs_is_warned_about() -> None:
    (text,) = pbs_warnings("q", "runs/a", 0.0, pbs({}, {}))
    assert "flatuid is not set" in text and "runs/a/output.txt" in text


def test_without_pbs_there_is_no_warning() -> None:
    assert pbs_warnings("", "runs/a", 99.0, lambda command: "") == []
