"""One unusual model, trained under every strategy on teams of ranks; each rank's state is compared with a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from support.nodes import in_pairs, one_per_node
from support.replicas import share
from support.shards import Variant, communicator
from torch import Tensor, nn
from torch.nn.functional import conv1d, cross_entropy

from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.wrap import attach

SAMPLES = 12  # per step, over all ranks
RATE = 0.01
VOCABULARY, LENGTH, WIDTH = 13, 5, 7
Stored = dict[str, Tensor]  # flat datasets by their path

# By name: the strategy, and the numbers of ranks on which it differs from the other variants.
VARIANTS = {
    "ddp": (Variant("ddp"), (1, 2, 3, 4)),
    "zero1": (Variant("zero1"), (2, 3, 4)),
    "zero2": (Variant("zero2"), (2, 3, 4)),
    "fsdp": (Variant("fsdp"), (1, 2, 3, 4)),
    "zero2_alone": (Variant("zero2", one_per_node), (2,)),
    "fsdp_alone": (Variant("fsdp", one_per_node), (2, 3, 4)),
    "fsdp_in_pairs": (Variant("fsdp", in_pairs), (3,)),
    "hybrid": (Variant("fsdp", in_pairs, "node"), (4,)),
    "hybrid_alone": (Variant("fsdp", one_per_node, "node"), (2,)),
}
# Shards in float32 beside whole parameters in bfloat16: in memory that the node shares, and in each rank's own.
NARROW = {"narrow": (Variant("fsdp"), (1, 2, 3)), "narrow_alone": (Variant("fsdp", one_per_node), (4,))}
CASES = [(name, size) for name, (_, sizes) in {**VARIANTS, **NARROW}.items() for size in sizes]


class Convolve(nn.Module):
    """Convolution and batch norm; the norm is skipped in bfloat16, whose weights it does not support on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, WIDTH, 3) / 4)
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, WIDTH]`` to ``[batch, 7]``."""
        x = conv1d(x.transpose(1, 2).to(self.weight.dtype), self.weight)
        return (x if x.dtype is torch.bfloat16 else self.norm(x)).mean(2)


class Narrow(nn.Module):
    """Layers in two further precisions."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.wide = nn.Linear(7, 5, bias=False, dtype=torch.float64)
        self.narrow = nn.Linear(5, outputs, bias=False, dtype=torch.bfloat16)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, 7]`` to ``[batch, outputs]``."""
        return self.narrow(self.wide(x.double()).bfloat16()).float()  # type: ignore[no-any-return]


class Odd(nn.Module):
    """Model with tied, frozen, unused and scalar parameters of three dtypes and up to three dims, and changing buffers.

    It has few tensors: the cost of a file grows with their number.
    """

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList([Convolve(), Narrow(outputs)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.randn(2, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return one loss of all parts for tokens ``[batch, LENGTH]``."""
        x = (self.token(tokens) + self.position) * self.scale
        hidden = x
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(x).float()
        return cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten()) + hidden.square().mean()


def make_odd(seed: int = 5, outputs: int = 3) -> Odd:
    """Return the model, the same at every call."""
    torch.manual_seed(seed)
    return Odd(outputs)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW with two groups, as a run uses it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, fused=True)


def learn(one: Case, steps: Sequence[int], clip: float = 0.5) -> None:
    """Take some steps, each on this rank's part of its batch."""
    for step in steps:
        tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(100 + step))
        one.model(share(tokens, one.comm)).backward()
        one.strategy.clip_grad_norm(clip)
        one.optimizer.step()
        one.optimizer.zero_grad()


class Case:
    """The model under one strategy on the ranks of a team."""

    def __init__(self, name: str, comm: Any, seed: int = 5, outputs: int = 3) -> None:
        variant, _ = {**VARIANTS, **NARROW}[name]
        self.name, self.comm, self.rounds = name, comm, name in NARROW
        self.model = make_odd(seed, outputs)
        self._numels = {name: each.numel() for name, each in self.model.named_parameters(remove_duplicate=False)}
        settings = ParallelSettings(
            data=variant.data,
            shard_within=variant.within if variant.data != "ddp" else "world",
            mixed_precision="bfloat16" if self.rounds else "none",
            bucket_mib=1e-3,  # many pieces, each cut at different offsets
        )
        self.strategy = attach(self.model, comm, settings)
        self.optimizer = make_optimizer(self.model)
        self._begins = self._offsets(variant.within == "node")

    def _offsets(self, replicated: bool) -> dict[str, int]:
        """Return the offset of this rank's elements in each parameter: after those of lower ranks of its replica."""
        own = {name: each.numel() for name, each in self.model.named_parameters(remove_duplicate=False)}
        everyone = self.comm.all_gather_object((self.comm.node if replicated else 0, own))
        if self.strategy.split is None:
            return dict.fromkeys(own, 0)
        mine = everyone[self.comm.rank][0]
        held = [(rank, numels) for rank, (node, numels) in enumerate(everyone) if node == mine]
        assert {name: sum(numels[name] for _, numels in held) for name in own} == self._numels
        return {name: sum(numels[name] for rank, numels in held if rank < self.comm.rank) for name in own}

    def spoil(self, *, forget: bool) -> None:
        """Write other values over everything; ``forget`` the optimizer's states, or spoil them too."""
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                tensor.fill_(3)
        for group in self.optimizer.param_groups:
            group["lr"] = 7.0
        if forget:
            self.optimizer.state.clear()
        for state in self.optimizer.state.values():
            for value in state.values():
                value.fill_(9)

    def differences(self, stored: Stored) -> list[str]:
        """Return the tensors in which this rank differs from a file."""
        found = []
        first = {id(parameter): name for name, parameter in reversed(list(self.model.named_parameters()))}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if not self._same(stored, f"model/{name}", name, tensor):
                found.append(name)
        for group in self.optimizer.param_groups:
            found += [] if group["lr"] == RATE else [f"learning rate {group['lr']}"]
            for parameter in group["params"]:
                found += self._state_differences(stored, first[id(parameter)], self.optimizer.state.get(parameter, {}))
        return found

    def _state_differences(self, stored: Stored, name: str, state: dict[str, Tensor]) -> list[str]:
        start = f"optimizer/{name}/"
        keys = {path.removeprefix(start) for path in stored if path.startswith(start)}
        wrong = [] if keys == state.keys() else [f"{start}: {sorted(keys ^ state.keys())}"]
        for key in keys & state.keys():
            of = name if key != "step" else ""
            if not self._same(stored, start + key, of, state[key]):
                wrong.append(start + key)
        return wrong

    def _same(self, stored: Stored, path: str, name: str, tensor: Tensor) -> bool:
        """Compare bits with the elements of a dataset that this rank is to hold."""
        begin = self._begins.get(name, 0)
        expected = stored[path][begin : begin + tensor.numel()]
        return bits(tensor) == bits(expected) and (name in self._begins or tensor.numel() == stored[path].numel())

    def whole(self) -> Stored:
        """Return the whole parameters and buffers, as a forward pass would see them. Collective."""
        with self.strategy.unshard():
            found = {f"model/{name}": tensor.clone().view(-1) for name, tensor in self.model.state_dict().items()}
        self.comm.barrier()  # the next write may go to memory that other ranks read here
        return found


def bits(tensor: Tensor) -> tuple[torch.dtype, bytes]:
    """Return a tensor's dtype and bytes."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.dtype, flat.view(torch.uint8).numpy().tobytes()


@contextmanager
def case(name: str, comm: Any, **options: Any) -> Iterator[Case]:
    """Yield a case in memory of its own, which is freed afterwards."""
    variant, _ = {**VARIANTS, **NARROW}[name]
    with communicator(comm, variant) as own:
        made = Case(name, own, **options)
        yield made
        made.strategy.detach()


SIZES = {2: (1, 2), 3: (3,), 4: (1, 2, 3, 4)}  # cases of its teams, by the number of ranks in the world


@contextmanager
def teams(comm: Any) -> Iterator[list[tuple[Any, list[str]]]]:
    """Divide the ranks into teams of 1, 2, ... ranks; yield this rank's teams, each with its cases.

    No rank is idle: those that a small team does not need form another team.
    """
    found, parts = [], []
    for smaller in range(comm.size // 2 + 1):
        if comm.size - smaller not in SIZES[comm.size]:
            continue
        last = comm.rank >= comm.size - smaller
        part = comm.split(int(last))
        names = [name for name, size in CASES if size == part.size]
        if 2 * smaller == comm.size:  # two teams of one size share their cases
            names = names[int(last) :: 2]
        found.append((part, names))
        parts.append(part)
    yield found
    for part in parts:
        part.free()


def stored_in(path: Path) -> Stored:
    """Return the tensors of a checkpoint's model and optimizer by h5py alone, flat, under their paths."""
    found: Stored = {}

    def take(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and name.split("/")[0] in ("model", "optimizer"):
            array = np.ascontiguousarray(item[()]).reshape(-1)
            kind = item.attrs.get("torch_dtype", b"")
            text = kind.decode() if isinstance(kind, bytes) else str(kind)
            tensor = torch.from_numpy(array.view(np.int16) if text == "bfloat16" else array)
            found[name] = tensor.view(torch.bfloat16) if text == "bfloat16" else tensor

    with h5py.File(path, "r") as file:
        file.visititems(take)
    return found
