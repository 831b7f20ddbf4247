"""Subclasses of a module's own class that differ only in ``forward`` and pickling.

A ``forward`` assigned to the instance would be shared by copies, which ``copy.deepcopy`` and
torch's DataParallel make, and would refer to the parameters of the original. The subclass cannot be
imported: copies and pickles refer to the plain class.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import nn


def blank(plain: type[nn.Module], *arguments: Any) -> nn.Module:
    """Return an empty module of a plain class, whose state is set later."""
    return plain.__new__(plain, *arguments)


def subclass_with(
    plain: type[nn.Module],
    forward: Callable[..., Any],
    marker: str,
    make_copy: Callable[..., nn.Module] = blank,
) -> type[nn.Module]:
    """Return a subclass with another ``forward`` and the same name; its attribute ``marker`` is the plain class.

    ``make_copy(plain)``, a function that pickle can import, creates the module that receives a
    copy's state.
    """

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = plain.__reduce_ex__(self, max(2, int(protocol)))
        make, arguments, *rest = reduced
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            make, arguments = make_copy, (plain, *arguments[1:])
        return make, arguments, *rest

    same: Mapping[str, Any] = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {"forward": wraps(plain.forward)(forward), "__reduce_ex__": reduce, marker: plain}
    return type(plain.__name__, (plain,), {**same, **own})
