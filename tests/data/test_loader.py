"""Loader: order of samples, shares of global batches, evaluation batches, and its state."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpctrain.data.dataset import Indices
from hpctrain.data.loader import Batch, Loader, check_batch, evaluation_batches, take
from hpctrain.data.orders import SampleOrder
from hpctrain.errors import DataError, SettingsError


class Squares:
    """Dataset whose inputs are the sample numbers and whose targets are their squares."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        numbers = torch.from_numpy(indices.copy())
        return numbers, numbers.double() ** 2


def _steps(loader: Loader, count: int | None = None) -> list[list[int]]:
    return [batch.inputs.tolist() for batch in islice(loader, count)]


def _world(length: int, size: int, count: int | None, **options: Any) -> list[list[int]]:
    """Run the loaders of all ranks and concatenate each step's shares in the order of the ranks."""
    ranks = [_steps(Loader(Squares(length), rank=rank, size=size, **options), count) for rank in range(size)]
    assert len({len(steps) for steps in ranks}) == 1
    return [sum(shares, []) for shares in zip(*ranks)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_all_numbers_of_ranks_see_the_same_global_batches(size: int) -> None:
    order = SampleOrder(100, seed=5)
    expected = [order.indices(24 * step, 24).tolist() for step in range(20)]
    assert _world(100, size, 20, batch=24, seed=5) == expected


@pytest.mark.parametrize("position", [0, 1, 24, 95, 100, 1234])
def test_a_run_resumes_at_any_position_on_any_number_of_ranks_with_any_batch(position: int) -> None:
    first = Loader(Squares(100), batch=24, seed=5, position=position)
    _steps(first, 3)
    state = json.loads(json.dumps(first.state_dict()))
    rest = sum(_steps(first, 10), [])
    for size, batch in ((1, 24), (2, 24), (3, 12), (4, 48), (6, 60)):
        steps = []
        for rank in range(size):
            loader = Loader(Squares(100), batch=batch, rank=rank, size=size, seed=5)
            loader.load_state_dict(state)
            steps.append(_steps(loader, 240 // batch))
        assert sum((sum(shares, []) for shares in zip(*steps)), []) == rest[: 240 // batch * batch]


def test_the_position_counts_the_samples_returned() -> None:
    loader = Loader(Squares(100), batch=24, rank=1, size=2)
    for step, batch in enumerate(islice(loader, 10), start=1):
        assert batch.samples == 12 and batch.weight == 1.0
        assert loader.state_dict()["position"] == loader.position == 24 * step
        assert loader.epoch == 24 * step // 100


def test_a_batch_may_be_larger_than_the_data() -> None:
    steps = _world(5, 2, 3, batch=12)
    assert [np.bincount(step, minlength=5).sum() for step in steps] == [12, 12, 12]
    assert np.bincount(sum(steps, [])[:35], minlength=5).tolist() == [7] * 5


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_without_drop_last_epochs_end_with_a_smaller_batch(size: int) -> None:
    steps = _world(101, size, None, batch=24, epochs=3, drop_last=False, seed=2)
    assert [len(step) for step in steps] == [24, 24, 24, 24, 5] * 3
    for epoch in range(3):
        assert sorted(sum(steps[5 * epoch : 5 * epoch + 5], [])) == list(range(101))
    assert steps == _world(101, 1, None, batch=24, epochs=3, drop_last=False, seed=2)
    tail = [list(Loader(Squares(101), batch=24, rank=r, size=size, epochs=1, drop_last=False))[-1] for r in range(size)]
    assert sum(batch.weight for batch in tail) == pytest.approx(size)
    assert [batch.weight for batch in tail] == pytest.approx([batch.samples * size / 5 for batch in tail])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_with_drop_last_epochs_end_without_the_remaining_samples(size: int) -> None:
    steps = _world(101, size, None, batch=24, epochs=3)
    assert [len(step) for step in steps] == [24] * 12
    order = SampleOrder(101)
    assert [steps[0], steps[4], steps[11]] == [order.indices(p, 24).tolist() for p in (0, 101, 2 * 101 + 72)]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("done", range(16))
def test_a_bounded_run_resumes_where_it_stopped(drop_last: bool, done: int) -> None:
    whole = _steps(Loader(Squares(101), batch=24, epochs=3, drop_last=drop_last))
    first = Loader(Squares(101), batch=24, epochs=3, drop_last=drop_last)
    before = _steps(first, done)
    second = Loader(Squares(101), batch=24, epochs=3, drop_last=drop_last)
    second.load_state_dict(first.state_dict())
    assert before + _steps(second) == whole


def test_an_epoch_of_whole_batches_drops_no_sample() -> None:
    assert [len(step) for step in _world(96, 2, None, batch=24, epochs=2)] == [24] * 8


@pytest.mark.parametrize(
    "batch, size, microbatches, nearest",
    [(10, 4, 1, "4 ranks: nearest are 8 and 12 samples$"), (2, 3, 1, "3 ranks: nearest are 3 samples$"),
     (12, 2, 4, "2 ranks x 4 microbatches: nearest are 8 and 16 samples$")],
)  # fmt: skip
def test_a_batch_not_divisible_by_the_ranks_is_refused(batch: int, size: int, microbatches: int, nearest: str) -> None:
    with pytest.raises(SettingsError, match=f"a batch of {batch} samples cannot be divided evenly over {nearest}"):
        Loader(Squares(100), batch=batch, size=size, microbatches=microbatches)
    for allowed in [int(word) for word in nearest.removesuffix(" samples$").split("are ")[1].split(" and ")]:
        check_batch(allowed, size, microbatches)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (-4, 2, 1), (4, 0, 1), (4, 1, 0)])
def test_numbers_below_one_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(SettingsError, match="each must be 1 or more"):
        check_batch(*numbers)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(SettingsError, match="rank 2 of 2: ranks are numbered 0 to 1"):
        Loader(Squares(100), batch=4, rank=2, size=2)
    with pytest.raises(DataError, match="3 samples do not fill a batch of 4"):
        Loader(Squares(3), batch=4, epochs=1)
    with pytest.raises(SettingsError, match="position"):
        Loader(Squares(3), batch=4, position=-1)
    with pytest.raises(SettingsError, match="epochs"):
        Loader(Squares(3), batch=2, epochs=0)


def test_a_resume_with_other_data_or_order_is_refused() -> None:
    state = Loader(Squares(100), batch=4, seed=1).state_dict()
    with pytest.raises(DataError, match="different order: the run had seed = 1, this one has 2"):
        Loader(Squares(100), batch=4, seed=2).load_state_dict(state)
    with pytest.raises(DataError, match="different data: the run had samples = 100, this one has 99"):
        Loader(Squares(99), batch=4, seed=1).load_state_dict(state)
    with pytest.raises(DataError, match="lacks samples"):
        Loader(Squares(100), batch=4, seed=1).load_state_dict({"position": 3, "seed": 1})
    with pytest.raises(DataError, match="is -3, expected 0 or more"):
        Loader(Squares(100), batch=4, seed=1).load_state_dict({**state, "position": -3})


@pytest.mark.parametrize("length", [1, 2, 7, 100])
def test_every_epoch_holds_every_sample_once(length: int) -> None:
    order = SampleOrder(length, seed=3)
    epochs = [order.indices(epoch * length, length) for epoch in range(5)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    if length == 100:
        assert len({tuple(epoch) for epoch in epochs}) == 5


@pytest.mark.parametrize("start, count", [(0, 0), (0, 3), (5, 4), (6, 1), (7, 7), (3, 30), (1_000_000, 5)])
def test_any_range_equals_that_of_the_whole_sequence(start: int, count: int) -> None:
    expected = []
    for position in range(start, start + count):
        generator = np.random.Generator(np.random.PCG64([11, position // 7]))
        expected.append(generator.permutation(7)[position % 7])
    used = SampleOrder(7, seed=11)
    used.indices(40, 9)  # earlier calls must not matter
    assert used.indices(start, count).tolist() == expected
    assert SampleOrder(7, seed=11).indices(start, count).dtype == np.int64


def test_the_order_does_not_change_between_versions() -> None:
    # A resumed run must continue the order of its first part: a NumPy that shuffles differently fails here.
    golden = [4, 6, 2, 7, 3, 5, 9, 0, 8, 1] + [9, 1, 3, 8, 7, 6, 0, 4, 2, 5]
    assert SampleOrder(10, seed=0).indices(0, 20).tolist() == golden
    assert SampleOrder(10, seed=1).indices(0, 10).tolist() != golden[:10]


@pytest.mark.parametrize("length, seed", [(0, 0), (-1, 0), (5, -1)])
def test_an_invalid_order_is_refused(length: int, seed: int) -> None:
    with pytest.raises(SettingsError, match=f"order of {length} samples with seed {seed}"):
        SampleOrder(length, seed)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("total", [1, 2, 5, 6, 12, 13])
def test_weights_make_the_mean_of_means_the_global_mean(total: int, size: int) -> None:
    indices = np.random.default_rng(total).permutation(1000)[:total]
    shares = [take(Squares(1000), indices, rank, size) for rank in range(size)]
    assert torch.cat([share.inputs for share in shares]).tolist() == indices.tolist()
    sizes = [share.samples for share in shares]
    assert max(sizes) - min(sizes) <= 1 and [len(share.targets) for share in shares] == sizes
    mean = sum(share.weight * share.targets.mean().item() for share in shares if share.samples) / size
    assert mean == pytest.approx(np.mean(indices.astype(float) ** 2), rel=1e-12)
    assert sum(share.weight for share in shares) == pytest.approx(size)
    if total % size == 0:
        assert all(share.weight == 1.0 for share in shares)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_microbatches_add_up_to_the_batch(count: int) -> None:
    share = take(Squares(1000), np.arange(13), 0, 2)
    pieces = share.split(count)
    assert len(pieces) == count
    assert torch.equal(torch.cat([piece.inputs for piece in pieces]), share.inputs)
    assert sum(piece.samples for piece in pieces) == share.samples
    mean = sum(piece.weight * piece.targets.mean().item() for piece in pieces if piece.samples)
    assert mean == pytest.approx(share.weight * share.targets.mean().item(), rel=1e-12)


def test_an_empty_share_splits_into_empty_microbatches() -> None:
    share = take(Squares(1000), np.arange(1), 0, 2)
    assert (share.samples, share.weight) == (0, 0.0)
    assert [(piece.samples, piece.weight) for piece in share.split(3)] == [(0, 0.0)] * 3


def test_tensors_move_to_a_device() -> None:
    moved = Batch(torch.zeros(3), torch.ones(3), 0.5, 3).to("meta")
    assert moved.inputs.is_meta and moved.targets.is_meta and (moved.weight, moved.samples) == (0.5, 3)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("batch, limit", [(8, None), (200, None), (8, 101), (8, 1000), (8, 33), (1, 3)])
def test_every_selected_sample_is_seen_once(size: int, batch: int, limit: int | None) -> None:
    ranks = [list(evaluation_batches(Squares(101), batch=batch, rank=r, size=size, limit=limit)) for r in range(size)]
    count = min(limit or 101, 101)
    assert {len(batches) for batches in ranks} == {-(-count // batch)}
    seen = [int(number) for step in zip(*ranks) for share in step for number in share.inputs]
    assert len(seen) == count and seen == sorted(set(seen))
    if count == 101:
        assert seen == list(range(101))
    full = [share for batches in ranks for share in batches if share.samples]
    mean = sum(share.targets.mean().item() * share.samples for share in full) / sum(share.samples for share in full)
    assert mean == pytest.approx(np.mean(np.array(seen) ** 2.0), rel=1e-12)


def test_a_limit_selects_samples_spread_over_the_split() -> None:
    (batch,) = evaluation_batches(Squares(101), batch=10, limit=10)
    gaps = np.diff(batch.inputs.numpy())
    assert batch.inputs[0] == 0 and gaps.min() >= 10 and gaps.max() <= 11


@pytest.mark.parametrize("batch, limit", [(0, None), (4, 0), (4, -1)])
def test_invalid_arguments_of_an_evaluation_are_refused(batch: int, limit: int | None) -> None:
    with pytest.raises(SettingsError, match="each must be 1 or more"):
        list(evaluation_batches(Squares(101), batch=batch, limit=limit))
