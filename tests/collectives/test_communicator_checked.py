"""With HPCTRAIN_CHECK=order the communicator names the first collective in which ranks differ."""

from __future__ import annotations

import json
from typing import Any

JOB = """
import torch, hpctrain
job = hpctrain.init(device="cpu")
comm = job.comm
comm.all_reduce(torch.ones(4))
{body}
"""


MISMATCHES = {
    "shape": ("comm.all_reduce(torch.ones(8 if job.rank else 4))", "shape"),
    "dtype": ("comm.all_reduce(torch.ones(4, dtype=[torch.float64, torch.int64][job.rank]))", "dtype"),
    "operation": ("comm.barrier() if job.rank else comm.broadcast(torch.ones(4))", "operation"),
    "reduction": ("comm.all_reduce(torch.ones(4), 'max' if job.rank else 'sum')", "root, reduction or place"),
    "piece": ("comm.all_reduce(node[4 * job.rank :][:4])", "root, reduction or place"),
    "memory": ("comm.broadcast(torch.ones(8) if job.rank else node)", "root, reduction or place"),
    "piece under way": (
        "comm.reduce_scatter(node[:2], node[4 * job.rank :][:4], async_op=True)",
        "root, reduction or place",
    ),
    "reduction under way": (
        "comm.reduce_scatter(node[:4], node, 'max' if job.rank else 'sum', async_op=True)",
        "root, reduction or place",
    ),
}
ATTEMPT = """
try:
    {body}
except hpctrain.errors.MismatchError as error:
    caught[{name!r}] = str(error)
"""


def test_a_mismatch_ends_the_job_with_its_lines(launch: Any) -> None:
    body, said = MISMATCHES["shape"]
    done = launch(2, JOB.format(body=body), timeout=40, env={"HPCTRAIN_CHECK": "order"})
    assert done.returncode == 2, done
    assert done.stderr.count(f"the ranks differ in {said}") == 1, done
    assert "rank 0: " in done.stderr and "rank 1: " in done.stderr


def test_every_mismatch_is_named_on_every_rank_before_anything_is_sent(launch: Any) -> None:
    """One after another in one job: had one begun, those after it would meet its leftovers."""
    body = "import json\ncaught, node = {}, comm.empty(8)\n"
    body += "".join(ATTEMPT.format(name=name, body=body) for name, (body, _) in MISMATCHES.items())
    body += "assert comm.all_gather_object(caught) == [caught, caught]\njob.rank or print(json.dumps(caught))"
    done = launch(2, JOB.format(body=body), timeout=40, env={"HPCTRAIN_CHECK": "order"})
    assert done.returncode == 0, done
    caught = json.loads(done.stdout)
    assert list(caught) == list(MISMATCHES)
    for name, (_, said) in MISMATCHES.items():
        assert f"the ranks differ in {said}: rank 0: " in caught[name] and "; rank 1: " in caught[name], caught[name]


def test_training_passes_the_check(launch: Any) -> None:
    body = """
model = job.wrap(torch.nn.Linear(3, 3))
for _ in range(3):
    model(torch.ones(2, 3)).sum().backward()
print("done")
"""
    done = launch(2, JOB.format(body=body), timeout=40, env={"HPCTRAIN_CHECK": "order"})
    assert done.returncode == 0 and done.stdout.count("done") == 2, done


def test_what_is_under_way_passes_the_check_again_and_again(launch: Any) -> None:
    body = """
whole, other, out = comm.empty(1000), comm.empty(1000), torch.empty(500)
for _ in range(5):
    whole.fill_(job.rank + 1)
    other.fill_(job.rank + 2)
    works = [comm.reduce_scatter(out, whole, async_op=True), comm.all_reduce(other, async_op=True)]
    works[job.rank].wait()
    works[1 - job.rank].wait()
    assert out.eq(3).all() and other.eq(5).all()
print("done")
"""
    done = launch(2, JOB.format(body=body), timeout=40, env={"HPCTRAIN_CHECK": "order"})
    assert done.returncode == 0 and done.stdout.count("done") == 2, done
