"""Tensor parallelism of models in the form of Hugging Face's: their own plan, and Conv1D layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.hugging_face_models import GPT2, WIDTH, Config, Conv1D, Llama, batch, made, plain, trained
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.tensor.fused import Conv1DQKV, FusedGate, FusedQKV
from hpctrain.parallel.tensor.plan import apply, check, choose
from hpctrain.parallel.tensor.plan_source import plan_of

CLOSE = 1e-9  # in float64; the sums over ranks have another order


class Rank:
    """Communicator of one of several simulated ranks, which never sends."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank


# Translation of plans -------------------------------------------------------------------------------------------------


def test_styles_become_kinds() -> None:
    assert plan_of(Llama()) == {
        "model.embed_tokens": "embedding",
        **{f"model.layers.*.self_attn.{name}_proj": "heads" for name in "qkv"},
        "model.layers.*.self_attn.o_proj": "row",
        "model.layers.*.mlp.gate_proj": "column",
        "model.layers.*.mlp.up_proj": "column",
        "model.layers.*.mlp.down_proj": "row",
        "lm_head": "vocabulary",
    }


def test_a_plan_of_a_model_inside_another_has_its_prefix() -> None:
    whole = nn.Module()
    whole.student, whole.probe = Llama(), nn.Linear(2, 2)
    plan = plan_of(whole)
    assert plan["student.lm_head"] == "vocabulary" and plan["student.model.layers.*.mlp.down_proj"] == "row"


def test_lines_of_the_settings_take_precedence() -> None:
    plan = plan_of(Llama(), ["*.mlp.*=whole", "lm_head=whole"])
    kinds = {entry.name: entry.kind for entry in choose(Llama(), plan)}
    assert kinds["model.layers.1.mlp.up_proj"] == "whole" and kinds["lm_head"] == "whole"
    assert kinds["model.layers.1.self_attn.q_proj"] == "heads"


@pytest.mark.parametrize("style", ["moe_tp_experts", "mla_kv_a_proj", "rowwise_split_input", "of_a_later_version"])
def test_other_styles_are_refused_by_name_unless_a_line_replaces_them(style: str) -> None:
    model = Llama()
    model.styles["model.layers.*.mlp.down_proj"] = style
    text = f"a Llama .* has the style {style} for model.layers.*.mlp.down_proj; allowed are colwise, rowwise"
    with pytest.raises(UsageError, match=text.replace("layers.*", r"layers\.\*")):
        plan_of(model)
    plan = plan_of(model, ["*.mlp.*=whole"])
    assert {entry.kind for entry in choose(model, plan) if ".mlp." in entry.name} == {"whole"}


def test_gathered_layers_inside_blocks_are_refused() -> None:
    model = Llama()
    model.styles["model.layers.*.self_attn.q_proj"] = "colwise_gather_output"
    with pytest.raises(UsageError, match=r"style colwise_gather_output for model\.layers.* or colwise_rep for a head"):
        plan_of(model)


def test_styles_of_parameters_are_refused() -> None:
    model = Llama()
    model.experts = nn.ParameterDict({"gate_up_proj": torch.zeros(2, 4, 4)})
    model.styles["experts.gate_up_proj"] = "packed_colwise"
    with pytest.raises(UsageError, match="style packed_colwise for experts.gate_up_proj; .* write 'experts=whole'"):
        plan_of(model)
    assert "experts" in plan_of(model, ["experts=whole"])


def test_embeddings_of_another_class_stay_whole_with_their_head() -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
            return super().forward(input) * 4

    model = Llama(tied=True)
    model.model.embed_tokens.__class__ = Scaled
    assert {name: plan_of(model)[name] for name in ("model.embed_tokens", "lm_head")} == {
        "model.embed_tokens": "whole",
        "lm_head": "whole",
    }


def test_a_head_that_shares_the_embedding_is_split_with_it() -> None:
    model = Llama(tied=True)
    del model.styles["model.embed_tokens"], model.styles["lm_head"]
    assert "lm_head" not in plan_of(model)  # neither is split
    model.styles["lm_head"] = "colwise_rep"
    assert plan_of(model)["model.embed_tokens"] == "embedding"


def test_counts_of_heads_come_from_the_configuration() -> None:
    model = Llama(Config(num_key_value_heads=1))
    entries = check(choose(model, plan_of(model)), 4)
    assert {str(entry): entry.shares_heads for entry in entries if ".0.self_attn.k" in entry.name} == {
        "model.layers.0.self_attn.k_proj (model.layers.*.self_attn.k_proj=heads)": True
    }
    with pytest.raises(UsageError, match="4 heads cannot be split over 8 tensor ranks: .* are 1, 2, 4"):
        check(choose(model, plan_of(model)), 8)


# Layers with several results, and Conv1D ------------------------------------------------------------------------------


def test_gpt2_has_a_built_in_plan() -> None:
    assert plan_of(GPT2()) == {
        "h.*.attn.c_attn": "qkv",
        "h.*.attn.c_proj": "row",
        "h.*.mlp.c_fc": "column",
        "h.*.mlp.c_proj": "row",
        "wte": "embedding",
        "lm_head": "vocabulary",
    }


@pytest.mark.parametrize("size", [2, 4])
def test_slices_of_fused_layers_take_a_part_of_each_result(size: int) -> None:
    whole = torch.arange(3 * 8.0).repeat(2, 1)
    parts = [Conv1DQKV.slice_of(Rank(size, rank), "weight", whole) for rank in range(size)]
    count = 8 // size
    assert parts[1][0].tolist() == [part * 8 + count + index for part in range(3) for index in range(count)]
    rebuilt = torch.stack([each.unflatten(1, (3, count)) for each in parts], 2).flatten(1)
    assert torch.equal(rebuilt, whole)


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (nn.Linear(4, 10), "gate_up", "10 outputs cannot|outputs of each part"),
        (nn.Linear(4, 9), "gate_up", "9 outputs are not 2 equal parts"),
        (nn.Linear(4, 12), "qkv", "12 outputs are not queries, keys and values of an unknown number of heads"),
        (Conv1D(12, 4), "qkv", "12 outputs are not queries, keys and values of an unknown number of heads"),
        (Conv1D(12, 4), "vocabulary", "a Conv1D is not a Linear"),
        (Conv1D(13, 4), "column", "13 outputs cannot be split over 2 tensor ranks"),
    ],
)
def test_fused_layers_that_cannot_be_split_are_refused(model: nn.Module, plan: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(choose(nn.Sequential(model), {"0": plan}), 2)


def test_queries_keys_and_values_need_whole_heads() -> None:
    with pytest.raises(UsageError, match="4 heads cannot be split over 8 tensor ranks: .* are 1, 2, 4"):
        check(choose(GPT2(), plan_of(GPT2())), 8)


class Fused(nn.Module):
    """Attention and a gated MLP with linear layers that compute several results one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, WIDTH // 4
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 24), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(gate.sigmoid() * up)  # type: ignore[no-any-return]


@pytest.mark.ranks(2, 4)
def test_fused_linear_layers_compute_what_the_whole_ones_do(own: Any) -> None:
    torch.manual_seed(2)
    whole, model = Fused().double(), Fused().double()
    model.load_state_dict(whole.state_dict())
    split = apply(model, own, {"qkv": "qkv", "project": "row", "gate_up": "gate_up", "down": "row"})
    assert type(model.qkv) is FusedQKV and type(model.gate_up) is FusedGate and model.num_heads == 4 // own.size
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    own.broadcast(x)
    torch.testing.assert_close(model(x), whole(x))
    for one in (model, whole):
        one(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        for shard in split.shards(name, parameter.grad):
            box = tuple(slice(start, start + extent) for start, extent in zip(shard.start, shard.extent))
            torch.testing.assert_close(shard.tensor, whole.get_parameter(name).grad[box])


# Training -------------------------------------------------------------------------------------------------------------


SETTINGS = [
    pytest.param({"tensor": 2}, marks=pytest.mark.ranks(2)),
    pytest.param({"tensor": 4}, marks=pytest.mark.ranks(4)),
    pytest.param({"tensor": 2}, marks=pytest.mark.ranks(4)),
    pytest.param({"tensor": 2, "data": "fsdp"}, marks=pytest.mark.ranks(4)),
]


@pytest.mark.few(4)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["gpt2", "tied llama", "llama", "one key head"])
def test_training_equals_a_plain_loop(own: Any, shared_tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    """The weights are those that one process loads from the checkpoint of the ranks."""
    losses, norms, weights = trained(own, name, ParallelSettings(**settings), shared_tmp_path / "a.h5")
    wanted_losses, wanted_norms, wanted = plain(name)
    assert losses == pytest.approx(wanted_losses, rel=CLOSE) and norms == pytest.approx(wanted_norms, rel=CLOSE)
    assert weights.keys() == wanted.keys() and losses[0] != losses[-1]
    for key, value in weights.items():
        torch.testing.assert_close(value, wanted[key], rtol=0, atol=CLOSE, msg=key)


@pytest.mark.ranks(2)
def test_each_rank_holds_its_slices_only(own: Any) -> None:
    model = made("gpt2")
    apply(model, own, plan_of(model))
    assert tuple(model.get_parameter("h.0.attn.c_attn.weight").shape) == (WIDTH, 3 * WIDTH // 2)
    assert tuple(model.get_parameter("h.0.mlp.c_proj.weight").shape) == (16, WIDTH)
    inputs, _ = batch(0)
    torch.testing.assert_close(model(**inputs)["logits"], made("gpt2")(**inputs)["logits"])
