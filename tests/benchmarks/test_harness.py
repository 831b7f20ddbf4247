"""Common harness of the benchmarks: statistics, turns, options, files, and the end by a signal."""

from __future__ import annotations

import csv
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_helpers import FOLDER, PROVENANCE, TIME, texts_of
from harness import plot, report, stats, turns
from harness.ranks import run_child
from harness.report import Target, at_least, at_most, target_table, targets_json
from harness.run import parse_sizes, split
from harness.turns import Stopped, interleave, stop
from support.pace import scaled

from hpctrain.errors import UsageError

# Statistics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 20, 41])
def test_summaries_equal_numpys(count: int) -> None:
    values = np.random.default_rng(count).random(count).tolist()
    found = stats.summary(values)
    quartiles = [found["quartile_1"], found["median"], found["quartile_3"]]
    if count > 2:  # numpy does not extrapolate beyond the smallest and the largest value
        assert quartiles == pytest.approx(np.quantile(values, [0.25, 0.5, 0.75], method="weibull"))
    assert (found["median"], found["min"], found["max"]) == (np.median(values), min(values), max(values))
    assert found["repeats"] == count


def test_a_single_repeat_has_no_spread() -> None:
    assert set(stats.summary([2.0]).values()) == {2.0, 1}


def test_the_slowest_rank_counts_in_each_repeat() -> None:
    assert stats.slowest([[1.0, 5.0, 2.0], [3.0, 4.0, 2.0]]) == [3.0, 5.0, 2.0]
    found = stats.summaries([{"a": [1.0, 5.0, 1.0], "b": []}, {"a": [2.0, 1.0, 3.0], "b": []}])
    assert (found["a"]["min"], found["a"]["median"], found["a"]["max"]) == (2.0, 3.0, 5.0) and list(found) == ["a"]
    times = {"a": {"median": 3.0}, "b": {"median": 1.5}}
    assert stats.ratio(times, "a", "b") == 2.0 and stats.ratio(times, "a", "c") is None


def test_the_largest_difference_of_any_rank_and_step_counts() -> None:
    right = {"torch": [2.0, 1.0], "ddp": [2.0, 1.0], "alone": [2.0, 9.0]}
    gathered = [{**right, "fsdp": [2.0, 1.0]}, {**right, "fsdp": [2.1, 1.0]}]
    assert stats.differences(gathered, "torch", without=["alone"]) == {"ddp": 0.0, "fsdp": pytest.approx(0.05)}
    assert stats.differences([{"ddp": [1.0]}], "torch") == {}


# Turns ----------------------------------------------------------------------------------------------------------------


def turns_of(names: str, log: list[str]) -> dict[str, Any]:
    return {name: lambda number, name=name: log.append(name) or number for name in names}


def test_each_round_begins_with_the_next_candidate_and_the_first_is_for_warm_up() -> None:
    log: list[str] = []
    found = interleave(turns_of("abc", log), 3, rotate=True)
    assert "".join(log) == "abc" "bca" "cab" "abc"
    assert found == {"a": [1, 2, 3], "b": [1, 2, 3], "c": [1, 2, 3]}


def test_a_random_order_is_the_same_on_all_ranks_and_differs_between_rounds() -> None:
    log: list[str] = []
    other: list[str] = []
    for each in (log, other):
        interleave(turns_of("abcd", each), 40, warmup=0)
    rounds = ["".join(log[start : start + 4]) for start in range(0, 160, 4)]
    assert log == other and all(sorted(order) == list("abcd") for order in rounds)
    assert len(set(rounds)) > 10 and {order[0] for order in rounds} == set("abcd")


def test_slow_candidates_take_fewer_turns_but_at_least_one() -> None:
    for rounds, expected in ((1, 1), (3, 1), (4, 2), (8, 3), (40, 11)):
        found = interleave(turns_of("ab", []), rounds, rotate=True, every={"b": 4})
        assert (len(found["a"]), len(found["b"])) == (rounds, expected)


def test_a_turn_is_timed_without_the_barrier_and_without_garbage_collection() -> None:
    log: list[str] = []

    class Comm:
        """Communicator that records its barrier."""

        def barrier(self) -> None:
            log.append(f"barrier {gc.isenabled()}")

    comm: Any = Comm()
    assert turns.timed(lambda: log.append(f"turn {gc.isenabled()}"), comm) >= 0
    assert log == ["barrier False", "turn False"] and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        turns.timed(lambda: 1 // 0)
    assert gc.isenabled()


def test_ranks_act_on_a_signal_that_all_know() -> None:
    flag = turns.StopFlag()

    class Comm:
        """Communicator of two ranks; a signal arrives at this one during the first exchange."""

        def all_gather_object(self, own: int) -> list[int]:
            flag.arrive(signal.SIGINT)
            return [own, 0]

    comm: Any = Comm()
    flag.check(comm)
    assert flag.number == 0  # the other rank does not know it yet
    with pytest.raises(turns.Stopped):
        flag.check(comm)
    assert flag.number == signal.SIGINT


@pytest.fixture
def stopped() -> Any:
    """Return the flag of a benchmark that a test may stop."""
    stop.forget()
    yield stop
    stop.forget()


def test_a_signal_ends_the_turns_and_keeps_their_results(stopped: turns.StopFlag) -> None:
    def turn(number: int) -> int:
        if number == 2:  # the third round, which "a" begins
            stopped.arrive(signal.SIGTERM)
        return number

    both = {"a": turn, "b": lambda number: number}
    assert interleave(both, 5, warmup=0, rotate=True) == {"a": [0, 1, 2], "b": [0, 1]}
    with pytest.raises(Stopped):
        stopped.check()


def test_ranks_agree_on_a_signal_that_one_of_them_has(stopped: turns.StopFlag) -> None:
    class Comm:
        """Communicator whose other rank has received SIGINT."""

        def all_gather_object(self, value: int) -> list[int]:
            return [value, signal.SIGINT]

    comm: Any = Comm()
    with pytest.raises(Stopped):
        stopped.check(comm)
    assert stopped.number == signal.SIGINT


# Options --------------------------------------------------------------------------------------------------------------


def test_lists_keep_their_order_and_sizes_are_sorted() -> None:
    assert split("ring, auto,ring,,window ") == ["ring", "auto", "window"] and split("") == []
    assert parse_sizes(" 25m , 1KiB,8B, 2 G,1024") == [8, 1024, 26214400, 2147483648]
    for text in ("", ",", "4,x"):
        with pytest.raises(UsageError, match="no sizes given|'x' is not a number of bytes"):
            parse_sizes(text)


# Output ---------------------------------------------------------------------------------------------------------------


def test_targets_are_minima_or_maxima_and_missing_figures_have_none() -> None:
    found = [
        *at_least("speed", 2.0, 1.5),
        *at_most("drift", 1e-5, 1e-6),
        *at_most("wrong", 0, 0),
        *at_least("x", None, 1),
    ]
    assert [one.met for one in found] == [True, False, True]
    assert targets_json(found)[0] == {"what": "speed", "value": 2.0, "wanted": ">= 1.5", "met": True}
    lines = target_table(found).splitlines()
    assert lines[1].split() == ["speed", "2.00", ">=", "1.5", "reached"]
    assert lines[2].split() == ["drift", "1.0e-05", "<=", "1e-06", "missed"] and lines[3].split()[1] == "0"
    assert target_table([]) == "" and not Target("load", 1.3, 1.2, at_least=False).met


def test_the_csv_has_a_row_per_summary_of_the_json(tmp_path: Path) -> None:
    content = {
        "seconds": {"a": stats.summary([1.0, 2.0, 4.0]), "b": TIME},
        "rows": [{"candidate": "mpi", "size": 8, "median": 2.0, "min": 1.0, "p95": 3.0, "repeats": 4}],
        "cases": [{"strategy": "fsdp", "parameters": 200, "ratio": 1.5, "plain": TIME}],
        "provenance": {},
    }
    table = report.csv_text(content, [("bytes", "c", 4, 1, 1, 1, 1)])
    paths = report.write_result(tmp_path / "new", "some", content, table)
    assert [path.name for path in paths] == ["some.json", "some.csv"]
    assert json.loads(paths[0].read_text()) == content
    rows = list(csv.DictReader(paths[1].read_text().splitlines()))
    assert tuple(rows[0]) == report.COLUMNS
    found = {(row["group"], row["candidate"], row["size"]): row for row in rows}
    seconds, more = [("seconds", "a", ""), ("seconds", "b", "")], [("cases/fsdp 200", "plain", ""), ("bytes", "c", "4")]
    assert list(found) == [*seconds, ("rows", "mpi", "8"), *more]
    for name, one in content["seconds"].items():  # type: ignore[attr-defined]
        row = found["seconds", name, ""]
        assert [float(row[key]) for key in ("median", "low", "high")] == [
            one[key] for key in ("median", "quartile_1", "quartile_3")
        ]
        assert int(row["repeats"]) == one["repeats"] and float(row["min"]) == one["min"]
    assert float(found["seconds", "a", ""]["mean"]) == pytest.approx(7 / 3)
    assert [found["rows", "mpi", "8"][key] for key in ("median", "low", "high", "repeats")] == [
        "2.0",
        "1.0",
        "3.0",
        "4",
    ]


def test_the_kind_of_host_and_its_caches_are_named(tmp_path: Path) -> None:
    dmi, cache = tmp_path / "sys/class/dmi/id", tmp_path / "cache"
    dmi.mkdir(parents=True)
    (dmi / "sys_vendor").write_text("HPE\n")
    (dmi / "product_name").write_text("Cray EX235n\n")
    assert report.host_kind(tmp_path) == "HPE Cray EX235n"
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nflags\t\t: fpu hypervisor sse\n")
    assert report.host_kind(tmp_path) == "HPE Cray EX235n, virtual machine"
    for number, (level, kind, size) in enumerate((("1", "Data", "32K"), ("2", "Unified", "1M"))):
        folder = cache / f"index{number}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n")
    assert report.caches(cache) == {"L1d": "32K", "L2": "1M"} and report.caches(tmp_path / "none") == {}
    assert report.mpi_network({"FI_PROVIDER": "cxi", "HOME": "/"}).endswith("FI_PROVIDER=cxi")


def test_provenance_names_machine_software_and_command() -> None:
    found = report.provenance(2, launched=True)
    assert PROVENANCE <= found.keys() and found["command"].startswith("mpiexec -n 2 python ")
    assert report.provenance(1, launched=False)["command"].startswith("python ")
    assert found["mpi"].split()[-1][0].isdigit() and report.mpi_slug() in ("mpich", "openmpi")


def test_bars_show_values_and_spread(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = plot.step_bars({"hpctrain": TIME, "alone": TIME}, own=["alone"])
    assert [one.colour for one in rows] == [plot.BLUE, plot.GREY] and rows[0].ends == (400, 600)
    png, svg = plot.save(
        tmp_path / "some-np2.5", (4, 2), lambda figure: plot.bars(figure.subplots(), rows, "ms", "steps")
    )
    assert [png.name, svg.name] == ["some-np2.5.png", "some-np2.5.svg"]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert {"hpctrain", "alone", "500", "ms", "steps"} <= set(texts_of(svg).splitlines())


# Processes and signals ------------------------------------------------------------------------------------------------


def test_a_child_that_takes_too_long_is_ended_with_its_processes() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(100)'])"
    with pytest.raises(UsageError, match="did not end within 0.5 s"):
        run_child([sys.executable, "-c", program], timeout=0.5)
    done = run_child([sys.executable, "-c", "print('out')"], timeout=60)
    assert (done.returncode, done.stdout) == (0, "out\n")


@pytest.mark.benchmark
@pytest.mark.limit(200)
@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_result_and_no_rank(number: int, tmp_path: Path) -> None:
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("no mpiexec beside the interpreter")
    words = ["--quick", "--rounds", "100000", "--without", "torch-dtensor", "--out", str(tmp_path)]
    command = [str(mpiexec), "-n", "2", sys.executable, str(FOLDER / "tensor.py"), *words]
    env = {**os.environ, "HPCTRAIN_BENCHMARK_TEST": str(tmp_path)}
    mark = f"HPCTRAIN_BENCHMARK_TEST={tmp_path}".encode()
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=env, **pipes) as process:  # type: ignore[call-overload]
        try:
            next(line for line in process.stderr if "ETA" in line)  # some rounds are measured
            started = time.monotonic()
            # SIGINT goes to the launcher, SIGTERM to a single rank: the ranks must agree on it.
            ranks = [path for path in Path("/proc").glob("[0-9]*/environ") if _has(path, mark) and _is_rank(path)]
            os.kill(process.pid if number == signal.SIGINT else int(ranks[0].parent.name), number)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + number, out
    assert time.monotonic() - started < 20
    assert not list(tmp_path.iterdir())
    assert "hpctrain tensor" in out and "the result is incomplete, and no file is written" in out
    others = [path for path in Path("/proc").glob("[0-9]*/environ") if _has(path, mark)]
    assert not others


@pytest.mark.benchmark
@pytest.mark.limit(200)
@pytest.mark.parametrize("target", ["tensor", "fsdp-step"])
def test_a_signal_to_make_alone_ends_all_ranks(target: str, tmp_path: Path) -> None:
    """fsdp-step has a shell that starts one job after another."""
    if not (FOLDER.parent / ".venv/bin/mpiexec").exists():
        pytest.skip("make would build an environment here")
    mark = f"HPCTRAIN_BENCHMARK_TEST={tmp_path}".encode()
    command = ["make", "-C", str(FOLDER), target, "ROUNDS=100000", f"OUT={tmp_path / 'out'}"]
    env = {**os.environ, "HPCTRAIN_BENCHMARK_TEST": str(tmp_path)}
    with open(tmp_path / "said", "w") as said, subprocess.Popen(command, env=env, stdout=said, stderr=said) as process:
        try:
            _until(lambda: len([path for path in _processes(mark) if _is_rank(path)]) >= 2, 60)
            process.terminate()
            assert process.wait(60) in (2, 128 + signal.SIGTERM, -signal.SIGTERM)
        finally:
            process.kill()
    _until(lambda: not _processes(mark), 30)
    assert not (tmp_path / "out").exists(), (tmp_path / "said").read_text()


def _processes(mark: bytes) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/environ") if _has(path, mark)]


def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + scaled(seconds)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _has(path: Path, mark: bytes) -> bool:
    try:
        return mark in path.read_bytes()
    except OSError:
        return False


def _is_rank(path: Path) -> bool:
    try:
        words = (path.parent / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended
    # else the launcher, which may be a script
    return len(words) > 1 and words[1].endswith((b"/tensor.py", b"/fsdp_step.py"))


def test_commands_of_results_name_no_folder_of_the_machine() -> None:
    folder = report.RESULTS / "checkpoint.tmp-1"
    command = report.command(["benchmarks/checkpoint.py", "--folder", str(folder)], 2)
    assert command == "mpiexec -n 2 python benchmarks/checkpoint.py --folder benchmarks/results/checkpoint.tmp-1"
    assert report.command(["benchmarks/kill.py"], 0) == "python benchmarks/kill.py"
