"""Memory of the candidates of the sharded steps: names, task, expected bytes, and measurement in a fresh process."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from fsdp_step_samples import (
    KINDS,
    PARAMETERS,
    REST,
    Buckets,
    Extent,
    MemorySampler,
    Sample,
    release_freed_memory,
    resident,
    size,
    union,
)
from harness.ranks import refuse
from harness.report import table
from harness.run import words_of
from harness.training import Training
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.models.build import build
from hpctrain.models.settings import ModelSettings
from hpctrain.parallel.fsdp.strategy import ShardedDataParallel
from hpctrain.parallel.fsdp.units import find_units

if TYPE_CHECKING:
    from fsdp_step import Candidate

MB = 10**6


class Name(StrEnum):
    """Candidates; their words on the command line are the names of the members."""

    ALONE = "no synchronisation"  # each rank trains independently: only sharing of memory can make a candidate faster
    DDP = "hpctrain DDP"
    ZERO1 = "hpctrain ZeRO-1"
    ZERO2 = "hpctrain ZeRO-2"
    FSDP = "hpctrain FSDP"  # one copy of the parameters in node memory
    PASSING = "hpctrain FSDP, one rank per node"  # each rank acts as if alone on its node: units are gathered and freed
    TORCH_DDP = "torch DDP + gloo"
    TORCH_FSDP = "torch FSDP2 + gloo"


CANDIDATES = words_of(Name)
NOTE = (
    f"{Name.PASSING}: all ranks are on this node, but each treats the others as ranks of other nodes; "
    "gathers and reductions are MPI messages"
)
VOCABULARY = 256
# 25.5 million parameters, and 0.1 million for tests.
FULL = ModelSettings(name="gpt-mini", context=128, layers=8, width=512, heads=8)
SMALL = ModelSettings(name="gpt-mini", context=32, layers=2, width=64, heads=2)


@dataclass(frozen=True)
class Task:
    """Shape of the model, and number of sequences per rank and step."""

    shape: ModelSettings = FULL
    batch: int = 1

    @property
    def context(self) -> int:
        """Return the tokens of a sequence."""
        assert self.shape.context is not None
        return self.shape.context

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of all parameters, in float32."""
        return 4 * self.shape.gpt(VOCABULARY).parameters

    def model(self) -> nn.Module:
        """Return the model, with the same weights each time and on every rank."""
        torch.manual_seed(0)
        return build(self.shape, vocab_size=VOCABULARY)

    def batches(self, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs and targets of one rank, endlessly."""
        generator = torch.Generator().manual_seed(rank)
        while True:
            tokens = torch.randint(VOCABULARY, (self.batch, self.context + 1), generator=generator)
            yield tokens[:, :-1], tokens[:, 1:]


# Expected memory, from the model and the number of ranks alone --------------------------------------------------------

MAPPED = (Name.ZERO1, Name.ZERO2, Name.FSDP)  # one copy of the parameters per node
GATHERED = (Name.PASSING, Name.TORCH_FSDP)  # shards, and the unit that computes
PER_PARAMETER = 2  # moments


def facts(candidate: Candidate, task: Task, ranks: int) -> dict[str, Any]:
    """Return the inputs of the formulas, in bytes; ``padding`` is the part of a rank's shards beyond 1/ranks of all."""
    strategy, whole = candidate.strategy, task.parameter_bytes
    padding = 0.0
    if isinstance(strategy, ShardedDataParallel):
        held = sum(group.layout.slice_numel * group.shard_data.itemsize for group in strategy.components.groups)
        padding = held - whole / ranks
    unit = largest_unit(task)
    return {"ranks": ranks, "batch": task.batch, "parameters": whole, "largest_unit": unit, "padding": padding}


def largest_unit(task: Task) -> int:
    """Return the bytes of the largest unit, without the root unit, which stays for the whole step."""
    with torch.device("meta"):
        units = find_units(task.model())
    return max(sum(parameter.nbytes for _, parameter in unit.parameters) for unit in units[1:])


def parameters_of_rank(name: str, facts: dict[str, Any]) -> float:
    """Return the maximum bytes of parameters per rank, its part of a node's copy included."""
    share = facts["parameters"] / facts["ranks"]
    if name in GATHERED:
        return float(share + facts["largest_unit"])
    return float(share if name in MAPPED else facts["parameters"])


def moments_of_rank(name: str, facts: dict[str, Any]) -> float:
    """Return the bytes of AdamW's moments per rank, without padding."""
    split = name in (*MAPPED, *GATHERED)
    return float(PER_PARAMETER * facts["parameters"] / (facts["ranks"] if split else 1))


# Sums over ranks ------------------------------------------------------------------------------------------------------

Split = dict[str, float]  # bytes of each kind, the rest, and their sum as "total"


def account(ranks: Sequence[Sequence[Sample]], before: Sequence[int]) -> dict[str, Any]:
    """Return the peaks of a node whose ranks took these samples, beyond the bytes ``before``.

    ``node`` and ``rank`` are split as at the peak of the node's memory, or of the fullest rank's;
    all kinds and the rest add up to the total. ``most`` is the largest value of each kind at any
    time.
    """
    moments = [_moment(samples, before) for samples in zip(*ranks, strict=True)]
    nodes = [node for node, _ in moments]
    place = max(range(len(nodes)), key=lambda number: nodes[number]["total"])
    rank = max((one for _, each in moments for one in each), key=lambda one: one["total"])
    most = {
        kind: {
            "node": max(node[kind] for node in nodes),
            "rank": max(one[kind] for _, each in moments for one in each),
        }
        for kind in KINDS
    }
    return {"node": nodes[place], "rank": rank, "most": most, "moment": ranks[0][place].moment, "samples": len(nodes)}


def _moment(samples: Sequence[Sample], before: Sequence[int]) -> tuple[Split, list[Split]]:
    """Return the split of the node and of each rank at one moment; ranks share node memory equally."""
    assert len({sample.moment for sample in samples}) == 1, "the ranks did not look at the same moments"
    shared = _shared(samples)
    each: list[Split] = []
    for sample, start in zip(samples, before, strict=True):
        own = {kind: sample.held[kind].private + shared[kind] / len(samples) for kind in KINDS}
        total = sample.resident.total - start
        each.append({**own, REST: total - sum(own.values()), "total": total})
    return {kind: sum(one[kind] for one in each) for kind in (*KINDS, REST, "total")}, each


def _shared(samples: Sequence[Sample]) -> dict[str, int]:
    """Return the bytes of node memory of each kind; bytes of one kind are not counted for later ones."""
    found: dict[str, int] = {}
    covered: list[Extent] = []
    for kind in KINDS:
        grown = union([*covered, *(extent for sample in samples for extent in sample.held[kind].shared)])
        found[kind] = size(grown) - size(covered)
        covered = grown
    return found


# Measurement ----------------------------------------------------------------------------------------------------------

WARMUP, STEPS = 2, 2
MOMENTS = ("exp_avg", "exp_avg_sq")

Memory = dict[str, dict[str, Any]]


def measure(comm: Communicator, task: Task, make: Callable[[], Candidate]) -> dict[str, Any]:
    """Return the peak memory of a candidate's ranks, beyond their memory before. Collective.

    The first steps, which create optimizer states and record execution orders, are not sampled, and neither
    is the construction of the model.
    """
    if comm.nodes > 1:
        refuse(f"memory is measured on one node, not on {comm.nodes}")
    # A tiny step first, so that one-time loads and allocations of torch are not counted.
    tiny = Training(nn.Linear(8, 8), nn.functional.mse_loss)
    tiny.step(torch.ones(8, 8), torch.ones(8, 8))
    before = resident().total
    candidate = make()
    buckets, batches = Buckets(candidate.model), task.batches(comm.rank)
    for _ in range(WARMUP):
        candidate.step(*next(batches))
        buckets.found.clear()
    gc.collect()
    release_freed_memory()
    with MemorySampler(candidate, buckets) as watch:
        for _ in range(STEPS):
            candidate.step(*next(batches), sample=watch.sample)
    states = candidate.optimizer.state.values()  # without the optimizer's step counters
    held = [getattr(state[name], "_local_tensor", state[name]) for state in states for name in MOMENTS]
    own = sum(tensor.untyped_storage().nbytes() for tensor in held)
    samples, starts, moments = zip(*comm.all_gather_object((watch.samples, before, own)))
    found = {
        "candidate": candidate.name,
        "optimizer": candidate.optimizer_name,
        **account(samples, starts),
        "moments": list(moments),
        "facts": facts(candidate, task, comm.size),
    }
    candidate.close()
    return found


def save(folder: Path, found: dict[str, Any]) -> None:
    """Store a result for the run that reports."""
    folder.mkdir(parents=True, exist_ok=True)
    _file(folder, found["candidate"]).write_text(json.dumps(found))


def _file(folder: Path, name: str) -> Path:
    return folder / f"{next(word for word, other in CANDIDATES.items() if other == name)}.json"


def load(folder: Path | None, ranks: int, task: Task) -> Memory:
    """Return the stored results of a folder; raises ``UsageError`` if one has other ranks, model or batch."""
    found: Memory = {}
    wanted = {"ranks": ranks, "parameters": task.parameter_bytes, "batch": task.batch}
    for name in Name:
        if folder and (path := _file(folder, name)).exists():
            found[name] = json.loads(path.read_text())
            made = found[name]["facts"]
            for key, value in wanted.items():
                if made[key] != value:
                    refuse(f"{path} was measured with {key} = {made[key]}, not {value}")
    return found


def memory_tables(memory: Memory) -> str:
    """Return the peak memory of nodes and ranks by kind; then the values of the formulas."""
    if not memory:
        return ""
    text = ""
    for where, title in (("node", "MB of the node at its peak"), ("rank", "MB of the fullest rank at its peak")):
        rows = [[title, *KINDS, REST, "total"]]
        for name, one in memory.items():
            rows.append([name, *(_mb(one[where][kind]) for kind in (*KINDS, REST, "total"))])
        text += table(rows) + "\n\n"
    rows = [["MB of a rank", "parameters at most", "formula", "moments", "formula", "padding"]]
    for name, one in memory.items():
        made = one["facts"]
        formulas = parameters_of_rank(name, made), moments_of_rank(name, made)
        parameters = [_mb(one["most"][PARAMETERS]["rank"]), _mb(formulas[0])]
        padding = f"{2 * made['padding'] / MB:.3f}" if name in (*MAPPED, Name.PASSING) else ""
        rows.append([name, *parameters, _mb(max(one["moments"])), _mb(formulas[1]), padding])
    copy, unit = (_mb(made[key]) for key in ("parameters", "largest_unit"))
    return f"{text}{table(rows)}\none copy of the parameters: {copy} MB, largest unit: {unit} MB\n"


def _mb(value: float) -> str:
    return f"{value / MB:.1f}"
