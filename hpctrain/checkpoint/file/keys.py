"""Keys of several models or optimizers in one file: one group each below ``/model`` or ``/optimizer``.

A single model or optimizer has no key (``""``) and is stored in the common group itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpctrain.checkpoint.file import layout

if TYPE_CHECKING:
    from hpctrain.checkpoint.file.reader import Reader

KEYS = "keys"  # the attribute of /model and of /optimizer that lists the keys


def group_of(group: str, key: str) -> str:
    """Return the group of a model or optimizer: the common group if there is no key."""
    return layout.child(group, key) if key else group


def keys_in(reader: Reader, group: str) -> list[str]:
    """Return the keys of the models or optimizers in a file: ``[""]`` for a single one, ``[]`` for none."""
    if group not in reader.groups:
        return []
    keys = reader.values(group).get(KEYS, ("",))
    return [keys] if isinstance(keys, str) else [str(key) for key in keys]


def key_groups(group: str, keys: Sequence[str]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the groups of several models or optimizers with their attributes; empty for a single one."""
    if not keys or list(keys) == [""]:
        return {}
    return {group: {KEYS: tuple(keys)}, **{layout.child(group, key): {} for key in keys}}
