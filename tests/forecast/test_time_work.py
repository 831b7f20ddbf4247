"""Counts of operations and bytes of a pass, compared with formulas and torch's counter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.forecasts import settings
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.errors import UsageError
from hpctrain.forecast.run import Spec, describe, facts_of
from hpctrain.forecast.time_work import count
from hpctrain.models.build import ConvNet
from hpctrain.parallel.config import ParallelSettings


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt2-1.5b"])
def test_a_gpt_takes_six_operations_per_weight_and_token_plus_attention(name: str) -> None:
    chosen = settings(model=name)
    shape = chosen.model.gpt()
    work = count(facts_of(chosen), "cross_entropy")
    samples, tokens = 8, 8 * shape.context
    weights = 12 * shape.width**2 * shape.layers + shape.width * shape.vocab_size  # of products, including the head
    attention = 12 * shape.layers * shape.width * shape.context * tokens
    assert work.flops(samples) == pytest.approx(6 * weights * tokens + attention, rel=1e-12)


def test_operations_of_a_convnet_equal_the_count_of_torch() -> None:
    with torch.device("meta"):
        facts = describe(ConvNet((3, 16, 16), 10), "convnet", Spec((3, 16, 16), torch.float32), Spec((), torch.int64))
    model, samples = ConvNet((3, 16, 16), 10), 6
    with FlopCounterMode(display=False) as counter:
        loss = F.cross_entropy(model(torch.rand(samples, 3, 16, 16, requires_grad=True)), torch.arange(samples))
        loss.backward()
    assert count(facts, "cross_entropy").flops(samples) == counter.get_total_flops()


def test_bytes_are_the_reads_and_writes_of_operators() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU())
    facts = describe(model, "two", Spec((8,), torch.float32), Spec((4,), torch.float32))
    linear, relu, loss = count(facts, "mse").at(3)
    weight, inputs, outputs = 4 * 8 * 4, 4 * 3 * 8, 4 * 3 * 4
    assert linear.forward.product_bytes == weight + inputs + outputs and linear.forward.other_bytes == 0
    assert linear.forward.flops == 2 * 3 * 8 * 4 and linear.backward.flops == 2 * linear.forward.flops
    assert relu.forward.other_bytes == 2 * outputs and relu.forward.flops == 0 and relu.forward.calls == 1
    assert relu.backward.other_bytes == 3 * outputs  # the gradient, the forward output, and the new gradient
    assert (linear.numel, linear.tensors, relu.numel, loss.name) == (32, 1, 0, "loss")
    assert linear.output == relu.output == outputs


def test_counting_leaves_no_gradients_and_bfloat16_halves_the_bytes() -> None:
    facts = facts_of(settings())
    whole, half = count(facts, "cross_entropy").at(4), count(facts, "cross_entropy", torch.bfloat16).at(4)
    assert all(one.grad is None for one in facts.model.parameters())
    assert half[1].forward.flops == whole[1].forward.flops
    assert half[1].forward.product_bytes == whole[1].forward.product_bytes / 2


def test_two_tensor_ranks_halve_the_products_and_sum_twice_per_block_and_pass() -> None:
    facts = facts_of(settings())
    whole = count(facts, "cross_entropy").at(8)
    halves = count(facts, "cross_entropy", None, ParallelSettings(tensor=2)).at(8)
    stream = 8 * 64 * 128 * 4  # samples, tokens, width, bytes
    for one, half in zip(whole[1:5], halves[1:5]):
        assert half.forward.flops == one.forward.flops / 2 and half.backward.flops == one.backward.flops / 2
        assert (half.forward.reductions, half.backward.reductions) == (2, 2)
        assert half.forward.reduced == half.backward.reduced == 2 * stream
        assert one.forward.reductions == one.forward.moves == 0
    parts = count(facts, "cross_entropy", None, ParallelSettings(tensor=2, sequence=True)).at(8)
    assert parts[1].forward.reductions == 0 and parts[1].forward.moved == 4 * stream
    assert parts[1].output == stream / 2


def test_an_indivisible_tensor_size_is_refused() -> None:
    with pytest.raises(UsageError, match="3"):
        count(facts_of(settings()), "cross_entropy", None, ParallelSettings(tensor=3))
