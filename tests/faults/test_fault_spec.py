"""Text of faults: kinds, places and values, the errors about wrong ones, and the ranks that get a fault."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.cli.main import main
from hpctrain.errors import UsageError
from hpctrain.faults.actions import check
from hpctrain.faults.spec import KINDS, PLACES, VARIABLE, Fault, parse

# A text of each kind, and how the fault is described on the last of four ranks.
DESCRIBED = {
    "kill rank=2 step=7 at=backward": "kill on rank 2 in step 7 at backward",
    "kill step=7": "kill on rank 3 in step 7 at backward",
    "segfault step=1 at=save": "segfault on rank 3 in step 1 at save",
    "exception step=2": "exception on rank 3 in step 2 at forward",
    "exit step=2": "exit on rank 3 in step 2 at begin",
    "node step=2 rank=0": "node on rank 0 in step 2 at backward",
    "hang step=2": "hang on rank 3 in step 2 at collective",
    "pause step=2 seconds=1.5": "pause on rank 3 in step 2 at collective (seconds=1.5)",
    "slow step=2 factor=3": "slow on rank 3 in step 2 (factor=3)",
    "nan step=2": "nan on rank 3 in step 2 at backward",
    "flip in=parameter step=2 bit=3": "flip on rank 3 in step 2 at end (in=parameter bit=3)",
    "flip in=moment step=2 tensor=a.weight": "flip on rank 3 in step 2 at end (in=moment tensor=a.weight)",
    "flip in=checkpoint step=2": "flip on rank 0 in step 2 at save (in=checkpoint)",
    "full step=2": "full on rank 3 in step 2 at save",
    "eio step=2 seconds=1": "eio on rank 3 in step 2 at save (seconds=1)",
}
# Wrong texts, and what the error says.
WRONG = {
    "kil step=3": "unknown kind 'kil': did you mean kill? known are eio, exception, exit, flip,",
    "kill": "'kill': step is missing; kill needs step; for example 'kill rank=2 step=7 at=backward'",
    "pause step=3": "seconds is missing; pause needs step, seconds;",
    "flip step=3": "in is missing; flip needs step, in;",
    "kill step=": "step has no value; write step=value;",
    "kill step": "step has no value; write step=value;",
    "kill step=0": "step='0'; step is a whole number from 1;",
    "kill step=-1": "step='-1'; step is a whole number from 1;",
    "kill step=1.5": "step='1.5'; step is a whole number from 1;",
    "kill step=99999999999999999999": "step is a whole number from 1;",
    "kill step=1 step=2": "step is given twice; give each key once;",
    "kill step=1 rank=first": "rank='first'; rank is a number from 0, or random;",
    "kill step=1 rank=-1": "rank='-1'; rank is a number from 0, or random;",
    "kill step=1 seed=3": "seed has no effect without rank=random; write rank=random seed=3;",
    "kill step=1 at=bakward": "unknown place 'bakward': did you mean backward? known are backward, begin, collective,",
    "nan step=1 at=save": "at=save does not fit nan; allowed is at=backward;",
    "full step=1 at=forward": "at=forward does not fit full; allowed is at=save;",
    "slow step=1 factor=2 at=end": "unknown key 'at' of slow",
    "flip in=parameter step=1 at=save": "at=save does not fit flip in=parameter; allowed is at=end, begin, optimizer;",
    "flip in=checkpoint step=1 at=end": "at=end does not fit flip in=checkpoint; allowed is at=save;",
    "flip in=checkpoint step=1 rank=1": "rank has no effect on a checkpoint; leave out rank: rank 0 changes the file;",
    "flip in=weights step=1": "in='weights' is unknown; allowed are parameter, moment, checkpoint;",
    "kill step=1 seconds=2": "unknown key 'seconds' of kill: known are at, rank, seed, step;",
    "pause step=1 seconds=0": "seconds='0'; seconds is a number above 0;",
    "pause step=1 seconds=nan": "seconds='nan'; seconds is a number above 0;",
    "slow step=1 factor=1": "factor='1'; factor is a number above 1;",
}


@pytest.mark.parametrize("text", DESCRIBED)
def test_a_fault_is_described_with_its_rank_and_place(text: str) -> None:
    (fault,) = parse(text)
    assert fault.describe(4) == DESCRIBED[text]


def test_every_kind_is_among_the_examples() -> None:
    assert {text.split()[0] for text in DESCRIBED} == set(KINDS)
    assert all(set(kind.places) <= set(PLACES) for kind in KINDS.values())


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_text_is_one_clear_error(text: str) -> None:
    with pytest.raises(UsageError) as found:
        parse(f"kill step=1; {text}")
    message = str(found.value)
    assert message.startswith("HPCTRAIN_FAULT: ") and WRONG[text] in message
    assert message.endswith(("; for example 'kill rank=2 step=7 at=backward'", "; for example 'kill step=7'"))
    assert found.value.everywhere and found.value.exit_code == 2 and "\n" not in message


def test_several_faults_are_separated_by_semicolons() -> None:
    assert [fault.kind for fault in parse(" kill step=3 ;pause  seconds=1 step=2;; ")] == ["kill", "pause"]
    assert parse(" ; ") == []


def test_the_order_of_keys_does_not_matter() -> None:
    first, second = parse("kill step=3 rank=1; kill rank=1 step=3")
    assert first.text == second.text == "kill rank=1 step=3"


def test_a_random_rank_depends_on_the_seed_alone() -> None:
    faults = parse("; ".join(f"kill step=1 rank=random seed={seed}" for seed in range(40)))
    ranks = [fault.rank_of(4) for fault in faults]
    assert set(ranks) == {0, 1, 2, 3}
    program = f"from hpctrain.faults.spec import parse; print([f.rank_of(4) for f in parse({faults[0].text!r})])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(ranks[:1])


def run_with(size: int = 2, steps: int | None = 8, **options: Any) -> Any:
    """Return what ``check`` needs of a run."""
    given = {"steps": steps, "background": False, "io": "posix", **options}
    names = [("0.weight", None), ("0.bias", None)]
    models = {"": SimpleNamespace(named_parameters=lambda: names)}
    return SimpleNamespace(
        job=SimpleNamespace(size=size, rank=size - 1), options=SimpleNamespace(**given), models=models
    )


@pytest.mark.parametrize(
    "text, run, message",
    [
        ("kill rank=2 step=3", run_with(), "rank=2: the job has 2 ranks; allowed are 0 to 1;"),
        ("kill step=9", run_with(), "step=9: the run has 8 steps; allowed are 1 to 8;"),
        ("hang step=3", run_with(1), "no other rank would wait for the only one; hang needs several ranks;"),
        ("full step=3", run_with(background=True), "set checkpoint.background = false and checkpoint.io = 'posix';"),
        ("eio step=3", run_with(io="mpiio"), "eio needs writes in the rank's own process;"),
        ("flip in=moment tensor=0.wait step=3", run_with(), "unknown tensor 0.wait: did you mean 0.weight?"),
    ],
)
def test_a_fault_that_does_not_fit_the_run_is_refused(text: str, run: Any, message: str) -> None:
    with pytest.raises(UsageError) as found:
        check(parse(text), run)
    assert message in str(found.value) and found.value.everywhere


def test_faults_that_fit_the_run_are_accepted() -> None:
    faults = parse("kill rank=1 step=8; hang step=1; flip in=parameter tensor=0.bias step=2")
    assert list(check(faults, run_with())) == faults
    assert check(parse("kill step=900"), run_with(steps=None)) == [Fault("kill", 900, "backward", text="kill step=900")]


def test_the_command_line_refuses_a_wrong_fault_before_the_config_is_read(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert main(["train", "missing.toml", "--fault", "kill step=3", "--fault", "kill step=0"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("hpctrain: error: HPCTRAIN_FAULT: 'kill step=0': step='0'; step is a whole number from 1")


def test_the_variable_and_the_option_are_joined(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv(VARIABLE, "kill step=3")
    assert main(["train", "missing.toml", "--fault", "exit step=4", "--fault", "pause step=5 seconds=1"]) == 2
    assert "cannot read settings from missing.toml" in capfd.readouterr().err

    assert os.environ[VARIABLE] == "kill step=3; exit step=4; pause step=5 seconds=1"
