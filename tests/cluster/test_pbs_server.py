"""Queries of PBS: ``qstat -F json`` is read as OpenPBS 23.06 writes it; without an answer the result is empty."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from hpctrain.cluster import accounting
from hpctrain.cluster.accounting import JobAccount, ask_pbs

PRESENT = {"12.head": {"job_state": "R"}, "5[1].head": {"job_state": "Q"}}
PAST = {"7.head": {"job_state": "F", "Exit_status": 75}}


class Qstat:
    """Fake of qstat on a server with or without a job history."""

    def __init__(self, *, history: bool = True, server: str = "pbs_version") -> None:
        self.history, self.server = history, server
        self.commands = list[Sequence[str]]()

    def __call__(self, command: Sequence[str]) -> str:
        self.commands.append(command)
        if not self.server:
            return ""
        past = "-x" in command
        # Without a history, qstat -x returns no job at all.
        known = {} if past and not self.history else {**PRESENT, **(PAST if past else {})}
        found = {name: job for name, job in known.items() if {name, name.partition(".")[0]} & set(command)}
        return json.dumps({self.server: "23.06.06", **({"Jobs": found} if found else {})})


@pytest.mark.parametrize("history", [True, False])
def test_jobs_are_found_by_id(history: bool) -> None:
    qstat = Qstat(history=history)
    found = accounting.jobs(["12", "12.head", "5[1].head", "7.head", "99", "x;y"], qstat)
    assert found is not None
    assert {name: job["id"] for name, job in found.items()} == {
        **{"12": "12.head", "12.head": "12.head", "5[1].head": "5[1].head"},
        **({"7.head": "7.head"} if history else {}),
    }
    assert not any("x;y" in command for command in qstat.commands)


def test_ended_jobs_are_recognised() -> None:
    found = ask_pbs(["12.head", "5[1].head", "7.head", "99.head"], Qstat())
    assert {name: account.has_ended for name, account in found.items()} == {
        **{"12.head": False, "5[1].head": True, "7.head": True, "99.head": True}
    }
    assert found["7.head"] == JobAccount("F", None)
    assert ask_pbs(["7.head"], Qstat(history=False))["7.head"].has_ended
    assert ask_pbs([], Qstat()) == {}


@pytest.mark.parametrize("printed", ["", "{", "[]", "{}", "qstat.pl: error"])
def test_without_a_valid_answer_the_result_is_empty(printed: str) -> None:
    assert accounting.jobs(["12"], lambda command: printed) is None and ask_pbs(["12"], lambda command: printed) == {}
    assert accounting.server(lambda command: printed) is None and accounting.queue("q", lambda command: printed) is None


@pytest.mark.parametrize(
    "facts, may", [({"flatuid": "True"}, True), ({"flatuid": True}, True), ({"flatuid": "False"}, False), ({}, False)]
)
def test_jobs_may_submit_jobs_if_flatuid_is_set(facts: dict[str, Any], may: bool) -> None:
    told = json.dumps({"pbs_version": "23", "Server": {"head": facts}})
    found = accounting.server(lambda command: told)
    assert found is not None and accounting.may_submit_itself(found) is may


@pytest.mark.parametrize("facts, seconds", [({}, 10), ({"kill_delay": 120}, 120), ({"kill_delay": "30"}, 30)])
def test_the_kill_delay_of_qdel_is_read(facts: dict[str, Any], seconds: int) -> None:
    assert accounting.kill_delay(facts) == seconds
