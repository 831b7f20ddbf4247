"""Habits of training scripts, each a loop that runs on a plain model and on a wrapped one.

A habit gets the model, the batches (of all samples, or this rank's share of each) and ``backward(model, x, y)``, which
computes the mean loss of a batch and its gradients. Its return value is compared, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    parameters_to_vector,
    parametrizations,
)

Batches = list[tuple[Tensor, Tensor]]
Backward = Callable[[nn.Module, Tensor, Tensor], Tensor]
Habit = Callable[[nn.Module, Batches, Backward], Any]

HABITS: dict[str, Habit] = {}
BEFORE: dict[str, Callable[[nn.Module], Any]] = {}  # changes of the model before it is wrapped


def habit(function: Habit) -> Habit:
    HABITS[function.__name__.replace("_", " ").strip()] = function
    return function


def before(name: str) -> Callable[[Any], Any]:
    def note(function: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
        BEFORE[name] = function
        return function

    return note


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def loop(model: nn.Module, batches: Batches, backward: Backward, then: Callable[[int], Any]) -> list[Tensor]:
    """Train by SGD; call ``then(step)`` between backward pass and update."""
    optimizer, losses = sgd(model), []
    for step, (x, y) in enumerate(batches):
        losses.append(backward(model, x, y))
        then(step)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def each(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.grad is not None)


# Norms and clipping ---------------------------------------------------------------------------------------------------


@habit
def clip_by_norm(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(model, batches, backward, lambda _: clip_grad_norm_(model.parameters(), 0.1))


@habit
def clip_by_norm_of_order_1(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(model, batches, backward, lambda _: clip_grad_norm_(model.parameters(), 0.1, norm_type=1))


@habit
def clip_by_largest(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(model, batches, backward, lambda _: clip_grad_norm_(model.parameters(), 0.01, float("inf")))


@habit
def clip_without_foreach(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(model, batches, backward, lambda _: clip_grad_norm_(model.parameters(), 0.1, foreach=False))


@habit
def clip_with_foreach(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(model, batches, backward, lambda _: clip_grad_norm_(model.parameters(), 0.1, foreach=True))


@habit
def clip_error_if_nonfinite(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(
        model, batches, backward, lambda _: clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
    )


@habit
def clip_a_subset(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    chosen = [parameter for name, parameter in model.named_parameters() if name.startswith("2")]
    return loop(model, batches, backward, lambda _: clip_grad_norm_(chosen, 0.02))


@habit
def clip_each_parameter(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(
        model, batches, backward, lambda _: [clip_grad_norm_(parameter, 0.02) for parameter in model.parameters()]
    )


@habit
def clip_by_value(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(model, batches, backward, lambda _: clip_grad_value_(model.parameters(), 0.01))


@habit
def total_norm_then_scale(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    norms = []

    def then(step: int) -> None:
        norms.append(get_total_norm([parameter.grad for parameter in each(model)]))
        clip_grads_with_norm_(model.parameters(), 0.1, norms[-1])

    return [*loop(model, batches, backward, then), *norms]


@habit
def norm_of_the_weights(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    found: list[Tensor] = []
    losses = loop(model, batches, backward, lambda _: found.append(get_total_norm(model.parameters())))
    return [*losses, *found]


@habit
def norm_by_hand(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    def then(step: int) -> None:
        norm = sum(parameter.grad.norm() ** 2 for parameter in each(model)) ** 0.5
        for parameter in each(model):
            parameter.grad.mul_(min(1.0, 0.1 / float(norm)))

    return loop(model, batches, backward, then)


@habit
def norm_by_sum_of_squares(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    found: list[Any] = []

    def then(step: int) -> None:
        found.append(torch.stack([parameter.grad.pow(2).sum() for parameter in each(model)]).sum().sqrt())

    return [*loop(model, batches, backward, then), *found]


@habit
def norm_of_one_vector(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    found: list[Any] = []

    def then(step: int) -> None:
        found.append(torch.linalg.vector_norm(parameters_to_vector(parameter.grad for parameter in each(model))))

    return [*loop(model, batches, backward, then), *found]


@habit
def weight_norms_in_a_log(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    found: list[Any] = []
    losses = loop(
        model, batches, backward, lambda _: found.append({n: p.norm().item() for n, p in model.named_parameters()})
    )
    return [*losses, *(value for row in found for value in row.values())]


@habit
def largest_gradient(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    found: list[Any] = []

    def then(step: int) -> None:
        found.append(max(parameter.grad.abs().max().item() for parameter in each(model)))

    return [*loop(model, batches, backward, then), *found]


@habit
def finite_by_hand(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(
        model, batches, backward, lambda _: all(torch.isfinite(parameter.grad).all() for parameter in each(model))
    )


@habit
def histogram_by_numpy(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(
        model, batches, backward, lambda _: [parameter.detach().cpu().numpy().std() for parameter in each(model)]
    )


# Penalties ------------------------------------------------------------------------------------------------------------


@habit
def squares_as_penalty(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = sgd(model)
    for x, y in batches:
        loss = F.mse_loss(model(x), y) + 0.1 * sum(parameter.pow(2).sum() for parameter in model.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@habit
def sizes_as_penalty(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = sgd(model)
    for x, y in batches:
        loss = F.mse_loss(model(x), y) + 0.1 * sum(torch.norm(parameter, 1) for parameter in model.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@habit
def decay_by_hand(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    def then(step: int) -> None:
        with torch.no_grad():
            for parameter in each(model):
                parameter.grad.add_(parameter, alpha=0.1)

    return loop(model, batches, backward, then)


# Initialising ---------------------------------------------------------------------------------------------------------


@habit
def normal_weights(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return loop(model, batches, backward, lambda _: None)


@habit
def xavier_weights(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    torch.manual_seed(5)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)

    model.apply(init)
    return loop(model, batches, backward, lambda _: None)


@habit
def reset_of_parameters(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    torch.manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    return loop(model, batches, backward, lambda _: None)


@habit
def constant_weights(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.constant_(parameter, 0.1)
    return loop(model, batches, backward, lambda _: None)


@habit
def weights_scaled(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
            parameter.data.add_(0.01)
    return loop(model, batches, backward, lambda _: None)


# Hooks ----------------------------------------------------------------------------------------------------------------


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


@habit
def hook_that_clamps(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    for parameter in model.parameters():
        parameter.register_hook(clamped)
    return loop(model, batches, backward, lambda _: None)


@habit
def hook_before_wrapping(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(model, batches, backward, lambda _: None)


@before("hook before wrapping")
def _hook(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(clamped)


@habit
def hook_that_is_removed(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    handle = next(model.parameters()).register_hook(lambda gradient: gradient * 0)
    return loop(model, batches, backward, lambda step: handle.remove() if step == 1 else None)


@habit
def hook_that_centres(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    next(model.parameters()).register_hook(lambda gradient: gradient - gradient.mean(dim=1, keepdim=True))
    return loop(model, batches, backward, lambda _: None)


@habit
def hook_behind_accumulation(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    def after(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(after)
    return loop(model, batches, backward, lambda _: None)


@habit
def optimizer_in_the_backward_pass(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.3) for parameter in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return [backward(model, x, y) for x, y in batches]


@habit
def hook_with_accumulation(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    next(model.parameters()).register_hook(clamped)
    optimizer = sgd(model)
    for step, (x, y) in enumerate(batches):
        backward(model, x, y)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


@habit
def module_hooks(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    seen: list[int] = []
    for module in list(model.children())[1:]:
        module.register_forward_hook(lambda *_: seen.append(1))
        module.register_full_backward_hook(lambda *_: None)
    return [*loop(model, batches, backward, lambda _: None), torch.tensor(len(seen))]


# Gradients by other means ---------------------------------------------------------------------------------------------


@habit
def autograd_grad(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = sgd(model)
    for x, y in batches:
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(F.mse_loss(model(x), y), parameters)):
            parameter.grad = gradient
        optimizer.step()


@habit
def penalty_on_input_gradients(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = sgd(model)
    for x, y in batches:
        x = x.clone().requires_grad_(True)
        outputs = model(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        (F.mse_loss(outputs, y) + 0.1 * slope.pow(2).sum(dim=1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


@habit
def two_losses_backward(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = sgd(model)
    for x, y in batches:
        outputs = model(x)
        F.mse_loss(outputs, y).backward(retain_graph=True)
        (0.1 * outputs.pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


@habit
def update_by_hand(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    for x, y in batches:
        backward(model, x, y)
        with torch.no_grad():
            for parameter in each(model):
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


@habit
def sign_of_gradients(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(model, batches, backward, lambda _: [parameter.grad.sign_() for parameter in each(model)])


@habit
def momentum_by_hand(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    buffers = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
    with torch.no_grad():
        for x, y in batches:
            with torch.enable_grad():
                backward(model, x, y)
            for parameter in each(model):
                buffers[parameter].mul_(0.9).add_(parameter.grad)
                parameter.sub_(buffers[parameter], alpha=0.05)
            model.zero_grad()


@habit
def gradients_scaled_by_layer(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    def then(step: int) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad / (1 + int(name[0]))

    return loop(model, batches, backward, then)


@habit
def sharpness_aware(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = sgd(model)
    for x, y in batches:
        backward(model, x, y)
        norm = get_total_norm([parameter.grad for parameter in each(model)])
        moves = []
        with torch.no_grad():
            for parameter in each(model):
                moves.append((parameter, parameter.grad * (0.05 / (norm + 1e-12))))
                parameter.add_(moves[-1][1])
        optimizer.zero_grad()
        backward(model, x, y)
        with torch.no_grad():
            for parameter, move in moves:
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


# Freezing, and later changes ------------------------------------------------------------------------------------------


@habit
def unfrozen_later(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(model, batches, backward, lambda step: model[2].requires_grad_(True) if step == 1 else None)


@before("unfrozen later")
def _freeze(model: nn.Module) -> None:
    model[2].requires_grad_(False)  # type: ignore[index]


@habit
def frozen_later(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(model, batches, backward, lambda step: model[2].requires_grad_(False) if step == 1 else None)


@habit
def frozen_at_first(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(model, batches, backward, lambda _: None)


BEFORE["frozen at first"] = _freeze


@habit
def head_after_wrapping(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    torch.manual_seed(6)
    model[5] = nn.Linear(9, 3)  # type: ignore[index]
    return loop(model, batches, backward, lambda _: None)


@habit
def parametrized_after_wrapping(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    parametrizations.weight_norm(model[2])  # type: ignore[index]
    return loop(model, batches, backward, lambda _: None)


@habit
def parametrized_before_wrapping(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(model, batches, backward, lambda _: None)


@before("parametrized before wrapping")
def _parametrize(model: nn.Module) -> None:
    parametrizations.weight_norm(model[2])  # type: ignore[index]


@habit
def tied_weights(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    return loop(model, batches, backward, lambda _: None)


@before("tied weights")
def _tie(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(torch.eye(9))  # type: ignore[index]
    model[4].bias = model[2].bias  # type: ignore[index]


# Optimizers -----------------------------------------------------------------------------------------------------------


@habit
def groups_by_dims(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": others}], lr=0.01)
    for x, y in batches:
        backward(model, x, y)
        optimizer.step()
        optimizer.zero_grad()


@habit
def group_added_later(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.3)  # type: ignore[index]
    for step, (x, y) in enumerate(batches):
        if step == 2:
            optimizer.add_param_group({"params": list(model[5].parameters()), "lr": 0.1})  # type: ignore[index]
        backward(model, x, y)
        optimizer.step()
        model.zero_grad()


@habit
def two_optimizers(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    matrices = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.ndim > 1], lr=0.3)
    others = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.ndim <= 1], lr=0.01)
    for x, y in batches:
        backward(model, x, y)
        for optimizer in (matrices, others):
            optimizer.step()
            optimizer.zero_grad()


@habit
def zeros_kept(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = sgd(model)
    for x, y in batches:
        optimizer.zero_grad(set_to_none=False)
        backward(model, x, y)
        optimizer.step()


@habit
def accumulation_by_hand(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = adamw(model)
    for step, (x, y) in enumerate(batches):
        backward(model, x, y)
        if step % 2:
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


@habit
def closure(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer, losses = sgd(model), []
    for x, y in batches:

        def compute(x: Tensor = x, y: Tensor = y) -> Any:
            optimizer.zero_grad()
            return backward(model, x, y)

        losses.append(optimizer.step(compute))
    return losses


@habit
def fused_adamw(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for x, y in batches:
        backward(model, x, y)
        optimizer.step()
        optimizer.zero_grad()


@habit
def adafactor(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    for x, y in batches:
        backward(model, x, y)
        optimizer.step()
        optimizer.zero_grad()


@habit
def plateau(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    for x, y in batches:
        loss = backward(model, x, y)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(loss)
    return [group["lr"] for group in optimizer.param_groups]


@habit
def one_cycle(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=len(batches))
    for x, y in batches:
        backward(model, x, y)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


@habit
def scaler(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer, scales = sgd(model), []
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for x, y in batches:
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@habit
def scaler_that_skips(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer, scales = sgd(model), []
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for step, (x, y) in enumerate(batches):
        outputs = model(x)
        if step == 2:
            outputs = outputs * torch.tensor([1.0, 1.0, float("inf")])
        scaler.scale(F.mse_loss(outputs, y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


# Averages, copies and files -------------------------------------------------------------------------------------------


@habit
def average_by_hand(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    """Average the weights, and load the average into the model at the end."""
    averages = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def then(step: int) -> None:
        for name, parameter in model.named_parameters():
            averages[name].mul_(0.5).add_(parameter.detach(), alpha=0.5)

    loop(model, batches, backward, then)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(averages[name])


@habit
def lookahead(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    slow = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = sgd(model)
    for step, (x, y) in enumerate(batches):
        backward(model, x, y)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            with torch.no_grad():
                for before_it, parameter in zip(slow, model.parameters()):
                    before_it.lerp_(parameter, 0.5)
                    parameter.copy_(before_it)


@habit
def weights_clamped(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = sgd(model)
    for x, y in batches:
        backward(model, x, y)
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)


@habit
def evaluation_between(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    found = []

    def then(step: int) -> None:
        model.eval()
        with torch.no_grad():
            found.append(model(torch.ones(2, 6)))
        model.train()

    loop(model, batches, backward, then)
    return found


@habit
def layer_called_alone(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = sgd(model)
    for x, y in batches:
        (F.mse_loss(model(x), y) + 0.1 * model[0](x).pow(2).mean()).backward()  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()


@habit
def weight_read_outside(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = sgd(model)
    for x, y in batches:
        outputs = model(x)
        (F.mse_loss(outputs, y) + 0.1 * (outputs @ model[5].weight).pow(2).mean()).backward()  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()
