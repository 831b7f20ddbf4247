"""Position in a DataLoader: the rest of a pass is that of a whole one, whatever draws the order of the samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hpctrain.integrations.loader_position import count_batches, position_of


class Stream(IterableDataset[int]):
    """Samples without indices."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(options.pop("dataset", list(range(12))), **{"batch_size": 2, **options})


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
        {"batch_size": None, "shuffle": True},
        {"dataset": Stream()},
    ],
    ids=["global", "own generator", "no batches", "stream"],
)
def test_the_rest_of_a_pass_is_that_of_a_whole_one(options: dict[str, Any], workers: int) -> None:
    first = loader(**options, num_workers=workers)
    position = count_batches(first)
    list(first)  # one pass before
    source = iter(first)
    for _ in range(3):
        next(source)
    torch.rand(3)  # by the program
    state, before = first.state_dict(), dict(position.before or {})  # type: ignore[attr-defined]
    expected = [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in source]
    assert state == {"batches": 3} and len(expected) > 2

    torch.manual_seed(99)
    again = loader(**options, num_workers=workers)
    count_batches(again).before = before
    again.load_state_dict(state)  # type: ignore[attr-defined]
    resumed = iter(again)
    drawn = torch.get_rng_state()
    found = [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in resumed]
    assert found == expected
    if not workers and "dataset" not in options:
        assert torch.equal(torch.get_rng_state(), drawn)  # the program's numbers do not change
    after = position_of(again)
    assert after is not None and after.batches == 3 + len(expected)


def test_a_loader_stays_the_object_that_it_was() -> None:
    one = loader(shuffle=True)
    sampler = one.batch_sampler
    assert position_of(one) is None
    position = count_batches(one)
    assert isinstance(one, DataLoader) and type(one).__name__ == "DataLoader"
    assert one.batch_sampler is sampler and len(one) == 6
    assert count_batches(one) is position is position_of(one)
    list(one)
    assert one.batch_sampler is sampler and position.batches == 6
