"""Deadline of a job: from the user's walltime, the environment, or the scheduler's answer."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from hpctrain.cluster.deadline import Ask, Deadline, find, seconds_of
from hpctrain.errors import SettingsError

SLURM, PBS = {"SLURM_JOB_ID": "7"}, {"PBS_JOBID": "9.server"}
QSTAT = {"stime": "Sun Nov 22 03:00:00 2026", "Resource_List": {"walltime": "01:30:00"}}


def answering(text: str) -> tuple[list[Sequence[str]], Ask]:
    asked: list[Sequence[str]] = []

    def ask(command: Sequence[str]) -> str:
        asked.append(command)
        return text

    return asked, ask


@pytest.mark.parametrize(
    "text, seconds",
    [("04:00:00", 14400), ("1-12:00:00", 129600), ("0:00:09", 9)]
    + [("90s", 90), ("15m", 900), ("4h", 14400), ("2d", 172800), ("1.5h", 5400)],
)
def test_walltimes_are_parsed(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["90", "4:00", "1:60:00", "-4h", "4 h", "04:00:00 # long", "", "1-4h", "nan"])
def test_a_malformed_walltime_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="write it as 04:00:00"):
        seconds_of(text)


def test_the_user_precedes_the_variable_and_the_variable_the_scheduler() -> None:
    asked, ask = answering("2026-11-22T03:00:00\n")
    environ = {"HPCTRAIN_DEADLINE": "1795315000", "SLURM_JOB_END_TIME": "1795316000", **SLURM}
    assert find(environ, "4h", started=1000.0, ask=ask) == Deadline(15400.0, "a walltime of 4h")
    assert find(environ, ask=ask) == Deadline(1795315000.0, "HPCTRAIN_DEADLINE")
    del environ["HPCTRAIN_DEADLINE"]
    assert find(environ, ask=ask) == Deadline(1795316000.0, "Slurm") and not asked
    found = find(SLURM, ask=ask)
    assert found == Deadline(time.mktime((2026, 11, 22, 3, 0, 0, 0, 0, -1)), "Slurm")
    assert asked == [["squeue", "--noheader", "--jobs", "7", "--format", "%e"]]
    assert find({}, ask=ask) is None and len(asked) == 1


@pytest.mark.parametrize("environ", [SLURM, PBS])
@pytest.mark.parametrize("answer", ["", "NONE", "N/A", "{", "[]", '{"Jobs": {}}', '{"Jobs": {"9": {"stime": "soon"}}}'])
def test_an_answer_without_a_time_gives_no_deadline(environ: dict[str, str], answer: str) -> None:
    assert find(environ, ask=answering(answer)[1]) is None


@pytest.mark.parametrize("text", ["soon", "-5", "0", "nan", "inf", "1e30", "2026-11-22"])
def test_an_invalid_deadline_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="HPCTRAIN_DEADLINE=.*seconds since the epoch"):
        find({"HPCTRAIN_DEADLINE": text})
