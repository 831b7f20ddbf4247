"""Small models in the form of Hugging Face's: a configuration, ``_tp_plan``, ``dummy_inputs``, Conv1D layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain import checkpoint
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import Objective
from hpctrain.parallel.wrap import attach

VOCABULARY, WIDTH, HEADS, BLOCKS, LENGTH, BATCH, STEPS = 19, 16, 4, 3, 6, 8, 3


@dataclass
class Config:
    """Sizes of a model."""

    num_attention_heads: int = HEADS
    num_key_value_heads: int = 2
    use_cache: bool = True


class Attention(nn.Module):
    """Causal attention whose number of heads is in the configuration, as LLaMA has it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.head_dim = config, WIDTH // HEADS
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(WIDTH, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(WIDTH, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(WIDTH, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, WIDTH, bias=False)

    def forward(self, hidden_states: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            each(hidden_states).view(shape).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = query * turn[0] + turn[1], key * turn[0]
        key, value = (each.repeat_interleave(self.num_key_value_groups, 1) for each in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, mask)
        return self.o_proj(mixed.transpose(1, 2).reshape(*shape[:2], -1))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    """Gate and values in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)
        self.down_proj = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Block that takes what all blocks share by keywords."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), GatedMLP()
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden_states: Tensor, *, mask: Tensor, turn: tuple[Tensor, Tensor], use_cache: bool) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.first_norm(hidden_states), mask, turn)
        return hidden_states + self.mlp(self.second_norm(hidden_states))  # type: ignore[no-any-return]


class Turns(nn.Module):
    """Factors of the positions, from a buffer; defined after the blocks, used before them."""

    def __init__(self) -> None:
        super().__init__()
        self.speed = nn.Buffer(torch.linspace(1, 2, WIDTH // HEADS), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None] * self.speed.to(torch.float64)
        return angles.cos(), angles.sin()


class Base(nn.Module):
    """Embedding, blocks and norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Decoder(config) for _ in range(BLOCKS))
        self.norm, self.rotary, self.drop = nn.LayerNorm(WIDTH), Turns(), nn.Dropout(0.0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool | None = None) -> Tensor:
        length = input_ids.shape[1]
        hidden_states = self.drop(self.embed_tokens(input_ids))
        mask = torch.ones(length, length, dtype=torch.bool).tril().expand(len(input_ids), 1, -1, -1)
        if attention_mask is not None:
            mask = mask & (attention_mask.bool()[:, None, None, :] | torch.eye(length, dtype=torch.bool))
        turn = self.rotary(torch.arange(length))
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask=mask, turn=turn, use_cache=bool(use_cache))
        return self.norm(hidden_states)  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Decoder with a head, and the plan that such models carry."""

    def __init__(self, config: Config | None = None, *, tied: bool = False) -> None:
        super().__init__()
        self.config = config or Config()
        self.model = Base(self.config)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        names = {"colwise": ("q_proj", "k_proj", "v_proj"), "rowwise": ("o_proj",)}
        self.styles = self._tp_plan = {
            "model.embed_tokens": "embedding_rowwise",
            **{f"model.layers.*.self_attn.{name}": style for style, some in names.items() for name in some},
            "model.layers.*.mlp.gate_proj": "colwise",
            "model.layers.*.mlp.up_proj": "colwise",
            "model.layers.*.mlp.down_proj": "rowwise",
            "model.layers.*.mlp.absent_in_this_model": "colwise",
            "lm_head": "colwise_gather_output",
        }

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[1, 2, 3]])}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool | None = None, **_: Any
    ) -> dict[str, Any]:
        use_cache = self.config.use_cache if use_cache is None else use_cache
        logits = self.lm_head(self.model(input_ids, attention_mask, use_cache))
        return {"logits": logits, "cache": logits.detach().sum() if use_cache else None}


class Conv1D(nn.Module):
    """Linear layer with weight ``[inputs, outputs]``, as the transformers library has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * 0.2), nn.Parameter(torch.randn(nf) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class FusedAttention(nn.Module):
    """Attention with all queries, then all keys, then all values in one Conv1D."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.split_size = HEADS, WIDTH // HEADS, WIDTH
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each.view(*each.shape[:-1], -1, self.head_dim).transpose(1, 2)
            for each in self.c_attn(x).split(self.split_size, dim=2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FusedMLP(nn.Module):
    """MLP of two Conv1D layers."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(32, WIDTH), Conv1D(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))  # type: ignore[no-any-return]


class FusedBlock(nn.Module):
    """Block of GPT-2, which returns a tuple as in earlier versions of the library."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = (
            nn.LayerNorm(WIDTH),
            FusedAttention(),
            nn.LayerNorm(WIDTH),
            FusedMLP(),
        )

    def forward(self, hidden_states: Tensor) -> tuple[Tensor]:
        hidden_states = hidden_states + self.attn(self.ln_1(hidden_states))
        return (hidden_states + self.mlp(self.ln_2(hidden_states)),)


class GPT2(nn.Module):
    """GPT-2, whose embedding is also the head; it has no plan."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(FusedBlock() for _ in range(BLOCKS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[1, 2, 3]])}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Any]:
        hidden_states = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.h:
            hidden_states = block(hidden_states)[0]
        return {"logits": self.lm_head(self.ln_f(hidden_states))}


# Training -------------------------------------------------------------------------------------------------------------

MODELS: dict[str, Any] = {
    "llama": Llama,
    "tied llama": lambda: Llama(tied=True),
    "one key head": lambda: Llama(Config(num_key_value_heads=1)),
    "gpt2": GPT2,
}


def made(name: str) -> nn.Module:
    """Return a model in float64, with the same values on all ranks."""
    torch.manual_seed(11)
    model: nn.Module = MODELS[name]().double()
    return model


def batch(step: int, rank: int = 0, size: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """Return a data rank's samples of a step: arguments of the model, and targets."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (BATCH, 1), generator=generator)
    part = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    return {"input_ids": tokens[part, :-1], "attention_mask": mask[part]}, tokens[part, 1:]


def loss_of(outputs: dict[str, Any], targets: Tensor) -> Tensor:
    """Return the mean loss of all tokens."""
    return F.cross_entropy(outputs["logits"].flatten(0, 1), targets.flatten())


def plain(name: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return losses, norms of gradients and final weights of a loop in one process."""
    model, losses, norms = made(name), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        inputs, targets = batch(step)
        loss = loss_of(model(**inputs), targets)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, model.state_dict()


def trained(comm: Any, name: str, settings: ParallelSettings, path: Any) -> tuple[list[float], list[float], Any]:
    """Return losses, norms and weights of a strategy; the weights are what one process loads from its checkpoint."""
    model = made(name)
    strategy: Any = attach(model, comm, settings)
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), lr=1e-2), [], []
    strategy.check_optimizer(optimizer)
    for step in range(STEPS):
        inputs, targets = batch(step, strategy.data.rank, strategy.data.size)
        loss = strategy.forward_backward(inputs, targets, Objective(loss_of)).clone()
        strategy.data.all_reduce(loss)
        losses.append(float(loss) / strategy.data.size)
        norms.append(float(strategy.clip_grad_norm(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(path, model=model, optimizer=optimizer, comm=comm, split=strategy.split)
    strategy.detach()
    alone = made(name)
    checkpoint.load(path, model=alone, optimizer=torch.optim.AdamW(alone.parameters()))
    return losses, norms, alone.state_dict()
