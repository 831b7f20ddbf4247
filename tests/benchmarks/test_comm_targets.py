from __future__ import annotations

import pytest
from comm.figures import Figures, by_size_and_name, row_of
from comm.targets import Target, targets

TWIN = "hpctrain bfloat16"
K, M = 2**10, 2**20


def figures(**medians: dict[int, float]) -> Figures:
    """Return figures by name ("mpi_16_MiB" for "mpi 16 MiB") of medians by size."""
    rows = [
        row_of("all_reduce", name.replace("_", " "), size, [median], ranks=2, size=size, calls=1)
        for name, by_size in medians.items()
        for size, median in by_size.items()
    ]
    return by_size_and_name(rows)


def found(
    operation: str, ranks: int, made: Figures, twin: str = TWIN
) -> dict[str, Target]:
    return {one.what: one for one in targets(operation, ranks, made, twin)}


def only(start: str, all_of_them: dict[str, Target]) -> Target:
    (one,) = [target for what, target in all_of_them.items() if what.startswith(start)]
    return one


def test_the_mean_is_geometric_and_requires_every_size() -> None:
    sizes = (64 * K, M, 4 * M, 25 * M, 64 * M)
    library = dict(zip(sizes, (1.0, 2.0, 4.0, 8.0, 16.0)))
    made = figures(hpctrain=dict.fromkeys(sizes, 1.0), mpi=library, mpi_16_MiB={64 * M: 8.0})
    one_call = only("times the library (one call)", found("all_reduce", 2, made))
    assert one_call.value == pytest.approx(4.0) and one_call.target == 4.0
    better = only("times the library (the better", found("all_reduce", 2, made))
    assert better.value == pytest.approx((1 * 2 * 4 * 8 * 8) ** 0.2)
    del made[M, "hpctrain"]
    assert not [what for what in found("all_reduce", 2, made) if "mean" in what]


def test_gloo_is_compared_at_25_mib() -> None:
    made = figures(hpctrain={25 * M: 1.0, M: 1.0}, gloo={25 * M: 14.0, M: 100.0})
    one = only("times gloo", found("all_reduce", 2, made))
    assert one.value == 14.0 and not one.met


@pytest.mark.parametrize("operation, ranks", [("all_reduce", 4), ("broadcast", 2), ("all_gather", 2)])
def test_large_sizes_must_all_be_faster(operation: str, ranks: int) -> None:
    made = figures(hpctrain={64 * K: 1.0, M: 1.0, 4 * M: 1.0}, mpi={64 * K: 1.0, M: 5.0, 4 * M: 2.9})
    one = only("hpctrain: times the library from 1 MiB up", found(operation, ranks, made))
    assert one.value == pytest.approx(2.9) and not one.met and "4 MiB" in one.what


def test_the_slack_is_five_percent_and_three_microseconds() -> None:
    made = figures(hpctrain={4: 5.05e-6}, hpctrain_outside={4: 5.2e-6}, mpi={4: 2e-6})
    every = found("all_reduce", 2, made)
    ours = only("(library + 5 % + 3 us) / hpctrain,", every)
    outside = only("(library + 5 % + 3 us) / hpctrain outside,", every)
    assert ours.value == pytest.approx(5.1 / 5.05) and ours.met
    assert outside.value == pytest.approx(5.1 / 5.2) and not outside.met


def test_stream_bandwidth_counts_bytes_read_and_written() -> None:
    rate = 2 * 64 * M / 0.009  # a copy reads and writes
    with_copy = found("all_reduce", 2, figures(hpctrain={64 * M: 0.01}, copy={64 * M: 0.009}))
    one = only("2 S / (time x streaming rate)", with_copy)
    assert one.value == pytest.approx(2 * 64 * M / (0.01 * rate))
    without = found("all_reduce", 2, figures(hpctrain={64 * M: 0.01}))
    assert not [what for what in without if "streaming" in what]


@pytest.mark.parametrize("twin, value", [("hpctrain bfloat16", 2.0), ("hpctrain float32", 0.5)])
def test_bfloat16_has_a_target_whichever_dtype_was_requested(twin: str, value: float) -> None:
    made = figures(**{"hpctrain": {8: 2.0}, twin: {8: 1.0}})
    assert only("float32 / bfloat16", found("all_reduce", 2, made, twin=twin)).value == value


def test_a_pingpong_has_no_target() -> None:
    assert not found("pingpong", 2, figures(hpctrain={8: 2.0}, mpi={8: 1.0}))
