"""With HPCTRAIN_CHECK=order the communicator names the first collective in which ranks differ."""

from __future__ import annotations

from typing import Any

import pytest

JOB = """
import torch, hpctrain
job = hpctrain.init(device="cpu")
comm = job.comm
comm.all_reduce(torch.ones(4))
{body}
"""


@pytest.mark.parametrize(
    "body, said",
    [
        ("comm.all_reduce(torch.ones(8 if job.rank else 4))", "the ranks differ in shape"),
        ("comm.all_reduce(torch.ones(4, dtype=[torch.float64, torch.int64][job.rank]))", "the ranks differ in dtype"),
        ("comm.barrier() if job.rank else comm.broadcast(torch.ones(4))", "the ranks differ in operation"),
        ("comm.all_reduce(torch.ones(4), 'max' if job.rank else 'sum')", "differ in root, reduction or place"),
        ("t = comm.empty(8); comm.all_reduce(t[4 * job.rank :][:4])", "the ranks differ in root, reduction or place"),
        ("t = comm.empty(4); comm.broadcast(torch.ones(4) if job.rank else t)", "differ in root, reduction or place"),
    ],
    ids=["shape", "dtype", "operation", "reduction", "piece", "memory"],
)
def test_a_mismatch_is_named_with_its_lines(launch: Any, body: str, said: str) -> None:
    done = launch(2, JOB.format(body=body), timeout=40, env={"HPCTRAIN_CHECK": "order"})
    assert done.returncode == 2, done
    assert done.stderr.count(said) == 1, done
    assert "rank 0: " in done.stderr and "rank 1: " in done.stderr


def test_training_passes_the_check(launch: Any) -> None:
    body = """
model = job.wrap(torch.nn.Linear(3, 3))
for _ in range(3):
    model(torch.ones(2, 3)).sum().backward()
print("done")
"""
    done = launch(2, JOB.format(body=body), timeout=40, env={"HPCTRAIN_CHECK": "order"})
    assert done.returncode == 0 and done.stdout.count("done") == 2, done
