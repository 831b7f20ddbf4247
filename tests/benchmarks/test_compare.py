from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import compare
import pytest

HEAD = {"benchmark": "all_reduce", "ranks": 2, "nodes": 1, "dtype": "float32", "device": "cpu", "mpi": "MPICH 5.0.2"}


def result(path: Path, medians: dict[tuple[int, str], float], **head: Any) -> str:
    rows = [{"size": size, "candidate": name, "median": median} for (size, name), median in medians.items()]
    path.write_text(json.dumps({**HEAD, **head, "rows": rows}))
    return str(path)


def run(arguments: list[str]) -> int:
    return compare.main(compare.parse, compare.run, arguments)


OLD = {(4, "hpctrain"): 1e-6, (4, "mpi"): 2e-6, (2**20, "hpctrain"): 1e-4, (2**20, "mpi"): 4e-4}


def test_unchanged_and_faster_results_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = result(tmp_path / "a", OLD), result(tmp_path / "b", {**OLD, (4, "hpctrain"): 1.09e-6})
    assert run([old, new]) == 0
    out = capsys.readouterr().out
    assert "4 B    hpctrain        1.09    1.00    1.09\n" in out
    assert "no median of hpctrain grew by more than 10%" in out


def test_a_regression_beyond_the_tolerance_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = result(tmp_path / "a", OLD), result(tmp_path / "b", {**OLD, (2**20, "hpctrain"): 1.2e-4})
    assert run([old, new]) == 1
    assert "1 MiB  hpctrain        1.20  100.00  120.00  slower\n" in capsys.readouterr().out
    assert run([old, new, "--tolerance", "0.25"]) == 0


def test_a_slower_library_is_not_a_regression(tmp_path: Path) -> None:
    assert run([result(tmp_path / "a", OLD), result(tmp_path / "b", {**OLD, (4, "mpi"): 1.0})]) == 0


@pytest.mark.parametrize(
    "head", [{"benchmark": "broadcast"}, {"ranks": 4}, {"dtype": "float64"}, {"device": "cuda"}, {"nodes": 2}]
)
def test_other_measurements_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], head: dict[str, Any]
) -> None:
    (key,) = head
    assert run([result(tmp_path / "a", OLD), result(tmp_path / "b", OLD, **head)]) == 2
    message = f"hpctrain: error: these results cannot be compared: {key} is {HEAD[key]} in {tmp_path / 'a'} and"
    assert message in capsys.readouterr().err


def test_a_result_at_a_git_revision_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    name = "all-reduce-np2-mpich.json"
    assert run([f"HEAD:{name}", name]) in (0, 1)
    assert f"old: HEAD:{name} (MPICH" in capsys.readouterr().out
    for wrong in (f"no-such-revision:{name}", "HEAD:no-such.json", f"--output=x:{name}"):
        assert run(["--", wrong, name]) == 2
        assert f"at revision {wrong.partition(':')[0]}: " in capsys.readouterr().err


def test_results_without_a_common_row_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([result(tmp_path / "a", OLD), result(tmp_path / "b", {(8, "mpi"): 1.0})]) == 2
    assert "share no size and candidate" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"rows": [{"size": "x"}]}', '{"rows": 4}'])
def test_invalid_results_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    other = tmp_path / "b"
    other.write_text(content)
    assert run([result(tmp_path / "a", OLD), str(other)]) == 2
    err = capsys.readouterr().err
    assert f"{other} is no result of a communication benchmark" in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["missing.json", "missing.json"], ["a"], ["a", "b", "--tolerance", "x"]])
def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_negative_tolerance_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = result(tmp_path / "a", OLD)
    assert run([old, old, "--tolerance", "-0.1"]) == 2
    assert "tolerance -0.1 is not a share" in capsys.readouterr().err


def test_of_two_libraries_the_better_one_is_shown_without_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [size * 2**10 for size in (64, 1024, 4096, 25600, 65536)]
    first = {(size, name): median for size in sizes for name, median in (("hpctrain", 1.0), ("mpi", 4.0))}
    second = {(size, name): median for size in sizes for name, median in (("hpctrain", 2.0), ("mpi", 8.0))}
    old = result(tmp_path / "a", {**first, (4, "hpctrain"): 2.0, (4, "mpi"): 2.0, (sizes[1], "mpi 16 MiB"): 3.0})
    new = result(tmp_path / "b", {**second, (4, "hpctrain"): 4.0, (4, "mpi"): 1.0}, mpi="Open MPI 5.0.11")
    assert run([old, new]) == 0
    out = capsys.readouterr().out
    assert "hpctrain against the faster of MPICH 5.0.2 and Open MPI 5.0.11" in out
    assert re.search(r"^4 B +0.50 \(0.50\) +0.25 \(0.25\)$", out, re.M)
    assert re.search(r"^1 MiB +4.00 \(3.00\) +2.00 \(1.50\)$", out, re.M)
    assert re.search(r"^mean from 64 KiB up +4.00 +2.00$", out, re.M)
