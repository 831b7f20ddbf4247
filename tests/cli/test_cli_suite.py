"""``hpctrain bench NAME`` runs programs of benchmarks/ on the ranks of this job, ``bench report`` compares folders."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli.bench import SUITE
from hpctrain.cli.main import main
from hpctrain.errors import EXIT_USAGE

ROOT = Path(__file__).resolve().parents[2]
HEAD = ["group", "candidate", "size", "median", "low", "high", "repeats"]


def write(folder: Path, name: str, rows: dict[tuple[str, int], tuple[float, float, float]], **more: Any) -> None:
    """Write a result as benchmarks do."""
    folder.mkdir(exist_ok=True)
    content = {"benchmark": name, "provenance": {"machine": folder.name, "processor": "CPU"}, **more}
    (folder / f"{name}.json").write_text(json.dumps(content))
    lines = [["rows", candidate, size, *spread, 5] for (candidate, size), spread in rows.items()]
    with open(folder / f"{name}.csv", "w", newline="") as file:
        csv.writer(file).writerows([HEAD, *lines])


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Return the results of three nodes: the second is slower for large messages, the third is noisy."""
    target = {"what": "hpctrain / mpi", "value": 1.5, "wanted": ">= 2", "met": False}
    small, large = ("hpctrain", 4), ("hpctrain", 1 << 20)
    write(tmp_path / "n1", "x", {small: (1.0, 0.9, 1.1), large: (10.0, 9.0, 11.0)}, targets=[target])
    write(tmp_path / "n2", "x", {small: (1.05, 0.95, 1.15), large: (20.0, 19.0, 21.0), ("mpi", 4): (2.0, 1.0, 3.0)})
    write(tmp_path / "n3", "x", {small: (1.5, 0.5, 2.5), large: (5.0, 4.9, 5.1)})
    return [str(tmp_path / name) for name in ("n1", "n2", "n3")]


def test_a_report_of_several_folders_shows_what_differs(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "report", *folders]) == 0
    said = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in said if line.startswith("x ")]
    assert rows == [["x", "hpctrain", "1048576", "10", "20", "5", "2.00", "0.50", "longer", "shorter"]]
    assert said[-1] == "1 of 2 figures differ by more than 10%, beyond spread"
    assert main(["bench", "report", *folders, "--all"]) == 0
    assert sum(line.startswith("x ") for line in capsys.readouterr().out.splitlines()) == 2
    assert main(["bench", "report", *folders, "--tolerance", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 of 2 figures")


def test_a_report_of_one_folder_shows_targets_and_figures(
    folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "report", folders[0]]) == 0
    said = capsys.readouterr().out
    assert f"{folders[0]}: n1, CPU" in said and ["x", "hpctrain", "/", "mpi", "1.5", ">=", "2", "missed"] in [
        line.split() for line in said.splitlines()
    ]
    assert "1048576" in said


def test_reports_for_programs(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "report", *folders, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["ratios"] for each in found["figures"]] == [[1.0, 1.05, 1.5], [1.0, 2.0, 0.5]]
    assert found["figures"][1]["verdicts"] == ["", "longer", "shorter"]
    assert main(["bench", "report", *folders, "--csv"]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[0] == ["file", "group", "candidate", "size", *folders] and rows[2][4:] == ["10.0", "20.0", "5.0"]


def test_the_committed_results_can_be_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "report", str(ROOT / "benchmarks/results")]) == 0
    assert "all-reduce-np2-mpich" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "{", '{"provenance": 3}', '{"provenance": {}}'])
def test_folders_without_results_are_one_line(
    content: str | None, tmp_path: Path, folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad/x.json").write_text(content)
        (tmp_path / "bad/x.csv").write_text("group,median\na,b\n")
    assert main(["bench", "report", folders[0], str(tmp_path / "bad")]) == EXIT_USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_is_reported_alone(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "n1", "y", {("other", 4): (1.0, 0.9, 1.1)})
    assert main(["bench", "report", f"{folders[0]}/x.json"]) == 0
    said = capsys.readouterr().out
    assert "hpctrain" in said and "other" not in said
    (tmp_path / "z.json").write_text("{}")
    assert main(["bench", "report", str(tmp_path / "z.json")]) == EXIT_USAGE
    assert "z.json is not the result of a benchmark" in capsys.readouterr().err


def test_folders_with_nothing_in_common_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, name, {("hpctrain", 4): (1.0, 1.0, 1.0)})
    assert main(["bench", "report", str(tmp_path / "a"), str(tmp_path / "b")]) == EXIT_USAGE
    assert "have no figure in common" in capsys.readouterr().err


def test_every_program_of_the_suite_exists() -> None:
    for program, _, what in SUITE.values():
        assert (ROOT / "hpctrain/benchmarks" / program).is_file() and what


@pytest.mark.limit(120)
def test_a_benchmark_runs_on_the_ranks_of_the_job(launch: Any, tmp_path: Path) -> None:
    """Its options are its own; the results go to this folder unless --out names another."""
    words = ["all_reduce", "--sizes", "64,4K", "--rounds", "2", "--without", "gloo"]
    for out in ([], ["--out", "mine"]):
        done = launch(2, "-m", "hpctrain", "bench", *words, *out, cwd=tmp_path, timeout=100)
        assert done.returncode == 0, done
        (result,) = (tmp_path / (out[-1] if out else "bench-results")).glob("all-reduce-np2-*.json")
        found = json.loads(result.read_text())
        assert found["ranks"] == 2 and {row["size"] for row in found["rows"]} == {64, 4096}
    done = launch(2, "-m", "hpctrain", "bench", "all_reduce", "--sizes", "x", cwd=tmp_path, timeout=60)
    assert done.returncode == EXIT_USAGE and done.stderr.count("hpctrain: error: ") == 1, done


def test_a_benchmark_explains_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "ddp", "--help"])
    said = capsys.readouterr().out
    assert not end.value.code and "--warmup" in said and "srun hpctrain bench ddp" in said
    assert said.count("usage: ") == said.count("usage: hpctrain bench ddp [-h]") == 1


def test_an_error_in_its_options_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ddp", "--absent"]) == EXIT_USAGE
    assert "unrecognized arguments: --absent (see hpctrain bench ddp --help)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ddp", "checkpoint", "offload"])
def test_results_that_cannot_be_written_are_refused_at_the_start(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["bench", name, "--out", str(tmp_path / "file/results")]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert "results cannot be written there: Not a directory" in said and said.count("\n") == 1


def test_a_folder_is_made_with_the_results_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a/b"
    assert main(["bench", "all_reduce", "--out", str(out)]) == EXIT_USAGE
    assert "all_reduce needs 2 ranks or more, not 1: mpiexec -n 2 hpctrain bench all_reduce" in capsys.readouterr().err
    assert not out.parent.exists()


@pytest.mark.parametrize("name", ["loader", "offload"])
def test_a_benchmark_of_one_process_is_refused_on_ranks(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", name, "--help"])
    assert "  hpctrain bench " in (said := capsys.readouterr().out) and "mpiexec" not in said
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert main(["bench", name]) == EXIT_USAGE
    assert f"{name} measures one process, not 2 ranks: hpctrain bench {name}" in capsys.readouterr().err
