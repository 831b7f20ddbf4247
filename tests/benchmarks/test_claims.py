"""Recorded runs of benchmarks, and the ranges of claimed ratios over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import claims
import pytest
from claims import BEGIN, CLAIMS, END, PAGE, Claim, markdown, ranges, with_tables
from harness.history import FOLDER, Figure, record, runs_of
from harness.report import RESULTS

from hpctrain.errors import UsageError

README = Path(__file__).resolve().parents[2] / "README.md"
STEP = Claim("step", "torch", "step", "step NP=2", ("ours",), ("torch",))


def result(ours: float, torch: float, *, day: int = 1, processor: str = "EPYC", **more: Any) -> dict[str, Any]:
    times = {"ours": ours, "torch": torch, **more}
    spread = {
        name: {"median": value, "quartile_1": 0.9 * value, "quartile_3": 1.2 * value} for name, value in times.items()
    }
    return {
        "seconds": spread,
        "provenance": {"date": f"2026-11-0{day}T10:00:00", "processor": processor, "python": "3"},
    }


def test_runs_are_added_and_read_in_order(tmp_path: Path) -> None:
    for day, ours in enumerate((1.0, 2.0), 1):
        record(tmp_path, "step", result(ours, 3.00004, day=day))
    runs = list(runs_of(tmp_path, "step"))
    assert [run.day for run in runs] == ["2026-11-01", "2026-11-02"] and runs[0].processor == "EPYC"
    assert "python" not in runs[0].provenance
    found = runs[0].figures["seconds", "torch", ""]
    assert found == Figure(3.0, 2.7, 3.6, 3.0)  # four digits; without a minimum, the median
    assert found.spread == pytest.approx(0.3)
    assert list(runs_of(tmp_path, "other")) == []


def test_a_range_is_that_of_one_model_of_processor(tmp_path: Path) -> None:
    for day, ratio in ((1, 2.0), (1, 3.0), (2, 2.5), (2, 2.2), (3, 2.1)):
        record(tmp_path, "step", result(1.0, ratio, day=day))
    record(tmp_path, "step", result(1.0, 1.1, processor="Xeon"))
    record(tmp_path, "step", {**result(1.0, 9.0), "seconds": {}})  # has not measured it
    several, one = ranges(tmp_path, [STEP])
    assert (several.ratios, several.days, several.median, several.remark) == ((2.0, 3.0, 2.5, 2.2, 2.1), 3, 2.2, "")
    assert several.spread == pytest.approx((0.3, 0.3))
    assert (one.processor, one.ratios) == ("Xeon", (1.1,))
    assert one.remark == "fewer than 5 runs, spread exceeds the difference"
    assert ranges(tmp_path, [Claim("step", "torch", "step", "step", ("ours",), ("absent",))]) == []


def test_times_of_several_candidates_are_added_and_slower_is_said(tmp_path: Path) -> None:
    record(tmp_path, "step", result(4.0, 1.0, start=2.0))
    (found,) = ranges(tmp_path, [Claim("step", "both", "step", "step", ("ours",), ("torch", "start"))])
    assert found.ratios == (0.75,) and found.remark.endswith("slower")


def test_the_program_writes_the_page_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nbehind\n")
    name = next(claim.file for claim in CLAIMS if claim.what == "DDP step")
    content = result(1.0, 1.0)
    content["seconds"] = {"hpctrain DDP": {"median": 2.0}, "torch DDP + gloo": {"median": 3.0}}
    record(tmp_path, name, content)
    claims.run(claims.parse(["--results", str(tmp_path), "--page", str(page), "--json"]))
    (found,) = json.loads(capsys.readouterr().out)
    assert found["ratios"] == [1.5] and found["command"] == "make -C benchmarks ddp-step NP=2"
    text = page.read_text()
    assert text.startswith("before\n\n") and text.endswith("\n\nbehind\n") and "old" not in text
    assert "| DDP step | torch DDP + gloo | 1.50 (1.50 to 1.50) | 1, 1 | 0%, 0% | fewer than 5 runs |" in text
    claims.run(claims.parse(["--results", str(tmp_path / "empty")]))
    assert "no runs are recorded" in capsys.readouterr().out


def test_a_page_without_a_place_for_tables_is_refused() -> None:
    for page in ("text", BEGIN, f"{END}\n{BEGIN}"):
        with pytest.raises(UsageError, match="the page has no place for the tables"):
            with_tables(page, "table")


def test_the_page_shows_the_recorded_runs() -> None:
    """``make -C benchmarks claims`` writes it."""
    text = PAGE.read_text()
    assert with_tables(text, markdown(ranges(RESULTS))) == text


def test_every_claim_has_been_measured() -> None:
    measured = {id(one.claim) for one in ranges(RESULTS)}
    assert not [claim.what for claim in CLAIMS if id(claim) not in measured]
    assert {path.stem for path in (RESULTS / FOLDER).glob("*.jsonl")} >= {claim.file for claim in CLAIMS}


def test_runs_before_a_change_are_left_out(tmp_path: Path) -> None:
    for day in (1, 2, 3):
        record(tmp_path, "step", result(1.0, day, day=day))
    since = Claim("step", "torch", "step", "step", ("ours",), ("torch",), since="2026-11-02")
    assert ranges(tmp_path, [since])[0].ratios == (2.0, 3.0)
