"""Cross entropy of split logits, compared with torch's of whole logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tensor_fixtures import CLOSE, own
from torch import Tensor

from hpctrain.errors import UsageError
from hpctrain.parallel.tensor.vocabulary import cross_entropy

RANKS = pytest.mark.ranks(2, 3, 4)
VOCABULARY = 31


def case(scale: float = 1.0, shape: tuple[int, ...] = (4, 6)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = scale * torch.randn(*shape, VOCABULARY, generator=generator)
    return logits, torch.randint(VOCABULARY, shape, generator=generator)


def both(comm: Any, logits: Tensor, targets: Tensor, by: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    whole, piece = logits.clone().requires_grad_(), own(logits, comm, -1).contiguous().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, -2).float(), targets.flatten())
    found = cross_entropy(piece, targets, VOCABULARY, comm)
    (expected * by).backward()
    (found * by).backward()
    assert whole.grad is not None and piece.grad is not None
    return found, expected, piece.grad, own(whole.grad, comm, -1)


@RANKS
@pytest.mark.parametrize("scale", [1.0, 40.0, 1e4], ids=str)
@pytest.mark.parametrize("shape", [(4, 6), (5,), (2, 3, 2)], ids=str)
def test_loss_and_gradient_equal_those_of_torch(comm: Any, scale: float, shape: tuple[int, ...]) -> None:
    found, expected, gradient, wanted = both(comm, *case(scale, shape), by=3.0)
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(gradient, wanted, **CLOSE)
    assert len({float(loss) for loss in comm.all_gather_object(found.detach())}) == 1


@RANKS
def test_ignored_targets_do_not_count(comm: Any) -> None:
    logits, targets = case()
    targets[0] = -100
    found, expected, gradient, wanted = both(comm, logits, targets)
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(gradient, wanted, **CLOSE)
    assert not gradient[0].any()
    marked = targets.masked_fill(targets == -100, -7)
    other = cross_entropy(own(logits, comm, -1), marked, VOCABULARY, comm, ignore_index=-7)
    assert torch.equal(other, found)
    assert math.isnan(cross_entropy(own(logits, comm, -1), targets.fill_(-100), VOCABULARY, comm))


@RANKS
def test_half_precision_logits_are_compared_in_float32(comm: Any) -> None:
    logits, targets = case()
    found, expected, gradient, wanted = both(comm, logits.bfloat16(), targets)
    assert found.dtype is torch.float32 and gradient.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(gradient, wanted)


@RANKS
def test_backward_is_silent_and_forward_sends_two_numbers_per_target(comm: Any) -> None:
    logits, targets = case()
    piece = own(logits, comm, -1).contiguous().requires_grad_()
    loss = cross_entropy(piece, targets, VOCABULARY, comm)
    with comm.recording() as recorder:
        loss.backward()
        assert not recorder.calls
        retained = cross_entropy(piece, targets, VOCABULARY, comm)
        assert sum(recorder.bytes.values()) < 100 * targets.numel()
    first = torch.autograd.grad(retained, [piece], retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(retained, [piece])[0])


@RANKS
@pytest.mark.parametrize("target", [-1, VOCABULARY])
def test_a_target_outside_the_vocabulary_is_refused(comm: Any, target: int) -> None:
    logits, targets = case()
    targets[0, 0] = target
    with pytest.raises(UsageError, match=f"^target {target} is outside of the vocabulary: allowed are 0 to 30$"):
        cross_entropy(own(logits, comm, -1), targets, VOCABULARY, comm)


@RANKS
def test_whole_logits_are_refused(comm: Any) -> None:
    logits, targets = case()
    message = r"split cross entropy of logits \(4, 6, 31\) with targets \(4, 6\): needed are"
    with pytest.raises(UsageError, match=message):
        cross_entropy(logits, targets, VOCABULARY, comm)


def test_on_one_rank_it_equals_torchs(comm: Any) -> None:
    found, expected, gradient, wanted = both(comm, *case())
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, wanted)
