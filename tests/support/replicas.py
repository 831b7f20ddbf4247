"""Small models, batches that can be split over ranks, and the plain loops that data parallelism must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from hpctrain.models.build import MultiLayerPerceptron
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig
from hpctrain.parallel.config import ParallelSettings

TINY = ParallelSettings(bucket_mib=1e-6)  # one bucket per parameter
BOTH = pytest.mark.parametrize("settings", [ParallelSettings(), TINY], ids=["one_bucket", "many_buckets"])
BATCH = 12  # samples, which 2, 3 and 4 ranks can share equally
WIDTH = 10
Gradients = dict[str, Tensor | None]


def make_mlp() -> nn.Module:
    """Return a perceptron of six parameters, the same at every call."""
    torch.manual_seed(7)
    return MultiLayerPerceptron((WIDTH,), WIDTH, hidden=(17, 23))


def make_gpt() -> nn.Module:
    """Return a GPT of two blocks whose head shares its weight with the embedding."""
    torch.manual_seed(7)
    return GPT(GPTConfig(vocab_size=31, context=8, layers=2, heads=2, width=16, dropout=0.0, tied=True))


class Branches(nn.Module):
    """Three layers; the forward pass adds up those that are named, in the order of their names."""

    def __init__(self, names: Sequence[str] = "abc") -> None:
        super().__init__()
        torch.manual_seed(7)
        for name in names:
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, use: Iterable[str]) -> Tensor:
        """Map ``[batch, WIDTH]`` to the same shape."""
        for name in use:
            x = torch.tanh(self.get_submodule(name)(x)) + x
        return x


class Beside(nn.Module):
    """Layer that first uses parameters independent of the input, so that backward reaches them last."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, WIDTH]`` to the same shape."""
        beside = (torch.tanh(self.left @ self.right) @ self.right).sum(0)
        return x * self.scale + beside


class Mixed(nn.Module):
    """Layers in three precisions, one each, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.narrow = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.nothing = nn.Parameter(torch.empty(0))
        self.single = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, WIDTH]`` to the same shape."""
        x = self.wide(self.narrow(x.bfloat16()).double())
        return self.single(x.float()) + self.nothing.sum()  # type: ignore[no-any-return]


def vectors(step: int = 0, samples: int = BATCH) -> tuple[Tensor, Tensor]:
    """Return the whole batch of a step: inputs and targets for the perceptron."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(samples, WIDTH, generator=generator)
    return inputs, inputs.flip(1)


def tokens(step: int = 0) -> tuple[Tensor, Tensor]:
    """Return the whole batch of a step: inputs and targets for the GPT."""
    windows = torch.randint(0, 31, (BATCH, 9), generator=torch.Generator().manual_seed(100 + step))
    return windows[:, :-1], windows[:, 1:]


def share(tensor: Tensor, comm: Any, rank: int | None = None) -> Tensor:
    """Return a rank's part of a whole batch (by default this rank's)."""
    return tensor.chunk(comm.size)[comm.rank if rank is None else rank]


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compare logits with tokens."""
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]], Callable[..., Tensor]]] = {
    "mlp": (make_mlp, vectors, mse_loss),
    "gpt": (make_gpt, tokens, token_loss),
}


def learn(model: nn.Module, kind: str, steps: int, comm: Any = None, forward: Any = None) -> list[float]:
    """Train a model on whole batches, or on this rank's parts of them; return the losses, averaged over the ranks.

    ``forward``, if given, is called in place of the model.
    """
    _, batch, compare = KINDS[kind]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        inputs, targets = batch(step)
        if comm is not None:
            inputs, targets = share(inputs, comm), share(targets, comm)
        loss = compare((forward or model)(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if comm is None:
        return losses
    return [sum(column) / comm.size for column in zip(*comm.all_gather_object(losses))]


def backward(model: nn.Module, batch: tuple[Tensor, Tensor], weight: float = 1, *use: str) -> None:
    """Add the gradients of one weighted loss; ``use`` names branches."""
    outputs = model(batch[0], use) if use else model(batch[0])
    (mse_loss(outputs, batch[1]) * weight).backward()


def part(comm: Any, rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Return a rank's inputs and targets of a step."""
    inputs, targets = vectors(step)
    return share(inputs, comm, rank), share(targets, comm, rank)


def branch_gradients(comm: Any, *passes: Sequence[str]) -> Gradients:
    """Return the average of the ranks' separately computed gradients; ``passes[step][rank]`` names the branches."""
    parts = []
    for rank in range(comm.size):
        model = Branches()
        for step, use in enumerate(passes):
            backward(model, part(comm, rank, step), 1, *use[rank])
        parts.append(gradients(model))
    return average(parts)


def gradients(model: nn.Module) -> Gradients:
    """Return copies of a model's gradients by name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def average(parts: Sequence[Gradients]) -> Gradients:
    """Return the mean of several ranks' gradients, a missing one being zero; None where all are missing."""
    result: Gradients = {}
    for name in parts[0]:
        found = [tensor for part in parts if (tensor := part[name]) is not None]
        result[name] = torch.stack(found).sum(0) / len(parts) if found else None
    return result


def assert_same(one: Gradients, two: Gradients, **tolerance: float) -> None:
    """Compare gradients or weights by name; None only equals None."""
    assert list(one) == list(two)
    assert {name for name, tensor in one.items() if tensor is None} == {
        name for name, tensor in two.items() if tensor is None
    }
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def weights(model: nn.Module) -> Gradients:
    """Return copies of a model's state by name."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_on_all_ranks(comm: Any, tensors: Gradients) -> None:
    """Compare bits between the ranks."""
    for other in comm.all_gather_object(tensors):
        assert_same(tensors, other, rtol=0, atol=0)


def hooked_modules(model: nn.Module) -> list[str]:
    """Return the names of modules with a hook of a strategy, on themselves or on their parameters."""
    return [
        name
        for name, module in model.named_modules()
        if module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or any(each._post_accumulate_grad_hooks for each in module.parameters(recurse=False))
    ]
