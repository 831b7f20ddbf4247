"""Settings for the model that a run trains; without torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hpctrain.errors import SettingsError
from hpctrain.models.shapes import SHAPES, GPTConfig
from hpctrain.settings import check as check_fields
from hpctrain.settings import check_most, names_function, unknown
from hpctrain.util.text import short_repr

BUILTIN = ("convnet", "mlp")
_GPT_FIELDS = ("layers", "heads", "width", "vocab_size", "dropout", "tied")


@dataclass(frozen=True)
class ModelSettings:
    """Name of the model, or the function that makes it, with options."""

    # a shape of the GPT family (gpt-tiny ... gpt2-1.5b), mlp or convnet; not used if a factory is set
    name: str = "gpt-tiny"

    # your own model: "package.module:function", called with the options as keyword arguments
    factory: str | None = None

    # keyword arguments of the factory, of mlp (hidden) or of convnet (channels)
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
            self._check_factory()
        elif self.name not in SHAPES and self.name not in BUILTIN:
            raise SettingsError(unknown(f"model.name {short_repr(self.name)}", self.name, [*SHAPES, *BUILTIN]))
        elif self.name in SHAPES:
            if self.options:
                raise SettingsError(f"model.options do not apply to {self.name}: set {', '.join(_GPT_FIELDS)}, context")
            self.gpt()
        if self.gpt_name is None:
            self._refuse_gpt_fields()
        if self.context is not None and self.context < 1:
            raise SettingsError(f"model.context = {self.context}: allowed is 1 or more")
        check_most(self, "model", context=2**24)

    @property
    def gpt_name(self) -> str | None:
        """Return the name of the GPT shape; ``None`` if the model is not a GPT."""
        return self.name if self.factory is None and self.name in SHAPES else None

    @property
    def window(self) -> int | None:
        """Return the length of the token windows for training; ``None`` if the settings do not define it."""
        return self.gpt().context if self.gpt_name else self.context

    def gpt(self, vocab_size: int | None = None) -> GPTConfig:
        """Return the shape of the named GPT with all changes; ``vocab_size`` is that of the data."""
        if self.gpt_name is None:
            raise SettingsError(f"model {self.factory or self.name} is not of the GPT family")
        changes = {name: getattr(self, name) for name in ("context", *_GPT_FIELDS)}
        if vocab_size is not None and self.vocab_size is None:
            changes["vocab_size"] = vocab_size
        if vocab_size is not None and self.vocab_size is not None and self.vocab_size < vocab_size:
            raise SettingsError(f"model.vocab_size = {self.vocab_size}: the data's vocabulary needs {vocab_size}")
        chosen = {name: value for name, value in changes.items() if value is not None}
        return dataclasses.replace(SHAPES[self.gpt_name], **chosen)

    def _check_factory(self) -> None:
        if not names_function(self.factory or ""):
            raise SettingsError(f"model.factory = {short_repr(self.factory)}: write it as package.module:function")

    def _refuse_gpt_fields(self) -> None:
        for name in _GPT_FIELDS:
            if getattr(self, name) is not None:
                model = self.factory or self.name
                raise SettingsError(f"model.{name} applies to the GPT family, not to {model}: use model.options")
