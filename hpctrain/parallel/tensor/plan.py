"""Tensor plan: split of a model's layers over the tensor ranks, by patterns of module names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.meta_init import check_initialisable, materialise
from hpctrain.parallel.model_agreement import check_same_model
from hpctrain.parallel.rng import RngRegion, has_dropout, synchronize_generators
from hpctrain.parallel.tensor import sequence as sequences
from hpctrain.parallel.tensor.functional import bounds
from hpctrain.parallel.tensor.kinds import KINDS, PlanEntry
from hpctrain.parallel.tensor.layers import ColumnParallel, Parallel
from hpctrain.parallel.tensor.partial_gradients import PartialGradients, replicate
from hpctrain.parallel.tensor.sharding import SlicePosition, TensorSplit

Plan = Mapping[str, str]
_UNSPLIT = ("scatter", "gather", "replicated", "whole")


def parse(lines: Sequence[str]) -> dict[str, str]:
    """Return the plan of lines such as ``["*.fc=column", ...]``. Raises ``UsageError`` if a line is not valid."""
    plan: dict[str, str] = {}
    for line in lines:
        pattern, equals, kind = (word.strip() for word in line.partition("="))
        if not (pattern and equals and kind):
            raise UsageError(f"tensor plan {line!r}: allowed are pattern=kind, as in '*.fc=column'", everywhere=True)
        _check_kind(pattern, kind)
        plan.pop(pattern, None)  # the last entry of a pattern wins
        plan[pattern] = kind
    return plan


def plan_of(model: nn.Module, lines: Sequence[str] = ()) -> dict[str, str]:
    """Return the model's own plan (attribute ``tensor_plan``), then the settings' lines, which take precedence."""
    own = getattr(model, "tensor_plan", None)
    if own is None and not lines:
        raise UsageError(
            f"a model of class {type(model).__name__} has no plan of how to split it over tensor ranks: say so by "
            "patterns, as in '*.fc=column', or in its attribute tensor_plan",
            everywhere=True,
        )
    return parse([*(f"{pattern}={kind}" for pattern, kind in (own or {}).items()), *lines])


def apply(
    model: nn.Module,
    comm: Communicator,
    plan: Plan,
    *,
    sequence: bool = False,
    device: torch.device = torch.device("cpu"),
    layers: Sequence[nn.Module] = (),
) -> TensorSplit:
    """Split a model over the ranks of ``comm``, in place. Collective; the values of rank 0 are used.

    ``plan`` maps patterns of module names (``fnmatch``; a later one wins) to kinds (``KINDS``).
    Modules whose parameters are None, pruned by a pipeline, stay unchanged. Modules on the meta
    device are initialised on ``device``, one at a time, and then split. Other modules on the meta
    device are initialised only if the values of the split ones depend on their draws.

    With ``sequence``, the activations between split layers are split along the sequence. ``layers``
    is the sequence of layers that the stages of a pipeline call. Raises ``UsageError``, with the
    model unchanged, for a pattern without a match and for a module that cannot be split. Raises
    ``MismatchError`` if the ranks hold different models.
    """
    chosen = choose(model, plan)
    entries = check(chosen, comm.size)
    _check_shared(model, entries)
    if sequence:
        _check_sequence(chosen)
    check_initialisable(model)
    check_same_model(model, comm)
    # Dropout, and modules that are still to be initialised, must draw alike on all ranks.
    synchronize_generators(comm, *dict.fromkeys((torch.device("cpu"), device)))
    region = RngRegion(comm.rank) if has_dropout(model) else None
    positions = _positions(entries, model, comm)
    _slice_parameters(model, entries, comm, device)
    split: dict[str, Parallel] = {}
    for entry in entries:
        split[entry.name] = entry.parallel_class.adopt(entry.module, comm, **entry.options)
        _configure(entry, sequence, region)
    if region is not None:
        model.register_forward_hook(lambda *_: region.end(), always_call=True)
    partial_gradients = None
    if not sequence:
        for entry in chosen:
            if entry.kind == "replicated":
                replicate(entry.module, comm)
        partial_gradients = PartialGradients(model, comm, split.values(), {each.module: str(each) for each in chosen})
        model.register_forward_hook(lambda _, args, result: partial_gradients.after_forward(result))
    if sequence:
        _split_sequences(model, comm, chosen, list(split.values()), region, layers)
    named = {entry.name for entry in entries if entry.kind == "vocabulary"}
    heads = {name: one for name, one in split.items() if name in named and isinstance(one, ColumnParallel)}
    return TensorSplit(comm, split, positions, heads, partial_gradients)


def check(chosen: Sequence[PlanEntry], size: int) -> list[PlanEntry]:
    """Return the entries that split parameters. Raises ``UsageError`` if ``size`` ranks cannot share a module."""
    entries = [entry for entry in chosen if entry.kind not in _UNSPLIT and not _is_pruned(entry.module)]
    for entry in entries:
        entry.check(size, entries)
    for outer in (entry for entry in chosen if entry.kind == "replicated"):
        inside = set(outer.module.modules())
        for entry in entries:
            if entry.module in inside:
                raise UsageError(
                    f"tensor plan {outer.pattern}=replicated: module {outer.name} contains {entry.name}, which is "
                    f"split ({entry.pattern}={entry.kind}); a replicated module is whole on all tensor ranks; write "
                    "replicated for modules beside the split ones",
                    everywhere=True,
                )
    return entries


# Interpretation of the plan -------------------------------------------------------------------------------------------


def choose(model: nn.Module, plan: Plan) -> list[PlanEntry]:
    """Return the entry of each module that a plan names. Raises ``UsageError`` for a pattern without a match."""
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    chosen: dict[nn.Module, PlanEntry] = {}
    for pattern, kind in plan.items():
        _check_kind(pattern, kind)
        found = [name for name in modules if fnmatchcase(name, pattern)]
        if not found:
            raise UsageError(
                f"tensor plan {pattern}={kind}: no module has such a name; there are {_listed(list(modules))}",
                everywhere=True,
            )
        for name in found:
            parent = model.get_submodule(name.rpartition(".")[0])
            first = chosen[modules[name]].name if modules[name] in chosen else name
            chosen[modules[name]] = PlanEntry(first, modules[name], parent, kind, pattern)
    order = {module: index for index, module in enumerate(model.modules())}
    return sorted(chosen.values(), key=lambda entry: order[entry.module])


def _check_kind(pattern: str, kind: str) -> None:
    if kind not in KINDS:
        raise UsageError(f"tensor plan {pattern}={kind}: allowed kinds are {', '.join(KINDS)}", everywhere=True)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _is_pruned(module: nn.Module) -> bool:
    own = module._parameters.values()
    return len(own) > 0 and all(parameter is None for parameter in own)


def _check_shared(model: nn.Module, entries: Sequence[PlanEntry]) -> None:
    """Raise ``UsageError`` if modules that share a parameter would split it differently, or not all of them."""
    cuts = {entry.module: entry.parallel_class.dims for entry in entries}
    owners: dict[nn.Parameter, tuple[str, int | None]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            dim = cuts.get(module, {}).get(attribute)
            other, cut = owners.setdefault(parameter, (name, dim))
            if cut != dim:
                raise UsageError(
                    f"tensor plan: modules {other or 'of the whole model'} and {name} share a parameter, "
                    "so they must be split alike (embedding and vocabulary) or both left whole",
                    everywhere=True,
                )


def _check_sequence(chosen: Sequence[PlanEntry]) -> None:
    kinds = {entry.kind for entry in chosen}
    if "scatter" not in kinds or not kinds & {"gather", "vocabulary"}:
        raise UsageError(
            "sequence parallelism needs a module of kind scatter in the tensor plan, behind which sequences are split, "
            "and one of kind vocabulary or gather, from which on they are whole",
            everywhere=True,
        )


# Application of the plan ----------------------------------------------------------------------------------------------


def _positions(entries: Sequence[PlanEntry], model: nn.Module, comm: Communicator) -> dict[str, SlicePosition]:
    """Return the shape and offset of this rank's slice for every split tensor, by its names in ``state_dict``."""
    cuts = {entry.module: entry.parallel_class.dims for entry in entries}
    positions = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, dim in cuts.get(module, {}).items():
            parameter = module._parameters.get(attribute)
            if parameter is not None:
                shape = tuple(parameter.shape)
                begin, _ = bounds(shape[dim], comm.rank, comm.size)
                start = tuple(begin if axis == dim else 0 for axis in range(len(shape)))
                positions[f"{path}.{attribute}"] = SlicePosition(shape, start)
    return positions


@torch.no_grad()
def _slice_parameters(model: nn.Module, entries: Sequence[PlanEntry], comm: Communicator, device: torch.device) -> None:
    """Replace parameters by their slices; the parameter objects stay, because modules may share them."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            comm.broadcast(tensor)
    cuts = {entry.module: partial(entry.parallel_class.slice_of, comm) for entry in entries}
    cut: set[nn.Parameter] = set()
    for module, cutting in cuts.items():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta and parameter not in cut:
                parameter.data = cutting(name, parameter.data)
                cut.add(parameter)
    materialise(model, device, cuts)


def _configure(entry: PlanEntry, sequence: bool, region: RngRegion | None) -> None:
    module = entry.module
    if entry.kind != "embedding":
        module.sequence = sequence  # type: ignore[assignment]
    if entry.kind in ("column", "heads", "row"):
        module.region = region  # type: ignore[assignment]
    for name, count in entry.counters.items():
        setattr(entry.parent, name, count)


def _split_sequences(
    model: nn.Module,
    comm: Communicator,
    chosen: Sequence[PlanEntry],
    split: list[Parallel],
    region: RngRegion | None,
    layers: Sequence[nn.Module],
) -> None:
    sequence_region = sequences.SequenceRegion(model, layers, {entry.module: entry.kind for entry in chosen})
    for entry in chosen:
        if entry.kind == "scatter":
            sequences.scatter_after(entry.module, comm, sequence_region)
        elif entry.kind == "gather":
            sequences.gather_before(entry.module, comm, sequence_region)
        elif entry.kind == "vocabulary" and isinstance(entry.module, ColumnParallel):
            entry.module.register_forward_pre_hook(lambda *_: sequence_region.change(False))
    whole = [entry.module for entry in chosen if entry.kind in _UNSPLIT and entry.kind != "replicated"]
    sequences.prepare(model, comm, split, whole, region, sequence_region)
