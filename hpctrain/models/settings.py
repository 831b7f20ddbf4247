"""Settings of a model, and the shapes of GPT models by name; without torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hpctrain.errors import SettingsError
from hpctrain.settings import check as check_fields
from hpctrain.settings import check_most, names_function, unknown
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
    separator: int | None = None  # token that ends a document: attention and positions stay within documents

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SettingsError(f"gpt with {name} = {short_repr(value)}: allowed are whole numbers above 0")
            if value > most:
                raise SettingsError(f"gpt with {name} = {short_repr(value)}: allowed are at most {most}")
        if self.width % self.heads:
            fitting = [heads for heads in range(1, self.width + 1) if self.width % heads == 0]
            raise SettingsError(
                f"gpt with width {self.width} and {self.heads} heads: the heads must divide the width, "
                f"nearest that do: {_nearest(self.heads, fitting)}"
            )
        if not 0 <= self.dropout < 1:
            raise SettingsError(f"gpt with dropout = {self.dropout!r}: allowed is 0 up to, not including, 1")
        if self.separator is not None and (
            type(self.separator) is not int or not 0 <= self.separator < self.vocab_size
        ):
            raise SettingsError(
                f"gpt with separator = {short_repr(self.separator)}: allowed are None and the tokens 0 to "
                f"{self.vocab_size - 1}"
            )

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


BUILTIN = ("convnet", "mlp")
PRETRAINED = "hf:"  # the beginning of model.factory for a folder of Transformers
_GPT_FIELDS = ("layers", "heads", "width", "vocab_size", "dropout", "tied")


@dataclass(frozen=True)
class ModelSettings:
    """Name of the model, or the function that makes it, with options."""

    # a shape of the GPT family (gpt-tiny ... gpt2-1.5b), mlp or convnet; not used if a factory is set
    name: str = "gpt-tiny"

    # your own model: "package.module:function", called with the options as keyword arguments; or
    # "hf:FOLDER": a causal language model of Transformers with its weights (config.json, safetensors)
    factory: str | None = None

    # keyword arguments of the factory, of mlp (hidden) or of convnet (channels); with "hf:FOLDER", entries
    # of config.json to change (attn_implementation)
    options: dict[str, Any] = field(default_factory=dict)

    # build the factory's model on the meta device; job.wrap initialises each module with its
    # reset_parameters(), and ranks that split the model never allocate all of it (always done for
    # models by name)
    meta: bool = False

    # length of the token windows; overrides the named shape; required for a factory that reads tokens
    context: int | None = None

    # other changes to a named GPT; vocab_size defaults to that of the data
    layers: int | None = None
    heads: int | None = None
    width: int | None = None
    vocab_size: int | None = None
    dropout: float | None = None
    tied: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self, "model")
        if self.factory is not None:
            if not self.pretrained and not names_function(self.factory):
                text = f"model.factory = {short_repr(self.factory)}: write it as package.module:function, or hf:FOLDER"
                raise SettingsError(text)
            if self.pretrained and self.meta:
                raise SettingsError(f"model.meta with model.factory = {self.factory}: always applies there; remove it")
        elif self.name not in SHAPES and self.name not in BUILTIN:
            raise SettingsError(unknown(f"model.name {short_repr(self.name)}", self.name, [*SHAPES, *BUILTIN]))
        elif self.name in SHAPES:
            if self.options:
                raise SettingsError(f"model.options do not apply to {self.name}: set {', '.join(_GPT_FIELDS)}, context")
            self.gpt()
        for name in _GPT_FIELDS if self.gpt_name is None else ():
            if getattr(self, name) is not None:
                model = self.factory or self.name
                raise SettingsError(f"model.{name} applies to the GPT family, not to {model}: use model.options")
        if self.context is not None and self.context < 1:
            raise SettingsError(f"model.context = {self.context}: allowed is 1 or more")
        check_most(self, "model", context=2**24)

    @property
    def pretrained(self) -> str | None:
        """Return the folder of a model of Transformers; ``None`` for other models."""
        factory = self.factory or ""
        return factory.removeprefix(PRETRAINED).strip() or None if factory.startswith(PRETRAINED) else None

    @property
    def gpt_name(self) -> str | None:
        """Return the name of the GPT shape; ``None`` if the model is not a GPT."""
        return self.name if self.factory is None and self.name in SHAPES else None

    @property
    def window(self) -> int | None:
        """Return the length of the token windows for training; ``None`` if the settings do not define it."""
        return self.gpt().context if self.gpt_name else self.context

    def gpt(self, vocab_size: int | None = None, separator: int | None = None) -> GPTConfig:
        """Return the shape of the named GPT with all changes; ``vocab_size`` and ``separator`` are those of the data.

        With a separator, the model has document masks.
        """
        if self.gpt_name is None:
            raise SettingsError(f"model {self.factory or self.name} is not of the GPT family")
        changes = {name: getattr(self, name) for name in ("context", *_GPT_FIELDS)}
        if vocab_size is not None and self.vocab_size is None:
            changes["vocab_size"] = vocab_size
        if vocab_size is not None and self.vocab_size is not None and self.vocab_size < vocab_size:
            raise SettingsError(f"model.vocab_size = {self.vocab_size}: the data's vocabulary needs {vocab_size}")
        changes["separator"] = separator
        chosen = {name: value for name, value in changes.items() if value is not None}
        return dataclasses.replace(SHAPES[self.gpt_name], **chosen)
