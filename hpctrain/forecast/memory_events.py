"""Simulated memory of one step of a rank, in addition to its persistent memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hpctrain.forecast.holdings import lives_in_bucket
from hpctrain.forecast.pass_memory import Moment, PassMemory
from hpctrain.forecast.rank import RankModel
from hpctrain.forecast.run import PlannedRun
from hpctrain.parallel.pipeline.schedules import ActionKind


def moments_of(run: PlannedRun, model: RankModel) -> list[Moment]:
    """Return the memory events of a step, including the optimizer step."""
    if run.parallel.pipe > 1:
        found = _of_schedule(run, model)
    else:
        (number,) = model.chunks
        found = _of_passes(run, model, model.chunk(number))
    kept = 0 if _go_at_once(run, model) and run.settings.train.accumulate == 1 else model.gradient_bytes
    return [*found, Moment("update", 0, 0 if _leave(run, model) else kept)]


def _go_at_once(run: PlannedRun, model: RankModel) -> bool:
    """Return whether a backward pass with reduction moves each gradient to its bucket or shard immediately."""
    if run.parallel.pipe > 1:
        return False
    return model.sharded or model.data.size > 1 and lives_in_bucket(run)


def _leave(run: PlannedRun, model: RankModel) -> bool:
    """Return whether no gradient remains in its own autograd tensor at the optimizer step."""
    return model.sharded or model.data.size > 1 and lives_in_bucket(run)


def _of_passes(run: PlannedRun, model: RankModel, passes: PassMemory) -> list[Moment]:
    """Return the memory events of a step's passes without a pipeline; with accumulation there are several passes."""
    whole = model.gradient_bytes
    several = run.settings.train.accumulate > 1
    local = not (model.sharded and run.parallel.reduces_early)
    if not _go_at_once(run, model):
        again = _beside(passes.passing, whole) if several else []
        return passes.forward + passes.fresh + (again + _beside(passes.forward, whole) if several else [])
    if several and local:
        return passes.fresh + _beside(passes.forward + passes.passing, whole)
    return passes.forward + _with_targets(passes, _targets(run, model), whole)


def _targets(run: PlannedRun, model: RankModel) -> int:
    """Return the bytes of separate buffers for the reduced gradient shards; 0 if they are reduced in place."""
    if run.offload.any_update:
        return 0  # offloaded to the host immediately
    adds = run.settings.train.accumulate > 1 and run.parallel.reduces_early
    if model.sharded and (adds or run.parallel.mixed_precision != "none"):
        return sum(one.narrow_share for one in model.pieces.trained)
    return 0


def _with_targets(passes: PassMemory, targets: int, gradients: int) -> list[Moment]:
    """Return the events of a backward pass whose reduction targets are allocated as gradients appear."""
    return [
        replace(one, temporary=one.temporary + targets * fresh.gradients // max(gradients, 1))
        for one, fresh in zip(passes.passing, passes.fresh)
    ]


def _beside(moments: Iterable[Moment], gradients: int) -> list[Moment]:
    return [replace(one, gradients=gradients) for one in moments]


# Pipelines ------------------------------------------------------------------------------------------------------------


def _of_schedule(run: PlannedRun, model: RankModel) -> list[Moment]:
    """Simulate a rank's actions: twice if gradients accumulate over several passes, else once."""
    found, gradients = _play(run, model, {})
    if run.settings.train.accumulate > 1:
        found += _play(run, model, gradients)[0]
    extra = _gathered(run, model)
    return [replace(one, gathered=one.gathered + extra) for one in found]


def _gathered(run: PlannedRun, model: RankModel) -> int:
    """Return the bytes of parameters that are gathered for a step, or stashed in several versions (pipedream)."""
    if model.sharded and model.passing:
        return model.pieces.whole
    schedule = run.schedule
    assert schedule is not None
    live = schedule.live(model.stage)
    stashed = schedule.name == "pipedream" and live > 1
    return live * model.parameter_bytes if stashed else 0


def _play(run: PlannedRun, model: RankModel, before: dict[int, int]) -> tuple[list[Moment], dict[int, int]]:
    """Return the memory events of a rank's actions, and the remaining gradient bytes by chunk."""
    schedule = run.schedule
    assert schedule is not None
    walks = {number: model.chunk(number) for number in model.chunks}
    gradients = dict(before)
    live, found = 0, []
    for action in schedule.actions[model.stage]:
        if action.kind is ActionKind.UPDATE:
            gradients.clear()
            continue
        passes, came = walks[action.chunk], model.entering(action.chunk)
        there = sum(gradients.values())
        if action.kind is ActionKind.FORWARD:
            moments, change = passes.forward, passes.kept + came
        elif action.kind is ActionKind.WEIGHT:
            moments, change = passes.weights, -passes.held
        else:
            new = action.chunk not in gradients
            moments = [_without(one, passes.kept) for one in (passes.fresh if new else passes.passing)]
            change = -passes.kept - came + (passes.held if action.kind is ActionKind.INPUT else 0)
        found += [_on_top(one, live, there, str(action)) for one in moments]
        if action.kind is not ActionKind.FORWARD:
            gradients[action.chunk] = model.chunk_gradients(action.chunk)
        live += change
    return found, gradients


def _without(moment: Moment, kept: int) -> Moment:
    """Subtract the activations that the forward pass keeps, which are already part of the live bytes."""
    return replace(moment, activations=moment.activations - kept)


def _on_top(moment: Moment, live: int, gradients: int, when: str) -> Moment:
    return replace(moment, activations=moment.activations + live, gradients=moment.gradients + gradients)
