"""Findings about PBS, and its distinction from Slurm's wrappers of PBS commands."""

from __future__ import annotations

import pytest
from support.doctoring import MISSING, told

from hpctrain.doctor.findings import Finding
from hpctrain.doctor.login.pbs import Pbs, check
from hpctrain.util.probe import Answer

PBS = Pbs(Answer("pbs_version = 2022.1.3.20230214"))


def test_a_machine_without_pbs_has_no_finding() -> None:
    assert list(check(Pbs(MISSING), {}, slurm=False)) == []


def test_openpbs_and_torque_are_recognized() -> None:
    (found,) = check(PBS, {}, slurm=False)
    assert found.level == "ok" and found.found.startswith("2022.1.3.20230214;")
    (found,) = check(Pbs(Answer("Version: 6.1.2\nCommit: 661e092552de43a785c15d39a3634a541d86898e")), {}, slurm=False)
    assert found.found.startswith("6.1.2;")


def test_pbs_wrappers_of_slurm_are_not_pbs() -> None:
    usage = Pbs(Answer("Unknown option: version\nUsage:\n    qstat.pl [-f] [-a|-i|-r]", "exit code 1"))
    assert list(check(usage, {}, slurm=True)) == []
    assert told(check(usage, {}, slurm=False)) == [("note", "PBS")]


def test_a_changed_prefix_of_directives_is_noted() -> None:
    assert told(check(PBS, {"PBS_DPREFIX": "#QSUB"}, slurm=False)) == [("note", "PBS")]


SERVER = {"flatuid": "True", "job_history_enable": "True", "default_queue": "workq"}
WAYS = {"pbs_tmrsh": "/opt/pbs/bin/pbs_tmrsh", "ssh": "/usr/bin/ssh"}


def pbs(ways: dict[str, str] = WAYS, queue: dict[str, object] | None = None, **server: str) -> list[Finding]:
    found = Pbs(PBS.version, {**SERVER, **server}, queue or {}, ways)
    return [finding for finding in check(found, {}, slurm=False)][1:]


def test_a_well_configured_server_is_ok() -> None:
    levels = [(finding.level, finding.found) for finding in pbs()]
    assert [level for level, _ in levels] == ["ok", "note", "ok"]
    assert "qdel leaves a job 10 s" in levels[1][1] and "/opt/pbs/bin/pbs_tmrsh" in levels[2][1]
    assert "qdel leaves a job 90 s" in pbs(queue={"kill_delay": 90})[1].found


def test_a_server_that_refuses_submission_by_jobs_is_a_warning() -> None:
    first = pbs(flatuid="False")[0]
    assert first.level == "warning" and "Bad UID" in first.why and "flatuid = True" in first.advice


def test_a_server_without_job_history_is_noted() -> None:
    assert pbs(job_history_enable="False")[1].found.startswith("no history of jobs")


@pytest.mark.parametrize(
    "ways, level, words",
    [(WAYS, "ok", "need no ssh"), ({"ssh": "/usr/bin/ssh"}, "note", "/usr/bin/ssh"), ({}, "warning", "neither")],
)
def test_the_remote_launch_method_is_reported(ways: dict[str, str], level: str, words: str) -> None:
    last = pbs(ways)[-1]
    assert last.level == level and words in last.found
