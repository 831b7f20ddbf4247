"""Accounting by ``sacct`` and ``qstat``: their output is read as documented; without an answer the result is empty."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cluster import accounting
from hpctrain.cluster.accounting import JobAccount, ask_pbs, ask_slurm
from hpctrain.util.probe import output_of

# Job 7 was requeued once: its first steps were numbered 0, too. Task 4 of the array 12 is job 16 within Slurm.
PRINTED = """\
7|7|NODE_FAIL|18446744073709551614
7.batch|7.batch|CANCELLED|900
7.0|7.0|CANCELLED by 1000|1000
7|7|COMPLETED|
7.batch|7.batch|COMPLETED|1900
7.extern|7.extern|COMPLETED|2000
7.0|7.0|COMPLETED|2000
8|8|RUNNING|
8.batch|8.batch|RUNNING|500
9|9|CANCELLED by 1000|
16|12_4|TIMEOUT|700
"""


class Sacct:
    """Fake of sacct that records its commands."""

    def __init__(self, printed: str) -> None:
        self.printed, self.commands = printed, list[Sequence[str]]()

    def __call__(self, command: Sequence[str]) -> str:
        self.commands.append(command)
        return self.printed


def test_states_and_energy_are_read() -> None:
    sacct = Sacct(PRINTED)
    found = ask_slurm(["7", "8", "9", "12_4", "77"], sacct)
    assert found == {
        "7": JobAccount("COMPLETED", 3000.0),
        "8": JobAccount("RUNNING", 500.0),
        "9": JobAccount("CANCELLED", None),
        "12_4": JobAccount("TIMEOUT", 700.0),
    }
    assert [found[job].has_ended for job in ("7", "8", "9", "12_4")] == [True, False, True, True]
    assert ask_slurm(["16"], sacct)["16"].joules == 700.0
    command, _ = sacct.commands
    assert command[command.index("--jobs") + 1] == "12_4,7,77,8,9" and "--duplicates" in command


@pytest.mark.parametrize("printed", ["", "sacct: error", "7|7|", "|||", "7|7||x", "7.0|7.0|COMPLETED|12"])
def test_malformed_output_is_ignored(printed: str) -> None:
    assert ask_slurm(["7"], Sacct(printed)).get("7") in (None, JobAccount("", None))


def test_invalid_job_ids_are_not_queried() -> None:
    sacct = Sacct(PRINTED)
    assert ask_slurm(["--help", "7;x", "", "a.server"], sacct) == {} and not sacct.commands


def test_a_missing_failing_or_slow_sacct_gives_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_slurm(["7"]) == {}, "there is none"
    sacct = tmp_path / "sacct"
    for script, known in (
        ("echo '7|7|TIMEOUT|5'", {"7": JobAccount("TIMEOUT", 5.0)}),
        ("echo 'Slurm accounting storage is disabled' >&2; exit 1", {}),
        ("printf '\\377'", {}),
        ("/bin/sleep 20", {}),
    ):
        sacct.write_text(f"#!/bin/sh\nexec 2>/dev/null\n{script}\n")
        sacct.chmod(0o755)
        ask = partial(output_of, timeout=0.5 if "sleep" in script else 20.0)
        assert ask_slurm(["7"], ask) == known, script


# PBS: ``qstat -F json`` as OpenPBS 23.06 writes it --------------------------------------------------------------------


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
