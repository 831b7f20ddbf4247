"""Settings of models from Hugging Face folders, and errors before Transformers is needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpctrain.errors import SettingsError
from hpctrain.models.build import build
from hpctrain.models.settings import ModelSettings


def test_a_factory_may_name_a_folder() -> None:
    assert ModelSettings(factory="hf:/weights/llama", context=8).pretrained == "/weights/llama"
    assert ModelSettings(factory="mine:make").pretrained is None and ModelSettings().pretrained is None
    for factory in ("hf:", "hf: ", "hf/folder"):
        with pytest.raises(SettingsError, match="write it as package.module:function, or hf:FOLDER"):
            ModelSettings(factory=factory)
    with pytest.raises(SettingsError, match="always applies there; remove it"):
        ModelSettings(factory="hf:folder", meta=True)


def test_errors_tell_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ModelSettings(factory=f"hf:{tmp_path}")
    with pytest.raises(SettingsError, match="no file config.json in this folder"):
        build(settings, vocab_size=3)
    with pytest.raises(SettingsError, match="reads tokens, the data are images or vectors"):
        build(settings, input_shape=(2,), outputs=3)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SettingsError, match=r"needs the package transformers.*pip install 'hpctrain\[hf\]'"):
        build(settings, vocab_size=3)
