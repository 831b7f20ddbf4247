"""Build GPT-2: learned positions, norm before each part, GELU, biases everywhere but in the head.

The model is four parts in a row, ``embedding``, ``blocks``, ``norm`` and ``head``, so that it can be cut between any
two blocks. Inside a block, ``attention.qkv`` and ``mlp.fc`` widen and ``project`` narrows again: the first two can be
split by rows and the last by columns of their weights, as Megatron-LM does (``tensor_plan``).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.models.shapes import GPTConfig
from hpctrain.models.weights import blank, draw, draw_weights, generator_for, give_memory, has_weights, reset_norm


class Embedding(nn.Module):
    """Turn tokens into vectors and add where they stand."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``[batch, length, width]`` for tokens ``[batch, length]``."""
        length, context = tokens.shape[-1], self.position.num_embeddings
        if length > context:
            raise UsageError(f"a sequence of {length} tokens is longer than the model's context of {context}")
        positions = torch.arange(length, device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Let every token look at itself and the ones before it.

    The rows of ``qkv`` are ordered by head, then query, key, value, so that a contiguous piece of the weight is
    whole heads. The number of heads follows from the weight, which may be such a piece.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.dropout = config.dropout
        self.context = config.context
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        features = self.qkv(x)
        batch, length, _ = features.shape  # those of x may be a piece of the sequence
        query, key, value = features.view(batch, length, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        joined = mixed.transpose(1, 2).reshape(batch, length, -1)
        return self.residual_dropout(self.project(joined))  # type: ignore[no-any-return]

    def flops_beside_weights(self) -> float:
        """Return the multiplications and additions that a token's place in the longest sequence takes, on average."""
        # Two products with the vectors of all tokens before it: half of them, taken over the sequence.
        return 2 * 2 * self.project.in_features * self.context / 2


class MLP(nn.Module):
    """Transform every token by itself, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.width, 4 * config.width)
        self.project = nn.Linear(4 * config.width, config.width)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        hidden = F.gelu(self.fc(x), approximate="tanh")
        return self.residual_dropout(self.project(hidden))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Add attention and then the MLP to the stream, each seeing a normalised copy of it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Predict the next token at every position. Radford et al. 2019; weights as its authors initialised them."""

    # How to split it over tensor ranks: patterns of module names, and what becomes of the modules.
    tensor_plan = {
        "embedding": "scatter",
        "embedding.token": "embedding",
        "blocks.*.attention.qkv": "heads",
        "blocks.*.attention.project": "row",
        "blocks.*.mlp.fc": "column",
        "blocks.*.mlp.project": "row",
        "head": "vocabulary",
    }

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        with blank():
            self.embedding = Embedding(config)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        give_memory(self)
        if config.tied:
            self.head.weight = self.embedding.token.weight
        draw_weights(self, self.initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[batch, length, vocab_size]`` for int64 tokens ``[batch, length]``."""
        x = tokens
        for layer in self.layers():
            x = layer(x)
        return x

    def layers(self) -> list[nn.Module]:
        """Return the parts in a row that the model is, between any two of which it can be cut."""
        return [self.embedding, *self.blocks, self.norm, self.head]

    def initialise(self, name: str, module: nn.Module) -> None:
        """Draw the weights of one module in place; ``name`` is its name in the model, whose other modules need not be.

        They follow from torch's seed and the name. On the meta device nothing is drawn.
        """
        if not has_weights(module):
            return
        if isinstance(module, (nn.Linear, nn.Embedding)):
            # Each block adds two terms to the stream: scaled down, the sum's variance does not grow with depth.
            std = 0.02 / math.sqrt(2 * self.config.layers) if name.endswith(".project") else 0.02
            shared = self.config.tied and name == "head"
            generator = generator_for("embedding.token" if shared else name)
            draw(module.weight, lambda host: host.normal_(std=std, generator=generator))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        else:
            reset_norm(name, module)
