"""Gradients of gathered tensors: a loss over the rows of all ranks trains as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from hpctrain.errors import MismatchError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.wrap import attach

pytestmark = pytest.mark.ranks
CPU = torch.device("cpu")
WIDTH, EMBEDDING = 6, 5
COUNTS = {"even": [2, 2, 2, 2], "uneven": [3, 1, 2, 4], "without": [0, 2, 1, 0]}
DIVIDED = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)


def rows_of(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(count * 3, dtype=torch.float64).view(count, 3) + 100 * rank).to(dtype)


# Values ---------------------------------------------------------------------------------------------------------------


@DIVIDED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16], ids=str)
def test_rows_are_in_rank_order(comm: Any, counts: Any, dtype: torch.dtype) -> None:
    wanted = torch.cat([rows_of(rank, counts[rank], dtype) for rank in range(comm.size)])
    found = comm.all_gather(rows_of(comm.rank, counts[comm.rank], dtype))
    assert torch.equal(found, wanted) and not found.requires_grad
    strided = rows_of(comm.rank, counts[comm.rank], dtype).t().contiguous().t()
    assert torch.equal(comm.all_gather(strided), wanted)


def test_empty_shares_gather_to_an_empty_tensor(comm: Any) -> None:
    assert comm.all_gather(torch.empty(0, 3)).shape == (0, 3)


def test_all_gather_into_a_tensor_without_grad_is_unchanged(comm: Any) -> None:
    out, own = torch.empty(comm.size, 3), rows_of(comm.rank, 1)
    with comm.recording() as recorder:
        assert comm.all_gather(out, own) is out
    assert recorder.calls == {"all_gather": 1} and not out.requires_grad
    with torch.no_grad():
        assert comm.all_gather(out, own.clone().requires_grad_()) is out
    assert torch.equal(out, torch.cat([rows_of(rank, 1) for rank in range(comm.size)]))


# Gradients ------------------------------------------------------------------------------------------------------------


def factors(rank: int, total: int) -> Tensor:
    return torch.randn(total, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@DIVIDED
def test_gradients_are_sums_over_all_ranks(comm: Any, counts: Any) -> None:
    counts = counts[: comm.size]
    total, begin = sum(counts), sum(counts[: comm.rank])
    own = rows_of(comm.rank, counts[comm.rank], torch.float64).requires_grad_()
    gathered = comm.all_gather(own)
    (gathered.square() * factors(comm.rank, total)).sum().backward()
    wanted = sum(2 * gathered.detach() * factors(rank, total) for rank in range(comm.size))
    assert own.grad is not None and isinstance(wanted, Tensor)
    torch.testing.assert_close(own.grad, wanted[begin : begin + counts[comm.rank]])


def test_gradients_flow_through_a_given_output_tensor(comm: Any) -> None:
    out = torch.empty(comm.size, 3, dtype=torch.float64)
    for _ in range(2):  # the memory may be used again
        own = rows_of(comm.rank, 1, torch.float64).requires_grad_()
        gathered = comm.all_gather(out, own)
        assert gathered.data_ptr() == out.data_ptr() and not out.requires_grad
        (gathered * factors(comm.rank, comm.size)).sum().backward()
        assert own.grad is not None
        wanted = torch.stack([factors(rank, comm.size) for rank in range(comm.size)]).sum(0)
        torch.testing.assert_close(own.grad, wanted[comm.rank : comm.rank + 1])


def test_expanded_gradients_are_not_written_in_place(comm: Any) -> None:
    own = torch.ones(1 + comm.rank, 2, requires_grad=True)
    comm.all_gather(own).sum().backward()  # its gradient is one number, expanded
    assert own.grad is not None and torch.equal(own.grad, torch.full_like(own, comm.size))


# Contrastive losses ---------------------------------------------------------------------------------------------------


class Towers(nn.Module):
    """Two embeddings and a temperature, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.image, self.text = (nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, EMBEDDING)) for _ in "12")
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return normalize(self.image(images)), normalize(self.text(texts)), self.scale.exp()


def pairs(step: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) for _ in "12"]


def alone(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, texts, scale = model(*batch)
    logits, targets = scale * images @ texts.t(), torch.arange(len(images))
    return (cross_entropy(logits, targets) + cross_entropy(logits.t(), targets)) / 2


def together(comm: Any, model: nn.Module, batch: list[Tensor], weight: float) -> Tensor:
    """Compute the loss of a rank's own rows with all columns, and of its own columns with all rows."""
    images, texts, scale = model(*batch)
    all_images, all_texts = (comm.all_gather(each, weight=weight) for each in (images, texts))
    ranks = comm.all_gather(torch.full((len(images),), comm.rank), weight=weight)
    targets = (int((ranks < comm.rank).sum()) + torch.arange(len(images))).clamp(max=len(all_texts) - 1)
    logits = scale * images @ all_texts.t(), scale * texts @ all_images.t()
    return (cross_entropy(logits[0], targets) + cross_entropy(logits[1], targets)) / 2


@DIVIDED
@pytest.mark.parametrize("data", ["ddp", "zero2", "fsdp"])
def test_contrastive_loss_trains_as_in_one_process(comm: Any, counts: Any, data: Any) -> None:
    counts = counts[: comm.size]
    count, first, total = counts[comm.rank], sum(counts[: comm.rank]), sum(counts)
    single, model = Towers().double(), Towers().double()
    strategy = attach(model, comm, ParallelSettings(data=data), CPU)
    weight = count * comm.size / total
    strategy.set_sample_weight(weight)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (single, model)]
    for step in range(5):
        batch = pairs(step, total)
        wanted = alone(single, batch)
        own = [each[first : first + count] for each in batch] if count else [torch.ones(1, WIDTH).double()] * 2
        loss = together(comm, model, own, weight)
        for each in (wanted, loss):
            each.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mean = comm.all_reduce(loss.detach().reshape(1) * weight, "average")
        torch.testing.assert_close(mean.item(), wanted.item(), rtol=1e-6, atol=0)
    with strategy.unshard():
        found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in single.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-8)


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_tensors_of_different_shapes_are_refused_on_all_ranks(comm: Any) -> None:
    last = comm.rank == comm.size - 1
    cases = [
        (torch.zeros(2, 4 if last else 3), r"rank 0 has \[2, 3\] of torch\.float32, rank . has \[2, 4\] of"),
        (torch.zeros((2, 3, 1) if last else (2, 3)), r"rank . has \[2, 3, 1\] of torch\.float32; only the first dim"),
        (torch.zeros(2, 3, dtype=torch.float64 if last else torch.float32), r"has \[2, 3\] of torch\.float64; only"),
        (torch.zeros(2, 3, requires_grad=last), r"the tensor of rank . requires a gradient, that of rank 0 does not"),
        (torch.zeros(()), r"rank 0 has a scalar; allowed are tensors of at least one dim; pass tensor\.reshape\(1\)"),
    ]
    for tensor, said in cases:
        with pytest.raises(MismatchError, match=said) as raised:
            comm.all_gather(tensor)
        assert raised.value.everywhere
