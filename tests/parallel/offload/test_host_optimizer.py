"""Time of the updates on the host: after a step, during the backward pass, or behind the next step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.copy_device import LateDevice
from support.meshes import Trained
from support.offloading import HOST, Loop, Model, Outcome, adamw, attached, batch
from torch.nn.functional import mse_loss

from hpctrain.errors import SettingsError, UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.offload import host_optimizer
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.parallel.strategy import Strategy

pytestmark = pytest.mark.usefixtures("one_thread")
PARAMETERS = replace(HOST, parameters=True)
DELAYED = replace(HOST, delayed=True)


# A device that is late ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["none", "bfloat16"])
@pytest.mark.parametrize("offload", [HOST, PARAMETERS, DELAYED], ids=["optimizer", "parameters", "delayed"])
def test_no_copy_is_read_before_it_is_complete(
    comm: Any, offload: OffloadSettings, precision: str
) -> None:
    loop = Loop(clip=0.05, accumulate=2, synced=True, steps=5)
    how: dict[str, Any] = {"data": "fsdp", "mixed_precision": precision}
    plain = loop.run(attached(comm, offload, **how))
    device = LateDevice()
    loop.run(attached(comm, replace(offload, piece_mib=0.002), device, **how)).check_same(plain)
    assert 0 < device.most["down"] <= 2 and device.nbytes <= 2 * 2**20


def test_gradients_of_the_last_layers_are_copied_first(comm: Any) -> None:
    late = LateDevice()
    strategy = attached(comm, HOST, late, data="fsdp")
    parts = (*strategy.model.blocks, strategy.model.head)  # type: ignore[misc]
    sizes = [sum(each.numel() for each in part.parameters()) for part in parts]
    Loop(steps=1).passes(strategy, 0)
    late.log.clear()
    Loop(steps=1).passes(strategy, 1)
    down = [int(entry.split()[1]) for entry in late.log if entry.startswith("down")]
    assert len(down) == 4 and len(set(sizes[:3])) == 1
    assert down[3] < down[0] == down[1] == down[2]  # the blocks, then the model's own unit


# During the backward pass ---------------------------------------------------------------------------------------------


class Early(Loop):
    """Loop without anything that delays an update, and a count of the early updates."""

    early = 0

    def run(self, strategy: Strategy, optimizer: Any = None, begin: int = 0) -> Outcome:
        """Train a model."""
        optimizer = optimizer or self.make(strategy.model)
        strategy.update_early(optimizer)
        return super().run(strategy, optimizer, begin)

    def passes(self, strategy: Strategy, step: int) -> float:
        """Run the backward passes of a step."""
        loss = super().passes(strategy, step)
        groups: list[host_optimizer.HostGroup]
        groups = strategy.components.host_optimizer.host_groups  # type: ignore[attr-defined]
        self.early += sum(each.early_update is not None for each in groups)
        return loss


@pytest.mark.parametrize("precision, synced", [("none", False), ("none", True), ("bfloat16", False)])
def test_early_updates_give_the_same_bits(comm: Any, precision: str, synced: bool) -> None:
    how: dict[str, Any] = {"data": "fsdp", "mixed_precision": precision}
    plain = Loop(accumulate=2, synced=synced).run(attached(comm, **how))
    loop = Early(accumulate=2, synced=synced)
    loop.run(attached(comm, HOST, **how)).check_same(plain)
    assert (loop.early > 0) is not synced  # an accumulated gradient is applied when it is complete


def test_early_updates_wait_for_late_gradients(comm: Any) -> None:
    loop = Early(steps=8)
    loop.run(attached(comm, HOST, LateDevice(), data="fsdp")).check_same(Loop(steps=8).run(attached(comm)))
    assert loop.early > 0


@pytest.mark.ranks
@pytest.mark.parametrize("data", ["zero2", "fsdp"])
def test_early_updates_on_ranks_give_the_same_bits(own: Any, data: str) -> None:
    loop = Early()
    loop.run(attached(own, HOST, data=data)).check_same(Loop().run(attached(own, data=data)))


def test_clipping_after_early_updates_is_refused(comm: Any) -> None:
    strategy = attached(comm, HOST, data="fsdp")
    optimizer = adamw(strategy.model)
    Early(steps=2).run(strategy, optimizer)
    Loop().passes(strategy, 2)
    assert torch.isfinite(strategy.clip_grad_norm(float("inf")))
    with pytest.raises(UsageError, match="cannot be clipped any more"):
        strategy.clip_grad_norm(1.0)


# Behind the next step -------------------------------------------------------------------------------------------------


def delayed_by_hand(loop: Loop) -> Outcome:
    """Train in one process whose passes see an update only after the next one has begun."""
    shown, master = Model(), Model()
    optimizer = loop.make(master)
    losses: list[float] = []
    norms: list[float] = []
    waiting: dict[str, torch.Tensor] | None = None
    for step in range(loop.steps):
        optimizer.param_groups[0]["lr"] = 3e-3 / (step + 1) ** 0.5
        inputs, targets = batch(step)
        loss = mse_loss(shown(inputs), targets)
        loss.backward()
        losses.append(loss.item())
        if waiting is not None:
            shown.load_state_dict(waiting)
        for mine, other in zip(master.parameters(), shown.parameters()):
            mine.grad, other.grad = other.grad, None
        if loop.clip:
            norms.append(float(torch.nn.utils.clip_grad_norm_(master.parameters(), loop.clip)))
        optimizer.step()
        optimizer.zero_grad()
        waiting = {name: value.clone() for name, value in master.state_dict().items()}
    weights = {name: value.detach() for name, value in master.named_parameters()}
    states = {
        f"{name}/{key}": value
        for name, parameter in master.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    return Outcome(losses, norms, weights, states)


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_delayed_updates_equal_those_of_a_plain_simulation(comm: Any, clip: float) -> None:
    loop = Loop(clip=clip)
    expected = delayed_by_hand(loop)
    for data, parameters in (("zero2", False), ("fsdp", False), ("fsdp", True)):
        loop.run(attached(comm, replace(DELAYED, parameters=parameters), data=data)).check_same(expected)


def test_optimizers_that_update_all_parameters_at_once_are_also_delayed(comm: Any) -> None:
    loop = Loop(make=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01))
    loop.run(attached(comm, DELAYED)).check_same(delayed_by_hand(loop))


# Other kinds of updates -----------------------------------------------------------------------------------------------


def test_masters_and_states_on_a_disk_give_the_same_bits(comm: Any, tmp_path: Path) -> None:
    loop = Loop(clip=0.05)
    offload = replace(HOST, disk=str(tmp_path / "swap"))
    loop.run(attached(comm, offload)).check_same(loop.run(attached(comm)))
    assert not list((tmp_path / "swap").iterdir())  # files are unlinked immediately


def test_an_unusable_disk_is_refused(comm: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="offload.disk"):
        attached(comm, replace(HOST, disk=str(tmp_path / "file")))


def test_a_closure_gives_the_same_update(comm: Any) -> None:
    results = []
    for offload in (OffloadSettings(), HOST):
        strategy = attached(comm, offload)
        optimizer = adamw(strategy.model)
        for step in range(4):

            def closure() -> float:
                optimizer.zero_grad()
                return Loop().passes(strategy, step)

            optimizer.step(closure)
        results.append(Loop().passes(strategy, 9))
    assert results[0] == results[1]


def test_reduced_gradients_are_visible_until_zeroed_and_are_scaled(comm: Any) -> None:
    seen = []
    for offload in (OffloadSettings(), HOST):
        strategy = attached(comm, offload)
        optimizer = adamw(strategy.model)
        for step in range(3):
            Loop().passes(strategy, step)
            strategy.clip_grad_norm(0.05)
            strategy.clip_grad_norm(0.02 * (step + 1))
            strategy.gradients.scale(torch.tensor(0.3))
            optimizer.step()
            seen.append([gradient.clone().reshape(-1) for _, gradient in strategy.reduced_gradients()])
            optimizer.zero_grad(set_to_none=step == 0)
    for plain, offloaded in zip(seen[:3], seen[3:]):
        assert len(plain) == len(offloaded) and all(map(torch.equal, plain, offloaded))


def test_dropped_gradients_make_no_update(comm: Any) -> None:
    strategy = attached(comm, HOST)
    optimizer = adamw(strategy.model)
    optimizer.register_step_pre_hook(lambda *_: strategy.gradients.drop())
    before = [each.clone() for each in strategy.model.parameters()]
    Loop().passes(strategy, 0)
    optimizer.step()
    assert all(map(torch.equal, before, strategy.model.parameters())) and not strategy.reduced_gradients()


def test_unshard_returns_the_values_of_the_host_and_accepts_writes(comm: Any) -> None:
    strategy = attached(comm, DELAYED, data="fsdp")
    Loop(steps=3).run(strategy)
    with strategy.unshard(write=True):
        with torch.no_grad():
            strategy.model.head.bias.add_(1.0)
        wanted = strategy.model.head.bias.clone()
    with strategy.unshard():
        assert torch.equal(strategy.model.head.bias, wanted)


# The share of the device ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"data": "zero2", "bucket_mib": 0.005}, {"data": "fsdp"}], ids=["zero2", "fsdp"])
def test_groups_moved_to_the_device_continue_with_the_same_bits(comm: Any, how: dict[str, Any]) -> None:
    loop, later = Loop(clip=0.05, steps=5), Loop(clip=0.05, steps=10)
    results = []
    for moves in (False, True):
        strategy = attached(comm, HOST, **how)
        optimizer = adamw(strategy.model)
        loop.run(strategy, optimizer)
        if moves:
            found: host_optimizer.HostOptimizer = strategy.components.host_optimizer  # type: ignore[attr-defined]
            before = len(found.host_groups)
            found.stay_on_device(optimizer, [before - 2, before - 1])
            assert len(found.host_groups) == before - 2 > 0
        results.append(later.run(strategy, optimizer, begin=5))
    results[0].check_same(results[1])


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "offload, parallel, message",
    [
        (PARAMETERS, {}, 'take parallel.data = "fsdp"'),
        (OffloadSettings(activations=True), {}, "set parallel.recompute = true"),
        (HOST, {"data": "dp"}, "a rank a GPU"),
        (HOST, {"pipe": 2, "schedule": "pipedream"}, "take another schedule"),
        (replace(DELAYED, device_fraction=0.5), {}, "set one of the two"),
    ],
)
def test_unsupported_settings_are_refused(comm: Any, offload: Any, parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        attached(comm, offload, **parallel)


def test_optimizers_that_need_whole_parameters_are_refused(comm: Any) -> None:
    strategy = attached(comm, HOST)
    with pytest.raises(UsageError, match="LBFGS cannot be used"):
        strategy.check_optimizer(torch.optim.LBFGS(strategy.model.parameters()))


# Pipelines ------------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("axes", [{"pipe": 2}, {"pipe": 2, "schedule": "zb-h1"}, {"tensor": 2}], ids=str)
def test_pipeline_stages_give_the_same_bits(own: Any, axes: dict[str, Any]) -> None:
    settings = ParallelSettings(**axes)
    plain = Trained.of(own, settings, layers=2).learn(range(8))
    offloaded = Trained.of(own, settings, layers=2, offload=HOST).learn(range(8))
    assert offloaded.losses == plain.losses and offloaded.norms == plain.norms
    for one, other in zip(offloaded.model.parameters(), plain.model.parameters()):
        assert torch.equal(one.reshape(-1), other.reshape(-1))
