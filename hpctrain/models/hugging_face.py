"""Causal language models of Transformers from the ``config.json`` of a folder, without their weights.

The package ``transformers`` is imported at the first use. Parameters are on the meta device, so that
each rank allocates only its own part. Buffers have their values: most are computed by the
constructor and are not stored in the folder.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hpctrain.errors import SettingsError
from hpctrain.util.text import short_repr

CONFIG = "config.json"


class CausalLM(nn.Module):
    """Mixin of a model of Transformers: maps tokens ``[batch, length]`` to logits ``[batch, length, vocab_size]``."""

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        """Return the logits; ``options`` are arguments of the model's own ``forward``."""
        found: Tensor = super().forward(input_ids=input_ids, **{"use_cache": False, **options}).logits
        return found

    def initialise(self, name: str, module: nn.Module) -> None:
        """Fill the parameters of a module with NaN: weights that were not loaded must not train."""
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta:
                nn.init.constant_(parameter, float("nan"))


def causal_lm(
    folder: str | Path,
    options: Mapping[str, Any] | None = None,
    *,
    vocab_size: int | None = None,
    context: int | None = None,
) -> nn.Module:
    """Return the model that the ``config.json`` of a folder describes, with parameters on the meta device.

    ``job.wrap`` allocates them, ``job.load_pretrained`` fills them. They are float32, whatever the
    dtype of the files. ``options`` change the config (``attn_implementation``). ``vocab_size`` and
    ``context`` are those of the data. Raises ``SettingsError`` if the folder has no such model, or if
    it does not fit the data.
    """
    path, named = Path(folder), f"model.factory hf:{folder}"
    if not (path / CONFIG).is_file():
        raise SettingsError(f"{named}: no file {CONFIG} in this folder; save a model there by model.save_pretrained")
    transformers = _transformers(named)
    config = _config(transformers, path, dict(options or {}), named)
    _check_data(config, named, vocab_size, context)
    _check_class(transformers, config, named)
    make = transformers.AutoModelForCausalLM.from_config
    undrawn = importlib.import_module("transformers.initialization").no_init_weights
    with undrawn(), _parameters_without_memory():
        model: Any = make(config, dtype=torch.float32, trust_remote_code=False)
    model.tie_weights()
    kind = type(model)
    model.__class__ = type(kind.__name__, (CausalLM, kind), {})  # the names in its state_dict stay
    model.train()
    return model  # type: ignore[no-any-return]


def _transformers(named: str) -> Any:
    try:
        import transformers

        importlib.import_module("transformers.initialization")  # since version 5
    except ImportError as error:
        raise SettingsError(
            f"{named} needs the package transformers, version 5 or newer: {error}; pip install 'hpctrain[hf]'"
        ) from error
    return transformers


def _config(transformers: Any, path: Path, options: dict[str, Any], named: str) -> Any:
    """Return the config of a folder. No code of the folder is executed, and nothing is downloaded."""
    safe = {"local_files_only": True, "trust_remote_code": False}
    try:
        config, unused = transformers.AutoConfig.from_pretrained(
            str(path), return_unused_kwargs=True, **safe, **options
        )
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise SettingsError(f"{named}: cannot read {CONFIG}: {type(error).__name__}: {text}") from error
    unknown = sorted(set(unused) & set(options))
    if unknown:
        raise SettingsError(f"{named}: model.options has {', '.join(unknown)}: allowed are entries of {CONFIG}")
    return config


def _check_data(config: Any, named: str, vocab_size: int | None, context: int | None) -> None:
    held, longest = getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)
    if vocab_size is not None and held is not None and vocab_size > held:
        raise SettingsError(
            f"{named}: the data's vocabulary has {vocab_size} tokens, the model's {held}; allowed are at most as many; "
            "pack the data with the model's tokenizer"
        )
    if context is not None and isinstance(longest, int) and context > longest:
        raise SettingsError(f"{named}: model.context = {context}: allowed are at most {longest} tokens")


def _check_class(transformers: Any, config: Any, named: str) -> None:
    """Raise ``SettingsError`` unless the config is that of a causal language model of floats, or of its base."""
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if getattr(config, "quantization_config", None) is not None:
        raise SettingsError(f"{named}: its weights are quantized; allowed are weights of floats, for training")
    if type(config) not in known or getattr(config, "is_encoder_decoder", False):
        raise SettingsError(f"{named}: {config.model_type} is no causal language model; write your own script for it")
    found = known[type(config)]
    names = [kind.__name__ for kind in (found if isinstance(found, tuple) else (found,))]
    other = [name for name in getattr(config, "architectures", None) or () if name not in [*names, *_bases(names)]]
    if other:
        raise SettingsError(
            f"{named}: it holds a {short_repr(other[0])}; allowed are {', '.join(names)}; write your own script for "
            "other heads"
        )


def _bases(names: Sequence[str]) -> list[str]:
    """Return the names of models without a head: GPT2Model of GPT2LMHeadModel, LlamaModel of LlamaForCausalLM."""
    return [f"{name.removesuffix('LMHeadModel').removesuffix('ForCausalLM')}Model" for name in names]


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Move each parameter to the meta device when a module registers it; buffers stay."""

    def moved(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook: Any = moved  # torch declares that it returns nothing
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()
