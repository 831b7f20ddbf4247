"""Models as users write them, with whole modules between split layers, and a plain loop that trains them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, HEAD_WIDTH, LENGTH, BATCH = 32, 4, 8, 6, 4
QKV = {"*.wq": "heads", "*.wk": "heads", "*.wv": "heads", "*.wo": "row"}
MLP = {"*.fc": "column", "*.project": "row"}


class Attention(nn.Module):
    """Attention with ``shared`` key and value heads, and a norm (``make_norm``) of each head's queries and keys."""

    def __init__(self, shared: int = HEADS, make_norm: Any = None, *, bias: bool = True) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, shared, HEAD_WIDTH
        self.wq = nn.Linear(WIDTH, HEADS * HEAD_WIDTH, bias=bias)
        self.wk = nn.Linear(WIDTH, shared * HEAD_WIDTH, bias=False)  # a bias of keys has only rounding as gradient
        self.wv = nn.Linear(WIDTH, shared * HEAD_WIDTH, bias=bias)
        self.wo = nn.Linear(HEADS * HEAD_WIDTH, WIDTH, bias=bias)
        self.q_norm = make_norm(HEAD_WIDTH) if make_norm else nn.Identity()
        options = {"bias": False} if make_norm is nn.LayerNorm else {}
        self.k_norm = make_norm(HEAD_WIDTH, **options) if make_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, WIDTH]`` to the same shape."""
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        batch, length, _ = q.shape
        q = self.q_norm(q.view(batch, length, self.num_heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(k.view(batch, length, self.num_kv_heads, self.head_dim)).transpose(1, 2)
        v = v.view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        repeats = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and an MLP, each with a norm before it and a residual around it."""

    def __init__(self, attention: nn.Module, act: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.attention, self.norm_2 = nn.LayerNorm(WIDTH), attention, nn.LayerNorm(WIDTH)
        self.fc, self.project = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act = act or nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, WIDTH]`` to the same shape."""
        x = x + self.attention(self.norm(x))
        return x + self.project(self.act(self.fc(self.norm_2(x))))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """An MLP whose split features are scaled by a whole parameter and by a gate of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.project = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale, self.gate = nn.Parameter(torch.full((1,), 0.7)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., WIDTH]`` to the same shape."""
        gate = torch.sigmoid(self.gate(x))
        hidden = torch.tanh(self.fc(x)) * self.scale * gate
        return x * gate + self.project(hidden)  # type: ignore[no-any-return]


def model_of(case: str) -> tuple[nn.Sequential, dict[str, str]]:
    """Return the model of a case, and the plan that its author writes."""
    torch.manual_seed(3)
    kinds: dict[str, Any] = {
        "mqa": lambda: Block(Attention(1)),
        "gqa": lambda: Block(Attention(2)),
        "layer norm": lambda: Block(Attention(HEADS, nn.LayerNorm)),
        "rms norm": lambda: Block(Attention(HEADS, nn.RMSNorm, bias=False)),
        "mqa rms norm": lambda: Block(Attention(1, nn.RMSNorm)),
        "gated": Gated,
        "plain": lambda: Block(Attention()),
        "softmax": lambda: Block(Attention(), nn.Softmax(dim=-1)),
    }
    name = case.removesuffix(", whole k v").removesuffix(", declared")
    model = nn.Sequential(nn.Linear(5, WIDTH), *(kinds[name]() for _ in range(2)), nn.Linear(WIDTH, 3))
    plan = dict(MLP) if name == "gated" else {**QKV, **MLP}
    if case.endswith("whole k v"):
        del plan["*.wk"], plan["*.wv"]
    if case.endswith("declared"):
        plan |= {"*.q_norm": "replicated", "*.k_norm": "replicated"}
    return model, plan


def samples(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return the batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH, LENGTH, 5, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randn(BATCH, LENGTH, 3, generator=generator, dtype=torch.float64).to(dtype)


def learnt(case: str, steps: int = 5, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the weights that a plain loop in one process reaches."""
    model = model_of(case)[0].to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = samples(step, dtype)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def difference(strategy: Any, model: nn.Module, wanted: dict[str, Tensor]) -> float:
    """Return the largest difference of the weights that the ranks hold from those of a plain loop. Collective."""
    largest = 0.0
    with strategy.unguarded(), torch.no_grad():
        for name, tensor in model.state_dict().items():
            for shard in strategy.split.shards(name, tensor):
                part = wanted[name][tuple(slice(at, at + extent) for at, extent in zip(shard.start, shard.extent))]
                if part.numel():
                    held = shard.tensor.detach().as_subclass(Tensor).reshape(part.shape)
                    largest = max(largest, float((held - part).abs().max()))
    return max(strategy.comm.all_gather_object(largest))
