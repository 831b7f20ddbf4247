"""Runs whose memory is forecast and measured: ten models, each with several strategies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from forecasting.own_models import CLASSES, CONTEXT

from hpctrain.data.dataset import write_arrays
from hpctrain.data.pack import pack

STEPS = 5
PIPELINES = ("1f1b", "zb-h1")
OFFLOAD = {"offload": {"parameters": True, "activations": True}}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": {"data": "ddp"}},
    "fsdp": {"parallel": {"data": "fsdp"}},
    "offload": {"parallel": {"data": "fsdp", "recompute": True}, **OFFLOAD},
    **{name: {"parallel": {"schedule": name}} for name in PIPELINES},
}
# In the order of measurement: if the benchmark is stopped early, every model has had equally many
# cases.
PLACES = (("ddp", 2), ("fsdp", 2), ("zb-h1", 2), ("ddp", 1), ("offload", 2), ("1f1b", 2), ("ddp", 4), ("fsdp", 4))


@dataclass(frozen=True)
class Model:
    """A model, its data and its batch."""

    name: str
    factory: str
    options: dict[str, Any]
    batch: int
    shape: tuple[int, ...] = ()  # of a sample; empty: tokens
    is_row: bool = False  # sequential, so that it can be partitioned into stages


MODELS = (
    Model("mlp", "mlp", {"width": 768, "depth": 8}, 256, (256,), True),
    Model("mlp-wide", "mlp", {"inputs": 1024, "width": 2048, "depth": 3}, 256, (1024,), True),
    Model("mlp-normed", "normed_mlp", {"width": 1024, "depth": 5}, 2048, (256,), True),
    Model("cnn", "cnn", {"channels": 16}, 128, (3, 32, 32), True),
    Model("resnet", "resnet", {"channels": 16, "blocks": 3}, 128, (3, 32, 32), True),
    Model("unet", "unet", {"channels": 16}, 32, (3, 64, 64)),
    Model("encoder", "encoder", {"width": 256, "layers": 6}, 32, (64, 256)),
    Model("encoder-decoder", "encoder_decoder", {"width": 256, "layers": 3}, 32),
    Model("gpt", "gpt", {"width": 256, "blocks": 6}, 32, (), True),
    Model("embedding", "embedding", {"rows": 60000, "width": 128}, 64, (), True),
)


@dataclass(frozen=True)
class Case:
    """Training run of a model with a strategy on a number of ranks."""

    model: Model
    way: str
    ranks: int

    @property
    def name(self) -> str:
        """Return the name of the case in lists."""
        return f"{self.model.name} {self.way} on {self.ranks}"

    def config(self, folder: Path) -> Path:
        """Write its settings and its data into a folder; return the file of the settings."""
        slug = self.name.replace(" ", "-")
        path = folder / f"{slug}.toml"
        lines = []
        for section, values in self._settings(folder, slug).items():
            lines += [f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in values.items())]
        path.write_text("\n".join(lines) + "\n")
        return path

    def _settings(self, folder: Path, slug: str) -> dict[str, Any]:
        sections = {name: dict(section) for name, section in WAYS[self.way].items()}
        if self.way in PIPELINES:
            sections["parallel"]["pipe"] = self.ranks
        tokens = not self.model.shape
        data = {"files": [str(data_for(self.model, folder))], "format": "tokens" if tokens else "arrays"}
        options = {"kind": self.model.factory, **self.model.options}
        return {
            **sections,
            "model": {
                "factory": "forecasting.own_models:make",
                "options": options,
                **({"context": CONTEXT} if tokens else {}),
            },
            "data": {**data, "validation_samples": 8},
            "train": {"batch": self.model.batch, "steps": STEPS},
            "run": {"folder": str(folder / slug), "device": "cpu"},
            "checkpoint": {"every": STEPS},
        }


CASES = tuple(
    Case(model, way, ranks)
    for way, ranks in PLACES
    for model in MODELS
    if model.is_row or way not in PIPELINES
)


def data_for(model: Model, folder: Path) -> Path:
    """Return a file of random samples, which is written if it does not exist."""
    path = folder / ("-".join(map(str, model.shape or ("tokens",))) + ".h5")
    if path.exists():
        return path
    chance = np.random.default_rng(0)
    if not model.shape:
        source = path.with_suffix(".txt")
        source.write_bytes(chance.integers(97, 123, size=2**19, dtype=np.uint8).tobytes())
        pack([source], path)
        return path
    most = 2 * max(one.batch for one in MODELS if one.shape == model.shape)

    def pair(samples: int) -> tuple[Any, Any]:
        inputs = chance.random((samples, *model.shape), dtype=np.float32)
        return inputs, np.arange(samples, dtype=np.int64) % CLASSES

    write_arrays(path, train=pair(most), validation=pair(16))
    return path


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(one)}" for name, one in value.items()) + "}"
    return json.dumps(value)
