"""Settings of the strategies, and the numbers of ranks and microbatches that follow from them."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.errors import SettingsError, UsageError
from hpctrain.parallel.asynchronous.config import AsynchronousSettings, asynchronous_settings
from hpctrain.parallel.config import (
    ParallelSettings,
    generator_number,
    largest_divisor,
    microbatches_for,
    parallel_settings,
    shape_of,
)
from hpctrain.parallel.offload.config import OffloadSettings, offload_settings


@pytest.mark.parametrize("size", [0, -1.5, float("nan"), float("inf")])
def test_an_invalid_bucket_size_is_refused(size: float) -> None:
    with pytest.raises(SettingsError, match=r"^setting parallel.bucket_mib = .*: must be a number of MiB above 0$"):
        ParallelSettings(bucket_mib=size)


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        (ParallelSettings, {"data": "FSDP"}, "setting parallel.data = 'FSDP': .*; did you mean 'fsdp'?"),
        (ParallelSettings, {"data": "zero3"}, "setting parallel.data = 'zero3': .*; did you mean 'fsdp'?"),
        (ParallelSettings, {"compression": "bf16"}, "compression = 'bf16': .*; did you mean 'bfloat16'?"),
        (ParallelSettings, {"data": "fsdp", "mixed_precision": "bf16"}, "mixed_precision = 'bf16'.*'bfloat16'?"),
        (ParallelSettings, {"pipe": 2.0}, "setting parallel.pipe = 2.0: expected a whole number"),
        (ParallelSettings, {"recompute": "yes"}, "setting parallel.recompute = 'yes': expected true or false"),
        (ParallelSettings, {"units": [3]}, "setting parallel.units = 3: expected text"),
        (OffloadSettings, {"optimizer": "cpu"}, "setting offload.optimizer = 'cpu': expected true or false"),
        (
            AsynchronousSettings,
            {"mode": "async"},
            "setting asynchronous.mode = 'async': .*; did you mean 'asynchronous'?",
        ),
    ],
)
def test_wrong_values_are_also_refused_in_python(kind: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message.replace("?", r"\?")):
        kind(**fields)


def test_one_unit_needs_no_list() -> None:
    assert ParallelSettings(units="Block").units == ("Block",)  # type: ignore[arg-type]


def test_settings_may_be_a_name_a_dict_or_a_dataclass() -> None:
    assert parallel_settings(None) == ParallelSettings()
    assert parallel_settings("fsdp") == ParallelSettings(data="fsdp")
    chosen = ParallelSettings(data="fsdp", recompute=True)
    assert parallel_settings({"data": "fsdp", "recompute": True}) == parallel_settings(chosen) == chosen
    assert offload_settings({"optimizer": True}) == OffloadSettings(optimizer=True)
    assert asynchronous_settings({"period": 3}) == AsynchronousSettings(period=3)


@pytest.mark.parametrize(
    "value, message",
    [
        ("FSDP", "did you mean 'fsdp'"),
        ({"dat": "fsdp"}, "unknown setting parallel.dat: did you mean data?"),
        (OffloadSettings(), "allowed are ParallelSettings, a dict of its fields, the name of a strategy"),
    ],
)
def test_other_values_are_refused(value: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message.replace("?", r"\?")):
        parallel_settings(value)


# Ranks and microbatches that follow from the settings -----------------------------------------------------------------


def test_remaining_ranks_form_the_data_axis() -> None:
    shape = shape_of(ParallelSettings(pipe=2, tensor=3), 24)
    assert (shape.pipe, shape.data, shape.tensor) == (2, 4, 3)
    with pytest.raises(UsageError, match="4 ranks cannot form a mesh"):
        shape_of(ParallelSettings(pipe=3), 4)


@pytest.mark.parametrize(
    "pipe, schedule, samples, expected",
    [(2, "1f1b", 8, 8), (2, "1f1b", 32, 8), (4, "gpipe", 30, 15), (2, "1f1b", 7, 7), (2, "1f1b", 11, 1)]
    + [(2, "interleaved", 6, 6), (4, "interleaved", 12, 12), (2, "interleaved", 10, 2)],
)
def test_microbatches_are_as_many_as_fit(pipe: int, schedule: str, samples: int, expected: int) -> None:
    settings = ParallelSettings(pipe=pipe, schedule=schedule)  # type: ignore[arg-type]
    assert microbatches_for(settings, samples) == expected


def test_microbatches_that_do_not_divide_the_samples_are_refused() -> None:
    assert microbatches_for(ParallelSettings(pipe=2, microbatches=3), 12) == 3
    with pytest.raises(SettingsError, match="= 5 does not divide the 12 samples .*: allowed are 1, 2, 3, 4, 6, 12"):
        microbatches_for(ParallelSettings(pipe=2, microbatches=5), 12)
    with pytest.raises(SettingsError, match="7 samples .* multiple of the 2 stages"):
        microbatches_for(ParallelSettings(pipe=2, schedule="interleaved"), 7)


def test_equal_parts_are_as_many_as_fit() -> None:
    assert [largest_divisor(12, most) for most in (1, 2, 5, 8, 100)] == [1, 2, 4, 6, 12]


def test_ranks_of_one_tensor_group_use_the_same_generator() -> None:
    shape = shape_of(ParallelSettings(pipe=2, tensor=2), 8)
    assert [generator_number(shape, rank) for rank in range(8)] == [0, 0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"pipe": 0}, "parallel.pipe = 0: must be at least 1"),
        ({"microbatches": -1}, "parallel.microbatches = -1"),
        ({"order": ("pipe", "data")}, "parallel.order .* name pipe, data, tensor, once each"),
        ({"sequence": True}, "parallel.sequence: is for parallel.tensor above 1"),
        ({"tensor_plan": ("a=column",)}, "parallel.tensor_plan: is for parallel.tensor above 1"),
        ({"pipe": 2, "chunks": 2}, "parallel.chunks = 2: must be 1 for .*1f1b"),
        ({"pipe": 2, "chunks": 1, "schedule": "interleaved"}, "must be 2 or more for .*interleaved"),
        ({"data": "dp", "tensor": 2}, "without parallel.pipe or .tensor"),
        ({"data": "zero1", "pipe": 2, "schedule": "pipedream"}, 'works with "ddp" only'),
        ({"pipe": 2, "sync_batchnorm": True}, "sync_batchnorm: is not for parallel.pipe above 1"),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        ParallelSettings(**settings)  # type: ignore[arg-type]
