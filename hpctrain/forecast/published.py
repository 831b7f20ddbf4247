"""Memory formulas of papers and courses, for comparison with the forecast."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT32 = 4
# Rajbhandari et al., ZeRO, SC 2020, section 3.1: parameters and gradients in 16 bits; in 32 bits a
# copy of the parameters and Adam's two moments.
MIXED_PRECISION = 2 + 2 + 3 * FLOAT32
STREAMS = 6  # number of [batch, context, width] tensors counted per layer


@dataclass(frozen=True)
class ModelMemory:
    """Memory account in bytes, as usually drawn up for training a GPT in float32 with Adam."""

    parameters: int
    gradients: int
    states: int
    activations: int


def mixed_precision_bytes(parameters: float) -> float:
    """Return the bytes of parameters, gradients and Adam's states in mixed precision: 16 per parameter."""
    return MIXED_PRECISION * parameters


def layer_activations(batch: int, context: int, width: int) -> int:
    """Return the bytes of a layer's activations in that account: 6 activation tensors and one attention matrix.

    GPT-2 1.5B, batch 32, context 1024, width 1600: 1.1758 GiB, printed as 1.17; 48 layers 56.4375,
    printed as 56.43.
    """
    return FLOAT32 * (STREAMS * batch * context * width + context**2)


def usual_account(parameters: int, layers: int, batch: int, context: int, width: int) -> ModelMemory:
    """Return the account; its states take 12 bytes per parameter: two moments, and a copy superfluous in float32."""
    return ModelMemory(
        FLOAT32 * parameters,
        FLOAT32 * parameters,
        3 * FLOAT32 * parameters,
        layers * layer_activations(batch, context, width),
    )
