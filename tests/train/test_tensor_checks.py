"""Checks of the first step of a split model: errors for wrong plans, functions of all features, partial gradients."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.split_models import MLP, QKV, WIDTH, Attention, Block, model_of, samples
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpctrain.errors import MismatchError, UsageError
from hpctrain.parallel.tensor.first_step_checks import watch
from hpctrain.parallel.tensor.partial_gradients import check_same, gradient_checksums

BOTH = {**QKV, **MLP}
TWO = pytest.mark.ranks(2)


def _without(*patterns: str) -> dict[str, str]:
    return {pattern: kind for pattern, kind in BOTH.items() if pattern not in patterns}


def _step(job: Any, model: nn.Module, plan: dict[str, str], **settings: Any) -> Any:
    """Run one step of a model that is split by a plan."""
    lines = tuple(f"{pattern}={kind}" for pattern, kind in plan.items())
    job.wrap(model, {"tensor": 2, "tensor_plan": lines, **settings})
    strategy = job.strategy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = (part.chunk(strategy.data.size)[strategy.data.rank] for part in samples(0))
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    return strategy


WRONG = [
    (
        "plain",
        _without("*.project"),
        r"in 1.project \(Linear, not in the plan\) failed: mat1 and mat2 .*follows 1.fc \(Linear, \*.fc=column\), "
        r".*write '1.project=row'",
    ),
    ("plain", _without("*.wo"), r"1.attention.wo \(Linear, not in the plan\) failed.*write '1.attention.wo=row'"),
    ("plain", _without("*.fc"), r"1.project \(Linear, \*.project=row\) failed.*write '1.project=whole', or column"),
    ("plain", {**BOTH, "*.project": "column"}, r"1.project .*=column\) failed.*takes whole features; write '1.proj"),
    ("plain", _without("*.wk"), r"in 1.attention \(Attention, not in the plan\) failed.*write '1.attention.wk=heads'"),
    ("plain", {**BOTH, "*.norm": "replicated"}, r"1.attention.w. \(\*.w.=heads\) takes whole.*replicated is only for"),
    ("plain", {**BOTH, "1": "replicated"}, r"1=replicated: module 1 contains 1.attention.wq, which is split"),
    ("plain", {"*.norm_2": "column"}, r"\*.norm_2=column: module 1.norm_2: a LayerNorm is not a Linear"),
]


@TWO
@pytest.mark.parametrize("case, plan, message", WRONG)
def test_wrong_plans_name_modules_and_what_to_write(job: Any, case: str, plan: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        _step(job, model_of(case)[0], plan)
    assert error.value.everywhere


class Gated(nn.Module):
    """Gated MLP, whose gate and values may be one layer."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.gate, self.up = nn.Linear(WIDTH, 32 if fused else 16), nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x).chunk(2, -1) if self.fused else (self.gate(x), self.up(x))
        result: Tensor = self.down(F.silu(gate) * up)
        return result


def _gated(*, fused: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, WIDTH), Gated(fused=fused), nn.Linear(WIDTH, 3))


@TWO
def test_a_missing_half_of_a_gate_is_named(job: Any) -> None:
    with pytest.raises(UsageError, match=r"1.up in the same module is not; write '1.up=column' in parallel"):
        _step(job, _gated(fused=False), {"*.gate": "column", "*.down": "row"})


@TWO
def test_a_gate_and_its_values_in_one_layer_are_refused(job: Any) -> None:
    with pytest.raises(MismatchError, match="between 1.gate .*outputs are cut into several, as gate and up, must be"):
        _step(job, _gated(fused=True), {"*.gate": "column", "*.down": "row"})


@TWO
def test_a_missing_row_layer_at_the_end_is_named(job: Any) -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
    with pytest.raises(UsageError, match=r"the outputs of the model are .* behind 2 \(2=column\); a row must come"):
        _step(job, model, {"2": "column"})


@TWO
def test_errors_of_the_program_are_not_changed(job: Any) -> None:
    class Fails(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[..., :4])

    with pytest.raises(RuntimeError, match="mat1 and mat2") as error:
        _step(job, Fails(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), {"0": "column", "2": "row"}, check_split=False)
    assert type(error.value) is RuntimeError or "0 (Linear, 0=column)" not in str(error.value)


@TWO
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_softmax_over_split_features_is_named(job: Any, dropout: float) -> None:
    act = nn.Sequential(nn.Softmax(dim=-1), nn.Dropout(dropout))
    model = nn.Sequential(nn.Linear(5, WIDTH), Block(Attention(), act), nn.Linear(WIDTH, 3))
    with pytest.raises(MismatchError, match=r"difference is in 1.act.0 \(Softmax, .* after 1.fc \(Linear, ") as e:
        _step(job, model, BOTH)
    assert e.value.everywhere


@TWO
def test_a_function_over_split_features_is_located_between_layers(job: Any) -> None:
    class Normed(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.fc(x)
            return x + self.project(hidden / hidden.norm(dim=-1, keepdim=True))  # type: ignore[no-any-return]

    model = nn.Sequential(nn.Linear(5, WIDTH), Normed(Attention()), nn.Linear(WIDTH, 3))
    with pytest.raises(MismatchError, match=r"between 1.fc \(Linear, \*.fc=column\) and 1.project \(Linear, "):
        _step(job, model, BOTH)


class Normed(nn.Module):
    """MLP with a norm over all of its features, whose last layer is initialized with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.project = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        nn.init.zeros_(self.project.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.project(F.rms_norm(self.fc(x), (self.fc(x).shape[-1],)))
        return result


@TWO
def test_zero_weights_do_not_hide_a_norm_over_split_features(job: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, WIDTH), Normed(), nn.Linear(WIDTH, 3))
    with pytest.raises(MismatchError, match=r"what 1.project \(Linear, \*.project=row\) is given in the first pass"):
        _step(job, model, {"*.fc": "column", "*.project": "row"})


@TWO
def test_whole_key_heads_with_split_query_heads_are_found(job: Any) -> None:
    """Each rank would use the first key heads for all its query heads."""
    with pytest.raises(MismatchError, match=r"between 1.attention.wq \(Linear, \*.wq=heads\) and 1.attention.wo"):
        _step(job, model_of("gqa")[0], _without("*.wk", "*.wv"))


@TWO
@pytest.mark.parametrize("settings", [{}, {"data": "fsdp"}])
def test_models_that_draw_random_numbers_are_not_compared(job: Any, settings: dict[str, Any]) -> None:
    class Noisy(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.randn_like(x))

    torch.manual_seed(0)
    before = torch.get_rng_state()
    model = Noisy(nn.Linear(5, 8), nn.Softmax(-1), nn.Linear(8, 3))
    _step(job, model, {"0": "column", "2": "row"}, **settings)
    assert not torch.equal(before, torch.get_rng_state())


@TWO
def test_the_comparison_does_not_change_model_or_generator(job: Any) -> None:
    calls = []

    class Counting(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            calls.append((self is model, self.training, torch.is_grad_enabled()))
            return super().forward(x)

    model = Counting(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 3), nn.BatchNorm1d(6))
    plain = copy.deepcopy(model)
    state = torch.get_rng_state()
    _step(job, model, {"0": "column", "3": "row"})
    assert torch.equal(state, torch.get_rng_state())
    assert calls.count((True, True, True)) == 1 and len(calls) == (2 if job.rank == 0 else 1)
    assert type(model) is Counting and model.training
    plain(samples(0)[0])
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


@TWO
def test_check_split_disables_the_comparison(job: Any) -> None:
    _step(job, model_of("softmax")[0], BOTH, check_split=False)


class Again(Attention):
    """Attention that is recomputed in the backward pass, so that autograd's graph does not show its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]


@pytest.mark.ranks(2, 4)
def test_partial_gradients_raise_before_the_first_update(job: Any) -> None:
    def make() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(5, WIDTH), Block(Again(make_norm=nn.RMSNorm)), nn.Linear(WIDTH, 3))

    model = make()
    wanted = r"1.attention.k_norm.weight, 1.attention.q_norm.weight differ between tensor ranks 0 and 1; .*=replicated'"
    with pytest.raises(MismatchError, match=wanted):
        _step(job, model, BOTH)
    parameter = model.get_parameter("1.attention.q_norm.weight").detach()
    assert torch.equal(parameter.as_subclass(Tensor), torch.ones(8))
    _step(job, make(), {**BOTH, "*_norm": "replicated"})


@TWO
def test_partial_gradients_behind_frozen_layers_raise(job: Any) -> None:
    def make() -> nn.Module:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(5, WIDTH), Block(Attention(make_norm=nn.RMSNorm)), nn.Linear(WIDTH, 3))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(("0", "1.norm.")) and ".attention.w" not in name)
        return model

    with pytest.raises(MismatchError, match="q_norm.weight differ between tensor ranks 0 and 1"):
        _step(job, make(), BOTH)
    plain, model = make(), make()
    _step(job, model, {**BOTH, "*_norm": "replicated"})
    F.mse_loss(plain(samples(0)[0]), samples(0)[1]).backward()
    for name in ("1.attention.q_norm.weight", "1.attention.k_norm.weight"):
        found, wanted = model.get_parameter(name).grad, plain.get_parameter(name).grad
        assert found is not None
        torch.testing.assert_close(found.as_subclass(Tensor), wanted)


def test_copies_before_the_first_step_have_the_original_class() -> None:
    model = model_of("gated")[0]
    watch(model, [])
    assert isinstance(model, nn.Sequential) and type(model) is not nn.Sequential
    assert type(copy.deepcopy(model)) is nn.Sequential
    assert type(pickle.loads(pickle.dumps(model))) is nn.Sequential
    model(samples(0)[0])
    assert type(model) is nn.Sequential


def test_gradients_that_differ_by_rounding_are_accepted() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(1000)
    near, far, none = gradient * (1 + 1e-6 * torch.randn(1000)), gradient * 0.98, torch.zeros(3)
    check_same(
        [gradient_checksums([("a.b", gradient), ("z", none)]), gradient_checksums([("a.b", near), ("z", none + 1e-9)])]
    )
    with pytest.raises(MismatchError, match="a.b differ between tensor ranks 0 and 2; .*write 'a=replicated'"):
        check_same([gradient_checksums([("a.b", each)]) for each in (gradient, near, far)])
    check_same(
        [gradient_checksums([("a.b [((0,), (4,))]", gradient)]), gradient_checksums([("a.b [((0,), (5,))]", far)])]
    )
