"""Meshes of pipe x data x tensor: training equals that of a plain loop, whatever the mesh and the schedule."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support.meshes import BATCH, LENGTH, SHAPE, SYNCHRONOUS, Trained, plain, samples, small_gpt
from support.nodes import on_nodes, one_per_node

from hpctrain.errors import MismatchError, SettingsError, UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import Objective, cross_entropy

STEPS, FEW = 30, 10
CLOSE = 1e-5
MESHES = {
    2: [{"pipe": 2}, {"tensor": 2}, {"tensor": 2, "sequence": True}],
    3: [{"pipe": 3}],
    4: [
        {"pipe": 2, "tensor": 2},
        {"pipe": 2, "tensor": 2, "schedule": "zb-h1"},
        {"pipe": 4},
        {"pipe": 2, "order": ("data", "tensor", "pipe")},
        {"pipe": 2, "data": "zero1"},
        {"pipe": 2, "data": "zero2"},
        {"tensor": 2, "data": "fsdp"},
    ],
}


@cache
def expected() -> tuple[float, ...]:
    return tuple(plain(STEPS))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "settings", [pytest.param(each, marks=pytest.mark.ranks(size)) for size, some in MESHES.items() for each in some]
)
def test_losses_equal_those_of_a_plain_loop(own: Any, settings: dict[str, Any]) -> None:
    """Compare all steps on two and three ranks, and on four if both axes split the model; else the first steps."""
    steps = STEPS if own.size < 4 or settings == {"pipe": 2, "tensor": 2} else FEW
    trained = Trained.of(own, ParallelSettings(**settings)).learn(range(steps))
    assert trained.losses == pytest.approx(expected()[:steps], rel=CLOSE)
    assert trained.losses[-1] < trained.losses[0] - (0.3 if steps == STEPS else 0.05)


@pytest.mark.ranks(2, 4)
def test_all_synchronous_schedules_give_the_same_bits(own: Any) -> None:
    """Interleaved stages hold different layers, so for them only losses and norms must be equal."""
    first: Trained | None = None
    for schedule in SYNCHRONOUS:
        trained = Trained.of(own, ParallelSettings(pipe=own.size, schedule=schedule)).learn(range(FEW))
        assert trained.losses == pytest.approx(expected()[:FEW], rel=CLOSE)
        first = first or trained
        assert trained.losses == first.losses and trained.norms == first.norms, schedule
        if schedule != "interleaved":
            mine, other = trained.state(), first.state()
            assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.few(2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_recomputing_does_not_change_a_bit(own: Any, schedule: str) -> None:
    runs = [
        Trained.of(own, ParallelSettings(pipe=2, schedule=schedule, recompute=recompute)).learn(range(2))
        for recompute in (False, True)
    ]
    assert runs[0].losses == runs[1].losses and runs[0].norms == runs[1].norms


@pytest.mark.ranks(2)
@pytest.mark.parametrize("partition", ["parameters", "3,6", "blocks.1", "time"])
def test_any_partition_gives_the_same_loss(own: Any, partition: str) -> None:
    from hpctrain.parallel.wrap import attach

    model = small_gpt()
    strategy = attach(model, own, ParallelSettings(pipe=2, partition=partition), example=samples(0)[0][:1])
    inputs, targets = samples(0)
    loss = strategy.forward_backward(inputs, targets, Objective(cross_entropy))
    assert loss.item() == pytest.approx(expected()[0], rel=CLOSE)
    held = {name.split(".")[1] for name in model.state_dict() if name.startswith("blocks")}
    if partition in ("3,6", "blocks.1"):
        assert held == ({"0"} if partition == "blocks.1" else {"0", "1"}) if own.rank == 0 else "5" in held


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("settings", [{"pipe": 2}, {"tensor": 2}, {"pipe": 2, "schedule": "interleaved"}])
def test_the_model_can_be_called_and_its_loss_measured(own: Any, settings: dict[str, Any]) -> None:
    trained = Trained.of(own, ParallelSettings(**settings))
    model = small_gpt()
    with torch.no_grad():
        for batch in (8, 3, 1):
            inputs, targets = samples(7, batch)
            outputs = trained.model(inputs)
            torch.testing.assert_close(outputs, model(inputs))
            loss = trained.strategy.measure(inputs, targets, Objective(cross_entropy))
            assert loss.item() == pytest.approx(cross_entropy(model(inputs), targets).item(), rel=CLOSE)


@pytest.mark.few(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("settings", [{"pipe": 2}, {"tensor": 2}])
def test_a_model_on_meta_gets_the_same_weights(own: Any, settings: dict[str, Any]) -> None:
    whole = small_gpt().state_dict()
    with torch.device("meta"):
        model = small_gpt()
    trained = Trained.of(own, ParallelSettings(**settings), model).learn(range(3))
    usual = Trained.of(own, ParallelSettings(**settings)).learn(range(3))
    assert trained.losses == usual.losses and len(whole) >= len(trained.model.state_dict())


@pytest.mark.ranks(2)
def test_unsupported_settings_are_refused_on_all_ranks(own: Any) -> None:
    inputs, targets = samples(0)

    def train(**settings: Any) -> None:
        Trained.of(own, ParallelSettings(**settings)).passes(inputs[:6], targets[:6])

    for said, settings in {
        r"2 ranks cannot form a mesh of pipe 3 .*pipe = 1 or 2 would work": {"pipe": 3},
        r"microbatches = 4 does not divide the 6 samples.*allowed are 1, 2, 3, 6": {"pipe": 2, "microbatches": 4},
        r"10 layers": {"pipe": 2, "partition": "2,2"},
    }.items():
        with pytest.raises((UsageError, SettingsError), match=said if "layers" not in said else "partition"):
            train(**settings)
    with pytest.raises(UsageError, match="must be 2 or more|at least"):
        ParallelSettings(pipe=2, schedule="interleaved", chunks=1)
    with pytest.raises(UsageError, match="forward_backward"):
        Trained.of(own, ParallelSettings(pipe=2)).model(inputs)
    torch.manual_seed(own.rank)
    with torch.device("meta"):
        model = type(small_gpt())(small_gpt().config)
    torch.manual_seed(own.rank)
    with pytest.raises(MismatchError, match="torch's seed"):
        Trained.of(own, ParallelSettings(pipe=2), model)


@pytest.mark.ranks(2, 4)
def test_live_microbatches_equal_the_theory(own: Any) -> None:
    """Count the graphs of a stage that autograd holds at once."""
    stages = own.size
    for schedule, most in {"gpipe": BATCH, "1f1b": stages - own.rank, "zb-h1": stages - own.rank, "naive": 1}.items():
        trained = Trained.of(own, ParallelSettings(pipe=stages, schedule=schedule))
        live = _Live(trained.model)
        trained.passes(*samples(0))
        assert live.most == most, schedule


class _Live:
    """Counter of the activations of one layer that wait for their backward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.now = self.most = 0
        norms = (each for each in model.modules() if isinstance(each, torch.nn.LayerNorm))
        norm = next(each for each in norms if each.weight is not None)
        norm.register_forward_hook(self._came)

    def _came(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            self.now += 1
            self.most = max(self.most, self.now)
            output.register_hook(lambda _: self._went())

    def _went(self) -> None:
        self.now -= 1


@pytest.mark.few(2)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_messages_and_slots_give_the_same_bits(own: Any, schedule: str) -> None:
    """Ranks on simulated separate nodes have no shared memory, and get the same bits."""
    settings = ParallelSettings(pipe=own.size, schedule=schedule)
    apart = on_nodes(own, one_per_node)
    slots, messages = (Trained.of(comm, settings).learn(range(2)) for comm in (own, apart))
    assert slots.losses == messages.losses and slots.norms == messages.norms
    with apart.recording() as sent:
        messages.passes(*samples(0))
    assert sent.calls["handover"] == 0
    apart.free()


@pytest.mark.ranks(2)
def test_activations_are_written_once_and_read_in_place(own: Any) -> None:
    """Slots carry only the activations of each microbatch and their gradients."""
    trained = Trained.of(own, ParallelSettings(pipe=2)).learn(range(1))
    with trained.strategy.mesh.pipe.recording() as recorder:  # type: ignore[attr-defined]
        trained.passes(*samples(0))
    assert recorder.calls["handover"] == BATCH
    assert recorder.bytes["handover"] == BATCH * LENGTH * SHAPE["width"] * 4
    assert recorder.bytes["send"] == recorder.bytes["recv"] == 0


@pytest.mark.ranks(8)
@pytest.mark.limit(200)
@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_eight_ranks_split_along_all_axes_at_once(own: Any, data: Any) -> None:
    trained = Trained.of(own, ParallelSettings(pipe=2, tensor=2, data=data)).learn(range(FEW))
    assert trained.losses == pytest.approx(expected()[:FEW], rel=CLOSE)


@pytest.mark.ranks(2, 4)
def test_tensor_ranks_draw_equal_random_numbers(own: Any) -> None:
    trained = Trained.of(own, ParallelSettings(tensor=2))
    torch.manual_seed(own.rank)
    trained.strategy.agree_on_generators()
    drawn = own.all_gather_object(torch.rand(3).tolist())
    mesh = trained.strategy.mesh  # type: ignore[attr-defined]
    assert all(drawn[rank] == drawn[own.rank] for rank in mesh.shape.line("tensor", own.rank))
    assert own.size == 2 or drawn[0] != drawn[2]


@pytest.mark.ranks(4)
def test_a_model_whose_heads_cannot_be_split_is_refused_unchanged(own: Any) -> None:
    model = small_gpt(width=12, heads=3)
    names = list(model.state_dict())
    with pytest.raises(UsageError, match="3 heads cannot be split over 2 tensor ranks"):
        Trained.of(own, ParallelSettings(pipe=2, tensor=2), model)
    assert list(model.state_dict()) == names and "forward" not in vars(model)
