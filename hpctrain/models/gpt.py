"""GPT-2: learned positions, pre-norm, GELU, biases everywhere except in the head.

The model is a sequence of four parts, ``embedding``, ``blocks``, ``norm`` and ``head``, so that a
pipeline stage may begin at any block. Inside a block, ``attention.qkv`` and ``mlp.fc`` widen the
features and ``project`` narrows them: the first two can be split along the rows and the last along
the columns of their weights, as in Megatron-LM (``tensor_plan``).

If the configuration has a ``separator``, attention stays within the documents of a window, and
positions restart with each of them. Every block then takes the tokens in addition, and computes the
mask from them: this costs about 1 % of attention, pipelines send no mask from stage to stage, and
recomputation stores none.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.documents import document_ids, document_mask, document_positions
from hpctrain.errors import UsageError
from hpctrain.models.settings import GPTConfig
from hpctrain.models.weights import allocate, draw_weights, fill, generator_for, has_weights, reset_norm, without_memory


class Embedding(nn.Module):
    """Token embedding plus position embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.separator = config.separator
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``[batch, length, width]`` for tokens ``[batch, length]``."""
        length, context = tokens.shape[-1], self.position.num_embeddings
        if length > context:
            raise UsageError(f"a sequence of {length} tokens is longer than the model's context of {context}")
        if self.separator is None:
            positions = torch.arange(length, device=tokens.device)
        else:
            positions = document_positions(document_ids(tokens, self.separator))
        return self.dropout(self.token(tokens) + self.position(positions))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention.

    The rows of ``qkv`` are ordered by head, then query, key, value, so that a contiguous shard of
    the weight consists of whole heads. The number of heads is derived from the weight, which may be
    such a shard.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.dropout = config.dropout
        self.context = config.context
        self.separator = config.separator
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape; ``tokens`` are required if there is a separator."""
        mask = self._mask(tokens)
        features = self.qkv(x)
        batch, length, _ = features.shape  # x may be a shard of the sequence
        query, key, value = features.view(batch, length, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
        )
        joined = mixed.transpose(1, 2).reshape(batch, length, -1)
        return self.residual_dropout(self.project(joined))  # type: ignore[no-any-return]

    def _mask(self, tokens: Tensor | None) -> Tensor | None:
        if self.separator is None:
            return None
        if tokens is None:
            raise UsageError("attention within documents needs the tokens of the window: call block(x, tokens)")
        return document_mask(document_ids(tokens, self.separator))

    def flops_beside_weights(self) -> float:
        """Return the average number of multiplications and additions of attention per token of the longest sequence."""
        # Two products with the vectors of all preceding tokens, which are half of the sequence on average. With a
        # mask, kernels compute the products with all tokens.
        share = 0.5 if self.separator is None else 1.0
        return 2 * 2 * self.project.in_features * self.context * share


class MLP(nn.Module):
    """Feed-forward network of each token, with four times the width inside."""

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
    """Transformer block: attention and MLP, each with pre-norm and a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape; ``tokens`` are required if there is a separator."""
        x = x + self.attention(self.norm1(x), tokens)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """GPT-2 language model. Radford et al. 2019; initialised as by its authors."""

    # Tensor parallelism: patterns of module names, and the way in which the modules are split.
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
        with without_memory():
            self.embedding = Embedding(config)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        allocate(self)
        if config.tied:
            self.head.weight = self.embedding.token.weight
        draw_weights(self, self.initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[batch, length, vocab_size]`` for int64 tokens ``[batch, length]``."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if self.config.separator is None else block(x, tokens)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def layers(self) -> list[nn.Module]:
        """Return the layers in order; stages of a pipeline pass the argument ``tokens`` to each block."""
        return [self.embedding, *self.blocks, self.norm, self.head]

    def initialise(self, name: str, module: nn.Module) -> None:
        """Initialise the weights of one module in place; ``name`` is its name in the model.

        The weights depend on torch's seed and the name alone; other modules of the model need not
        exist. Modules on the meta device are skipped.
        """
        if not has_weights(module):
            return
        if isinstance(module, (nn.Linear, nn.Embedding)):
            # Each block adds two terms to the residual stream; with this scale, the variance does not grow with depth.
            std = 0.02 / math.sqrt(2 * self.config.layers) if name.endswith(".project") else 0.02
            shared = self.config.tied and name == "head"
            generator = generator_for("embedding.token" if shared else name)
            fill(module.weight, lambda host: host.normal_(std=std, generator=generator))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        else:
            reset_norm(name, module)


@torch.no_grad()
def generate(
    model: GPT,
    prompt: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    multiple: int = 1,
) -> Tensor:
    """Return the prompt, int64 ``[batch, length]`` or ``[length]``, followed by ``count`` sampled tokens.

    Temperature 0 selects the likeliest token; with ``top_k`` only the k likeliest tokens are
    sampled. Tokens before the model's context have no effect. The model's training mode is
    restored. Sequences are padded at the end to a ``multiple`` of tokens, for models whose ranks
    split the sequence.
    """
    if prompt.shape[-1] < 1 or count < 0 or temperature < 0 or (top_k is not None and top_k < 1):
        raise UsageError(
            f"cannot generate {count} tokens after {prompt.shape[-1]} at temperature {temperature} with top_k {top_k}: "
            "allowed are a prompt of 1 or more, 0 or more tokens, temperature 0 or more, top_k 1 or more"
        )
    tokens = prompt if prompt.ndim == 2 else prompt[None]
    training = model.training
    model.eval()
    try:
        for _ in range(count):
            seen = tokens[:, -(model.config.context // multiple * multiple) :]
            length = seen.shape[1]
            logits = model(F.pad(seen, (0, -length % multiple)))[:, length - 1].float()
            tokens = torch.cat([tokens, _choose(logits, temperature, top_k, generator)], dim=1)
    finally:
        model.train(training)
    return tokens if prompt.ndim == 2 else tokens[0]


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Return one token per row, ``[batch, 1]``."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    best, tokens = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    drawn = torch.multinomial(torch.softmax(best / temperature, dim=-1), 1, generator=generator)
    return tokens.gather(-1, drawn)
