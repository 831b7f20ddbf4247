"""Parts of metrics files, compared with the whole file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hpctrain.watch.curves import CurveReader, best_of, drawn, read_curves, shown_together
from hpctrain.watch.rows import MetricsFile, Row

STEPS = 20_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row]]:
    rows: list[Row] = [{"step": step, "loss": 1.0 / step, "grad_norm": 0.5} for step in range(1, STEPS + 1)]
    for each in rows[249::250]:
        each["val"] = 2.0 / each["step"]
    path = tmp_path_factory.mktemp("large") / "metrics.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path, rows


def test_last_sampled_and_rare_rows_are_those_of_the_file(large: tuple[Path, list[Row]]) -> None:
    path, rows = large
    with MetricsFile.opened(path) as file:
        assert file.last(50) == rows[-50:]
        sampled = file.sampled(100)
        assert sampled[0] == rows[0] and sampled[-1] == rows[-1] and 95 <= len(sampled) <= 101
        assert all(each == rows[each["step"] - 1] for each in sampled)
        gaps = [after["step"] - before["step"] for before, after in zip(sampled, sampled[1:])]
        assert max(gaps) < 2 * STEPS / 100
        assert file.rare(1000) == [each for each in rows if "val" in each]
        few = file.rare(10)
        assert len(few) == 10 and few[0] == rows[249] and few[-1] == rows[-1]


def test_torn_and_damaged_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = [json.dumps({"step": step, "val": 1.0}) for step in range(1, 6)]
    damaged = ["{", "[1]", '{"step": "2"}', "\x00\xff", "x" * 100_000, '{"step": 3.5}']
    path.write_text("\n".join([*good[:2], *damaged, *good[2:], '{"step": 6, "va']), errors="replace")
    with MetricsFile.opened(path) as file:
        assert [each["step"] for each in file.last(50)] == [1, 2, 3, 4, 5]
        assert [each["step"] for each in file.sampled(50)] == [1, 2, 3, 4, 5]
        assert [each["step"] for each in file.rare(50)] == [1, 2, 3, 4, 5]


def test_missing_and_empty_files_have_no_rows(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    for name in ("missing", "empty"):
        with MetricsFile.opened(tmp_path / name) as file:
            assert not file.last(5) and not file.sampled(5) and not file.rare(5)


def test_a_file_that_shrinks_while_it_is_open_has_no_rows(large: tuple[Path, list[Row]], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(large[0].read_bytes())
    with MetricsFile.opened(path) as file:
        path.write_text("")
        assert not file.last(5) and not file.sampled(5) and not file.rare(5)


def test_curves_have_the_points_of_the_file_and_losses_come_first(large: tuple[Path, list[Row]]) -> None:
    curves = read_curves(large[0].parent, 100)
    assert list(curves) == ["loss", "val", "grad_norm"]
    steps, values = curves["val"]
    assert steps == [*range(250, STEPS + 1, 250)] and values == [2.0 / step for step in steps]
    assert all(value == 1.0 / step for step, value in zip(*curves["loss"]))
    assert shown_together("loss", curves) == ["loss", "val"] and shown_together("grad_norm", curves) == ["grad_norm"]
    assert best_of("val", curves["val"]) == (STEPS, 2.0 / STEPS)
    assert best_of("val_accuracy", curves["val"]) == (250, 2.0 / 250)


def test_a_file_that_grows_is_read_from_where_it_ended(large: tuple[Path, list[Row]], tmp_path: Path) -> None:
    path, new = tmp_path / "metrics.jsonl", [{"step": STEPS + number, "loss": 5.0} for number in (1, 2, 3)]
    path.write_bytes(large[0].read_bytes())
    reader = CurveReader(tmp_path, 100)
    before = reader.read()["loss"]
    with open(path, "a") as file:
        file.write(json.dumps(new[0]) + "\n" + json.dumps(new[1])[:9])
    steps, values = reader.read()["loss"]
    assert steps == [*before[0], STEPS + 1] and values == [*before[1], 5.0]
    with open(path, "a") as file:
        file.write(json.dumps(new[1])[9:] + "\n" + json.dumps(new[2]) + "\n")
    assert reader.read()["loss"][0] == [*before[0], STEPS + 1, STEPS + 2, STEPS + 3]
    path.write_text(json.dumps(new[2]) + "\n")  # the run has gone back: a shorter file
    assert reader.read() == {"loss": ([STEPS + 3], [5.0])}
    (tmp_path / "new").write_bytes(large[0].read_bytes())  # a run replaces its file when it goes back
    (tmp_path / "new").replace(path)
    assert reader.read()["loss"] == before
    path.unlink()
    assert reader.read() == {}


@pytest.mark.parametrize("width, height", [(30, 8), (80, 12), (160, 20)])
def test_a_picture_has_the_requested_size(large: tuple[Path, list[Row]], width: int, height: int) -> None:
    curves = read_curves(large[0].parent, 100)
    lines = drawn(["loss", "val"], curves, width, height, colour=False).rstrip("\n").split("\n")
    assert len(lines) == height and max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines) and "20,000" in lines[-1]
    assert "\x1b[" in drawn(["loss"], curves, width, height, colour=True)


def test_infinite_values_are_not_drawn(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": None}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": math.inf}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert read_curves(tmp_path) == {"loss": ([2], [1.0])}
