"""Communicator with HPCTRAIN_CHECK=order: it names the first collective in which ranks differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hpctrain.errors import MismatchError
from hpctrain.parallel.ddp import DataParallel

PLACE = "root, reduction or place"
JOB = """
import torch, hpctrain
job = hpctrain.init(device="cpu")
job.comm.all_reduce(torch.ones(4))
job.comm.all_reduce(torch.ones(8 if job.rank else 4))
"""


@pytest.fixture
def checked(comm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a communicator of all ranks that compares every collective and has completed one."""
    monkeypatch.setenv("HPCTRAIN_CHECK", "order")
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "20")
    checked = comm.split(0)
    checked.all_reduce(torch.ones(4))
    yield checked
    checked.free()


def test_a_mismatch_ends_the_job_and_names_the_source_lines(launch: Any) -> None:
    done = launch(2, JOB, timeout=40, env={"HPCTRAIN_CHECK": "order"})
    assert done.returncode == 2, done
    assert done.stderr.count("the ranks differ in shape") == 1, done
    assert "rank 0: " in done.stderr and "rank 1: " in done.stderr


@pytest.mark.ranks(2)
def test_every_mismatch_is_named_on_every_rank_before_anything_is_sent(checked: Any) -> None:
    """All mismatches occur on one communicator: if one had sent anything, the next would receive its leftovers."""
    comm, odd = checked, bool(checked.rank)
    node = comm.empty(8)
    mine = node[4 * comm.rank :][:4]
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "shape": (lambda: comm.all_reduce(torch.ones(8 if odd else 4)), "shape"),
        "dtype": (lambda: comm.all_reduce(torch.ones(4, dtype=torch.int64 if odd else torch.float64)), "dtype"),
        "operation": (lambda: comm.barrier() if odd else comm.broadcast(torch.ones(4)), "operation"),
        "reduction": (lambda: comm.all_reduce(torch.ones(4), "max" if odd else "sum"), PLACE),
        "piece": (lambda: comm.all_reduce(mine), PLACE),
        "memory": (lambda: comm.broadcast(torch.ones(8) if odd else node), PLACE),
        "piece under way": (lambda: comm.reduce_scatter(node[:2], mine, async_op=True), PLACE),
        "reduction under way": (
            lambda: comm.reduce_scatter(node[:4], node, "max" if odd else "sum", async_op=True),
            PLACE,
        ),
    }
    caught = {}
    for name, (call, said) in calls.items():
        with pytest.raises(MismatchError, match=f"the ranks differ in {said}: rank 0: .*; rank 1: ") as found:
            call()
        caught[name] = str(found.value)
    assert comm.all_gather_object(caught) == [caught, caught]


@pytest.mark.ranks(2)
def test_training_passes_the_check(checked: Any) -> None:
    model = torch.nn.Linear(3, 3)
    DataParallel(model, checked)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
    assert len(checked.all_gather_object(checked.rank)) == 2


@pytest.mark.ranks(2)
def test_asynchronous_operations_pass_the_check_repeatedly(checked: Any) -> None:
    comm = checked
    whole, other, out = comm.empty(1000), comm.empty(1000), torch.empty(500)
    for _ in range(5):
        whole.fill_(comm.rank + 1)
        other.fill_(comm.rank + 2)
        works = [comm.reduce_scatter(out, whole, async_op=True), comm.all_reduce(other, async_op=True)]
        works[comm.rank].wait()
        works[1 - comm.rank].wait()
        assert out.eq(3).all() and other.eq(5).all()
