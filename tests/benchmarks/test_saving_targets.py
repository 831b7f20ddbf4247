from __future__ import annotations

from typing import Any

import pytest
from saving.background import BackgroundRow
from saving.figures import Figures, by_name, row_of
from saving.targets import Target, background_targets, targets

GB = 10**9


def figures(**seconds: float) -> Figures:
    """Return figures of 2 GB by name ("raw_pwrite" for "raw pwrite") and median."""
    rows = [row_of("write", name.replace("_", " "), 2 * GB, [median], None) for name, median in seconds.items()]
    return by_name(rows)


def found(made: Figures) -> dict[str, Target]:
    return {one.what: one for one in targets(made)}


def only(start: str, made: Figures) -> Target:
    (one,) = [target for what, target in found(made).items() if what.startswith(start)]
    return one


@pytest.mark.parametrize("name, wanted", [("raw_pwrite", 0.95), ("torch.save", 3.0), ("torch_DCP", 1.0)])
def test_saving_is_compared_with_each_other_library(name: str, wanted: float) -> None:
    just = only("write", figures(**{"hpctrain": 1.0, name: wanted}))
    assert (just.value, just.target, just.met) == (wanted, wanted, True)
    assert not only("write", figures(**{"hpctrain": 1.01, name: wanted})).met


def test_a_slow_disk_limits_the_target_of_reading() -> None:
    made = figures(raw_preadv=2.0, hpctrain_load=2.5, hpctrain_verify=2.2)  # 1 GB/s raw
    assert only("load: speed", made).value == pytest.approx(0.8) and not only("load: speed", made).met
    assert only("verify", made).value == pytest.approx(2 / 2.2) and only("verify", made).met


def test_on_a_fast_disk_checksums_limit_the_target_of_reading() -> None:
    made = figures(raw_preadv=0.2, hpctrain_load=1.0, hpctrain_verify=1.2)  # 10 GB/s raw
    assert only("load: speed", made).value == pytest.approx(1.0)
    assert only("verify", made).value == pytest.approx(1 / 1.2) and not only("verify", made).met


def test_the_slowest_of_the_other_rank_counts_is_compared() -> None:
    made = figures(**{"hpctrain_load": 1.0, "hpctrain_load,_1_wrote": 1.1, "hpctrain_load,_4_wrote": 1.3})
    one = only("load: time", made)
    assert (one.value, one.met, one.wanted) == (1.3, False, "<= 1.2")
    assert "(4 wrote)" in one.what


def test_without_figures_there_are_no_targets() -> None:
    assert not found({}) and not found(figures(hpctrain=1.0)) and not found(figures(torch_DCP=1.0))


def row(name: str, **changes: Any) -> BackgroundRow:
    usual: dict[str, Any] = {"stall": 1.1, "floor": 1.0, "free": 1.0, "busy": 1.04}
    return BackgroundRow(name, written=3.0, busy_steps=5, saves=2, **{**usual, **changes})


def test_only_hpctrain_in_the_background_has_targets() -> None:
    assert not list(background_targets([row("torch DCP async"), row("hpctrain foreground")]))
    stall, slower = background_targets([row("torch DCP async"), row("hpctrain background")])
    assert (stall.value, stall.met, slower.value, slower.met) == (1.1, True, 1.04, True)


def test_long_stalls_and_slow_steps_miss_their_targets() -> None:
    stall, slower = background_targets([row("hpctrain background", stall=1.3, busy=1.06)])
    assert not stall.met and not slower.met
    assert [one.wanted for one in (stall, slower)] == ["<= 1.2", "<= 1.05"]


def test_a_write_shorter_than_a_step_has_no_target_for_steps() -> None:
    (stall,) = background_targets([row("hpctrain background", busy=None)])
    assert "stall" in stall.what
