"""Sessions of pytest on several workers, started as jobs: distribution of tests, and end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.pace import scaled
from support.sessions import Sessions
from support.workers import WORKERS_OR_RANKS, WorkersRun, how_many
from xdist import newhooks


@pytest.fixture
def session(tmp_path: Path, launch: Any) -> Sessions:
    """Return a function that runs a file of tests in a folder of its own."""
    return Sessions(tmp_path / "project", launch)


@pytest.mark.parametrize("cores, workers", [(1, 3), (2, 3), (3, 3), (4, 4), (64, 4)])
def test_the_number_of_workers_is_that_of_cores_within_three_and_four(cores: int, workers: int) -> None:
    assert how_many(cores) == workers


def test_workers_share_the_tests_of_one_process(session: Sessions) -> None:
    source = """
import sys
assert "torch" not in sys.modules, "it would not see the variable any more"
@pytest.mark.parametrize("n", range(40))
def test_it(n):
    time.sleep(0.02)
    with open("ran", "a") as file: file.write(f"{os.getpid()} {n} {os.environ['OMP_NUM_THREADS']}\\n")
@pytest.mark.ranks
def test_on_ranks(): pass
"""
    result = session(0, source, "-n", "2", env={"OMP_NUM_THREADS": "3"})
    assert result.returncode == 0 and "40 passed" in result.stdout, result
    ran = [line.split() for line in (session.folder / "ran").read_text().splitlines()]
    assert sorted(int(n) for _, n, _ in ran) == list(range(40))
    assert len({pid for pid, _, _ in ran}) == 2 and {threads for _, _, threads in ran} == {"1"}


def test_the_controller_has_a_time_limit_until_tests_are_collected() -> None:
    calls: list[str] = []
    watchdog: Any = SimpleNamespace(disarm=lambda: calls.append("disarm"))
    plugins = pytest.PytestPluginManager()
    plugins.add_hookspecs(newhooks)
    plugins.register(WorkersRun(watchdog))
    plugins.hook.pytest_xdist_node_collection_finished(node=None, ids=[])
    assert calls == ["disarm"]


@pytest.mark.long
def test_a_hang_in_a_worker_ends_the_session_with_its_stacks(session: Sessions) -> None:
    source = """
@pytest.mark.limit(2)
def test_hang(): sleeping()
def sleeping(): time.sleep(100)
@pytest.mark.parametrize("n", range(400))
def test_other(n): time.sleep(0.1)
"""
    result = session(0, source, "-n", "2")
    assert result.returncode == 1 and not result.survivors, result
    assert "test_inner.py::test_hang is not done after 2 s" in result.stderr and "in sleeping" in result.stderr
    assert any(f"[gw{number}] " in result.stderr for number in (0, 1))
    assert "crashed while running 'test_inner.py::test_hang'" in result.stdout
    assert "the session ended early, because worker gw" in result.stdout
    # 40 s of tests remained for the other worker.
    assert "1 failed" in result.stdout and result.seconds < scaled(25)


DEATH = "os._exit(0) if os.environ.get('PYTEST_XDIST_WORKER') == 'gw1' else time.sleep(0.1)"


MANY = "@pytest.mark.parametrize('n', range(20))\n"


@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["", f"{MANY}def test_it(n): "], ids=["collecting", "in a test"])
def test_a_dead_worker_fails_the_session(session: Sessions, place: str) -> None:
    result = session(0, f"def test_first(): pass\n{place}{DEATH}\n", "-n", "2")
    assert result.returncode == 1, result
    assert "the session ended early, because worker gw1" in result.stdout


def test_workers_and_ranks_at_once_are_refused(session: Sessions) -> None:
    result = session(2, "@pytest.mark.ranks\ndef test_it(): pass\n", "-n", "2")
    assert result.returncode != 0 and result.stderr.count(f"ERROR: {WORKERS_OR_RANKS}") == 1


CASES = """
@pytest.mark.parametrize("x", "ab")
@pytest.mark.parametrize("y", "cde")
def test_two_parameters(x, y): pass
@pytest.mark.few(2)
@pytest.mark.parametrize("x", "fghi")
def test_marked(x): pass
@pytest.mark.parametrize("x", ["j", pytest.param("k", marks=pytest.mark.long)])
def test_sweep(x): pass
@pytest.mark.parametrize("x", "lmn")
def test_one_parameter(x): pass
def test_none(): pass
"""


def test_few_cases_have_each_value_and_rest_has_the_others(session: Sessions) -> None:
    outputs = (session(0, CASES, "-v", "--cases", cases).stdout.split() for cases in ("few", "rest"))
    few, rest = ({word.partition("::test_")[2] for word in words if "::" in word} for words in outputs)
    assert few == {"two_parameters[c-a]", "two_parameters[c-b]", "two_parameters[d-a]", "two_parameters[e-a]"} | {
        "marked[f]", "marked[h]", "sweep[j]", "one_parameter[l]", "one_parameter[m]", "one_parameter[n]", "none"
    }
    assert rest == {"two_parameters[d-b]", "two_parameters[e-b]", "marked[g]", "marked[i]", "sweep[k]"}
