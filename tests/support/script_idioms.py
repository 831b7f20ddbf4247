"""Habits of training scripts, each a loop that runs on a plain model and on a wrapped one.

A habit gets the model, the batches (of all samples, or this rank's share of each) and ``backward(model, x, y)``, which
computes the mean loss of a batch and its gradients. Its return value is compared, too. Most habits are a plain loop
with one peculiarity, and are registered by the decorator that says where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
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
from torch.utils._pytree import tree_leaves

Batches = list[tuple[Tensor, Tensor]]
Backward = Callable[[nn.Module, Tensor, Tensor], Any]
Habit = Callable[[Any, Batches, Backward], Any]

HABITS: dict[str, Habit] = {}
BEFORE: dict[str, Callable[[Any], Any]] = {}  # changes of the model before it is wrapped


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)


def loop(
    model: nn.Module,
    batches: Batches,
    backward: Backward,
    between: Callable[[int], Any] = lambda step: None,
    optimizer: torch.optim.Optimizer | None = None,
    after: Callable[[int], Any] = lambda step: None,
) -> list[Any]:
    """Train, by default by SGD; call ``between(step)`` before the update of a step, and ``after(step)`` after it."""
    optimizer, losses = optimizer or sgd(model), []
    for step, (x, y) in enumerate(batches):
        losses.append(backward(model, x, y))
        between(step)
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return losses


def each(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.grad is not None)


def name_of(function: Callable[..., Any]) -> str:
    return function.__name__.replace("_", " ").strip()


def habit(function: Habit) -> None:
    """Register a whole loop."""
    HABITS[name_of(function)] = function


def between(function: Callable[[Any, int], Any], name: str = "") -> None:
    """Register what is done with ``model`` and ``step`` between backward pass and update; its numbers are compared."""

    def run(model: nn.Module, batches: Batches, backward: Backward) -> Any:
        found: list[Any] = []
        losses = loop(model, batches, backward, lambda step: found.append(function(model, step)))
        return [*losses, *(one for one in tree_leaves(found) if one is not None)]

    HABITS[name or name_of(function)] = run


def changed(function: Callable[[Any], Any]) -> None:
    """Register a change of the wrapped model before the loop."""

    def run(model: nn.Module, batches: Batches, backward: Backward) -> Any:
        function(model)
        return loop(model, batches, backward)

    HABITS[name_of(function)] = run


def before(function: Callable[[Any], Any]) -> None:
    """Register a change of the model before it is wrapped."""
    BEFORE[name_of(function)], HABITS[name_of(function)] = function, loop


def loss(function: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    """Register another loss."""

    def run(model: nn.Module, batches: Batches, backward: Backward) -> Any:
        loop(model, batches, lambda model, x, y: function(model, x, y).backward())  # type: ignore[no-untyped-call]

    HABITS[name_of(function)] = run


def optimizer(function: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    """Register another optimizer."""
    HABITS[name_of(function)] = lambda model, batches, backward: loop(
        model, batches, backward, optimizer=function(model)
    )


# Norms and clipping ---------------------------------------------------------------------------------------------------


def clip(model: nn.Module, step: int, *limits: float, **options: Any) -> Tensor:
    return clip_grad_norm_(model.parameters(), *limits, **options)


between(lambda model, step: clip(model, step, 0.1), "clip by norm")
between(lambda model, step: clip(model, step, 0.1, 1), "clip by norm of order 1")
between(lambda model, step: clip(model, step, 0.01, float("inf")), "clip by largest")
between(partial(clip, max_norm=0.1, foreach=False), "clip without foreach")
between(partial(clip, max_norm=0.1, foreach=True), "clip with foreach")
between(partial(clip, max_norm=0.1, error_if_nonfinite=True), "clip error if nonfinite")


@between
def clip_a_subset(model: nn.Module, step: int) -> Any:
    return clip_grad_norm_([parameter for name, parameter in model.named_parameters() if name.startswith("2")], 0.02)


@between
def clip_each_parameter(model: nn.Module, step: int) -> Any:
    return [clip_grad_norm_(parameter, 0.02) for parameter in model.parameters()]


@between
def clip_by_value(model: nn.Module, step: int) -> None:
    clip_grad_value_(model.parameters(), 0.01)


@between
def total_norm_then_scale(model: nn.Module, step: int) -> Any:
    norm = get_total_norm([parameter.grad for parameter in each(model)])  # type: ignore[misc]
    clip_grads_with_norm_(model.parameters(), 0.1, norm)
    return norm


@between
def norm_of_the_weights(model: nn.Module, step: int) -> Any:
    return get_total_norm(model.parameters())


@between
def norm_by_hand(model: nn.Module, step: int) -> None:
    norm = sum(parameter.grad.norm() ** 2 for parameter in each(model)) ** 0.5  # type: ignore[union-attr]
    for parameter in each(model):
        parameter.grad.mul_(min(1.0, 0.1 / float(norm)))  # type: ignore[union-attr]


@between
def norm_by_sum_of_squares(model: nn.Module, step: int) -> Any:
    return torch.stack([parameter.grad.pow(2).sum() for parameter in each(model)]).sum().sqrt()


@between
def norm_of_one_vector(model: nn.Module, step: int) -> Any:
    return torch.linalg.vector_norm(parameters_to_vector(parameter.grad for parameter in each(model)))


@between
def weight_norms_in_a_log(model: nn.Module, step: int) -> Any:
    return {name: parameter.norm().item() for name, parameter in model.named_parameters()}


@between
def largest_gradient(model: nn.Module, step: int) -> Any:
    return max(parameter.grad.abs().max().item() for parameter in each(model))  # type: ignore[union-attr]


@between
def finite_by_hand(model: nn.Module, step: int) -> Any:
    return all(torch.isfinite(parameter.grad).all() for parameter in each(model))


@between
def histogram_by_numpy(model: nn.Module, step: int) -> Any:
    return [parameter.detach().cpu().numpy().std() for parameter in each(model)]


# Penalties ------------------------------------------------------------------------------------------------------------


@loss
def squares_as_penalty(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return F.mse_loss(model(x), y) + 0.1 * sum(parameter.pow(2).sum() for parameter in model.parameters())


@loss
def sizes_as_penalty(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return F.mse_loss(model(x), y) + 0.1 * sum(torch.norm(parameter, 1) for parameter in model.parameters())


@between
def decay_by_hand(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in each(model):
            parameter.grad.add_(parameter, alpha=0.1)  # type: ignore[union-attr]


# Initialising ---------------------------------------------------------------------------------------------------------


@changed
def normal_weights(model: nn.Module) -> None:
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)


@changed
def xavier_weights(model: nn.Module) -> None:
    torch.manual_seed(5)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)

    model.apply(init)


@changed
def reset_of_parameters(model: nn.Module) -> None:
    torch.manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


@changed
def constant_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.constant_(parameter, 0.1)


@changed
def weights_scaled(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
            parameter.data.add_(0.01)


# Hooks ----------------------------------------------------------------------------------------------------------------


def clamp_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


@changed
def hook_that_clamps(model: nn.Module) -> None:
    clamp_gradients(model)


@before
def hook_before_wrapping(model: nn.Module) -> None:
    clamp_gradients(model)


@habit
def hook_that_is_removed(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    handle = next(model.parameters()).register_hook(lambda gradient: gradient * 0)
    return loop(model, batches, backward, lambda step: handle.remove() if step == 1 else None)


@changed
def hook_that_centres(model: nn.Module) -> None:
    next(model.parameters()).register_hook(lambda gradient: gradient - gradient.mean(dim=1, keepdim=True))


@changed
def hook_behind_accumulation(model: nn.Module) -> None:
    def after(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(after)


@habit
def optimizer_in_the_backward_pass(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.3) for parameter in model.parameters()}

    def update(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return [backward(model, x, y) for x, y in batches]


@habit
def hook_with_accumulation(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    clamp_gradients(model)
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
    return [*loop(model, batches, backward), torch.tensor(len(seen))]


# Gradients by other means ---------------------------------------------------------------------------------------------


@habit
def autograd_grad(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = sgd(model)
    for x, y in batches:
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(F.mse_loss(model(x), y), parameters)):
            parameter.grad = gradient
        optimizer.step()


@loss
def penalty_on_input_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return F.mse_loss(outputs, y) + 0.1 * slope.pow(2).sum(dim=1).mean()


@loss
def two_losses_backward(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    outputs = model(x)
    F.mse_loss(outputs, y).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return 0.1 * outputs.pow(2).mean()


@habit
def update_by_hand(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    for x, y in batches:
        backward(model, x, y)
        with torch.no_grad():
            for parameter in each(model):
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


@between
def sign_of_gradients(model: nn.Module, step: int) -> None:
    for parameter in each(model):
        parameter.grad.sign_()  # type: ignore[union-attr]


@habit
def momentum_by_hand(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    buffers = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
    with torch.no_grad():
        for x, y in batches:
            with torch.enable_grad():
                backward(model, x, y)
            for parameter in each(model):
                buffers[parameter].mul_(0.9).add_(parameter.grad)  # type: ignore[arg-type]
                parameter.sub_(buffers[parameter], alpha=0.05)
            model.zero_grad()


@between
def gradients_scaled_by_layer(model: nn.Module, step: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad / (1 + int(name[0]))


@habit
def sharpness_aware(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = sgd(model)
    for x, y in batches:
        backward(model, x, y)
        norm = get_total_norm([parameter.grad for parameter in each(model)])  # type: ignore[misc]
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


@before
def frozen_at_first(model: Any) -> None:
    model[2].requires_grad_(False)


@between
def unfrozen_later(model: Any, step: int) -> None:
    if step == 1:
        model[2].requires_grad_(True)


BEFORE["unfrozen later"] = BEFORE["frozen at first"]


@between
def frozen_later(model: Any, step: int) -> None:
    if step == 1:
        model[2].requires_grad_(False)


@changed
def head_after_wrapping(model: Any) -> None:
    torch.manual_seed(6)
    model[5] = nn.Linear(9, 3)


@changed
def parametrized_after_wrapping(model: Any) -> None:
    parametrizations.weight_norm(model[2])


@before
def parametrized_before_wrapping(model: Any) -> None:
    parametrizations.weight_norm(model[2])


@before
def tied_weights(model: Any) -> None:
    model[2].weight = nn.Parameter(torch.eye(9))
    model[4].bias = model[2].bias


# Optimizers -----------------------------------------------------------------------------------------------------------


@optimizer
def groups_by_dims(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": others}], lr=0.01)


@optimizer
def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


@optimizer
def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


@habit
def group_added_later(model: Any, batches: Batches, backward: Backward) -> Any:
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.3)
    for step, (x, y) in enumerate(batches):
        if step == 2:
            optimizer.add_param_group({"params": list(model[5].parameters()), "lr": 0.1})
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
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
def plateau(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    for batch in batches:
        scheduler.step(*loop(model, [batch], backward, optimizer=optimizer))
    return [group["lr"] for group in optimizer.param_groups]


@habit
def one_cycle(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=len(batches))
    loop(model, batches, backward, optimizer=optimizer, after=lambda step: scheduler.step())


def scaled_training(model: nn.Module, batches: Batches, clips: bool, skipped: int = -1) -> list[float]:
    optimizer, scales = sgd(model), []
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for step, (x, y) in enumerate(batches):
        outputs = model(x)
        if step == skipped:
            outputs = outputs * torch.tensor([1.0, 1.0, float("inf")])
        scaler.scale(F.mse_loss(outputs, y)).backward()  # type: ignore[no-untyped-call]
        if clips:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


HABITS["scaler"] = lambda model, batches, backward: scaled_training(model, batches, clips=True)
HABITS["scaler that skips"] = lambda model, batches, backward: scaled_training(model, batches, clips=False, skipped=2)


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

    def after(step: int) -> None:
        if step % 2:
            with torch.no_grad():
                for before_it, parameter in zip(slow, model.parameters()):
                    before_it.lerp_(parameter, 0.5)
                    parameter.copy_(before_it)

    loop(model, batches, backward, after=after)


@habit
def weights_clamped(model: nn.Module, batches: Batches, backward: Backward) -> Any:
    loop(model, batches, backward, after=lambda step: [each.data.clamp_(-0.2, 0.2) for each in model.parameters()])


@between
def evaluation_between(model: nn.Module, step: int) -> Any:
    model.eval()
    with torch.no_grad():
        found = model(torch.ones(2, 6))
    model.train()
    return found


@loss
def layer_called_alone(model: Any, x: Tensor, y: Tensor) -> Any:
    return F.mse_loss(model(x), y) + 0.1 * model[0](x).pow(2).mean()


@loss
def weight_read_outside(model: Any, x: Tensor, y: Tensor) -> Any:
    outputs = model(x)
    return F.mse_loss(outputs, y) + 0.1 * (outputs @ model[5].weight).pow(2).mean()
