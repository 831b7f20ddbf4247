"""Copy in memory of the state of a run, from which a few steps are repeated without a file."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.checkpoint import content
from hpctrain.checkpoint.states import restore_state, state_of
from hpctrain.comm.agreement import agreed
from hpctrain.train.state import TrainState

Groups = list[dict[str, Any]]
States = dict[Tensor, dict[str, Any]]


class StateCopy:
    """Copy of a run's state between two steps: what a checkpoint has, in the memory of each rank.

    Without ``weights`` the copy has no optimizer states, and no parameters except those whose ids are
    in ``moving``, but everything else. It then serves to repeat a step whose update was not made. It
    has nothing of parameters whose ids are in ``elsewhere``.
    """

    def __init__(self, state: TrainState, *, weights: bool, elsewhere: Collection[int] = ()) -> None:
        self._state, self.weights, self._elsewhere = state, weights, elsewhere
        self._tensors: dict[str, dict[str, Tensor]] = {}  # of the models, by key
        self._groups: dict[str, Groups] = {}  # of the optimizers, by key
        self._optimizer_states: dict[str, States] = {}
        self._rest: dict[str, Any] = {}
        self._columns: dict[str, list[float]] = {}
        self.moving: set[int] = set()
        self.taken = False

    @torch.no_grad()
    def take(self) -> None:
        """Copy the present state; memory of an earlier copy is used again. The first call is collective."""
        state = self._state
        if not self.taken:
            state.find_schedulers()  # some are created after the run has been entered
        for key, model in state.models.items():
            before = self._tensors.get(key, {})
            self._tensors[key] = {name: _kept(before.get(name), each) for name, each in self._of_model(model)}
        for key, optimizer in state.optimizers.items():
            self._groups[key] = [_settings(group) for group in optimizer.param_groups]
            if self.weights:
                held = self._optimizer_states.get(key, {})
                self._optimizer_states[key] = {
                    parameter: {name: _kept(held.get(parameter, {}).get(name), value) for name, value in entry.items()}
                    for parameter, entry in optimizer.state.items()
                    if id(parameter) not in self._elsewhere
                }
        if self.weights:
            self._columns = {name: list(column) for name, column in state.curves.columns.items()}
        self._rest = {
            "parts": copy.deepcopy({name: state_of(part) for name, part in state.parts.items()}),
            "generators": dict(state.capture()),
            "step": state.step,
            "tokens": state.tokens,
            "logged": dict(state.logged),
            "stopped": state.stopped,
        }
        self.taken = True

    @property
    def step(self) -> int:
        """The number of updates in the copied state."""
        return int(self._rest["step"]) if self.taken else self._state.step

    @property
    def present_step(self) -> int:
        """The present number of updates."""
        return self._state.step

    @torch.no_grad()
    def restore(self, *, together: bool = True) -> None:
        """Set the run back to the copied state, without gradients; the copy remains.

        Collective, unless some ranks only restore it (``together=False``).
        """
        state, rest = self._state, self._rest
        for key, model in state.models.items():
            for name, tensor in self._of_model(model):
                _set(tensor, self._tensors[key].get(name))
        for key, optimizer in state.optimizers.items():
            _restore_groups(optimizer, self._groups[key])
            if self.weights:
                _restore_states(optimizer, self._optimizer_states[key], self._elsewhere)
        for strategy in state.strategies.values():
            strategy.gradients.drop()
            strategy.refresh()
        for name, part in state.parts.items():
            if name in rest["parts"]:
                saved = copy.deepcopy(rest["parts"][name])
                restored = partial(restore_state, part, saved, f'the state of "{name}"')
                agreed(state.comm if together else None, restored)
        content.restore_rng(rest["generators"])
        if self.weights:
            state.curves.columns = {name: list(column) for name, column in self._columns.items()}
        state.step, state.tokens, state.stopped = rest["step"], rest["tokens"], rest["stopped"]
        state.logged = dict(rest["logged"])

    def _of_model(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a model that are copied."""
        yield from model.named_buffers()
        for name, parameter in model.named_parameters():
            if (self.weights or id(parameter) in self.moving) and id(parameter) not in self._elsewhere:
                yield name, parameter


def _kept(before: Any, value: Any) -> Any:
    """Return a copy of a value, in the memory of the earlier copy if that fits."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if isinstance(before, Tensor) and (before.shape, before.dtype, before.device) == (
        value.shape,
        value.dtype,
        value.device,
    ):
        return before.copy_(value)
    return value.detach().clone()


def _set(tensor: Tensor, saved: Tensor | None) -> None:
    """Fill a tensor with its copy; a tensor that is new since the copy keeps its values."""
    if saved is None:
        return
    if tensor.shape == saved.shape:
        tensor.copy_(saved)
    else:
        tensor.data = saved.clone()


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the hyperparameters of a parameter group."""
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _restore_groups(optimizer: torch.optim.Optimizer, saved: Groups) -> None:
    del optimizer.param_groups[len(saved) :]  # added since the copy
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        for name, value in settings.items():
            if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                group[name].copy_(value)  # a compiled update holds the tensor itself
            else:
                group[name] = copy.deepcopy(value)


def _restore_states(optimizer: torch.optim.Optimizer, saved: States, elsewhere: Collection[int]) -> None:
    """Restore the states of parameters in place; those that are new since the copy are removed."""
    for parameter in [each for each in optimizer.state if each not in saved and id(each) not in elsewhere]:
        del optimizer.state[parameter]
    for parameter, entries in saved.items():
        present = optimizer.state[parameter]
        for name in [each for each in present if each not in entries]:
            del present[name]
        for name, value in entries.items():
            if isinstance(value, Tensor) and isinstance(present.get(name), Tensor):
                _set(present[name], value)
            else:
                present[name] = copy.deepcopy(value)
