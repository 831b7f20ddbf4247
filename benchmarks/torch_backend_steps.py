"""Steps of stock training programs on two groups of torch.distributed: DDP and FSDP2 of a GPT, and no exchange."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from harness.stats import Times, differences, ratio, summaries
from harness.training import Training, time_all
from harness.turns import stop, timed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch_backend_candidates import Groups

from hpctrain.models.build import build
from hpctrain.models.settings import ModelSettings

VOCABULARY = 256
# 10.9 million parameters, and 0.1 million for tests.
FULL = ModelSettings(name="gpt-mini", context=64)
SMALL = ModelSettings(name="gpt-mini", context=32, layers=2, width=64, heads=2)
WARMUP = 3


class Steps(StrEnum):
    """Candidates."""

    ALONE = "no exchange"
    DDP_GLOO = "DDP on gloo"
    DDP = "DDP on hpctrain"
    FSDP_GLOO = "FSDP2 on gloo"
    FSDP = "FSDP2 on hpctrain"


@dataclass(frozen=True)
class Step:
    """Measured steps of one batch; ``drift`` is the largest relative difference of losses from those on gloo."""

    context: int
    seconds: Times
    drift: dict[str, float]

    @property
    def exchange_ratio(self) -> float | None:
        """Return DDP's time beyond the step without exchange, relative to that on gloo; None if not measured."""
        if not {Steps.ALONE, Steps.DDP_GLOO, Steps.DDP} <= self.seconds.keys():
            return None
        alone, gloo, ours = (self.seconds[name]["median"] for name in (Steps.ALONE, Steps.DDP_GLOO, Steps.DDP))
        return max(ours - alone, 0.0) / max(gloo - alone, 1e-9)

    @property
    def ratios(self) -> dict[str, float]:
        """Return the time on gloo relative to that on hpctrain, by what was measured."""
        found = {
            "DDP step": ratio(self.seconds, Steps.DDP_GLOO, Steps.DDP),
            "FSDP2 step": ratio(self.seconds, Steps.FSDP_GLOO, Steps.FSDP),
        }
        values = {name: value for name, value in found.items() if value is not None}
        exchange = self.exchange_ratio
        return values if not exchange else values | {"DDP exchange": 1 / exchange}

    def to_json(self) -> dict[str, Any]:
        """Return the values of a result file."""
        return asdict(self) | {"ratios": self.ratios}


def measure_steps(groups: Groups, args: argparse.Namespace) -> dict[int, Step]:
    """Return the steps of each batch, in sequences per rank. Collective."""
    found: dict[int, Step] = {}
    for batch in args.batches:
        if not stop.number:
            found[batch] = measure_batch(groups, SMALL if args.quick else FULL, batch, args.rounds)
    return found


def measure_batch(groups: Groups, settings: ModelSettings, batch: int, rounds: int) -> Step:
    """Return the steps of all candidates, which are interleaved. Collective."""
    comm, context = groups.setting.comm, settings.context
    assert context is not None
    torch.manual_seed(0)
    model = build(settings, vocab_size=VOCABULARY)
    ddp = nn.parallel.DistributedDataParallel
    attach: dict[str, Callable[[nn.Module], nn.Module]] = {
        Steps.ALONE: lambda module: module,
        Steps.DDP_GLOO: lambda module: ddp(module, process_group=groups.gloo),
        Steps.DDP: lambda module: ddp(module, process_group=groups.ours),
        Steps.FSDP_GLOO: lambda module: sharded(module, groups.gloo),
        Steps.FSDP: lambda module: sharded(module, groups.ours),
    }
    candidates = {name: Training(wrap(copy.deepcopy(model)), fused=False) for name, wrap in attach.items()}
    batches: dict[int, Tensor] = {}
    source = tokens(comm.rank, batch, context)

    def turn(one: Training, number: int) -> float:
        if number not in batches:  # the first candidate of the round
            batches.clear()
            batches[number] = next(source)
        return timed(lambda: one.step(batches[number][:, :-1], batches[number][:, 1:]), comm)

    turns = {name: partial(turn, one) for name, one in candidates.items()}
    seconds, losses = time_all(comm, candidates, turns, rounds, WARMUP)
    drift = {
        name: differences(losses, against, without=[other for other in Steps if other not in (name, against)]).get(name)
        for name, against in ((Steps.DDP, Steps.DDP_GLOO), (Steps.FSDP, Steps.FSDP_GLOO))
    }
    return Step(context, summaries(seconds), {name: value for name, value in drift.items() if value is not None})


def sharded(model: nn.Module, group: Any) -> nn.Module:
    """Return the model with ``fully_shard`` on each block and on the whole, as its documentation recommends."""
    mesh = DeviceMesh.from_group(group, "cpu")
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tokens(rank: int, batch: int, context: int) -> Iterator[Tensor]:
    """Yield the tokens of one rank, endlessly."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(VOCABULARY, (batch, context + 1), generator=generator)
