"""Dropout under tensor parallelism: equal masks for replicated tensors, different masks for split ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tensor_fixtures import BLOCKS, CLOSE, make_blocks, make_gpt, split, tokens, vectors
from torch import Tensor, nn

from hpctrain.parallel.recompute import recompute
from hpctrain.parallel.rng import RngRegion, has_dropout

RANKS = pytest.mark.ranks(2, 3, 4)
CPU = torch.device("cpu")
UNITS = [("Block",), ("Attention", "MLP"), ("Linear",), ("Linear", "Dropout"), ("LayerNorm",)]


class Masks:
    """Record of the masks of a model's dropouts."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[str, list[Tensor]] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(
                    lambda _, args, result, name=name: self.found.setdefault(name, []).append(result.detach() != 0)
                )


@RANKS
def test_masks_are_equal_outside_regions_and_differ_inside(comm: Any) -> None:
    model = make_blocks(2, dropout=0.4)
    split(model, comm, BLOCKS)
    masks = Masks(model)
    torch.manual_seed(3)
    for step in range(3):
        model(vectors(step).repeat(4, 1, 1))
    everyone = comm.all_gather_object(masks.found)
    inner, outer = [f"{block}.inner_dropout" for block in "01"], [f"{block}.dropout" for block in "01"]
    for turn in range(3):
        for name in outer:
            assert all(torch.equal(one[name][turn], everyone[0][name][turn]) for one in everyone)
        for name in inner:
            assert len({one[name][turn].numpy().tobytes() for one in everyone}) == comm.size
    seen = {mask.numpy().tobytes() for name in (*inner, *outer) for mask in masks.found[name]}
    assert len(seen) == 4 * 3  # no mask is drawn twice
    for name in (*inner, *outer):
        kept = torch.stack(masks.found[name]).float().mean()
        assert abs(float(kept) - 0.6) < 0.03, name
    kinds = torch.stack([torch.stack(one[inner[0]]).float() for one in everyone])
    agree = (kinds[0] == kinds[1]).float().mean()
    assert abs(float(agree) - (0.6**2 + 0.4**2)) < 0.04  # masks of two ranks are independent


@RANKS
def test_with_split_sequences_every_rank_draws_for_its_own_part(comm: Any) -> None:
    model = make_gpt(dropout=0.3)
    split(model, comm, sequence=True)
    masks = Masks(model)
    torch.manual_seed(3)
    model(tokens()[0])
    everyone = comm.all_gather_object(masks.found)
    assert all(torch.equal(one["embedding.dropout"][0], everyone[0]["embedding.dropout"][0]) for one in everyone)
    for name in masks.found.keys() - {"embedding.dropout"}:
        assert len({one[name][0].numpy().tobytes() for one in everyone}) == comm.size, name
    states = comm.all_gather_object(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


@RANKS
@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
def test_gradients_belong_to_the_drawn_masks(comm: Any, sequence: bool) -> None:
    # With all random numbers repeated, the loss must fall by the amount that the gradients predict.
    model = make_gpt(dropout=0.3).double()
    found = split(model, comm, sequence=sequence)

    def loss() -> Tensor:
        torch.manual_seed(11)
        return model(tokens()[0])[..., :5].square().mean()

    loss().backward()
    for name in ("embedding.position.weight", "blocks.0.mlp.fc.bias", "blocks.1.attention.project.bias", "norm.weight"):
        parameter = model.get_parameter(name)
        step = 1e-6 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        with torch.no_grad():
            before = float(loss())
            parameter.add_(step)
            after = float(loss())
            parameter.sub_(step)
        assert parameter.grad is not None
        expected = (parameter.grad * step).sum()
        if found.is_split(name):
            comm.all_reduce(expected)
        assert after - before == pytest.approx(float(expected), rel=1e-3), name


@pytest.mark.few(3)
@RANKS
@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("units", UNITS, ids="-".join)
def test_recomputing_activations_repeats_all_draws(comm: Any, sequence: bool, units: tuple[str, ...]) -> None:
    gradients = []
    for again in (False, True):
        model = make_gpt(dropout=0.3)
        split(model, comm, sequence=sequence)
        if again:
            names = {"Linear": ("ColumnParallel", "RowParallel")}
            wanted = {name for unit in units for name in names.get(unit, (unit,))}
            recompute([module for module in model.modules() if type(module).__name__ in wanted])
        torch.manual_seed(3)
        for step in range(2):
            model(tokens(step)[0]).square().mean().backward()
        gradients.append({name: one.grad for name, one in model.named_parameters()})
        end = torch.get_rng_state()
        assert all(torch.equal(end, other) for other in comm.all_gather_object(end))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@RANKS
def test_a_unit_with_dropout_after_a_region_repeats_its_draws(comm: Any) -> None:
    class Tail(nn.Module):
        def __init__(self, block: Any) -> None:
            super().__init__()
            self.project, self.dropout = block.project, block.dropout

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(self.project(x)).tanh()  # type: ignore[no-any-return]

    found = []
    for again in (False, True):
        blocks = make_blocks(3, dropout=0.4)
        split(blocks, comm, BLOCKS)
        tails = [Tail(block) for block in blocks]
        if again:
            recompute(tails)
        torch.manual_seed(3)
        for step in range(2):
            x = vectors(step)
            for block, tail in zip(blocks, tails):
                x = tail(block.fc(x))
            x.square().sum().backward()
        found.append(blocks[0].fc.weight.grad)
    torch.testing.assert_close(found[1], found[0], **CLOSE)


@RANKS
def test_a_failed_forward_pass_leaves_the_region(comm: Any) -> None:
    model = make_blocks(2, dropout=0.4)
    split(model, comm, BLOCKS)

    def fail(*_: Any) -> None:
        raise KeyError("broken")

    handle = model[1].inner_dropout.register_forward_hook(fail)
    with pytest.raises(KeyError):
        model(vectors())
    handle.remove()
    states = comm.all_gather_object(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


@RANKS
def test_a_head_whose_outputs_stay_split_begins_no_region(comm: Any) -> None:
    model = make_gpt(dropout=0.3)
    found = split(model, comm)
    before = torch.get_rng_state()
    with found.split_outputs():
        model.head(vectors())  # like the last stage of a pipeline, without the model around it
    assert torch.equal(torch.get_rng_state(), before)


@RANKS
@pytest.mark.parametrize("dropout, training", [(0.0, True), (0.4, False)])
def test_the_generator_is_unchanged_without_dropout(comm: Any, dropout: float, training: bool) -> None:
    model = make_blocks(2, dropout=dropout).train(training)
    split(model, comm, BLOCKS)
    before = torch.get_rng_state()
    model(vectors()).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_modules_with_dropout_are_recognised() -> None:
    assert not has_dropout(make_gpt()) and has_dropout(make_gpt(dropout=0.1))
    assert has_dropout(nn.Sequential(nn.Dropout2d(0.5))) and not has_dropout(nn.Sequential(nn.Dropout(0.0), nn.ReLU()))
    assert has_dropout(nn.MultiheadAttention(4, 2, dropout=0.1))


def test_a_region_is_reproducible_and_restores_the_generator() -> None:
    kept = torch.get_rng_state()
    try:
        drawn = []
        for region in (RngRegion(0), RngRegion(0), RngRegion(1)):
            torch.manual_seed(1)
            assert region.enter(CPU) and not region.enter(CPU)  # already inside
            drawn.append(torch.rand(4))
            region.leave(CPU)
            drawn.append(torch.rand(4))
        assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[4])
        assert torch.equal(drawn[1], drawn[3]) and torch.equal(drawn[1], drawn[5])
        state = torch.get_rng_state()
        region.leave(CPU)  # already outside
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_rng_state(kept)


class OfGpu:
    """Generator like that of a GPU: its numbers follow from the seed and an offset, which is a multiple of four."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.seed, self.offset = 17, 8

    def initial_seed(self) -> int:
        return self.seed

    def manual_seed(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.offset = offset

    def get_state(self) -> Tensor:
        return torch.tensor([self.seed, self.offset])

    def set_state(self, state: Tensor) -> None:
        self.seed, self.offset = state.tolist()


def test_the_generator_of_a_gpu_is_never_synchronised() -> None:
    seeds: list[list[int]] = []
    for rank in range(2):
        generator: Any = OfGpu()
        region, own = RngRegion(rank, lambda device, one=generator: one), []
        for turn in range(3):
            assert (generator.seed, generator.offset) == (17, 8 + 4 * turn)
            assert region.enter(generator.device)
            own.append(generator.seed)
            region.leave(generator.device)
        seeds.append(own)
    assert len({*seeds[0], *seeds[1]}) == 6
    assert [seed >> 32 for seed in seeds[0]] == [seed >> 32 for seed in seeds[1]]


def test_the_number_of_kept_states_is_limited() -> None:
    kept = torch.get_rng_state()
    try:
        region, seeds = RngRegion(0), []
        for _ in range(600):
            region.enter(CPU)
            seeds.append(torch.initial_seed())
            region.leave(CPU)
        inside = []
        for seed in reversed(seeds):  # the newest first: entering anew forgets an old one
            torch.manual_seed(seed)
            inside.append(not region.enter(CPU))
        assert inside == [True] * 256 + [False] * (600 - 256)
    finally:
        torch.set_rng_state(kept)
