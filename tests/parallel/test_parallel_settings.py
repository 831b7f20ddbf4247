"""Settings of the strategies."""

from __future__ import annotations

import pytest

from hpctrain.errors import SettingsError
from hpctrain.parallel.settings import ParallelSettings


@pytest.mark.parametrize("size", [0, -1.5, float("nan"), float("inf")])
def test_bucket_of_no_size_is_refused(size: float) -> None:
    with pytest.raises(SettingsError, match=r"^setting parallel.bucket_mib = .*: must be a number of MiB above 0$"):
        ParallelSettings(bucket_mib=size)


def test_any_other_size_is_taken() -> None:
    assert ParallelSettings(bucket_mib=1e-9).bucket_mib == 1e-9
