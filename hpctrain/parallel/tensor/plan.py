"""Tensor plan: split of a model's layers over the tensor ranks, by patterns of module names and kinds of split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.meta_init import check_initialisable
from hpctrain.parallel.model_agreement import check_same_model
from hpctrain.parallel.rng import RngRegion, has_dropout, synchronize_generators
from hpctrain.parallel.tensor.functional import degrees
from hpctrain.parallel.tensor.fused import CONV1D_CLASSES, FusedGate, FusedQKV, is_conv1d
from hpctrain.parallel.tensor.layers import ColumnParallel, Parallel, RowParallel, SharedHeads
from hpctrain.parallel.tensor.partial_gradients import PartialGradients, replicate
from hpctrain.parallel.tensor.plan_source import COUNTS, WIDTHS, Plan, number_of
from hpctrain.parallel.tensor.sequence import split_sequences
from hpctrain.parallel.tensor.sharding import TensorSplit, slice_parameters, slice_positions
from hpctrain.parallel.tensor.vocabulary import ParallelEmbedding

_CLASSES: dict[str, type[Parallel]] = {
    "column": ColumnParallel,
    "row": RowParallel,
    "heads": ColumnParallel,
    "embedding": ParallelEmbedding,
    "vocabulary": ColumnParallel,
    "qkv": FusedQKV,
    "gate_up": FusedGate,
}
# Attribute names in attention modules: key and value heads, query heads per key head, outputs of queries alone.
_SHARED_COUNTS = ("num_kv_heads", "n_kv_heads", "kv_heads", "n_kv_head", "num_key_value_heads")
_REPEATS = ("num_key_value_groups", "n_rep")
_PART_WIDTHS = ("split_size",)


@dataclass
class PlanEntry:
    """Split of one module as the plan says; ``counters`` are the new values of its parent's head counts."""

    name: str
    module: nn.Module
    parent: nn.Module | None
    kind: str
    pattern: str
    options: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    shares_heads: bool = False  # whether several ranks compute the same head

    def __str__(self) -> str:
        return f"{self.name} ({self.pattern}={self.kind})"

    @property
    def parallel_class(self) -> type[Parallel]:
        """Return the class that the module gets."""
        if is_conv1d(self.module) and self.kind in CONV1D_CLASSES:
            return CONV1D_CLASSES[self.kind]
        return SharedHeads if self.shares_heads else _CLASSES[self.kind]

    def check(self, size: int, entries: Sequence[PlanEntry] = ()) -> None:
        """Raise ``UsageError`` if ``size`` ranks cannot share the module; ``entries`` are those of all modules."""
        if self.kind == "vocabulary":
            self.options["gathers"] = True
        try:
            if isinstance(self.module, Parallel):
                raise UsageError("it is split already")
            if isinstance(self.parent, nn.MultiheadAttention):
                raise UsageError("nn.MultiheadAttention takes its weight and never calls it: split layers of your own")
            if self.module._parameters.get("weight") is None:
                raise UsageError("its weight is computed (a parametrization), not a parameter")
            if self.kind == "qkv":
                self._check_qkv(size)
            if self.kind == "heads":
                self._check_heads(size, [each for each in entries if each.parent is self.parent and each is not self])
            self.parallel_class.check(self.module, size, **self.options)
        except UsageError as error:
            raise UsageError(f"tensor plan {self.pattern}={self.kind}: module {self.name}: {error}", everywhere=True)

    def _check_heads(self, size: int, entries: Sequence[PlanEntry]) -> None:
        ColumnParallel.check(self.module, 1)
        counts = {name: count for name in COUNTS if (count := self._of_parent((name,))) is not None}
        kv_counts = {name: count for name in _SHARED_COUNTS if (count := self._of_parent((name,))) is not None}
        own = self.count_heads()
        others = [each for each in entries if each.kind == "heads" and isinstance(each.module, nn.Linear)]
        query_heads = max([own, *counts.values(), *(each._heads_or_none() for each in others)])
        if own < query_heads and size % own == 0 and size > own and query_heads % size == 0:
            self.shares_heads, self.options = True, {"heads": own}
        for heads in {query_heads if self.shares_heads else own, *counts.values()}:
            if heads % size:
                more = (
                    "" if own == query_heads else f", and multiples of {own} that divide the {query_heads} query heads"
                )
                raise UsageError(
                    f"{heads} heads cannot be split over {size} tensor ranks: tensor degrees that divide them are "
                    f"{degrees(heads)}{more}"
                )
        self.counters = {name: count // size for name, count in counts.items()}
        if own < query_heads:
            self.counters |= {name: max(1, count // size) for name, count in kv_counts.items()}
            repeats = (query_heads // size) // max(1, own // size)
            self.counters |= {name: repeats for name in _REPEATS if self._of_parent((name,)) == query_heads // own}
        elif any(count == own for count in kv_counts.values()):  # as many key heads as query heads
            self.counters |= {name: count // size for name, count in kv_counts.items()}

    def _check_qkv(self, size: int) -> None:
        self.parallel_class.check(self.module, 1)
        outputs = int(getattr(self.module, "out_features", 0) or getattr(self.module, "nf", 0))
        width, counted = self._of_parent(WIDTHS), self._of_parent(COUNTS)
        heads = counted or (outputs // 3 // width if width else None)
        if heads is None or outputs % (3 * heads) or width is not None and outputs != 3 * heads * width:
            raise UsageError(
                f"{outputs} outputs are not queries, keys and values of {heads or 'an unknown number of'} heads each; "
                f"the parent must have the number of heads as {_alternatives(COUNTS)}; use three layers of kind heads "
                "for fewer key and value heads"
            )
        if heads % size:
            raise UsageError(
                f"{heads} heads cannot be split over {size} tensor ranks: tensor degrees that divide them are "
                f"{degrees(heads)}"
            )
        counts = {name: count for name in COUNTS if (count := self._of_parent((name,))) is not None}
        counts |= {name: outputs // 3 for name in _PART_WIDTHS if self._of_parent((name,)) == outputs // 3}
        self.counters = {name: count // size for name, count in counts.items()}

    def count_heads(self) -> int:
        """Return the number of heads of the outputs: from the parent's count, or from its width of a head."""
        width, counted = self._of_parent(WIDTHS), self._of_parent(COUNTS) or self._of_config("num_attention_heads")
        if width is None and counted is None:
            raise UsageError(
                f"how many heads there are must stand in its parent: as {_alternatives(COUNTS)}, or the width of one "
                f"as {_alternatives(WIDTHS)}"
            )
        module = cast(nn.Linear, self.module)
        inputs, outputs = module.in_features, module.out_features
        kv_counts = self._of_parent(_SHARED_COUNTS) or self._of_config("num_key_value_heads")
        if kv_counts is not None and counted is not None and kv_counts < counted:
            # Queries or, with fewer heads of the same width, keys or values.
            width = width or (inputs // counted if inputs % counted == 0 else None)
            if width is not None and outputs == kv_counts * width:
                return kv_counts
        if counted is not None and outputs % (counted * (width or 1)) == 0:
            return counted
        if width is None:
            raise UsageError(f"{outputs} outputs are no whole number of {counted} heads")
        # If the outputs are a multiple of the inputs (such as query, key and value in one layer), count the
        # heads of the inputs. Otherwise count the outputs: heads of one kind, perhaps fewer.
        shared = inputs if outputs % inputs == 0 else outputs
        if shared % width:
            raise UsageError(f"{shared} features are no whole number of heads of width {width}")
        return shared // width

    def _heads_or_none(self) -> int:
        try:
            return self.count_heads()
        except UsageError:
            return 0  # its own check reports the reason

    def _of_parent(self, names: tuple[str, ...]) -> int | None:
        return number_of(self.parent, names)

    def _of_config(self, name: str) -> int | None:
        return number_of(getattr(self.parent, "config", None), (name,))  # as models of Hugging Face have it


def described(name: str, module: nn.Module, entry: PlanEntry | None) -> str:
    """Return a module's name, class and entry of the plan."""
    kind = module.torch_class if isinstance(module, Parallel) else type(module)
    return f"{name} ({kind.__name__}, {'not in the plan' if entry is None else f'{entry.pattern}={entry.kind}'})"


def _alternatives(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" or {names[-1]}"


# Splitting of a model -------------------------------------------------------------------------------------------------


_UNSPLIT = ("scatter", "gather", "replicated", "whole")


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
    cuts = {entry.module: entry.parallel_class.dims for entry in entries}
    _check_shared(model, cuts)
    if sequence:
        _check_sequence(chosen)
    check_initialisable(model)
    check_same_model(model, comm)
    # Dropout, and modules that are still to be initialised, must draw alike on all ranks.
    synchronize_generators(comm, *dict.fromkeys((torch.device("cpu"), device)))
    region = RngRegion(comm.rank) if has_dropout(model) else None
    positions = slice_positions(model, comm, {entry.module: entry.parallel_class for entry in entries})
    slice_parameters(model, comm, {one.module: partial(one.parallel_class.slice_of, comm) for one in entries}, device)
    split: dict[str, Parallel] = {}
    for entry in entries:
        options: dict[str, Any] = {} if entry.kind == "embedding" else {"sequence": sequence}
        if entry.kind in ("column", "heads", "row", "qkv", "gate_up"):
            options["region"] = region
        split[entry.name] = entry.parallel_class.adopt(entry.module, comm, **entry.options, **options)
        for name, count in entry.counters.items():
            setattr(entry.parent, name, count)
    if region is not None:
        model.register_forward_hook(lambda *_: region.end(), always_call=True)
    partial_gradients = None
    if sequence:
        split_sequences(model, comm, {each.module: each.kind for each in chosen}, list(split.values()), region, layers)
    else:
        for entry in chosen:
            if entry.kind == "replicated":
                replicate(entry.module, comm)
        partial_gradients = PartialGradients(model, comm, split.values(), {each.module: str(each) for each in chosen})
        model.register_forward_hook(lambda _, args, result: partial_gradients.after_forward(result))
    vocabularies = (split[entry.name] for entry in entries if entry.kind == "vocabulary")
    heads = [one for one in vocabularies if isinstance(one, ColumnParallel)]
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


def _listed(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _is_pruned(module: nn.Module) -> bool:
    own = module._parameters.values()
    return len(own) > 0 and all(parameter is None for parameter in own)


def _check_shared(model: nn.Module, cuts: Mapping[nn.Module, Mapping[str, int]]) -> None:
    """Raise ``UsageError`` if modules that share a parameter would split it differently, or not all of them."""
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
