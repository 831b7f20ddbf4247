"""Accounting by ``sacct``: its output is read as its manual states; without an answer the result is empty."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from hpctrain.cluster.accounting import JobAccount, ask_slurm
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
    (command, _) = sacct.commands
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
