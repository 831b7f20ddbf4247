"""Memory accounts of publications, reproduced, and activations of a block, counted by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hpctrain.forecast.rank import PassSettings, local_model
from hpctrain.forecast.run import facts_of
from hpctrain.models.settings import ModelSettings
from hpctrain.train.config import Settings

GIB, GB = 2**30, 10**9
GPT2 = {"batch": 32, "context": 1024, "width": 1600}
FLOAT32 = 4
# Rajbhandari et al., ZeRO, SC 2020, section 3.1: parameters and gradients in 16 bits; in 32 bits a
# copy of the parameters and Adam's two moments.
MIXED_PRECISION = 2 + 2 + 3 * FLOAT32


def layer_activations(batch: int, context: int, width: int) -> int:
    """Return the bytes of a layer's activations in the usual account of training a GPT in float32 with Adam.

    It counts six [batch, context, width] tensors and one attention matrix. GPT-2 1.5B: 1.1758 GiB, printed as 1.17;
    48 layers 56.4375, printed as 56.43.
    """
    return FLOAT32 * (6 * batch * context * width + context**2)


def _cut(number: float, digits: int) -> float:
    """Truncate to ``digits`` digits, as the published account does."""
    return math.floor(number * 10**digits) / 10**digits


def test_gpt2_takes_87_gigabytes() -> None:
    # Parameters, gradients, and states of 12 bytes per parameter: two moments, and a copy superfluous in float32.
    model = 1_500_000_000 * (FLOAT32 + FLOAT32 + 3 * FLOAT32)
    assert model == (6 + 6 + 18) * GB
    assert _cut(layer_activations(**GPT2) / GIB, 2) == 1.17
    assert _cut(48 * layer_activations(**GPT2) / GIB, 2) == 56.43
    assert math.ceil(model / GB + 56.43) == 87


@pytest.mark.parametrize("billions, told", [(0.32, 5.12), (1.5, 24), (17.2, 275), (175, 2800)])
def test_mixed_precision_takes_sixteen_bytes_per_parameter(billions: float, told: float) -> None:
    assert MIXED_PRECISION * billions == pytest.approx(told, rel=1e-3)


def test_a_block_keeps_sixteen_streams() -> None:
    # By hand, in streams: input and output of qkv (1 + 3), output of attention (1), input of the second norm (1),
    # input and output of fc (1 + 4), output of GELU (4), and the output (1); the input belongs to the previous block.
    # In addition one number per head and token for attention, and two per norm and token.
    batch, context, width, heads = 4, 64, 128, 4
    settings = Settings(model=ModelSettings("gpt-tiny", layers=2, width=width, heads=heads, context=context))
    how = PassSettings.of(settings, batch, "cpu")
    block = local_model(facts_of(settings), how).layers[1].memory
    stream, tokens = 4 * batch * context * width, batch * context
    beside = 4 * tokens * (heads + 2 * 2)
    assert block.saved + block.output == 16 * stream + beside
    assert block.needs_input and not block.keeps_output
    again = local_model(facts_of(settings), replace(how, recompute=True)).layers[1].memory
    assert (again.saved, again.output, again.needs_input) == (0, stream, True)
