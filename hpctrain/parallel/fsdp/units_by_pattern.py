"""Choice of units by patterns of the user."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.fsdp.uncalled import uncalled

EXAMPLES = 8  # module names that an error lists


def modules_by_pattern(model: nn.Module, patterns: Sequence[str]) -> set[nn.Module]:
    """Return the modules whose class name or own name matches a pattern, except those that are never called.

    Raises ``UsageError`` for a pattern that matches no module with parameters.
    """
    others = uncalled(model)
    named = [(name, module) for name, module in model.named_modules(remove_duplicate=False)]
    chosen: set[nn.Module] = set()
    for pattern in patterns:
        matching = [(name, module) for name, module in named if _matches(pattern, name, module)]
        useful = {module for _, module in matching if module not in others and _holds_parameters(module)}
        if not useful:
            raise UsageError(_nothing_chosen(pattern, matching, model, others), everywhere=True)
        chosen |= useful
    return chosen


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    """Return whether a pattern matches the class name, or each part of the module name (``*`` stays within a part)."""
    if fnmatchcase(type(module).__name__, pattern):
        return True
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(part, want) for part, want in zip(parts, wanted))


def _holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _nothing_chosen(
    pattern: str, matching: list[tuple[str, nn.Module]], model: nn.Module, others: dict[nn.Module, str]
) -> str:
    """Return the error message for a pattern that matches no usable module."""
    for name, module in matching:
        if module in others and _holds_parameters(module):
            return f"unit pattern {pattern!r} matches {name}, which {others[module]}"
    if matching:
        return f"unit pattern {pattern!r} matches only modules without parameters, such as {matching[0][0]}"
    usable = {
        name: module for name, module in model.named_modules() if module not in others and _holds_parameters(module)
    }
    classes = sorted({type(module).__name__ for module in usable.values()})
    names = [name for name in usable if name]
    more = ", ..." if len(names) > EXAMPLES else ""
    return (
        f"unit pattern {pattern!r} matches no module: the model has the classes {', '.join(classes)} and modules named "
        f"{', '.join(names[:EXAMPLES])}{more}"
    )
