"""Agreement of docs/settings.md with the settings: every field with its default."""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.settings import to_tree
from hpctrain.train.config import Settings

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
# Defaults that the page describes in words.
IN_WORDS = {"run.folder", "data.files", "model.options", "model.dropout"}


def documented() -> dict[str, str]:
    return dict(re.findall(r"^\| `([a-z]+\.[a-z_]+)` \| (.+?) \|", PAGE.read_text(), re.MULTILINE))


def fields() -> set[str]:
    names = set()
    for section in Settings.__dataclass_fields__:
        names |= {f"{section}.{field}" for field in getattr(Settings(), section).__dataclass_fields__}
    return names


def test_exactly_the_settings_are_documented() -> None:
    assert set(documented()) == fields()


def test_documented_defaults_equal_those_of_the_code() -> None:
    page = documented()
    for section, values in to_tree(Settings()).items():
        for key, value in values.items():
            name = f"{section}.{key}"
            if name not in IN_WORDS:
                text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
                assert page[name].strip("`") == text.replace("'", '"'), name
