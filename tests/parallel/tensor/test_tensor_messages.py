"""Number and size of the messages of split layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.counting_comm import CountingComm
from support.tensor_fixtures import BATCH, BLOCKS, LENGTH, WIDTH, make_blocks, make_gpt, split, tokens, vectors

from hpctrain.models.gpt import GPT

pytestmark = pytest.mark.ranks(2, 3, 4)
ACTIVATION = BATCH * LENGTH * WIDTH * 4  # bytes


@pytest.fixture
def counting(comm: Any) -> Iterator[CountingComm]:
    counting = CountingComm.of(comm)
    yield counting
    counting.free()


def test_an_mlp_block_reduces_once_forward_and_once_backward(counting: CountingComm) -> None:
    model = make_blocks(3)
    split(model, counting, BLOCKS)
    counting.take()
    result = model(vectors().requires_grad_())
    assert counting.take() == [("all_reduce", ACTIVATION)] * 3
    result.sum().backward()
    assert counting.take() == [("all_reduce", ACTIVATION)] * 3


def test_a_transformer_block_reduces_twice_each_way(counting: CountingComm) -> None:
    model = make_gpt()
    found = split(model, counting)
    counting.take()
    inputs, targets = tokens()
    with found.split_outputs():
        logits = model(inputs)
        # The embedding, then two per block; the head's outputs stay split.
        assert counting.take() == [("all_reduce", ACTIVATION)] * (1 + 2 * 2)
        loss = found.cross_entropy(logits, targets)
    assert counting.take() == [("all_reduce", BATCH * LENGTH * 4), ("all_reduce", 2 * BATCH * LENGTH * 4)]
    loss.backward()
    # The head's inputs, then two per block; none for the embedding's rows.
    assert counting.take() == [("all_reduce", ACTIVATION)] * (1 + 2 * 2)


def test_sequence_parallelism_sends_the_same_bytes_in_halves(counting: CountingComm) -> None:
    model: GPT = make_gpt()
    found = split(model, counting, sequence=True)
    counting.take()
    block = model.blocks[0]
    result = block(vectors()[:, : LENGTH // counting.size].requires_grad_())
    assert counting.take() == [("all_gather", ACTIVATION), ("reduce_scatter", ACTIVATION)] * 2
    assert result.shape == (BATCH, LENGTH // counting.size, WIDTH)
    result.sum().backward()
    forth = [name for name, nbytes in counting.take() if nbytes == ACTIVATION]
    # Backward in reverse, and column-parallel inputs once more for the gradients of weights.
    assert forth == ["all_gather", "all_gather", "reduce_scatter"] * 2
    assert found.is_split("blocks.0.mlp.fc.weight")


@pytest.mark.ranks(2)
def test_ranks_of_a_node_reduce_in_its_memory_without_messages(near: Any) -> None:
    if near.nodes > 1:
        pytest.skip("ranks on several nodes")
    model = make_blocks(3)
    split(model, near, BLOCKS)
    x = vectors().repeat(1, 30, 1).requires_grad_()  # large enough for node memory to be fastest
    with near.recording() as recorder:
        result = model(x)
        assert recorder.calls["window"] == 3
        result.sum().backward()
    assert recorder.calls == {"window": 6}
    assert recorder.bytes["window"] == pytest.approx(6 * 30 * ACTIVATION / 2, rel=0.01)


def test_each_half_of_a_backward_pass_makes_its_own_calls(counting: CountingComm) -> None:
    model = make_blocks(2)
    found = split(model, counting, BLOCKS)
    found.separate_backward()
    x = vectors().requires_grad_()
    loss = model(x).square().sum()
    counting.take()
    (first,) = torch.autograd.grad(loss, [x], retain_graph=True)
    assert len(counting.take()) == 2
    last = model[1].fc.weight
    torch.autograd.grad(loss, [last], retain_graph=True)
    assert counting.take() == []
    assert first.shape == x.shape
