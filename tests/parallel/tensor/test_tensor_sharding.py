"""Slices as boxes of the whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tensor_fixtures import VOCABULARY, WIDTH, make_blocks, make_gpt, split
from torch import Tensor

from hpctrain.errors import UsageError
from hpctrain.parallel.tensor.functional import bounds, lengths
from hpctrain.shard import Shard

RANKS = pytest.mark.ranks(2, 3, 4)


def assemble(comm: Any, pieces: dict[str, list[Shard]]) -> dict[str, Tensor]:
    """Assemble the boxes of all ranks; every element must occur, with equal values from all ranks."""
    found: dict[str, Tensor] = {}
    for one in comm.all_gather_object(pieces):
        for name, shards in one.items():
            for shard in shards:
                whole = found.setdefault(name, torch.full(shard.shape, torch.nan))
                place = tuple(slice(start, start + extent) for start, extent in zip(shard.start, shard.extent))
                before = whole[place]
                assert (before.isnan() | (before == shard.tensor)).all(), name
                whole[place] = shard.tensor
    return found


@RANKS
@pytest.mark.parametrize("tied", [True, False])
def test_boxes_of_all_ranks_make_up_the_whole_model(comm: Any, tied: bool) -> None:
    model, alone = make_gpt(tied=tied), make_gpt(tied=tied)
    found = split(model, comm)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    whole = assemble(comm, {name: found.shards(name, tensor) for name, tensor in state.items()})
    for name, tensor in alone.state_dict().items():
        assert torch.equal(whole[name], tensor), name
    assert found.is_split("head.weight") and found.is_split("embedding.token.weight")
    assert not found.is_split("norm.weight") and not found.is_split("blocks.0.mlp.project.bias")
    (shard,) = found.shards("norm.weight", model.norm.weight)
    assert shard.is_whole
    (shard,) = found.shards("head.weight", model.head.weight)
    assert shard.shape == (VOCABULARY, WIDTH) and shard.extent == tuple(model.head.weight.shape)


class HalfRows:
    """Split of a rank that holds all rows of a tensor except the first."""

    def shards(self, name: str, tensor: Tensor) -> list[Shard]:
        shape = tuple(tensor.shape)
        cut = tensor[1:]
        return [Shard(name, shape, "float32", (1, *[0] * (len(shape) - 1)), tuple(cut.shape), cut)]


@RANKS
def test_boxes_of_slices_are_shifted(comm: Any) -> None:
    model = make_gpt()
    found = split(model, comm)
    begin, end = bounds(2 * 4 * WIDTH // 2, comm.rank, comm.size)
    (shard,) = found.compose(HalfRows()).shards("blocks.0.mlp.fc.weight", model.blocks[0].mlp.fc.weight)
    assert (shard.shape, shard.start, shard.extent) == ((4 * WIDTH, WIDTH), (begin + 1, 0), (end - begin - 1, WIDTH))
    (shard,) = found.compose(HalfRows()).shards("norm.weight", model.norm.weight)
    assert (shard.shape, shard.start) == ((WIDTH,), (1,))


@pytest.mark.ranks(2)
def test_a_loss_without_a_split_head_is_refused(comm: Any) -> None:
    found = split(make_blocks(), comm, {"*.fc": "column", "*.project": "row"})
    assert not found.has_head
    with pytest.raises(UsageError, match="a loss of split logits needs a head of kind vocabulary"):
        found.cross_entropy(torch.ones(1, 2), torch.ones(1, dtype=torch.int64))


@pytest.mark.ranks(2)
def test_outputs_are_gathered_again_after_an_error(comm: Any) -> None:
    model = make_gpt()
    found = split(model, comm)
    with pytest.raises(KeyError), found.split_outputs():
        assert not model.head.gathers
        raise KeyError
    assert model.head.gathers


@pytest.mark.parametrize("length, size", [(31, 4), (4, 4), (12, 5), (7, 1)])
def test_pieces_cover_the_length_and_differ_by_at_most_one(length: int, size: int) -> None:
    found = [bounds(length, rank, size) for rank in range(size)]
    assert found[0][0] == 0 and found[-1][1] == length
    assert all(one[1] == two[0] for one, two in zip(found, found[1:]))
    assert max(lengths(length, size)) - min(lengths(length, size)) <= 1
    assert lengths(length, size) == sorted(lengths(length, size), reverse=True)
