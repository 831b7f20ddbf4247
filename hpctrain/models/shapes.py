"""Shapes of GPT models by name; without torch."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.errors import SettingsError
from hpctrain.util.text import short_repr

# Far above real models, and low enough to count parameters and bytes, and to list the layers.
_MOST = {"layers": 10_000, "heads": 2**16, "width": 2**20, "context": 2**24, "vocab_size": 2**24}


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT; checked at construction."""

    layers: int
    heads: int  # must divide the width
    width: int  # features per token between the blocks
    context: int  # longest sequence, in tokens
    vocab_size: int = 50257
    dropout: float = 0.0
    tied: bool = True  # the head shares the token embedding's weight

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "context", "vocab_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SettingsError(f"gpt with {name} = {short_repr(value)}: allowed are whole numbers above 0")
            if value > _MOST[name]:
                raise SettingsError(f"gpt with {name} = {short_repr(value)}: allowed are at most {_MOST[name]}")
        if self.width % self.heads:
            fitting = [heads for heads in range(1, self.width + 1) if self.width % heads == 0]
            raise SettingsError(
                f"gpt with width {self.width} and {self.heads} heads: the heads must divide the width, "
                f"nearest that do: {_nearest(self.heads, fitting)}"
            )
        if not 0 <= self.dropout < 1:
            raise SettingsError(f"gpt with dropout = {self.dropout!r}: allowed is 0 up to, not including, 1")

    @property
    def parameters(self) -> int:
        """Return the number of trainable parameters; a shared weight counts once."""
        block = 12 * self.width**2 + 13 * self.width
        embeddings = (self.vocab_size + self.context) * self.width
        head = 0 if self.tied else self.vocab_size * self.width
        return embeddings + self.layers * block + 2 * self.width + head


def _nearest(wanted: int, fitting: list[int]) -> str:
    return ", ".join(str(heads) for heads in sorted(sorted(fitting, key=lambda heads: abs(heads - wanted))[:3]))


_BYTES = 256

# GPT-2's shapes: Radford et al., Language Models are Unsupervised Multitask Learners, 2019, table
# 2. The smaller shapes are meant for byte tokens.
SHAPES = {
    "gpt-tiny": GPTConfig(layers=4, heads=4, width=128, context=64, vocab_size=_BYTES, tied=False),
    "gpt-mini": GPTConfig(layers=6, heads=6, width=384, context=256, vocab_size=_BYTES, tied=False),
    "gpt-25m": GPTConfig(layers=8, heads=8, width=512, context=256, vocab_size=_BYTES),
    "gpt-50m": GPTConfig(layers=10, heads=10, width=640, context=512, vocab_size=_BYTES),
    "gpt2": GPTConfig(layers=12, heads=12, width=768, context=1024),
    "gpt2-medium": GPTConfig(layers=24, heads=16, width=1024, context=1024),
    "gpt2-large": GPTConfig(layers=36, heads=20, width=1280, context=1024),
    "gpt2-xl": GPTConfig(layers=48, heads=25, width=1600, context=1024),
    "gpt2-1.5b": GPTConfig(layers=48, heads=25, width=1600, context=1024),
}
