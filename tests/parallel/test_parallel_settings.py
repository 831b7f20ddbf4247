"""Settings of the strategies."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.errors import SettingsError
from hpctrain.parallel.asynchronous.config import AsynchronousSettings, asynchronous_settings
from hpctrain.parallel.config import ParallelSettings, parallel_settings
from hpctrain.parallel.offload.config import OffloadSettings, offload_settings


@pytest.mark.parametrize("size", [0, -1.5, float("nan"), float("inf")])
def test_an_invalid_bucket_size_is_refused(size: float) -> None:
    with pytest.raises(SettingsError, match=r"^setting parallel.bucket_mib = .*: must be a number of MiB above 0$"):
        ParallelSettings(bucket_mib=size)


def test_any_positive_bucket_size_is_accepted() -> None:
    assert ParallelSettings(bucket_mib=1e-9).bucket_mib == 1e-9


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
