"""Source of a tensor plan: the model's attribute, the plan of a Hugging Face model, and lines of the settings.

Models of the transformers library carry a plan of names and styles (``{"layers.*.self_attn.q_proj":
"colwise"}``). Its class attribute is merged with that of the configuration when the model is built.
Only these attributes are read here; the library itself is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.tensor.fused import is_conv1d

Plan = Mapping[str, str]
KINDS = {
    "column": "a linear layer, split by its outputs, which stay split",
    "row": "a linear layer, split by its inputs; outputs are summed",
    "heads": "column, by whole attention heads; of fewer key and value heads than ranks each rank computes one",
    "qkv": "a linear layer that computes all queries, then all keys, then all values; each third is split by heads",
    "gate_up": "a linear layer that computes a gate and then values, in two halves; each half is split",
    "embedding": "an embedding, split by its rows",
    "vocabulary": "a linear layer, split by its outputs, which are gathered where no split loss takes them",
    "scatter": "with sequence parallelism: sequences are split after this module",
    "gather": "with sequence parallelism: sequences are whole again from this module on",
    "replicated": "whole on all ranks, applied to split features; gradients are summed over the ranks",
    "whole": "left as it is",
}
# Attribute names in attention modules: number of heads, width of a head.
COUNTS = ("num_heads", "heads", "n_heads", "n_head", "num_attention_heads")
WIDTHS = ("head_width", "head_dim", "head_size", "d_head")

_KINDS = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "embedding",
    "replicated_with_grad_allreduce": "replicated",
    "replicate": "whole",
    "sequence_parallel": "",  # a norm between split layers: whole, and split along the sequence by parallel.sequence
}
_GATHERING = ("colwise_gather_output", "colwise_rep")
# Models without a plan of their own whose layers are known: GPT-2 and its relatives with Conv1D layers.
_CONV1D_PLAN = {
    "attn.c_attn": "qkv",
    "attn.c_proj": "row",
    "mlp.c_fc": "column",
    "mlp.c_proj": "row",
}


def parse(lines: Sequence[str]) -> dict[str, str]:
    """Return the plan of lines such as ``["*.fc=column", ...]``. Raises ``UsageError`` if a line is not valid."""
    plan: dict[str, str] = {}
    for line in lines:
        pattern, equals, kind = (word.strip() for word in line.partition("="))
        if not (pattern and equals and kind):
            raise UsageError(f"tensor plan {line!r}: allowed are pattern=kind, as in '*.fc=column'", everywhere=True)
        if kind not in KINDS:
            raise UsageError(f"tensor plan {pattern}={kind}: allowed kinds are {', '.join(KINDS)}", everywhere=True)
        plan.pop(pattern, None)  # the last entry of a pattern wins
        plan[pattern] = kind
    return plan


def plan_of(model: nn.Module, lines: Sequence[str] = ()) -> dict[str, str]:
    """Return the model's own plan, then the settings' lines, which take precedence.

    The own plan is the attribute ``tensor_plan``, or follows from that of a Hugging Face model (``tp_plan``).
    """
    own = getattr(model, "tensor_plan", None)
    if own is None:
        own = foreign_plan(model, lines)
    if own is None and not lines:
        raise UsageError(
            f"a model of class {type(model).__name__} has no plan of how to split it over tensor ranks: say so by "
            "patterns, as in '*.fc=column', or in its attribute tensor_plan",
            everywhere=True,
        )
    return parse([*(f"{pattern}={kind}" for pattern, kind in (own or {}).items()), *lines])


# Plans of Hugging Face models -----------------------------------------------------------------------------------------


def foreign_plan(model: nn.Module, lines: Sequence[str] = ()) -> dict[str, str] | None:
    """Return the plan of kinds for a model with ``_tp_plan``, or with GPT-2's layers; None for other models.

    ``lines`` are patterns and kinds of the settings, which take precedence: a style that is not
    supported is no error if a line names its modules. Raises ``UsageError`` for other such styles.
    """
    overridden = [line.partition("=")[0].strip() for line in lines]
    found: dict[str, str] = {}
    known = False
    for prefix, plan in _plans(model):
        known = True
        for pattern, style in plan.items():
            found |= _translated(model, prefix + pattern, style, overridden)
    found |= _conv1d_plan(model)
    if not found:
        return {} if known and lines else None
    return found | _shared_vocabulary(model, found)


def _plans(model: nn.Module) -> list[tuple[str, Mapping[str, str]]]:
    """Return the plans of the outermost modules that have one, with the prefix of their names."""
    found: list[tuple[str, Mapping[str, str]]] = []
    for name, module in model.named_modules():
        plan = getattr(module, "_tp_plan", None)
        inside = any(not outer or name.startswith(outer) for outer, _ in found)
        if isinstance(plan, Mapping) and plan and not inside:
            found.append((f"{name}." if name else "", plan))
    return found


def _translated(model: nn.Module, pattern: str, style: str, overridden: Sequence[str]) -> dict[str, str]:
    """Return the entry of a pattern and its style; empty if the model has no such modules, or they stay whole."""
    names = _matching(model, pattern)
    if not names:
        _check_parameters(model, pattern, style, overridden)
        return {}
    if all(_is_overridden(name, overridden) for name in names):
        return {}
    if style in _GATHERING and "*" not in pattern:
        return {pattern: "vocabulary"}
    if style not in _KINDS:
        raise _unsupported(model, pattern, style, pattern)
    kind = _KINDS[style]
    if kind == "column" and all(_computes_heads(model, name) for name in names):
        kind = "heads"
    return {pattern: kind} if kind else {}


def _matching(model: nn.Module, pattern: str) -> list[str]:
    """Return the names of the modules that a pattern means, in which ``*`` is the number of a layer."""
    meant = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return [name for name, _ in model.named_modules(remove_duplicate=False) if name and meant.fullmatch(name)]


def _check_parameters(model: nn.Module, pattern: str, style: str, overridden: Sequence[str]) -> None:
    """Raise ``UsageError`` for a pattern of parameters, such as the matrices of experts that are one parameter."""
    meant = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    names = [name for name, _ in model.named_parameters() if meant.fullmatch(name)]
    if names and not all(_is_overridden(name.rpartition(".")[0], overridden) for name in names):
        raise _unsupported(model, pattern, style, pattern.rpartition(".")[0])


def _is_overridden(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _unsupported(model: nn.Module, pattern: str, style: str, module: str) -> UsageError:
    return UsageError(
        f"the plan of a {type(model).__name__} (_tp_plan) has the style {style} for {pattern}; allowed are "
        f"{', '.join(_KINDS)}, and {' or '.join(_GATHERING)} for a head; write '{module}=whole' in "
        "parallel.tensor_plan to keep it whole on all tensor ranks, or entries of your own",
        everywhere=True,
    )


def _computes_heads(model: nn.Module, name: str) -> bool:
    """Return whether the outputs of a linear layer are whole attention heads, by the attributes of its parent."""
    module, parent = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
    width = number_of(parent, WIDTHS)
    outputs = getattr(module, "out_features", 0)
    if width is None:
        return number_of(parent, COUNTS) is not None
    return isinstance(outputs, int) and outputs % width == 0


def number_of(owner: object, names: Sequence[str]) -> int | None:
    """Return the first positive whole number among attributes."""
    values = (getattr(owner, name, None) for name in names)
    return next((each for each in values if isinstance(each, int) and not isinstance(each, bool) and each > 0), None)


# Models without a plan, and tied weights ------------------------------------------------------------------------------


def _conv1d_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan for blocks with Conv1D layers, as GPT-2 has them."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        for ending, kind in _CONV1D_PLAN.items():
            if is_conv1d(module) and (name == ending or name.endswith(f".{ending}")):
                found[re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name)] = kind
    return found


def _shared_vocabulary(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return entries for an embedding and a head that share a weight: both are split, or both stay whole.

    An embedding of another class, such as one that scales its rows, cannot be split.
    """
    kinds = {name: kind for pattern, kind in plan.items() for name in _matching(model, pattern)}
    named = [(name, module) for name, module in model.named_modules() if name]
    embeddings = {name: module for name, module in named if isinstance(module, nn.Embedding)}
    added: dict[str, str] = {}
    for name, embedding in embeddings.items():
        heads = [
            other
            for other, module in named
            if isinstance(module, nn.Linear) and module._parameters.get("weight") is embedding._parameters["weight"]
        ]
        involved = [each for each in (name, *heads) if each in kinds]
        if not involved and not (heads and "qkv" in kinds.values()):
            continue
        splits = type(embedding).forward is nn.Embedding.forward
        if heads or not splits:
            added[name] = "embedding" if splits else "whole"
            added |= dict.fromkeys(heads, "vocabulary" if splits else "whole")
    return added
