"""Findings about the settings of Slurm that determine how jobs end."""

from __future__ import annotations

import pytest
from support.doctoring import MISSING, TYPES, only, slurm, told

from hpctrain.doctor.login.slurm import Slurm, check
from hpctrain.util.probe import Answer


def test_a_machine_without_slurm_has_no_finding() -> None:
    assert list(check(Slurm(MISSING, MISSING, MISSING), {})) == []


def test_a_well_configured_slurm_is_ok() -> None:
    (found,) = check(slurm(), {})
    assert found.found == "22.05.8; --mpi: none, pmix, pmi2, pmix_v4 (default: pmi2)"


def test_missing_kill_on_bad_exit_is_a_warning() -> None:
    found = only(check(slurm(kill=0), {}))
    assert found.level == "warning" and "--kill-on-bad-exit=1" in found.advice
    assert told(check(slurm(kill=0), {"SLURM_KILL_BAD_EXIT": "1"})) == []


@pytest.mark.parametrize(
    "line, words",
    [
        ("JobRequeue = 0", "JobRequeue = 0"),
        ("KillWait = 5 sec", "KillWait = 5 sec"),
        ("PreemptMode = CANCEL\nPreemptType = preempt/qos", "PreemptMode = CANCEL"),
    ],
)
def test_settings_that_affect_requeueing_are_noted(line: str, words: str) -> None:
    found = only(check(Slurm(Answer("slurm 24.05.1"), Answer(TYPES), Answer(f"KillOnBadExit = 1\n{line}\n")), {}))
    assert found.level == "note" and words in found.found


def test_unused_preemption_is_no_finding() -> None:
    config = Answer("PreemptMode = CANCEL\nPreemptType = preempt/none\n")
    assert told(check(Slurm(Answer("slurm 24.05.1"), Answer(TYPES), config), {})) == []


def test_an_unreachable_controller_is_a_warning() -> None:
    config = Answer(error="slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)")
    found = only(check(Slurm(Answer("slurm 24.05.1"), Answer(error="x"), config), {}))
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
    assert slurm(version=version).forgets_cpus is forgets


def test_all_formats_of_the_mpi_list_are_parsed() -> None:
    # Slurm 23.11 and later also indent with tabs, and list pmix_v5 among the specific versions.
    text = "MPI plugin types are...\n\tcray_shasta\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: "
    assert slurm(text + "pmix_v4,pmix_v5").mpi_types == ["cray_shasta", "none", "pmi2", "pmix", "pmix_v4", "pmix_v5"]
    assert slurm("srun: MPI types are...\nsrun: none\n").mpi_types == ["none"]
