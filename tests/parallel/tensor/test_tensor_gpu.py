"""Split layers on a GPU: sums over any path of the tensors, and dropout by the GPU's generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tensor_fixtures import (
    BLOCKS,
    CLOSE,
    assert_slices,
    make_blocks,
    make_gpt,
    split,
    token_loss,
    tokens,
    vectors,
)

pytestmark = pytest.mark.gpu


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
def test_ranks_that_share_a_gpu_have_the_unsplit_gradients(comm: Any, sequence: bool) -> None:
    model, alone = make_gpt().cuda(), make_gpt().cuda()
    found = split(model, comm, sequence=sequence, device=torch.device("cuda"))
    inputs, targets = (each.cuda() for each in tokens())
    with found.split_outputs():
        loss = found.cross_entropy(model(inputs), targets)
    expected = token_loss(alone(inputs), targets)
    for each in (loss, expected):
        each.backward()
    torch.testing.assert_close(loss, expected, **CLOSE)
    assert_slices(model, alone, found, lambda parameter: parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2, 3, 4)
def test_masks_are_equal_outside_regions_and_differ_inside(comm: Any) -> None:
    model = make_blocks(1, dropout=0.4).cuda()
    split(model, comm, BLOCKS, device=torch.device("cuda"))
    masks: dict[str, list[Any]] = {"inner_dropout": [], "dropout": []}
    for name, found in masks.items():
        getattr(model[0], name).register_forward_hook(
            lambda _, args, result, found=found: found.append((result != 0).cpu().numpy().tobytes())
        )
    for step in range(2):
        model(vectors(step).cuda())
    everyone = comm.all_gather_object(masks)
    assert all(one["dropout"] == everyone[0]["dropout"] for one in everyone)
    assert len({mask for one in everyone for mask in one["inner_dropout"]}) == 2 * comm.size
