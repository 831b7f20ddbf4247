"""Number and size of the messages of split layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tensor_fixtures import BATCH, BLOCKS, LENGTH, WIDTH, make_blocks, make_gpt, split, tokens, vectors

from hpctrain.models.gpt import GPT

pytestmark = pytest.mark.ranks(2, 3, 4)
ACTIVATION = BATCH * LENGTH * WIDTH * 4  # bytes


class Calls:
    """Communicator that counts the bytes of its calls."""

    def __init__(self, comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[str, int]] = []
        for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"):
            monkeypatch.setattr(comm, name, self._counting(name, getattr(comm, name)))

    def _counting(self, name: str, call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            largest = max(one.numel() * one.itemsize for one in args if hasattr(one, "numel"))
            self.found.append((name, largest))
            return call(*args, **kwargs)

        return counted

    def take(self) -> list[tuple[str, int]]:
        found, self.found = self.found, []
        return found


def test_an_mlp_block_reduces_once_forward_and_once_backward(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_blocks(3)
    split(model, own, BLOCKS)
    calls = Calls(own, monkeypatch)
    result = model(vectors().requires_grad_())
    assert calls.take() == [("all_reduce", ACTIVATION)] * 3
    result.sum().backward()
    assert calls.take() == [("all_reduce", ACTIVATION)] * 3


def test_a_transformer_block_reduces_twice_each_way(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_gpt()
    found = split(model, own)
    calls = Calls(own, monkeypatch)
    inputs, targets = tokens()
    with found.split_outputs():
        logits = model(inputs)
        # The embedding, then two per block; the head's outputs stay split.
        assert calls.take() == [("all_reduce", ACTIVATION)] * (1 + 2 * 2)
        loss = found.cross_entropy(logits, targets)
    assert calls.take() == [("all_reduce", BATCH * LENGTH * 4), ("all_reduce", 2 * BATCH * LENGTH * 4)]
    loss.backward()
    # The head's inputs, then two per block; none for the embedding's rows.
    assert calls.take() == [("all_reduce", ACTIVATION)] * (1 + 2 * 2)


def test_sequence_parallelism_sends_the_same_bytes_in_halves(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model: GPT = make_gpt()
    found = split(model, own, sequence=True)
    calls = Calls(own, monkeypatch)
    block = model.blocks[0]
    result = block(vectors()[:, : LENGTH // own.size].requires_grad_())
    assert calls.take() == [("all_gather", ACTIVATION), ("reduce_scatter", ACTIVATION)] * 2
    assert result.shape == (BATCH, LENGTH // own.size, WIDTH)
    result.sum().backward()
    forth = [name for name, nbytes in calls.take() if nbytes == ACTIVATION]
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


def test_each_half_of_a_backward_pass_makes_its_own_calls(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_blocks(2)
    found = split(model, own, BLOCKS)
    found.separate_backward()
    x = vectors().requires_grad_()
    loss = model(x).square().sum()
    calls = Calls(own, monkeypatch)
    (first,) = torch.autograd.grad(loss, [x], retain_graph=True)
    assert len(calls.take()) == 2
    last = model[1].fc.weight
    torch.autograd.grad(loss, [last], retain_graph=True)
    assert calls.take() == []
    assert first.shape == x.shape
