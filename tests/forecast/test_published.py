"""Memory accounts of publications, reproduced, and activations of a block, counted by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hpctrain.forecast.facts import facts_of
from hpctrain.forecast.published import layer_activations, mixed_precision_bytes, usual_account
from hpctrain.forecast.rank import PassSettings, local_model
from hpctrain.models.settings import ModelSettings
from hpctrain.train.config import Settings

GIB, GB = 2**30, 10**9
GPT2 = {"batch": 32, "context": 1024, "width": 1600}


def _cut(number: float, digits: int) -> float:
    """Truncate to ``digits`` digits, as the published account does."""
    return math.floor(number * 10**digits) / 10**digits


def test_gpt2_takes_87_gigabytes() -> None:
    account = usual_account(1_500_000_000, 48, **GPT2)
    assert (account.parameters, account.gradients, account.states) == (6 * GB, 6 * GB, 18 * GB)
    assert _cut(layer_activations(**GPT2) / GIB, 2) == 1.17
    assert _cut(account.activations / GIB, 2) == 56.43
    assert math.ceil(6 + 6 + 18 + 56.43) == 87


@pytest.mark.parametrize("billions, told", [(0.32, 5.12), (1.5, 24), (17.2, 275), (175, 2800)])
def test_mixed_precision_takes_sixteen_bytes_per_parameter(billions: float, told: float) -> None:
    assert mixed_precision_bytes(billions * 1e9) / GB == pytest.approx(told, rel=1e-3)


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
