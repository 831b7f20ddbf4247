"""Findings on Slurm and PBS."""

from __future__ import annotations

import pytest
from support.doctoring import TYPES, only, slurm, told

from hpctrain.doctor.findings import Finding
from hpctrain.doctor.login.schedulers import Pbs, Slurm, check_pbs, check_slurm
from hpctrain.util.probe import Answer


def test_a_well_configured_slurm_is_ok() -> None:
    (found,) = check_slurm(slurm(), {})
    assert found.found == "22.05.8; --mpi: none, pmix, pmi2, pmix_v4 (default: pmi2)"


@pytest.mark.parametrize(
    "line, level, words",
    [
        ("KillOnBadExit = 0", "warning", "--kill-on-bad-exit=1"),
        ("JobRequeue = 0", "note", "JobRequeue = 0"),
        ("KillWait = 5 sec", "note", "KillWait = 5 sec"),
        ("PreemptMode = CANCEL\nPreemptType = preempt/qos", "note", "PreemptMode = CANCEL"),
        ("PreemptMode = CANCEL\nPreemptType = preempt/none", None, ""),  # unused preemption
    ],
)
def test_settings_that_affect_the_end_of_jobs_are_found(line: str, level: str | None, words: str) -> None:
    of_slurm = Slurm(Answer("slurm 24.05.1"), Answer(TYPES), Answer(f"{line}\n"))
    assert told(check_slurm(of_slurm, {})) == ([(level, "Slurm")] if level else [])
    assert any(words in f"{one.found} {one.advice}" for one in check_slurm(of_slurm, {}))
    if level == "warning":
        assert told(check_slurm(of_slurm, {"SLURM_KILL_BAD_EXIT": "1"})) == []


def test_an_unreachable_controller_is_a_warning() -> None:
    config = Answer(error="slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)")
    found = only(check_slurm(Slurm(Answer("slurm 24.05.1"), Answer(error="x"), config), {}))
    assert found.level == "warning" and "Unable to contact" in found.found


@pytest.mark.parametrize(
    "version, forgets",
    [
        ("slurm-wlm 22.05.8", True),
        ("slurm 23.02.7", True),
        ("slurm 23.11.0", False),
        ("slurm 21.08.5", False),
        ("slurm 24.05.1", False),
        ("?", True),
    ],
)
def test_some_releases_do_not_pass_cpus_per_task_to_srun(version: str, forgets: bool) -> None:
    assert slurm(version=version).drops_cpus_per_task is forgets


def test_all_formats_of_the_mpi_list_are_parsed() -> None:
    # Slurm 23.11 and later also indent with tabs, and list pmix_v5 among the specific versions.
    text = "MPI plugin types are...\n\tcray_shasta\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: "
    assert slurm(text + "pmix_v4,pmix_v5").mpi_types == ["cray_shasta", "none", "pmi2", "pmix", "pmix_v4", "pmix_v5"]
    assert slurm("srun: MPI types are...\nsrun: none\n").mpi_types == ["none"]


PBS = Pbs(Answer("pbs_version = 2022.1.3.20230214"))


TORQUE = Pbs(Answer("Version: 6.1.2\nCommit: 661e092552de43a785c15d39a3634a541d86898e"))


@pytest.mark.parametrize("own, version", [(PBS, "2022.1.3.20230214"), (TORQUE, "6.1.2")])
def test_openpbs_and_torque_are_recognized(own: Pbs, version: str) -> None:
    (found,) = check_pbs(own, {}, slurm=False)
    assert found.level == "ok" and found.found.startswith(f"{version};")


def test_pbs_wrappers_of_slurm_are_not_pbs() -> None:
    usage = Pbs(Answer("Unknown option: version\nUsage:\n    qstat.pl [-f] [-a|-i|-r]", "exit code 1"))
    assert list(check_pbs(usage, {}, slurm=True)) == []
    assert told(check_pbs(usage, {}, slurm=False)) == [("note", "PBS")]


def test_a_changed_prefix_of_directives_is_noted() -> None:
    assert told(check_pbs(PBS, {"PBS_DPREFIX": "#QSUB"}, slurm=False)) == [("note", "PBS")]


SERVER = {"flatuid": "True", "job_history_enable": "True", "default_queue": "workq"}
WAYS = {"pbs_tmrsh": "/opt/pbs/bin/pbs_tmrsh", "ssh": "/usr/bin/ssh"}


def pbs(ways: dict[str, str] = WAYS, queue: dict[str, object] | None = None, **server: str) -> list[Finding]:
    found = Pbs(PBS.version, {**SERVER, **server}, queue or {}, ways)
    return [finding for finding in check_pbs(found, {}, slurm=False)][1:]


def test_a_well_configured_server_is_ok() -> None:
    levels = [(finding.level, finding.found) for finding in pbs()]
    assert [level for level, _ in levels] == ["ok", "note", "ok"]
    assert "qdel leaves a job 10 s" in levels[1][1] and "/opt/pbs/bin/pbs_tmrsh" in levels[2][1]
    assert "qdel leaves a job 90 s" in pbs(queue={"kill_delay": 90})[1].found


def test_a_server_that_refuses_submission_or_forgets_jobs_is_a_finding() -> None:
    first = pbs(flatuid="False")[0]
    assert first.level == "warning" and "Bad UID" in first.why and "flatuid = True" in first.advice
    assert pbs(job_history_enable="False")[1].found.startswith("no history of jobs")


@pytest.mark.parametrize(
    "ways, level, words",
    [(WAYS, "ok", "need no ssh"), ({"ssh": "/usr/bin/ssh"}, "note", "/usr/bin/ssh"), ({}, "warning", "neither")],
)
def test_the_remote_launch_method_is_reported(ways: dict[str, str], level: str, words: str) -> None:
    last = pbs(ways)[-1]
    assert last.level == level and words in last.found
