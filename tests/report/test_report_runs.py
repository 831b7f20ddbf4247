"""Facts of runs for a report: names, settings, differences, rates, speed-up, use of time in a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.watched_runs import MakeRun

from hpctrain.errors import UsageError
from hpctrain.report.runs import differences, drawn_points, names_of, read_runs, scaling, work_per_second
from hpctrain.train.profile.read import read_times


def test_names_are_the_parts_of_the_paths_that_differ(tmp_path: Path) -> None:
    assert names_of([tmp_path / "runs" / "a"]) == ["a"]
    assert names_of([tmp_path / "x" / "a", tmp_path / "y" / "a"]) == ["x/a", "y/a"]
    assert names_of([Path("a\x1b[31m")]) == ["a\\x1b[31m"]


def test_settings_are_shown_with_dotted_names(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "config.toml").write_text('[train]\nsteps = 5\n[parallel]\nmesh = [2, 2]\n[model]\nname = "gpt"\n')
    (run,) = read_runs([folder])
    assert run.settings == {"train.steps": "5", "parallel.mesh": "[2, 2]", "model.name": "gpt"}
    assert run.environments[0]["size"] == "8" and not run.notes


def test_damaged_files_are_notes_not_errors(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "config.toml").write_text("[train\n")
    (folder / "trace.json").write_text("[1")
    (run,) = read_runs([folder])
    assert run.settings == {} and run.step is None and run.curves["loss"][0][-1] == 200
    assert "is no TOML file" in " ".join(run.notes) and "is not a trace" in " ".join(run.notes)


def test_metrics_that_cannot_be_read_are_a_note(make_run: MakeRun) -> None:
    folder, running = make_run(status="finished"), make_run("running")
    for each in (folder, running):
        (each / "metrics.jsonl").unlink()
        (each / "metrics.jsonl").mkdir()
    (run,) = read_runs([folder])
    assert not run.curves and "cannot be read" in run.notes[0]
    with pytest.raises(UsageError, match="cannot read .*metrics.jsonl"):
        read_runs([running])  # its newest steps are only there


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_runs([tmp_path / "nothing"])


def test_only_names_with_different_values_are_differences() -> None:
    facts = [{"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}]
    assert differences(facts) == {"b": ["2", "3"], "c": ["", "4"]}
    assert differences(facts[:1]) == {}


def test_many_runs_have_few_points_each(make_run: MakeRun) -> None:
    few = read_runs([make_run("one", 2000)])
    assert drawn_points(few) == 500 <= len(few[0].curves["loss"][0])
    many = read_runs([make_run(f"run{number}", 100) for number in range(100)])
    assert drawn_points(many) == 50


# Rates and scaling ----------------------------------------------------------------------------------------------------


def test_the_rate_is_that_of_the_median_step(make_run: MakeRun) -> None:
    folder = make_run(every=0.5)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows[100]["step_seconds"] = 50.0  # an evaluation, which may not matter
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = read_runs([folder])
    assert work_per_second(run) == (pytest.approx(4096 / 0.4), "tokens")


def test_speedup_and_efficiency_follow_from_the_rates(make_run: MakeRun) -> None:
    every = {"a": 0.8, "b": 0.82, "c": 0.78, "d": 0.5, "e": 0.4}
    sizes = {"a": 2, "b": 2, "c": 2, "d": 4, "e": 8}
    folders = [make_run(name, every=every[name], size=sizes[name]) for name in every]
    points, unit = scaling(read_runs(folders))
    assert unit == "tokens" and [(point.ranks, point.runs) for point in points] == [(2, 3), (4, 1), (8, 1)]
    assert [point.speedup for point in points] == pytest.approx([1.0, 1.6, 2.0])
    assert [point.efficiency for point in points] == pytest.approx([1.0, 0.8, 0.5])


@pytest.mark.parametrize("sizes", [(4, 4), (4,)])
def test_runs_with_equal_ranks_have_no_scaling(make_run: MakeRun, sizes: tuple[int, ...]) -> None:
    runs = read_runs([make_run(f"run{number}", size=size) for number, size in enumerate(sizes)])
    assert scaling(runs) == ([], "")


def test_rates_of_different_units_are_not_compared(make_run: MakeRun) -> None:
    folders = [make_run("a", size=2), make_run("b", size=4, batch=8)]
    rows = [json.loads(line) for line in (folders[1] / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({name: row[name] for name in row if name != "tokens"}) + "\n" for row in rows)
    (folders[1] / "metrics.jsonl").write_text(text)
    assert scaling(read_runs(folders)) == ([], "")


# Use of time in a trace -----------------------------------------------------------------------------------------------


def test_times_of_spans_do_not_include_the_spans_inside(traced: Path) -> None:
    times = read_times(traced)
    assert times.ranks == ("rank 0", "rank 1") and list(times.steps) == [3, 4]
    for rank, wait in ((0, 0.001), (1, 0.003)):
        expected: dict[str, Any] = {"step": 0.0015, "forward": 0.002, "reduce": wait, "optimizer": 0.0015}
        expected["backward"] = 0.005 - wait
        assert times.steps[4][rank] == pytest.approx(expected)
        assert sum(times.steps[4][rank].values()) == pytest.approx(0.010)


def test_a_step_that_a_rank_lacks_does_not_count(traced: Path) -> None:
    content = json.loads((traced / "trace.json").read_text())
    kept = [event for event in content["traceEvents"] if event["args"] != {"rank": 1, "step": 4}]
    (traced / "trace.json").write_text(json.dumps({"traceEvents": kept}))
    assert list(read_times(traced).steps) == [3]
