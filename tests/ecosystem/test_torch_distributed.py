"""PyTorch's own ``DistributedTest`` passes with our back end wherever it passes with gloo."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path

import distributed_suite
import pytest
import suite_results
from suite_results import STOCK, Outcome, SuiteResult

RANKS = int(os.environ.get("ECOSYSTEM_NP", "2"))
VERSION = importlib.metadata.version("torch")
long = pytest.mark.long


@pytest.fixture(scope="session")
def stock() -> SuiteResult:
    """Return the result of torch's own gloo: the recorded one, if it is of the same torch and number of ranks."""
    recorded = suite_results.stock(suite_results.read(), RANKS, VERSION)
    return recorded or distributed_suite.run_suite(STOCK, RANKS)


@pytest.mark.ecosystem
@pytest.mark.limit(1800)
@pytest.mark.parametrize("name", ["hpctrain", pytest.param("gloo", marks=long), pytest.param("mpi", marks=long)])
def test_all_that_gloo_passes_passes(name: str, stock: SuiteResult) -> None:
    result = distributed_suite.run_suite(name, RANKS)
    assert result.failed == {}
    assert suite_results.missing(result, stock) == []


@pytest.mark.ecosystem
@pytest.mark.long
@pytest.mark.limit(1800)
def test_recorded_result_of_gloo_is_still_that_of_gloo(stock: SuiteResult) -> None:
    assert distributed_suite.run_suite(STOCK, RANKS).all_passed == stock.all_passed


# Parts of the runner, without ranks -----------------------------------------------------------------------------------


def test_outcomes_are_those_of_all_ranks(tmp_path: Path) -> None:
    line = '{{"test": "{}", "status": "{}", "why": "{}", "seconds": 1}}\n'.format
    (tmp_path / "outcomes-0.jsonl").write_text(
        line("a", "passed", "") + line("b", "passed", "") + line("c", "skipped", "x")
    )
    (tmp_path / "outcomes-1.jsonl").write_text(line("a", "failed", "why") + line("c", "skipped", "x"))
    found = dict(distributed_suite.complete(tmp_path, 2))
    assert found == {"a": Outcome("failed", "why", 1), "c": Outcome("skipped", "x", 1)}  # b hangs on rank 1


def test_page_counts_what_gloo_passes_and_we_do_not(tmp_path: Path) -> None:
    def result(name: str, passed: list[str], patched: list[str]) -> SuiteResult:
        one = SuiteResult(name, 2, "MPICH 5.0.2", "2.13.0+cpu")
        one.add({test: Outcome("passed") for test in passed} | {"d": Outcome("skipped", "no GPU")}, patched=False)
        one.add({test: Outcome("passed") for test in patched}, patched=True)
        return one

    gloo, ours = result(STOCK, ["a", "b"], []), result("hpctrain", ["a"], ["c"])
    assert suite_results.missing(ours, gloo) == ["b"]
    for one in (gloo, ours):
        one.write(tmp_path)
    assert suite_results.read(tmp_path) == [gloo, ours]
    row = next(line for line in suite_results.page([gloo, ours]).splitlines() if "`hpctrain` |" in line)
    assert [cell.strip() for cell in row.split("|")[5:-1]] == ["1", "1", "0", "0", "1"]


@pytest.mark.parametrize("check", [lambda text: text, suite_results.last_line], ids=["whole", "last line"])
def test_failures_name_no_folders_of_the_machine(check: Callable[[str], str]) -> None:
    text = 'Traceback\n  File "/home/me/venv/torch/distributed/c10d.py", line 3\nValueError: no'
    assert "/home" not in check(suite_results.without_paths(text)) and "ValueError" in check(text)
