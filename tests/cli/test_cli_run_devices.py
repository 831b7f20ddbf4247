"""``hpctrain run`` on a machine with GPUs, which the program pretends to have: whose groups it gets by which name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

# torch's back end "fake" is that of the GPUs. torch chooses the default back ends by the type of the accelerator.
PROGRAM = """
import sys
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch.distributed import distributed_c10d as c10d

torch._C._get_accelerator = lambda: torch.device("cuda")
dist.Backend.default_device_backend_map["cuda"] = "fake"
for names in [None, "cpu:gloo,cuda:fake", "cuda:fake,cpu:mpi", "cpu:hpctrain,cuda:fake", "gloo", "cuda:fake"]:
    dist.init_process_group(names)
    world = dist.group.WORLD
    if names != "cuda:fake":
        total = torch.ones(3)
        dist.all_reduce(total)
        objects = [None] * 2
        dist.all_gather_object(objects, dist.get_rank())
        assert total.tolist() == [2.0] * 3 and objects == [0, 1]
        part = dist.new_group([0, 1])
        dist.barrier(part)
        assert type(part) is type(world)
    try:
        device = type(world._get_backend(torch.device("cuda"))).__name__
    except RuntimeError:
        device = None
    store = c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    kinds = [each.__name__ for each in type(world).__mro__ if each.__module__.startswith(("hpctrain", "torch"))]
    if dist.get_rank() == 0:
        row = [names, dist.get_backend(), kinds[0], device, [each.type for each in world._device_types]]
        print(*row, type(store).__name__)
    dist.destroy_process_group()

# The device of the program belongs to the back end of the GPUs; ours has none.
torch.accelerator.current_accelerator, torch.accelerator.device_count = lambda: torch.device("cuda"), lambda: 1
for names in ("cpu:gloo,cuda:fake", "gloo"):
    dist.init_process_group(names, device_id=torch.device("cuda:0"))
    world = dist.group.WORLD
    assert world.bound_device_id is None
    assert names == "gloo" or world.other.bound_device_id == torch.device("cuda:0")
    dist.destroy_process_group()
"""
EXPECTED = """\
None cpu:gloo,cuda:fake TwoGloo FakeProcessGroup ['cpu', 'cuda'] MpiStore
cpu:gloo,cuda:fake cpu:gloo,cuda:fake TwoGloo FakeProcessGroup ['cpu', 'cuda'] MpiStore
cuda:fake,cpu:mpi cpu:mpi,cuda:fake TwoAlias FakeProcessGroup ['cpu', 'cuda'] MpiStore
cpu:hpctrain,cuda:fake cpu:hpctrain,cuda:fake TwoBackends FakeProcessGroup ['cpu', 'cuda'] MpiStore
gloo gloo Gloo Gloo ['cpu'] MpiStore
cuda:fake cuda:fake ProcessGroup FakeProcessGroup ['cuda'] MpiStore
"""


@pytest.mark.limit(150)
def test_the_back_ends_of_each_name(launch: Any, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    result = launch(2, "-m", "hpctrain", "run", program)
    assert result.returncode == 0 and result.stdout == EXPECTED, result


@pytest.mark.limit(150)
def test_malformed_names_are_one_error(launch: Any, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import torch.distributed as dist\ndist.init_process_group('gloo,nccl')\n")
    result = launch(2, "-m", "hpctrain", "run", program)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result
    assert result.stderr.count("allowed are one name, or one name per type of device") == 1, result
